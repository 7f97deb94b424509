"""Single-threaded counters and histograms, at a fifth of the cost of prometheus_client.

prometheus_client takes a lock and formats every label at each observation, which costs more than
all other observation of a request. These use plain lists, so counting and collecting must be in one
thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class Count:
    """A counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Distribution:
    """A histogram: the number of observations up to each of the ascending `bounds`, and their
    sum."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Counts by bucket; the last is for values above all bounds."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def with_counts(self, counts: Sequence[int]) -> Distribution:
        """A histogram with the same bounds and other counts by bucket."""
        other = Distribution(self._bounds)
        other.counts = list(counts)
        return other

    def quantile(self, share: float) -> float | None:
        """The approximate quantile at `share` in [0, 1]: interpolated linearly within its bucket,
        and limited to the outermost bounds. None without observations."""
        num = sum(self.counts)
        if not num:
            return None
        due, before = share * num, 0
        for place, count in enumerate(self.counts):
            if count and before + count >= due:
                low = self._bounds[place - 1] if place else min(0.0, self._bounds[0])
                high = self._bounds[min(place, len(self._bounds) - 1)]
                return low + (high - low) * (due - before) / count
            before += count
        return self._bounds[-1]


class Counters(Collector):
    """A counter for each combination of labels."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._about = name, documentation, tuple(labels)
        self._children: dict[tuple[object, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: object) -> Count:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = Count()
        return child

    def __iter__(self) -> Iterator[tuple[tuple[object, ...], Count]]:
        return iter(self._children.items())

    def collect(self) -> Iterator[CounterMetricFamily]:
        name, documentation, labels = self._about
        family = CounterMetricFamily(name, documentation, labels=labels)
        for values, child in self._children.items():
            family.add_metric([str(value) for value in values], child.value)
        yield family


class Histograms(Collector):
    """A histogram for each combination of labels."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._about = name, documentation, tuple(labels)
        self._bounds = tuple(map(float, bounds))
        self._children: dict[tuple[object, ...], Distribution] = {}
        if not labels:
            self.labels()  # cumulative
        registry.register(self)

    def labels(self, *values: object) -> Distribution:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = Distribution(self._bounds)
        return child

    def collect(self) -> Iterator[HistogramMetricFamily]:
        name, documentation, labels = self._about
        family = HistogramMetricFamily(name, documentation, labels=labels)
        bounds = [*(repr(bound) for bound in self._bounds), "+Inf"]
        for values, child in self._children.items():
            buckets = list(zip(bounds, accumulate(child.counts), strict=True))
            family.add_metric([str(value) for value in values], buckets, child.total)
        yield family
