"""Requirements on a version's metrics, as devices measured them, for moving an alias to it.

    accuracy>=0.95              the mean over all devices that measured the model
    groups.accuracy>=0.9        the mean of every group, by the task's attribute `group_by`
    groups[phone].loss<0.4      the mean of one group
    classes.accuracy>=0.8       of every class; classes[7].accuracy of one
    devices>=20, examples>=500  how many measured it; groups.devices>=5 of every group

The figures are `RoundStatus`'s, the devices' own word (docs/evaluation.md). What nobody has
measured fulfils nothing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedpress_protocols.errors import ConfigurationError, Conflict
from fedpress_protocols.messages import Measured, RoundStatus
from fedpress_protocols.registry import ModelVersion

_FORM = re.compile(
    r"\s*(?:(?P<scope>groups|classes)(?:\[(?P<one>[^\]]+)\])?\.)?"
    r"(?P<metric>[A-Za-z0-9][A-Za-z0-9._-]{0,63})\s*(?P<sign><=|>=|<|>)\s*"
    r"(?P<bound>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)\s*"
)
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_COUNTED = {"devices": "num_clients", "examples": "num_examples"}


@dataclass(frozen=True, slots=True)
class Requirement:
    """A bound on `metric`: of all devices (`scope` empty), of every group or class, or of `one` of
    them."""

    text: str
    scope: str
    one: str | None
    metric: str
    sign: str
    bound: float

    @classmethod
    def parsed(cls, text: str) -> Requirement:
        """Raises ConfigurationError."""
        form = _FORM.fullmatch(text)
        if form is None:
            raise ConfigurationError(
                f"{text[:64]!r} is no requirement of a metric",
                hint="such as 'accuracy>=0.95', 'groups.accuracy>=0.9' or 'devices>=20'",
            )
        return cls(
            text.strip(),
            form["scope"] or "",
            form["one"],
            form["metric"],
            form["sign"],
            float(form["bound"]),
        )

    def findings(self, status: RoundStatus) -> Iterator[Finding]:
        """One for all devices, for the one that is named, or for each that there is."""
        if not self.scope:
            yield self._finding("", status.measured, "no device has measured the model")
            return
        there: Mapping[str, Measured] = getattr(status, self.scope)
        if self.one is not None:
            yield self._finding(self.one, there.get(self.one), f"no {self._kind} {self.one!r}")
        elif not there:
            yield self._finding("", None, f"no {self._kind} was measured")
        else:
            for name, measured in there.items():
                yield self._finding(name, measured, "")

    @property
    def _kind(self) -> str:
        return {"groups": "group", "classes": "class"}[self.scope]

    def _finding(self, whose: str, measured: Measured | None, missing: str) -> Finding:
        if measured is None:
            return Finding(self, whose, None, missing)
        counted = _COUNTED.get(self.metric)
        value = getattr(measured, counted) if counted else measured.metrics.get(self.metric)
        return Finding(self, whose, value, "" if value is not None else "was not measured")


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one requirement and the devices that it is about: `found`, or why there is nothing."""

    requirement: Requirement
    whose: str
    found: float | None
    missing: str = ""

    @property
    def holds(self) -> bool:
        asked = self.requirement
        return self.found is not None and _HOLDS[asked.sign](self.found, asked.bound)

    def __str__(self) -> str:
        asked = self.requirement
        kind = {"groups": "group", "classes": "class"}.get(asked.scope, "")
        of = f", {kind} {self.whose}" if self.whose and asked.one is None else ""
        if self.found is None:
            return f"{asked.text}: {self.missing}{of}"
        value = f"{self.found:,}" if asked.metric in _COUNTED else f"{self.found:.6g}"
        return f"{asked.text}: found {value}{of}"


def examined(requirements: Iterable[Requirement], status: RoundStatus) -> list[Finding]:
    """The finding for each requirement, in order, on the model that the round made."""
    return [finding for each in requirements for finding in each.findings(status)]


def checked(
    requirements: Sequence[Requirement], version: ModelVersion, status: RoundStatus | None
) -> list[Finding]:
    """The findings on a version, by the round that made it, None for version 0. Raises Conflict
    unless every requirement holds."""
    named = f"version {version.version} of task {version.task!r}"
    if status is None:
        raise Conflict(
            f"{named} is the one that the task began with, and no round has figures of it",
            hint="promote it without requirements, or a version that a round has made",
        )
    if status.model != version.model:
        raise Conflict(f"round {status.round} has made another model than {named}")
    findings = examined(requirements, status)
    failed = [each for each in findings if not each.holds]
    if failed:
        raise Conflict(
            f"{named} is not promoted: " + "; ".join(map(str, failed)),
            hint="fedpress round show has all figures; devices that come back report more",
            version=version.version,
            findings=[
                {"requirement": each.requirement.text, "of": each.whose, "found": each.found,
                 "holds": each.holds}
                for each in findings
            ],
        )  # fmt: skip
    return findings
