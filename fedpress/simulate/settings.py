"""Settings of `fedpress simulate`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import ValidationError

from fedpress.compressor_option import auto_from_option, compressor_from_option
from fedpress_compression.compressor import Compressor
from fedpress_protocols.defaults import masked_default
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.masking.graph import COMPLETE_UP_TO
from fedpress_protocols.plan import MaskingTerms, PhaseTerms, TrainingTerms, parsed
from fedpress_protocols.policies import Auto
from fedpress_protocols.validation import format_validation_errors

USUAL_ROUNDS = 20
MOST_DEVICES = 2000
"""Of a run with --task."""
_OF_THE_TASK = (
    *(
        "fraction",
        "rounds",
        "compressor",
        "downlink",
        "secure",
        "masking",
        "strategy",
        "run_config",
    ),
    *("timeout", "local_epochs", "local_steps", "batch_size", "learning_rate"),
)
OF_A_FLOWER_APP = (
    *("compressor", "downlink", "strategy", "fraction"),
    *("local_epochs", "local_steps", "batch_size", "learning_rate"),
)
"""Options that a Flower app sets in its own code."""
_LONGEST_TIMEOUT = 2**31
"""Seconds."""
ENGINES = ("local", "processes", "ray")


@dataclass(frozen=True)
class Settings:
    """The options of `fedpress simulate`, as typed; see its help."""

    clients: int = 100
    fraction: float = 0.1
    rounds: int | None = None
    engine: str = "processes"
    compressor: str | None = None
    downlink: bool | None = None
    secure: bool = False
    masking: str = ""
    strategy: str | None = None
    data: str = "digits"
    app: str | None = None
    run_config: str = ""
    partition: str = "dirichlet:0.3"
    dropout: float = 0.0
    link: float | None = None
    seed: int = 0
    timeout: float = 3600.0
    workers: int | None = None
    device: str = "cpu"
    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    task: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.clients <= 10**6:
            raise ConfigurationError(f"--clients must lie in 1 to 1000000, not {self.clients}")
        if not 0 < self.fraction <= 1:
            raise ConfigurationError(f"--fraction must lie in (0, 1], not {self.fraction:g}")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigurationError(f"--rounds must be at least 1, not {self.rounds}")
        if self.engine not in ENGINES:
            raise ConfigurationError(f"no engine {self.engine!r}; known are {', '.join(ENGINES)}")
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(f"--dropout must lie in [0, 1), not {self.dropout:g}")
        if self.link is not None and not 0 < self.link < math.inf:
            raise ConfigurationError(
                f"--link must be a finite number of more than 0 Mbit/s, not {self.link:g}"
            )
        if not 0 <= self.seed < 2**31:
            raise ConfigurationError(f"--seed must lie in 0 to 2**31 - 1, not {self.seed}")
        if not 0 < self.timeout < _LONGEST_TIMEOUT:
            raise ConfigurationError(
                f"--timeout must be more than 0 s and less than {_LONGEST_TIMEOUT}, not "
                f"{self.timeout:g}"
            )
        if self.masking and not self.secure:
            raise ConfigurationError("--masking is for masked rounds", hint="add --secure")
        if self.downlink and self.secure:
            raise ConfigurationError(
                "--downlink cannot be combined with --secure",
                hint="remove one, or simulate a task's file with --task, which may have both",
            )
        if self.model is not None and self.task is None:
            raise ConfigurationError("--model is a task's initial model", hint="add --task FILE")
        if self.task is not None:
            self._check_task()
        self._check_effects()

    def changed(self, *names: str) -> str:
        """The options among `names` that are not at their default, as typed; empty if all are."""
        usual = {each.name: each.default for each in dataclasses.fields(self)}
        other = [name for name in names if getattr(self, name) != usual[name]]
        return ", ".join(f"--{name.replace('_', '-')}" for name in other)

    def _check_effects(self) -> None:
        """Refuse what would have no effect beside the other options."""
        if self.app is None and self.run_config:
            raise ConfigurationError(
                "--run-config is for a Flower app", hint="add --app, or remove --run-config"
            )
        # On Ray an app's clients may need a part of a GPU.
        unread = ("data", "partition", *(("device",) if self.engine != "ray" else ()))
        if self.app is not None and (options := self.changed(*unread)):
            raise ConfigurationError(
                f"{options} cannot be combined with --app, whose clients bring their own data and "
                "training",
                hint="remove one of them",
            )
        if self.engine == "local" and self.workers is not None:
            raise ConfigurationError(
                "--workers has no meaning with --engine local, which is one process",
                hint="remove one of them",
            )

    def _check_task(self) -> None:
        """Refuse what the task's file says, and what its own engine does not have."""
        if options := self.changed(*_OF_THE_TASK):
            raise ConfigurationError(
                f"{options} cannot be combined with --task",
                hint=f"remove it, and say it in {self.task} where that is the task's to say",
            )
        if self.engine == "ray" or self.workers is not None:
            raise ConfigurationError(
                "--task runs a server and its devices in this process; --engine ray and --workers "
                "have no meaning there",
                hint="remove them",
            )
        if self.clients > MOST_DEVICES:
            raise ConfigurationError(
                f"--task takes {MOST_DEVICES} clients at most, not {self.clients}: each is a real "
                "device with its state in files",
                hint="simulate more without --task",
            )

    @property
    def num_rounds(self) -> int:
        """As asked for, or the usual number."""
        return USUAL_ROUNDS if self.rounds is None else self.rounds

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Settings:
        """Raises ConfigurationError for a name or a value that does not fit."""
        known = {each.name: each for each in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ConfigurationError(
                f"no setting {', '.join(unknown)}; known are {', '.join(known)}"
            )
        for name, kind in get_type_hints(cls).items():
            value = fields.get(name, known[name].default)
            takes = kind | int if isinstance(1.0, kind) else kind
            if not isinstance(value, takes) or (
                isinstance(value, bool) and not isinstance(True, kind)
            ):
                due = getattr(kind, "__name__", str(kind))
                raise ConfigurationError(f"the setting {name} is {value!r}, where {due} is due")
        return cls(**fields)

    @property
    def terms(self) -> TrainingTerms:
        asked = ("local_epochs", "local_steps", "batch_size", "learning_rate")
        try:
            return TrainingTerms(**{name: getattr(self, name) for name in asked})
        except ValidationError as exc:
            raise ConfigurationError(
                f"the local training: {format_validation_errors(exc)}"
            ) from exc

    @property
    def auto(self) -> Auto | None:
        """The terms of auto; None where a compressor is named."""
        return Auto() if self.compressor is None else auto_from_option(self.compressor)

    @property
    def method(self) -> Compressor[Any] | None:
        """The compressor that is named; None for auto."""
        if self.compressor is None or self.auto is not None:
            return None
        return compressor_from_option(self.compressor, masked=self.secure)

    def masking_terms(self, *, is_restricted: bool = False) -> MaskingTerms:
        """As asked for, and for the rest as the default has it if no compressor is named. A phase
        may take as long as a round, and where the cohort's graph is made for a share of lost
        clients it is for the one that the settings have."""
        try:
            asked = json.loads(self.masking or "{}")
            if not isinstance(asked, dict):
                raise ValueError("no object")
        except ValueError as exc:
            raise ConfigurationError(f"--masking is not a JSON object: {exc}") from exc
        seconds = dict.fromkeys(PhaseTerms.model_fields, max(1, math.ceil(self.timeout)))
        terms: dict[str, Any] = {"seconds": seconds}
        if self.method is None:
            terms |= masked_default(is_restricted=is_restricted)[1]
        if self.clients * self.fraction > COMPLETE_UP_TO:
            terms["dropout"] = max(MaskingTerms().dropout, self.dropout)
        terms |= asked
        try:
            return parsed(MaskingTerms, json.dumps(terms))
        except IncompatiblePlan as exc:
            known = ", ".join(MaskingTerms.model_fields)
            raise ConfigurationError(f"--masking: {exc.detail}", hint=f"known are {known}") from exc

    @property
    def run_id(self) -> int:
        """Of its own for each seed; the same when the run goes on."""
        return int.from_bytes(hashlib.sha256(f"run {self.seed}".encode()).digest()[:7], "big")
