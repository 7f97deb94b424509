"""The configuration of the strategies, and their report of a round."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.error_feedback import check_feedback
from fedpress_compression.fixed_point import FixedPoint
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.messages import PrivacyStatus
from fedpress_protocols.plan import PrivacyTerms
from fedpress_protocols.policies import Auto, Course

PROFILE = "flower"
NO_ANSWER = "no answer"
"""Why a client is dropped of which nothing came."""
NOT_THE_MEAN = "the compressor counts on a model that moves by the very mean of the updates"
ANOTHER = "choose fedavg with its defaults, or another compressor"


_AUTO = Auto()
_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EXAMPLES = 2**32


def is_compressor(value: object) -> bool:
    return hasattr(value, "wire_id") and not isinstance(value, type)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, Integral) and int(value) >= least


_DUE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "compressor": (
        lambda value: value is None or is_compressor(value),
        "a compressor, such as ErrorFeedback(TopK(0.01)),",
    ),
    "task": (
        lambda value: isinstance(value, str) and _TASK.fullmatch(value) is not None,
        "a name of 1 to 64 letters, digits, '.', '_' and '-'",
    ),
    "minimum": (lambda value: _is_whole(value, 1), "a whole number of clients"),
    "max_abs": (
        lambda value: isinstance(value, Real) and 0 < float(value) < 2**52,
        "a positive number",
    ),
    "max_examples": (
        lambda value: _is_whole(value, 1) and value < _EXAMPLES,
        "a whole number from 1 to 2**32 - 1",
    ),
    "seed": (lambda value: value is None or _is_whole(value, 0), "a whole number or None"),
    "auto": (lambda value: isinstance(value, Auto), "Auto(...)"),
    "restricted": (lambda value: isinstance(value, bool), "True or False"),
    "privacy": (
        lambda value: value is None or isinstance(value, PrivacyTerms),
        "PrivacyTerms(...) or None",
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Configuration of every round's plan; the fields are those of `TaskConfig`.

    Without a `compressor` the plan has the default of fedpress's server, docs/auto.md: a rate for
    each round by the policy `auto` with these terms, and under masks a fixed one.
    A round to which fewer than `minimum` uploads come leaves the model as it is. With a `seed` the
    cohort of a round depends on the seed, the round and the nodes alone, and so does the plan's
    public randomness.

    A strategy of fedpress weights a client by its number of examples, a whole number, and one with
    more than `max_examples` as if it had so many. Of updates what is beyond `max_abs` is clipped.

    Where it is `restricted` clients of the masked lane train on what is sent alone, as their apps
    have to know how to (`masking_mod(honours=["restricted"])`).

    With `privacy` terms clients clip, and noise hides what is left (docs/privacy.md): the central
    and the local lane in FedpressStrategy, the distributed one in MaskedStrategy. The first round's
    clients are then the cohort whose size divides every sum.
    """

    compressor: Compressor[Any] | None = None
    task: str = "flower"
    minimum: int = 1
    max_abs: float = 256.0
    max_examples: int = 65536
    seed: int | None = None
    auto: Auto = _AUTO
    restricted: bool = False
    privacy: PrivacyTerms | None = None

    def __post_init__(self) -> None:
        for name, (is_good, due) in _DUE.items():
            value = getattr(self, name)
            if not is_good(value):
                raise ConfigurationError(f"the plan's {name} is {value!r}, where {due} is due")
        FixedPoint.widest(max_abs=self.max_abs, max_weight=self.max_examples)
        if self.compressor is None:
            if self.privacy is not None:
                raise IncompatiblePlan(
                    "privacy terms in a plan without a compressor, where rates follow what clients "
                    "measure on their data, without noise",
                    hint="name a compressor, such as Quantize() or SharedSupport(fraction=0.05)",
                )
            return
        if self.auto != _AUTO:
            raise IncompatiblePlan(
                "a plan with a compressor and terms of auto, which chooses compressors by itself",
                hint="remove one of them",
            )
        check_feedback(self.compressor)
        unknown = sorted(self.compressor.needs - {"previous", "drift"})
        if unknown:
            raise IncompatiblePlan(
                f"the compressor reads {', '.join(unknown)}, which Flower's messages do not carry",
                hint="choose another, or run fedpress's own server",
            )


@dataclass(frozen=True, slots=True)
class RoundReport:
    """The outcome of one round of training. `asked` and `included` name nodes, `dropped` says why
    the others are not included. `upload_bytes` are those of all bodies that came, and of models
    that came uncompressed; `nmse` is the mean over the uploads included, NaN if there are none, or
    if they were masked; `model` is the digest of the model after the round. `download_bytes` are
    those of all models in the round's messages to train; of these `coded_download_bytes` were
    coded, and `difference_download_bytes` as the difference to a model that the client holds.
    `left_out` names by node the metrics that were NaN or infinite; its update is in the model.
    `profile` names the round's compressor; `course` is what `auto` decided and why, with the result
    of a probe, where the plan names no compressor.

    Of a masked round: `session_up_bytes` and `session_down_bytes` are those of the session's
    messages, bodies not among them; `silent` tells by step how many of those who were asked did not
    answer; `faults` what included clients did wrong once their bodies were in; `abandoned` why
    there was no sum.

    `privacy` is what the plan's privacy terms have spent, by the client that took part most often.
    """

    round: int
    asked: tuple[int, ...]
    included: tuple[int, ...]
    dropped: Mapping[int, str]
    upload_bytes: int
    nmse: float
    num_examples: int
    model: str
    download_bytes: int = 0
    coded_download_bytes: int = 0
    difference_download_bytes: int = 0
    left_out: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    profile: str = PROFILE
    course: Course | None = None
    session_up_bytes: int = 0
    session_down_bytes: int = 0
    silent: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)
    abandoned: str = ""
    privacy: PrivacyStatus | None = None


def needs_plain_mean(plan: Plan) -> bool:
    return bool(getattr(plan.compressor, "needs_plain_mean", False))
