"""The device's privacy budget: what it has spent, durably, and the plans that it refuses.

A participation is debited before the body that spends it can leave, and is never given back:
whether a round failed, or an upload was lost, is the server's word. What terms cost is computed
here, by the terms themselves; the server's claim counts only as a limit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedpress_client.checks import check_choices, check_kind, check_number
from fedpress_client.state import StateDirectory, write_durably
from fedpress_protocols.errors import PlanDeclined, StateCorrupt
from fedpress_protocols.plan import PrivacyTerms, RoundPlan
from fedpress_protocols.privacy import accounting
from fedpress_protocols.privacy.accounting import PrivacyLane
from fedpress_protocols.validation import format_validation_errors

_FILE = "privacy.json"
BUDGET_RULES = frozenset({"participations", "max_epsilon"})
"""The rules that a plan breaks once the budget is spent; the server then asks no more."""


@dataclass(frozen=True, slots=True)
class PrivacyRules:
    """Requirements of a device on privacy that no plan can overrule.

    With `required` plans without privacy terms are declined, and those of other `lanes`: in the
    central lane the server sees each update, and is trusted to add the noise. `max_epsilon` bounds
    what the device spends at `delta`, over all tasks of its state directory together. Raises
    ConfigurationError for bounds that no plan keeps.
    """

    max_epsilon: float | None = None
    delta: float = 1e-5
    required: bool = True
    lanes: frozenset[PrivacyLane] = frozenset({"distributed", "local"})

    def __post_init__(self) -> None:
        if self.max_epsilon is not None:
            check_number("max_epsilon", self.max_epsilon, 0, above=True)
        check_number("delta", self.delta, 0, 1)
        accounting.check_delta(self.delta)
        check_kind("required", self.required, bool)
        check_choices("lanes", self.lanes, get_args(PrivacyLane))
        object.__setattr__(self, "lanes", frozenset(self.lanes))


NO_RULES = PrivacyRules(required=False)


class _Spent(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    terms: PrivacyTerms
    participations: int = Field(ge=0)
    last_round: int | None = None
    """Of the last participation; kept where the terms have a separation."""


class _Account(BaseModel):
    """`tasks`: by name, the terms under which the device takes part, and how often it did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    tasks: Mapping[str, _Spent] = Field(default_factory=dict)

    def after(self, plan: RoundPlan, terms: PrivacyTerms) -> _Account:
        """The account after one more participation."""
        spent = self.tasks.get(plan.task)
        count = 1 if spent is None else spent.participations + 1
        last = plan.round if terms.separation > 1 else None
        more = {plan.task: _Spent(terms=terms, participations=count, last_round=last)}
        return _Account(tasks={**self.tasks, **more})

    def epsilon(self, delta: float) -> float:
        """Of all tasks together."""
        spent = [each.terms.cost(each.participations) for each in self.tasks.values()]
        return accounting.together(spent).epsilon(delta)


@dataclass(frozen=True, slots=True)
class Debit:
    """The privacy spent after a participation, by the task's `delta`: `epsilon` in this task,
    `total_epsilon` in all of this device's."""

    participations: int
    max_participations: int
    epsilon: float
    total_epsilon: float
    delta: float
    against: str


