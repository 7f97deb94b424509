"""Defaults of a task that names no compressor: `auto` over a ladder of rates, and its settings.

docs/bench-auto.md says on which tasks each constant was chosen, and what it gives on others.
Everything is written out in the task's configuration when it is created, so that later releases
change nothing about a task that has begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

BITS = (1.6, 1.13, 0.8, 0.57, 0.4, 0.28, 0.2, 0.14, 0.1, 0.07, 0.05)
"""Of the ladder's profiles, a value; the coder's contexts make it less."""
USUAL = 8
"""The rung that the usual gap asks for; the rungs beyond it are for a larger gap."""
_USUAL_GAP = 0.5
_ENOUGH = 24.0
"""Bits a value that all uploads of a task together have at least: 240 of .1 bit. Less tells too
little, and so few uploads cost little: three quarters of a single one in float32."""
_ENOUGH_ONCE = 90.0
"""The same where clients upload seldom, so that much of what they keep back is never sent."""
_HARDEST_OF_FLAT = 3
"""The most compressed rung for flat updates."""
_HARDEST_OF_STATISTICS = 4
"""The most compressed rung for models with running statistics."""
MAX_RATIO = 30.0
"""Of a residual's norm to the new update's: 10 cuts residuals of devices that have learnt their
data, and an update that diverged is a thousand times the usual one."""
MIN_BYTES = 256
"""Of a body, which travels with some 700 of headers: a model of a few thousand values is not made
to learn from less."""
_ALONE = frozenset({"auto", "bandwidth_aware"})
"""Policies that go with a ladder made here."""
_OTHERS = frozenset({"accuracy_driven", "divergence_guard"})
_BOUNDS = frozenset({"gap", "upload_bytes"})
"""Fields of `auto` by which somebody says how much is to be sent."""
_SHORTEST, _LONGEST, _SHARE = 3.0, 50.0, 0.1
"""Rounds that the average goes over, and their share of the task's."""
_MOMENTUM, _LESS = 0.8, 0.5
"""The server's, and what it is while the loss does not fall, and in small cohorts."""
SMALL = 10
"""Cohorts below this size are small."""
_ON_SUPPORT = 1.5
"""The server's rate where devices train on a support alone."""
_WITH_CONTROL = frozenset({"scaffold"})
"""Strategies that no downlink is for."""
_WHOLE, _NUMBER = TypeAdapter(int), TypeAdapter(float)
T = TypeVar("T")


def completed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a task with what it leaves open, if it names neither profiles nor policies of
    its own; else as they are. What a task says by itself stays as it says it.

    Numbers are read as `TaskConfig` reads them: 1e2 is 100. Of policies that cannot go without
    profiles of the task's own nothing is completed, and of wrong ones the profiles alone, so that
    it is the policies that are refused."""
    values = dict(fields)
    policies = _as_in_files(values.get("policies") or ({"id": "auto"},))
    if values.get("profiles") is not None:
        return values
    if not _is_ours(policies):
        return values if _choose_alone(policies) else {**values, "profiles": rate_levels()}
    is_masked = values.get("lane", "clear") == "masked"
    rounds = _read(_WHOLE, values.get("rounds"))
    careful = None
    if values.get("strategy") is None and rounds is not None and not values.get("asynchronous"):
        careful = careful_momentum(_cohort_size(values))
        values["strategy"] = strategy_for(
            rounds,
            _cohort_size(values),
            is_masked=is_masked,
            is_restricted=is_masked and values.get("privacy") is None and _is_restricted(values),
        )
    strategy = values.get("strategy")
    identity = strategy.get("id") if isinstance(strategy, Mapping) else None
    if "downlink" not in values and identity not in _WITH_CONTROL:
        values["downlink"] = {}
    if is_masked:
        return {**values, **_masked(values)}
    auto: Mapping[str, Any] = next(each for each in policies if each["id"] == "auto")
    is_free = len(policies) == 1 and _BOUNDS.isdisjoint(auto)
    uploads = _uploads(values) if is_free else None
    levels = rate_levels(_read(_NUMBER, auto.get("gap", _USUAL_GAP)), uploads)
    ours: dict[str, Any] = {}
    if is_free:
        ours |= {name: kept for name, kept in reserves(len(levels), uploads).items() if kept}
    if careful is not None:
        ours["careful_momentum"] = careful
    policies = tuple({**ours, **each} if each is auto else each for each in policies)
    return {**values, "policies": policies, "profiles": levels}


def _as_in_files(policies: Any) -> Any:
    if not isinstance(policies, list | tuple):
        return policies
    return tuple(
        {"id": each.id, **each.model_dump(exclude_unset=True)}  # type: ignore[attr-defined]
        if isinstance(each, BaseModel)
        else each
        for each in policies
    )


def _is_ours(policies: Any) -> bool:
    """Whether these are auto's."""
    ids = _ids(policies)
    return "auto" in ids and _ALONE.issuperset(ids)


def _choose_alone(policies: Any) -> bool:
    """Whether these choose among profiles of the task's own."""
    ids = _ids(policies)
    return bool(ids) and "auto" not in ids and (_ALONE | _OTHERS).issuperset(ids)


def _ids(policies: Any) -> list[Any]:
    """Empty where they are no policies."""
    if not isinstance(policies, tuple) or not all(isinstance(each, Mapping) for each in policies):
        return []
    ids = [each.get("id") for each in policies]
    return ids if all(isinstance(each, str) for each in ids) else []


