"""Conditions under which a device takes part: asked before each check-in, so before any assignment.

A condition is a callable without arguments. It returns True to take part, or else False or a
`Refusal` that says why and when to ask again:

    def at_home() -> bool | Refusal:
        return True if is_home_network() else Refusal("not on the home network", 600)

    Client(url, trainer, state_dir="state", should_participate=[Battery(), at_home])

A device that refuses does not check in, so no round counts on it. `Battery`, `Interface` and
`Load` read what Linux says of the machine, `Hours` the clock.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedpress_client.checks import check_kind, check_number
from fedpress_client.events import EventLog, ParticipationPostponed
from fedpress_protocols.errors import ConfigurationError

_log = logging.getLogger(__name__)

ASK_AGAIN = 60.0
"""Seconds after which a condition is asked again, where its refusal says nothing else."""
_LONGEST = 900.0
"""Seconds until `Hours` is asked again, at most: a machine may sleep, and a clock may be set."""
_UP, _REJECT = 0x1, 0x200
"""Flags of a route."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason not to take part now, and the seconds until the condition is asked again."""

    reason: str
    seconds: float = ASK_AGAIN

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)


def _check_seconds(seconds: float) -> None:
    check_number("seconds", seconds, 0, above=True)


Condition: TypeAlias = Callable[[], bool | Refusal]


class Participation:
    """Asks the conditions of a device in their order; the first refusal decides."""

    def __init__(self, conditions: tuple[Condition, ...], events: EventLog) -> None:
        self._conditions, self._events = conditions, events

    def postponed(self) -> float | None:
        """Seconds until the conditions are asked again; None if the device takes part."""
        for condition in self._conditions:
            refusal = _answer(condition)
            if refusal is not None:
                event = ParticipationPostponed(
                    condition=_name(condition), reason=refusal.reason, seconds=refusal.seconds
                )
                self._events.emit(event)
                return refusal.seconds
        return None


def checked_conditions(
    conditions: Condition | Sequence[Condition] | None,
) -> tuple[Condition, ...]:
    """One condition or several as a tuple. Raises ConfigurationError for what cannot be called."""
    if conditions is None:
        return ()
    several: tuple[Any, ...] = (conditions,)
    if not callable(conditions) and isinstance(conditions, Iterable):
        several = tuple(conditions)
    for each in several:
        if not callable(each):
            raise ConfigurationError(
                f"should_participate has {each!r}, which cannot be called",
                hint="give callables without arguments that return True or a fedpress.Refusal",
            )
    return several


def _answer(condition: Condition) -> Refusal | None:
    """None for taking part. A condition that fails refuses: the machine's state is unknown."""
    try:
        answer = condition()
    except Exception as exc:
        _log.warning("%s failed", _name(condition), exc_info=exc)
        return Refusal(f"{_name(condition)} failed: {type(exc).__name__}: {exc}")
    if isinstance(answer, Refusal):
        return answer
    if not isinstance(answer, bool | np.bool_):
        raise ConfigurationError(
            f"{_name(condition)} of should_participate returned {answer!r}",
            hint="return True to take part, or else False or a fedpress.Refusal",
        )
    return None if answer else Refusal(f"{_name(condition)} returned False")


def _name(condition: Condition) -> str:
    return getattr(condition, "__name__", type(condition).__name__)


@dataclass(frozen=True, slots=True)
class Battery:
    """Take part on external power, or with `min_percent` (0 .. 100) of charge in the battery.

    `only_on_power` refuses without external power, whatever the charge. With several batteries the
    mean counts; those of peripherals do not. A machine without a battery takes part. Reads Linux's
    `folder`; elsewhere psutil, if it is installed. It is asked again after `seconds`.
    """

    min_percent: float = 30.0
    only_on_power: bool = False
    seconds: float = ASK_AGAIN
    folder: Path = Path("/sys/class/power_supply")

    def __post_init__(self) -> None:
        check_number("min_percent", self.min_percent, 0, 100)
        check_kind("only_on_power", self.only_on_power, bool)
        _check_seconds(self.seconds)
        if not _has_sysfs():
            _psutil()

    def __call__(self) -> bool | Refusal:
        on_power, percent = _supplies(self.folder) if _has_sysfs() else _by_psutil()
        if on_power:
            return True
        if self.only_on_power:
            return Refusal("no external power", self.seconds)
        if percent is None:
            return Refusal("the charge of the battery cannot be read", self.seconds)
        if percent < self.min_percent:
            return Refusal(
                f"the battery has {percent:.0f} %, less than {self.min_percent:g} %, and no "
                "external power",
                self.seconds,
            )
        return True


def _has_sysfs() -> bool:
    return sys.platform.startswith("linux")


def _supplies(folder: Path) -> tuple[bool, float | None]:
    """Whether there is external power or no battery, and the batteries' mean charge in percent."""
    has_battery, on_power, charges = False, False, []
    for supply in sorted(folder.iterdir()) if folder.is_dir() else ():
        kind, status = _line(supply / "type"), _line(supply / "status")
        if kind != "Battery":
            on_power |= _line(supply / "online") in ("1", "2")
        elif _line(supply / "scope") != "Device" and _line(supply / "present") != "0":
            has_battery = True
            on_power |= status in ("Charging", "Full")
            capacity = _line(supply / "capacity")
            if capacity.isdecimal():
                charges.append(float(capacity))
    return on_power or not has_battery, sum(charges) / len(charges) if charges else None


