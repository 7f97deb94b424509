"""The speed of the device's uplink, measured on its newest uploads and reported at check-in."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from fedpress_protocols.messages import MAX_ATTRIBUTES, Attribute
from fedpress_protocols.policies import TELLING, UPLINK

_REMEMBERED = 5
"""Uploads whose speed is remembered; the median of them is reported."""


class UplinkMeter:
    """The device's attributes, with the measured uplink in place of the declared one."""

    def __init__(self, attributes: Mapping[str, Attribute]) -> None:
        self._declared = dict(attributes)
        self._speeds: list[float] = []
        """In Mbit/s, of the newest uploads that tell of the link."""

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count an upload of `num_bytes` in `seconds`, answer and repeats included."""
        if num_bytes >= TELLING and seconds > 0:
            self._speeds = [*self._speeds, 8e-6 * num_bytes / seconds][-_REMEMBERED:]

    @property
    def attributes(self) -> dict[str, Attribute]:
        if not self._speeds or len({*self._declared, UPLINK}) > MAX_ATTRIBUTES:
            return self._declared
        return {**self._declared, UPLINK: round(median(self._speeds), 6)}
