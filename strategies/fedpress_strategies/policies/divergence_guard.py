"""A rate that is too high for a task is noticed, told of, and lowered.

Three signs, each of which may come late: the effect of compression on the direction of the mean
update, by sketches of what it was before that clients send in some rounds; the loss that devices
measure; and the accuracy of each class, since a mean hides what a few clients alone know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fedpress_protocols.policies import Comparison, DivergenceGuard, Rung, Watch
from fedpress_strategies.policies.facts import Facts, Tally

_RECENT = 5
"""Models whose measures are taken together."""
_SURE = 3.0
"""Standard errors by which a class must have fallen."""
_FADING = 0.5
"""The weight of a probe relative to the next one."""


def first_watch(hardest: Rung) -> Watch:
    return Watch(ceiling=hardest)


def probes(guard: DivergenceGuard, watch: Watch, number: int) -> bool:
    """Whether round `number` is a probe."""
    return guard.sketch > 0 and (number <= guard.first or number >= watch.probe_at > guard.first)


def next_watch(
    guard: DivergenceGuard, before: Watch, facts: Facts, probed: Comparison | None, was_probe: bool
) -> tuple[Watch, tuple[str, ...]]:
    """The watch for the round that `facts` are of, and what was found; `probed` is what the
    round before came to, if it `was_probe`."""
    watch = before.model_copy(update=_pooled(before, probed))
    faults = [*_of_probe(guard, watch, probed), *_of_measures(guard, watch, facts)]
    number = facts.number
    if faults:
        after: dict[str, float] = {"strikes": watch.strikes + 1, "probe_at": number}
        if watch.strikes + 1 >= guard.patience:
            can_lower = watch.ceiling > 0
            after = {
                "ceiling": watch.ceiling - can_lower,
                "strikes": 0,
                "probe_at": number + guard.settle if can_lower else _next_probe(guard, number + 1),
                "since": number - 1,
                "inner": 0.0,
                "norm": 0.0,
            }
        return watch.model_copy(update=after), tuple(faults)
    is_cleared = was_probe or guard.sketch == 0
    after = {"strikes": 0} if is_cleared else {}
    if was_probe and number > guard.first:
        after["probe_at"] = _next_probe(guard, number)
    return watch.model_copy(update=after), ()


def _next_probe(guard: DivergenceGuard, number: int) -> int:
    """The next round from `number` on that is one after a multiple of `every`."""
    return number + -(number - 1) % guard.every


def _pooled(watch: Watch, probed: Comparison | None) -> dict[str, float]:
    if probed is None or probed.progress is None:
        return {}
    return {
        "inner": _FADING * watch.inner + probed.inner,
        "norm": _FADING * watch.norm + probed.norm,
    }


def _of_probe(guard: DivergenceGuard, watch: Watch, probed: Comparison | None) -> Iterator[str]:
    if probed is None:
        return
    is_known = probed.progress is not None and watch.norm > 0
    if is_known and watch.inner < guard.floor * watch.norm:
        yield (
            f"compressed updates go {watch.inner / watch.norm:.2f} of the way, less than "
            f"{guard.floor:g}"
        )
    if probed.energy > guard.most_energy:
        yield (
            f"a compressed update has {probed.energy:.1f} times the energy of one before "
            f"compression, more than {guard.most_energy:g}"
        )


def _of_measures(guard: DivergenceGuard, watch: Watch, facts: Facts) -> Iterator[str]:
    if watch.since and facts.number <= watch.since + guard.settle:
        return
    measured = [(model, loss) for model, loss in enumerate(facts.losses) if loss is not None]
    means = list(_means([loss for _, loss in measured]))
    if len(means) > 1 and measured[-1][0] > watch.since:
        best = min(means[:-1])
        if means[-1] > best + guard.rise * abs(best):
            yield (f"the loss of the last {_RECENT} models is {means[-1]:.4g}, after {best:.4g}")
    models = sorted(facts.classes)
    if len(models) > _RECENT and models[-1] > watch.since:
        yield from _blind_spots(guard, [facts.classes[model] for model in models])


def _blind_spots(guard: DivergenceGuard, counted: Sequence[Mapping[str, Tally]]) -> Iterator[str]:
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
        if fall > guard.blind_spot and fall > _SURE * _error(best, now):
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