class PrivacyBudget:
    """The account of one state directory, over all of its tasks; safe in several processes."""

    def __init__(self, directory: StateDirectory, rules: PrivacyRules) -> None:
        self._directory, self._rules = directory, rules
        self._private: set[str] = set()

    def check(self, plan: RoundPlan) -> None:
        """Raise PlanDeclined for a plan that the rules refuse, or that would overspend; raise
        StateCorrupt if the account cannot be read."""
        self._after(self._read(), plan)
        if plan.privacy is not None:
            self._private.add(plan.task)

    def debit(self, plan: RoundPlan) -> Debit | None:
        """Count a participation, durable when this returns; None for a plan without privacy terms.

        Raises PlanDeclined as `check`, and StateWriteError.
        """
        if plan.privacy is None:
            return None
        with self._directory.alone():
            after = self._after(self._read(), plan)
            if after is None:
                return None
            write_durably(self._path, after.model_dump_json(exclude_none=True).encode())
        spent, terms = after.tasks[plan.task], plan.privacy
        return Debit(
            participations=spent.participations,
            max_participations=terms.participations,
            epsilon=terms.spent(spent.participations),
            total_epsilon=after.epsilon(terms.delta),
            delta=terms.delta,
            against=plan.private_against,
        )

    def is_private(self, task: str) -> bool:
        """Whether the device requires privacy terms, or has seen some of the task: nothing but
        noised sums of its data may leave the device then."""
        return self._rules.required or task in self._private or task in self._read().tasks

    @property
    def _path(self) -> Path:
        return self._directory.path / _FILE

    def _read(self) -> _Account:
        try:
            return _Account.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return _Account()
        except ValidationError as exc:
            raise StateCorrupt(
                f"{self._path}: {format_validation_errors(exc)}",
                hint="restore the file; without it, nobody knows what this device has spent",
            ) from exc
        except OSError as exc:
            raise StateCorrupt(f"{self._path}: {os.strerror(exc.errno or 0)}") from exc

    def _after(self, account: _Account, plan: RoundPlan) -> _Account | None:
        """The account after taking part; None if the plan has no privacy terms, nor needs any."""
        before, terms = account.tasks.get(plan.task), plan.privacy
        if terms is None:
            self._check_without_terms(plan, before)
            return None
        self._check_lane(plan, terms)
        if before is not None:
            _check_same_terms(plan, terms, before)
            _check_rounds(plan, terms, before)
        after = account.after(plan, terms)
        self._check_epsilon(plan, after)
        return after

    def _check_without_terms(self, plan: RoundPlan, before: _Spent | None) -> None:
        if self._rules.required:
            raise PlanDeclined(
                f"{_about(plan)} sends updates without noise, and this device requires privacy",
                hint="give the task privacy terms; nothing was sent",
                rule="privacy",
            )
        if before is not None:
            raise PlanDeclined(
                f"{_about(plan)} sends updates without noise, and the task's terms of before had "
                "some",
                hint="restore the task's privacy terms, or begin another task",
                rule="privacy terms",
            )

    def _check_lane(self, plan: RoundPlan, terms: PrivacyTerms) -> None:
        if self._rules.required and terms.lane not in self._rules.lanes:
            raise PlanDeclined(
                f"{_about(plan)} has noise of the {terms.lane} lane, and this device takes part in "
                f"{', '.join(sorted(self._rules.lanes))} only",
                hint=f"add {terms.lane} to the lanes if the device's owner agrees; nothing was "
                "sent",
                rule="privacy",
            )

    def _check_epsilon(self, plan: RoundPlan, after: _Account) -> None:
        rules = self._rules
        if rules.max_epsilon is None:
            return
        total = after.epsilon(rules.delta)
        if total > rules.max_epsilon:
            raise PlanDeclined(
                f"{_about(plan)} would bring what this device has spent to epsilon {total:.3g} at "
                f"delta {rules.delta:g}, more than its {rules.max_epsilon:g}",
                hint="raise max_epsilon if the device's owner agrees",
                rule="max_epsilon",
            )


def _about(plan: RoundPlan) -> str:
    return f"the plan of round {plan.round}.{plan.attempt} of task {plan.task!r}"


def _check_same_terms(plan: RoundPlan, terms: PrivacyTerms, before: _Spent) -> None:
    """Terms hold for a whole task, but for a clip that adapts."""
    fixed = terms if terms.adaptive is None else terms.with_clip(before.terms.clip)
    if before.terms == fixed:
        return
    changed = [
        f"{name} from {_shown(before.terms, name)} to {_shown(terms, name)}"
        for name in PrivacyTerms.model_fields
        if getattr(fixed, name) != getattr(before.terms, name)
    ]
    raise PlanDeclined(
        f"{_about(plan)} changes the privacy terms: {', '.join(changed)}",
        hint="privacy terms hold for a whole task; begin another task for other terms",
        rule="privacy terms",
    )


def _check_rounds(plan: RoundPlan, terms: PrivacyTerms, before: _Spent) -> None:
    """One more participation is left, and this round is far enough from the last."""
    if before.participations >= terms.participations:
        raise PlanDeclined(
            f"{_about(plan)} comes after {before.participations} participations, which is all that "
            f"the task's epsilon of {terms.epsilon:g} at delta {terms.delta:g} allows",
            hint="this device takes no further part in the task",
            rule="participations",
        )
    last = before.last_round
    if last is not None and last != plan.round < last + terms.separation:
        raise PlanDeclined(
            f"{_about(plan)} comes too soon after round {last}, which this device took part in: "
            f"the task's terms have a separation of {terms.separation} rounds",
            hint=f"this device takes part again from round {last + terms.separation} on",
            rule="separation",
        )


def _shown(terms: PrivacyTerms, name: str) -> str:
    value = getattr(terms, name)
    return f"{value:g}" if isinstance(value, int | float) else str(value or "none")
