"""Rounds of each protocol as they open, for tests of the machines."""

from dataclasses import fields
from typing import Any, TypeVar

from fedpress_server.rounds import Event, Round, Rules

RoundT = TypeVar("RoundT", bound=Round)


def opened(kind: type[RoundT], **changes: Any) -> RoundT:
    """A round of two uploads, of which one is enough, by 10 s; `changes` are of its rules, or of
    its state."""
    terms: dict[str, Any] = {
        "number": 1,
        "attempt": 1,
        "last_round": 3,
        "max_attempts": 2,
        "size": 2,
        "minimum": 1,
        "places": 3,
        "seconds": 10.0,
        "deadline": 10.0,
    }
    terms |= changes
    rules = {each.name: terms.pop(each.name) for each in fields(Rules) if each.name in terms}
    return kind(Rules(**rules), **terms)


def after(round_: RoundT, *events: Event, now: float = 1.0) -> RoundT:
    for event in events:
        round_, effects = round_.on(event, now)
        assert effects, f"{event} had no place in {round_.phase}"
    return round_
