"""Delivers a run's rounds to callbacks, each round once, over stops of the process."""

from __future__ import annotations

import copy
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedpress.callbacks.interface import Callback, ClosedRound, Result, Run
from fedpress.simulate.rows import Row
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.local_files import replace_file
from fedpress_protocols.messages import RoundStatus

logger = logging.getLogger(__name__)
_CREDENTIALS = re.compile(r"//[^/@\s]*@")


@dataclass
class Position:
    """The last round that a callback has received, and the bytes of all rounds until then."""

    round: int = 0
    total_bytes: int = 0


@dataclass
class _State:
    """The content of the state file. `source` says of which run it is."""

    id: str
    source: str
    positions: dict[str, Position]


_STATES = TypeAdapter(_State)


class Delivery:
    """The callbacks of one run by name; `state` is the file that keeps their positions.

    A callback that raises is left out from then on, with a warning that names it. Raises
    ConfigurationError for a file that is of another run, or none of ours.
    """

    def __init__(self, callbacks: Mapping[str, Callback], state: Path, source: str) -> None:
        self._callbacks = {_without_credentials(name): each for name, each in callbacks.items()}
        self._path, self._failed = state, set[str]()
        self._state = self._read(source)
        for name in self._callbacks:
            self._state.positions.setdefault(name, Position())

    @property
    def position(self) -> int:
        """The last round that every callback at work has received."""
        rounds = [self._state.positions[name].round for name in self._active()]
        return min(rounds, default=0)

    @property
    def newest(self) -> int:
        """The last round that any callback has received."""
        return max((self._state.positions[name].round for name in self._callbacks), default=0)

    @property
    def failed(self) -> Sequence[str]:
        """Names of the callbacks that have raised."""
        return sorted(self._failed)

    @property
    def is_over(self) -> bool:
        """Whether no callback is left."""
        return not self._active()

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """A run of this name begins, or is resumed."""
        self._write()
        for key in self._active():
            run = Run(name, self._state.id, settings, self._state.positions[key].round)
            self._call(key, "begin", self._callbacks[key].begin, run)

    def closed(self, row: Row, attempts: Sequence[RoundStatus] = ()) -> None:
        """Deliver a round to those that have not received it; rounds come in order."""
        for key in self._active():
            position = self._state.positions[key]
            if row.round <= position.round:
                continue
            total = position.total_bytes + row.up_bytes + row.down_bytes
            each = ClosedRound(copy.deepcopy(row), total, tuple(attempts))
            method = self._callbacks[key].round_closed
            if self._call(key, f"round_closed, round {row.round}", method, each):
                self._state.positions[key] = Position(row.round, total)
                self._write()

    def end(self, result: Result) -> None:
        """The run has ended, or this process's part in it."""
        for key in self._active():
            self._call(key, "end", self._callbacks[key].end, result)

    def _active(self) -> list[str]:
        return [name for name in self._callbacks if name not in self._failed]

    def _call(self, key: str, what: str, method: Callable[[Any], None], argument: object) -> bool:
        try:
            method(argument)
        except Exception as exc:
            self._failed.add(key)
            logger.debug("the callback %s", key, exc_info=True)
            logger.warning(
                "fedpress: the callback %s failed in %s: %s: %s; the run goes on without it",
                *(key, what, type(exc).__name__, " ".join(str(exc).split())),
            )
            return False
        return True

    def _read(self, source: str) -> _State:
        if not self._path.exists():
            return _State(secrets.token_hex(8), source, {})
        try:
            state = _STATES.validate_json(self._path.read_bytes())
        except (OSError, ValidationError) as exc:
            raise ConfigurationError(
                f"{self._path} does not hold the positions of callbacks",
                hint="give another file, or remove this one to deliver all rounds again",
            ) from exc
        if state.source != source:
            raise ConfigurationError(
                f"{self._path} is of {state.source}, not of {source}", hint="give another file"
            )
        return state

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.write_bytes(_STATES.dump_json(self._state, indent=2) + b"\n")
        replace_file(fresh, self._path)


def _without_credentials(name: str) -> str:
    """Without the user and password of a URL: names are written to a file and into warnings."""
    return _CREDENTIALS.sub("//", name)
