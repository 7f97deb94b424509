"""Settings of a client, checked once, and the services that its parts share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from time import time
from typing import TypedDict

from pydantic import ValidationError

from fedpress_client.bandwidth import Bandwidth
from fedpress_client.checks import check_kind, check_number, check_public_key, check_whole
from fedpress_client.events import EventLog
from fedpress_client.failures import FailurePolicy
from fedpress_client.ledger_records import KEEP_ALL, Discard, ResidualRules
from fedpress_client.masking_rules import FREE, MaskingRules
from fedpress_client.participation import Condition, checked_conditions
from fedpress_client.privacy_budget import NO_RULES, PrivacyBudget, PrivacyRules
from fedpress_client.progress import Progress, ProgressLog
from fedpress_client.state import StateDirectory
from fedpress_client.trainer import Trainer
from fedpress_client.transport import Transport
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import Attribute, CheckInRequest
from fedpress_protocols.plan import TrainingTerms
from fedpress_protocols.policies import UPLINK
from fedpress_protocols.validation import format_validation_errors

MAX_MODEL_BYTES = 4 * 2**30
_KINDS = {
    "bandwidth": Bandwidth,
    "masking": MaskingRules,
    "privacy": PrivacyRules,
    "fine_tuning": TrainingTerms,
    "failures": FailurePolicy,
    "attributes": Mapping,
}
"""Of the options that may be None."""
_random = SystemRandom().random


class ClientOptions(TypedDict, total=False):
    """Keywords of `Client` beyond the first few; `ClientSettings` has their defaults."""

    name: str
    seed: int | None
    verify: str | None
    client_certificate: str | Path | None
    client_key: str | Path | None
    proxy: str | None
    timeout: float
    bandwidth: Bandwidth | None
    wait: float
    max_model_bytes: int
    max_disk_bytes: int | None
    rules: ResidualRules
    masking: MaskingRules | None
    privacy: PrivacyRules | None
    fine_tuning: TrainingTerms | None
    attributes: Mapping[str, Attribute] | None
    failures: FailurePolicy | None
    should_participate: Condition | Sequence[Condition] | None
    on_discard: Callable[[Discard], None] | None
    on_progress: Callable[[Progress], None] | None
    server_key: str | None
    sleep: Callable[[float], None] | None
    clock: Callable[[], float]
    random: Callable[[], float]


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """See `Client`. Raises ConfigurationError for values that cannot work."""

    name: str = ""
    seed: int | None = None
    verify: str | None = None
    client_certificate: str | Path | None = None
    client_key: str | Path | None = None
    proxy: str | None = None
    timeout: float = 30.0
    bandwidth: Bandwidth | None = None
    wait: float = 20.0
    max_model_bytes: int = MAX_MODEL_BYTES
    max_disk_bytes: int | None = None
    rules: ResidualRules = KEEP_ALL
    masking: MaskingRules | None = None
    privacy: PrivacyRules | None = None
    fine_tuning: TrainingTerms | None = None
    attributes: Mapping[str, Attribute] | None = None
    failures: FailurePolicy | None = None
    should_participate: Condition | Sequence[Condition] | None = None
    on_discard: Callable[[Discard], None] | None = None
    on_progress: Callable[[Progress], None] | None = None
    server_key: str | None = None
    sleep: Callable[[float], None] | None = None
    clock: Callable[[], float] = time
    random: Callable[[], float] = _random

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        check_number("timeout", self.timeout, 0, above=True)
        check_number("wait", self.wait, 0, 30)
        check_whole("max_model_bytes", self.max_model_bytes, 1)
        check_kind("rules", self.rules, ResidualRules)
        for name, kind in _KINDS.items():
            if getattr(self, name) is not None:
                check_kind(name, getattr(self, name), kind)
        if self.server_key is not None:
            check_public_key("server_key", self.server_key, "fedpress server key show")
        checked_conditions(self.should_participate)
        object.__setattr__(self, "attributes", _checked_attributes(self.attributes or {}))

    @property
    def masking_rules(self) -> MaskingRules:
        return self.masking or FREE

    @property
    def privacy_rules(self) -> PrivacyRules:
        return self.privacy or NO_RULES

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return checked_conditions(self.should_participate)

    @property
    def failure_policy(self) -> FailurePolicy:
        return self.failures or FailurePolicy()


class Stopped(Exception):
    """`Client.stop` was called during a pause."""


class StopSwitch:
    """A request to stop, made by any thread and observed by the one that runs the client."""

    def __init__(self, sleep: Callable[[float], None] | None) -> None:
        self._event = threading.Event()
        self._sleep = sleep or self._event.wait

    def set(self) -> None:
        self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`; raises Stopped if a stop was requested meanwhile."""
        self._sleep(seconds)
        if self.is_set:
            raise Stopped


@dataclass(frozen=True, slots=True)
class Services:
    """Everything that the parts of one client share."""

    settings: ClientSettings
    trainer: Trainer
    directory: StateDirectory
    transport: Transport
    events: EventLog
    progress: ProgressLog
    stopping: StopSwitch = field(repr=False)
    budget: PrivacyBudget


def _checked_attributes(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    uplink = attributes.get(UPLINK, 1.0)
    if isinstance(uplink, str) or not uplink > 0:
        raise ConfigurationError(
            f"the attribute {UPLINK} is {uplink!r} where a number of Mbit/s is due",
            hint="leave it out where it is not known: it is measured on uploads",
        )
    try:
        return CheckInRequest(attributes=dict(attributes)).attributes
    except ValidationError as exc:
        raise ConfigurationError(format_validation_errors(exc)) from exc