def _line(path: Path) -> str:
    """The text of a file of sysfs, empty if there is none; drivers fail with any OSError."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _by_psutil() -> tuple[bool, float | None]:
    battery = _psutil().sensors_battery()
    if battery is None:
        return True, None
    return bool(battery.power_plugged), float(battery.percent)


def _psutil() -> Any:
    try:
        import psutil
    except ImportError as exc:
        raise ConfigurationError(
            "the battery cannot be read: this is not Linux, and psutil is not installed",
            hint="pip install psutil, or give a callable of your own",
        ) from exc
    return psutil


@dataclass(frozen=True, slots=True)
class Interface:
    """Take part unless the default route leaves by a network interface that `avoid` names.

    `avoid` are names or patterns ("wwan*"); the usual names of cellular modems by default. Where
    several default routes exist, the one of the smallest metric counts. Reads Linux's routing
    tables in `folder`; other systems need a callable of their own. It is asked again after
    `seconds`.
    """

    avoid: tuple[str, ...] = ("wwan*", "wwp*", "ppp*", "rmnet*")
    seconds: float = ASK_AGAIN
    folder: Path = Path("/proc/net")

    def __post_init__(self) -> None:
        if isinstance(self.avoid, str) or not self.avoid:
            raise ConfigurationError(
                f"avoid is {self.avoid!r}; give a tuple of names or patterns of interfaces"
            )
        _check_seconds(self.seconds)
        if not sys.platform.startswith("linux"):
            raise ConfigurationError(
                "the default route is read from /proc/net, which is Linux's",
                hint="give a callable of your own",
            )

    def __call__(self) -> bool | Refusal:
        name = self._default_interface()
        pattern = next((each for each in self.avoid if fnmatch(name, each)), None)
        if pattern is None:
            return True
        return Refusal(f"the network is reached by {name}", self.seconds)

    def _default_interface(self) -> str:
        """Empty where there is no default route."""
        routes = [*_routes_4(self.folder / "route"), *_routes_6(self.folder / "ipv6_route")]
        return min(routes)[1] if routes else ""


def _routes_4(path: Path) -> Iterator[tuple[int, str]]:
    """Metric and interface of each default route in use; the table has flags in hex."""
    for line in _line(path).splitlines()[1:]:
        name, destination, _, flags, _, _, metric, mask = line.split()[:8]
        if int(destination, 16) == int(mask, 16) == 0 and int(flags, 16) & _UP:
            yield int(metric), name


def _routes_6(path: Path) -> Iterator[tuple[int, str]]:
    """The same of IPv6, whose metric is in hex; the route that refuses everything is no route."""
    for line in _line(path).splitlines():
        destination, prefix, _, _, _, metric, _, _, flags, name = line.split()
        is_default = int(destination, 16) == int(prefix, 16) == 0
        if is_default and int(flags, 16) & _UP and not int(flags, 16) & _REJECT:
            yield int(metric, 16), name


@dataclass(frozen=True, slots=True)
class Load:
    """Take part while the machine's load of the last minute is at most `max_load` a processor.

    The device's own training is part of the load: after a round it may take a minute until the
    next. Unix only. It is asked again after `seconds`.
    """

    max_load: float = 0.5
    seconds: float = ASK_AGAIN

    def __post_init__(self) -> None:
        check_number("max_load", self.max_load, 0, above=True)
        _check_seconds(self.seconds)
        if _load() is None:
            raise ConfigurationError(
                "this system does not say its load", hint="give a callable of your own"
            )

    def __call__(self) -> bool | Refusal:
        load = _load()
        if load is None or load <= self.max_load:
            return True
        reason = f"the load is {load:.2f} a processor, more than {self.max_load:g}"
        return Refusal(reason, self.seconds)


def _load() -> float | None:
    """Processes that run or wait, for each processor, over the last minute; None on Windows."""
    averages = getattr(os, "getloadavg", None)
    return None if averages is None else averages()[0] / (os.cpu_count() or 1)


_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class Hours:
    """Take part in the given windows of the day, such as "22:00-06:00", in local time.

    A window may span midnight; its end does not belong to it. `clock` gives the local time.
    """

    def __init__(self, *windows: str, clock: Callable[[], datetime] = datetime.now) -> None:
        self._windows = tuple(_window(each) for each in windows)
        if not windows:
            raise ConfigurationError("no hours", hint='give Hours("22:00-06:00")')
        self._text, self._clock = ", ".join(windows), clock

    def __call__(self) -> bool | Refusal:
        now = self._clock()
        day = timedelta(days=1)
        begun = timedelta(hours=now.hour, minutes=now.minute, seconds=now.second)
        if any((begun - begin) % day < (end - begin) % day for begin, end in self._windows):
            return True
        missing = min((begin - begun) % day for begin, _ in self._windows).total_seconds()
        reason = f"it is {now:%H:%M}, outside of {self._text}"
        return Refusal(reason, min(max(missing, 1.0), _LONGEST))


def _window(text: str) -> tuple[timedelta, timedelta]:
    match = _WINDOW.fullmatch(text)
    numbers = [int(each) for each in match.groups()] if match else []
    if not match or numbers[:2] == numbers[2:]:
        raise ConfigurationError(
            f"{text!r} is no window of the day", hint="give BEGIN-END, such as 22:00-06:00"
        )
    begin_hour, begin_minute, end_hour, end_minute = numbers
    return (
        timedelta(hours=begin_hour, minutes=begin_minute),
        timedelta(hours=end_hour, minutes=end_minute),
    )
