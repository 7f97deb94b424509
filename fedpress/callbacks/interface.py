"""The interface of callbacks, and what they receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedpress.simulate.rows import Row
from fedpress_protocols.messages import RoundStatus


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated run, or a server's task: `name`. `id` is of 16 hexadecimal digits and stays the
    same when the run is resumed; `last_round` is the last round that this callback has received
    before, 0 for a new run. `settings` are plain data: strings, numbers, lists, dictionaries."""

    name: str
    id: str
    settings: Mapping[str, Any]
    last_round: int = 0


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A round that has ended: its `figures`, and the bytes that went up and down until its end in
    all rounds. `attempts` are the server's statuses of all attempts at it, oldest first; a
    simulation without `--task` has none."""

    figures: Row
    total_bytes: int
    attempts: tuple[RoundStatus, ...] = field(default=())

    @property
    def scalars(self) -> dict[str, float]:
        """Numbers by name, `group/name`; what was not measured is left out."""
        row = self.figures
        named: dict[str, float | None] = {
            **{f"test/{name}": value for name, value in row.test.items()},
            **{f"evaluation/{name}": value for name, value in row.evaluation.items()},
            **{f"train/{name}": value for name, value in row.train.items()},
            "bytes/up": row.up_bytes,
            "bytes/down": row.down_bytes,
            "bytes/uploads": row.upload_bytes,
            "bytes/total": self.total_bytes,
            "compression/nmse": row.nmse,
            "clients/asked": row.asked,
            "clients/answered": row.answered,
            "clients/included": row.included,
            "clients/lost": row.lost,
            "clients/failed": len(row.failed),
            "privacy/epsilon": row.epsilon,
            "seconds/round": row.seconds,
            "seconds/link": row.link_seconds,
        }
        means = self.attempts[-1].figures if self.attempts else None
        if means is not None:
            named |= {
                "compression/residual": means.residual,
                "compression/norm": means.norm,
                "seconds/train": means.train,
                "seconds/compress": means.compress,
            }
        return {name: float(value) for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a run, or of this process's part in it: `is_complete` says which, `reason` why a
    run ended before its last round, `model` is the digest of its last model."""

    rounds: int
    is_complete: bool
    reason: str = ""
    model: str | None = None


class Callback:
    """Receives a run's figures; override what you need.

    The methods are called in one thread, in this order: `begin`, `round_closed` for each round in
    order, `end`. A callback may see several runs, one after another. If a method raises, the run
    goes on without this callback, with one warning. A run that was stopped is resumed by another
    `begin` with the same `run.id`; a round may then come twice if the process was killed.
    """

    def begin(self, run: Run) -> None:
        """The run begins, or is resumed."""

    def round_closed(self, closed: ClosedRound) -> None:
        """A round has ended."""

    def end(self, result: Result) -> None:
        """The run has ended or was stopped."""
