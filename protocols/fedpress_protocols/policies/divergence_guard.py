"""A rate that is too high for a task is noticed, told of, and lowered.

Three signs, each of which may come late: what compression does to the direction of the mean update,
against a reference that part of the cohort sends in some rounds; the loss that devices measure; and
the accuracy of each class, since a mean hides what a few clients alone know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.plan import Profile, Term
from fedpress_protocols.policies.course import Comparison, Facts, Rung, Tally, Watch

_RECENT = 5
"""Models whose measures are taken together."""
_SURE = 3.0
"""Standard errors by which a class must have fallen."""
_FADING = 0.5
"""What a probe counts for beside the next one."""


class DivergenceGuard(Term):
    """No harder profile than the task bears.

    In the first `first` rounds and in every `every`-th after, `share` of the cohort sends the
    `reference`, the others what they would have. A finding is a `progress` below `floor`, an
    `energy` above `most_energy` (see `Comparison`), a loss that is above the best so far by more
    than `rise` of it, or a class whose accuracy has fallen by more than `blind_spot`, each of the
    last five models that were measured. A finding warns, and the next round probes again; the
    `patience`-th in a row lowers the rate by one profile, for good. Until `settle` rounds after
    that, losses and classes find nothing.
    """

    id: Literal["divergence_guard"] = "divergence_guard"
    reference: Profile = Profile(name="reference", compressor=Uncompressed())
    share: Annotated[float, Field(ge=0, le=0.9)] = 0.5
    """0: no probes; losses and classes alone."""
    first: Annotated[int, Field(ge=0)] = 3
    every: Annotated[int, Field(ge=1)] = 25
    floor: Annotated[float, Field(ge=0, lt=1)] = 0.2
    most_energy: Annotated[float, Field(gt=1)] = 16.0
    rise: Annotated[float, Field(gt=0)] = 0.5
    blind_spot: Annotated[float, Field(gt=0, le=1)] = 0.2
    patience: Annotated[int, Field(ge=1)] = 2
    settle: Annotated[int, Field(ge=1)] = 10

    def begins(self, hardest: Rung) -> Watch:
        return Watch(ceiling=hardest)

    def probes(self, watch: Watch, number: int) -> bool:
        """Whether part of the cohort sends the reference in round `number`."""
        return self.share > 0 and (number <= self.first or number >= watch.probe_at > self.first)

    def references_among(self, clients: int) -> int:
        """How many of the first `clients` that are assigned in a probe send the reference."""
        return math.floor(round(clients * self.share, 6))

    def watched(
        self, before: Watch, facts: Facts, probed: Comparison | None, was_probe: bool
    ) -> tuple[Watch, tuple[str, ...]]:
        """The watch for the round that `facts` are of, and what was found; `probed` is what the
        round before came to, if it `was_probe`."""
        watch = before.model_copy(update=self._pooled(before, probed))
        found = [*self._of_probe(watch, probed), *self._of_measures(watch, facts)]
        number = facts.number
        if found:
            after: dict[str, float] = {"strikes": watch.strikes + 1, "probe_at": number}
            if watch.strikes + 1 >= self.patience:
                can_lower = watch.ceiling > 0
                after = {
                    "ceiling": watch.ceiling - can_lower,
                    "strikes": 0,
                    "probe_at": number + self.settle if can_lower else self._next_probe(number + 1),
                    "since": number - 1,
                    "inner": 0.0,
                    "norm": 0.0,
                }
            return watch.model_copy(update=after), tuple(found)
        is_cleared = was_probe or self.share == 0
        after = {"strikes": 0} if is_cleared else {}
        if was_probe and number > self.first:
            after["probe_at"] = self._next_probe(number)
        return watch.model_copy(update=after), ()

    def _next_probe(self, number: int) -> int:
        """The next round from `number` on that is one after a multiple of `every`."""
        return number + -(number - 1) % self.every

    def _pooled(self, watch: Watch, probed: Comparison | None) -> dict[str, float]:
        if probed is None:
            return {}
        return {
            "inner": _FADING * watch.inner + probed.inner,
            "norm": _FADING * watch.norm + probed.norm,
        }

    def _of_probe(self, watch: Watch, probed: Comparison | None) -> Iterator[str]:
        if probed is None:
            return
        if watch.norm > 0 and watch.inner < self.floor * watch.norm:
            yield (
                f"compressed updates go {watch.inner / watch.norm:.2f} of the reference's way, "
                f"less than {self.floor:g}"
            )
        if probed.energy > self.most_energy:
            yield (
                f"a compressed update has {probed.energy:.1f} times the energy of one of the "
                f"reference, more than {self.most_energy:g}"
            )

    def _of_measures(self, watch: Watch, facts: Facts) -> Iterator[str]:
        if watch.since and facts.number <= watch.since + self.settle:
            return
        known = [(model, loss) for model, loss in enumerate(facts.losses) if loss is not None]
        means = list(_means([loss for _, loss in known]))
        if len(means) > 1 and known[-1][0] > watch.since:
            best = min(means[:-1])
            if means[-1] > best + self.rise * abs(best):
                yield (
                    f"the loss of the last {_RECENT} models is {means[-1]:.4g}, after {best:.4g}"
                )
        models = sorted(facts.classes)
        if len(models) > _RECENT and models[-1] > watch.since:
            yield from self._blind_spots([facts.classes[model] for model in models])

    def _blind_spots(self, counted: Sequence[Mapping[str, Tally]]) -> Iterator[str]:
        """Classes that recent models have lost."""
        newest = _added(counted[-_RECENT:])
        for label, now in sorted(newest.items()):
            best = max(
                (
                    old
                    for at in range(0, len(counted) - _RECENT, _RECENT)
                    if (old := _added(counted[at : at + _RECENT]).get(label)) is not None
                ),
                key=_accuracy,
                default=None,
            )
            if best is None:
                continue
            fall = _accuracy(best) - _accuracy(now)
            if fall > self.blind_spot and fall > _SURE * _error(best, now):
                yield (
                    f"class {label} is right {100 * _accuracy(now):.0f} % of the time, after "
                    f"{100 * _accuracy(best):.0f} %"
                )


def _means(values: Sequence[float]) -> Iterator[float]:
    """Of every `_RECENT` values that follow one another, the newest last."""
    for stop in range(_RECENT, len(values) + 1):
        yield sum(values[stop - _RECENT : stop]) / _RECENT


def _added(counted: Sequence[Mapping[str, Tally]]) -> dict[str, Tally]:
    total: dict[str, Tally] = {}
    for each in counted:
        for label, tally in each.items():
            so_far = total.get(label, Tally(0, 0))
            total[label] = Tally(
                so_far.num_examples + tally.num_examples, so_far.correct + tally.correct
            )
    return total


def _accuracy(tally: Tally) -> float:
    return tally.correct / tally.num_examples


def _error(one: Tally, other: Tally) -> float:
    """The standard error of the difference of two accuracies, by their common mean."""
    n, m = one.num_examples, other.num_examples
    mean = (one.correct + other.correct) / (n + m)
    return math.sqrt(mean * (1 - mean) * (1 / n + 1 / m))