def _read(kind: TypeAdapter[T], value: Any) -> T | None:
    """As a field of a task would be read; None where it would be refused."""
    try:
        return kind.validate_python(value)
    except ValidationError:
        return None


def _uploads(fields: Mapping[str, Any]) -> int | None:
    """Of the whole task; None where its fields do not tell."""
    size, rounds = _cohort_size(fields), _read(_WHOLE, fields.get("rounds"))
    return None if size is None or rounds is None else rounds * size


def _cohort_size(fields: Mapping[str, Any]) -> int | None:
    """None where the fields do not tell."""
    cohort = fields.get("cohort")
    size = cohort.get("size") if isinstance(cohort, Mapping) else getattr(cohort, "size", None)
    return _read(_WHOLE, size)


def rate_levels(gap: float | None = _USUAL_GAP, uploads: int | None = None) -> list[dict[str, Any]]:
    """Error feedback around entropy-coded quantisation, the gentlest first, down to the rate that
    `gap` points of accuracy ask for: a quarter of the gap for twice the rate. Not below what
    `uploads`, all of the task, need to tell enough; None where a bound that somebody set counts.
    A `gap` of None or one that no task may have counts as the usual one."""
    hardest = USUAL
    if gap is not None and gap > 0:
        least = BITS[USUAL] * (_USUAL_GAP / gap) ** 0.5
        if uploads is not None and uploads > 0:
            least = max(least, _ENOUGH / uploads)
        hardest = max([1, *(rung for rung, bits in enumerate(BITS) if bits > 0.97 * least)])
    return [
        {
            "name": f"{bits:g}-bit",
            "compressor": {
                "id": "error_feedback",
                "max_ratio": MAX_RATIO,
                "inner": {
                    "id": "coded",
                    "contexts": "previous",
                    "inner": {
                        "id": "ecsq",
                        "control": "bits",
                        "target": bits,
                        "min_bytes": MIN_BYTES,
                        "by_rows": True,
                    },
                },
            },
        }
        for bits in BITS[: hardest + 1]
    ]


def strategy_for(
    rounds: int,
    cohort: int | None = None,
    *,
    is_masked: bool = False,
    is_restricted: bool = False,
) -> dict[str, Any]:
    """Server momentum, which makes good what a rate costs in speed, on mean updates without spikes,
    and the rounds' average. With less momentum in a small cohort, whose few updates swing under
    more: what a client keeps back comes late and at once. Under masks longer steps where training
    `is_restricted` to a support without noise: few values move in each round."""
    over = min(max(_SHARE * rounds, _SHORTEST), _LONGEST)
    is_small = not is_masked and cohort is not None and cohort < SMALL
    inner: dict[str, Any] = {
        "id": "fedavgm",
        "learning_rate": _ON_SUPPORT if is_restricted else 1.0,
        "momentum": _LESS if is_small else _MOMENTUM,
    }
    if rounds > 1 and (is_restricted or not is_masked):
        constant = rounds - rounds // 2
        inner |= {"constant_rounds": constant, "decay_rounds": rounds // 2, "final": 0.25}
    if not is_masked:
        inner = {"id": "spike_clipping", "ratio": 1.5, "inner": inner}
    return {"id": "ema", "decay": round(1 - 1 / over, 4), "inner": inner}


def careful_momentum(cohort: int | None) -> float:
    """That of the default's `Auto`."""
    return 0.0 if cohort is not None and cohort < SMALL else _LESS


def reserves(num_levels: int, uploads: int | None) -> dict[str, int]:
    """`reserve`, `flat_reserve` and `statistics_reserve` of `Auto`: how many of the most compressed
    of `num_levels` send too little in `uploads`, all of the task, unless clients upload often, of
    flat updates, and of models with running statistics."""
    least = _ENOUGH_ONCE / uploads if uploads else 0.0
    enough = max((rung for rung, bits in enumerate(BITS) if bits > 0.97 * least), default=0)
    return {
        "reserve": max(0, num_levels - 1 - enough),
        "flat_reserve": max(0, num_levels - 1 - min(enough, _HARDEST_OF_FLAT)),
        "statistics_reserve": max(0, num_levels - 1 - _HARDEST_OF_STATISTICS),
    }


def masked_default(*, is_restricted: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The profile, and the masking terms: of a support that the cohort shares, on which alone it
    trains, a few levels; of all values, fewer still, where training cannot be restricted."""
    dense = {"id": "quantize", "clip": 0.1}
    if not is_restricted:
        return {"name": "all", "compressor": dense}, {
            "levels": 2,
            "headroom": 5.0,
            "first_range": 0.05,
        }
    support = {"id": "shared_support", "fraction": 0.05, "explore": 0.3}
    profile = {
        "name": "support",
        "compressor": {"id": "per_tensor", "large": support, "small": dense},
    }
    return profile, {"levels": 4, "headroom": 8.0, "first_range": 0.05}


def _masked(fields: Mapping[str, Any]) -> dict[str, Any]:
    training = fields.get("training") or {}
    masking = fields.get("masking") or {}
    if not isinstance(training, Mapping) or not isinstance(masking, Mapping):
        return {}
    profile, terms = masked_default(is_restricted=_is_restricted(fields))
    return {
        "profiles": [profile],
        "masking": {**terms, **masking},
        "training": {"restricted": True, **training},
    }


def _is_restricted(fields: Mapping[str, Any]) -> bool:
    """Whether a masked task trains on a support alone: unless it says that its trainer cannot."""
    training = fields.get("training") or {}
    return isinstance(training, Mapping) and training.get("restricted", True) is True
