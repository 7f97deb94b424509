"""Masking rules: the requirements of a device that no plan can overrule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from fedpress_client.checks import (
    check_choices,
    check_kind,
    check_number,
    check_public_key,
    check_whole,
    checked_file,
)
from fedpress_compression.compressor import compressors, members
from fedpress_protocols.errors import ConfigurationError, PlanDeclined
from fedpress_protocols.masking.graph import Adversary
from fedpress_protocols.masking.keystream import SUITES, Suite
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.plan import RoundPlan


@dataclass(frozen=True, slots=True)
class MaskingRules:
    """Requirements of a device that no plan can overrule.

    With `required` nothing of an update leaves the device unmasked: a plan of the clear lane is
    declined. A device that joined a masked round of a task declines that task's clear plans even
    without it. `authority` is the public key (base64url) of the enrolment authority, by a way that
    is not the server's; without it the first one that the server names is pinned. `certificate` is
    a file that the authority's operator issued, for servers that do not hold the authority's key.
    `minimum`, `adversary`, `corrupt`, `suites` and `hybrid` are as in `ClientPolicy`. What the
    device measures of a model stays with it, since its losses and counts would travel in clear,
    unless `reports_evaluations`.

    The others bound what a plan may choose; None sets no bound. `max_weight`: the examples by which
    one masked update may count. `compressors`: the ids that a plan's profiles may use, without
    error_feedback, which sends nothing of its own. `min_support`: how many numbers of an update a
    masked sum must hold. `max_rounds`: the updates that the device prepares for one task. Raises
    ConfigurationError for values that cannot work, and where there is no file `certificate`.
    """

    authority: str | None = None
    certificate: Path | None = None
    minimum: int = 3
    adversary: Adversary = "malicious"
    corrupt: float = 0.1
    suites: tuple[Suite, ...] = SUITES
    hybrid: bool = False
    reports_evaluations: bool = False
    required: bool = True
    max_weight: int | None = None
    compressors: tuple[str, ...] | None = None
    min_support: int = 1
    max_rounds: int | None = None

    def __post_init__(self) -> None:
        if self.authority is not None:
            check_public_key("authority", self.authority, "fedpress authority public")
        if self.certificate is not None:
            object.__setattr__(self, "certificate", checked_file("certificate", self.certificate))
        check_whole("minimum", self.minimum, 3)
        if self.adversary not in get_args(Adversary):
            raise ConfigurationError(
                f"adversary must be {' or '.join(get_args(Adversary))}, not {self.adversary!r}"
            )
        check_number("corrupt", self.corrupt, 0, 0.9999)
        check_choices("suites", self.suites, SUITES)
        for name in ("hybrid", "reports_evaluations", "required"):
            check_kind(name, getattr(self, name), bool)
        for name in ("max_weight", "min_support", "max_rounds"):
            value = getattr(self, name)
            if value is not None or name == "min_support":
                check_whole(name, value, 1)
        if self.compressors is not None:
            check_choices("compressors", self.compressors, sorted(compressors()))

    def check_lane(self, lane: str, about: str, *, is_pinned: bool) -> None:
        """Raises PlanDeclined for a `lane` other than "masked" where masking is required, or where
        the task's lane `is_pinned`; `about` names the plan."""
        if lane == "masked" or not (self.required or is_pinned):
            return
        if self.required:
            raise PlanDeclined(
                f"{about} is of the clear lane, and this device requires masking",
                hint="put the task into the masked lane; nothing was sent",
                rule="required",
            )
        raise PlanDeclined(
            f"{about} is of the clear lane, and this device joined the task when it was masked",
            hint="if its owner agrees to the change, give the device a new state directory",
            rule="pinned lane",
        )

    def check(self, plan: RoundPlan, rounds: int, *, is_pinned: bool) -> None:
        """Raises PlanDeclined for a plan that the rules do not admit, before its model is fetched;
        `rounds` counts the updates prepared for the task so far."""
        about = _name_of(plan)
        self.check_lane(plan.lane, about, is_pinned=is_pinned)
        if self.compressors is not None:
            ids = sorted({each for profile in plan.profiles for each in _ids(profile.compressor)})
            strange = [each for each in ids if each not in self.compressors]
            if strange:
                raise PlanDeclined(
                    f"{about} compresses by {', '.join(strange)}, this device allows "
                    f"{', '.join(self.compressors)}",
                    rule="compressors",
                )
        weight = None if plan.masking is None else plan.masking.max_weight
        if self.max_weight is not None and weight is not None and weight > self.max_weight:
            raise PlanDeclined(
                f"{about} lets one update count {weight} times, this device allows "
                f"{self.max_weight} at most",
                rule="max_weight",
            )
        if self.max_rounds is not None and rounds >= self.max_rounds:
            raise PlanDeclined(
                f"{about} comes after {rounds} updates, this device gives a task "
                f"{self.max_rounds} at most",
                rule="max_rounds",
            )

    def check_payload(self, payload: Payload) -> None:
        """Raises PlanDeclined where a sum would hold too few numbers of an update."""
        size = payload.vectors[0].length
        if size < self.min_support:
            raise PlanDeclined(
                f"{_name_of(payload.plan)} sums {size} numbers of an update, this device gives "
                f"{self.min_support} at least",
                hint="a support that small may be chosen to single something out",
                rule="min_support",
            )


FREE = MaskingRules(required=False)
"""The rules of a device that was given none."""


def _name_of(plan: RoundPlan) -> str:
    return f"the plan of round {plan.round}.{plan.attempt} of task {plan.task!r}"


def _ids(compressor: Any) -> Iterator[str]:
    if compressor.wire_id != "error_feedback":
        yield compressor.wire_id
    for member in members(compressor):
        yield from _ids(member)
