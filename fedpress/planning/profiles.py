"""The profiles that are worth a look, and what each was measured to cost in accuracy.

Losses are points of accuracy below the best float32 baseline of the same table, means of seeds 0 to
2: `clear` profiles by `benchmarks/digits_bytes_to_accuracy.py`, `masked` ones by
`benchmarks/masked_bytes_to_accuracy.py`; that of auto by `benchmarks/accuracy_vs_bytes.py`. All are
of the digits. docs/planning.md has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedpress.planning.situation import Lane, Situation
from fedpress_compression.compressor import Compressor, from_config
from fedpress_protocols.defaults import BITS, USUAL, rate_levels, reserves
from fedpress_protocols.plan import MaskingTerms

Config = Mapping[str, Any]
AUTO = "auto"

MEASURED_ON: Mapping[Lane, str] = {
    "clear": "a perceptron of 50,826 parameters, 10 of 100 devices a round, 100 rounds",
    "masked": "a perceptron of 50,826 parameters, 20 of 100 devices a round, 150 rounds",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A profile by a short name. `loss` is None where nothing was measured.

    `masking` and `restricted` are of the masked lane. `baseline` is what the others are held
    against: what a task would do that does not compress.
    """

    name: str
    config: Config
    loss: float | None = None
    baseline: bool = False
    masking: MaskingTerms | None = None
    restricted: bool = False
    strategy: str = ""
    """That the loss was measured under, with its settings."""
    needs: str = ""
    """Other settings and extras that it needs."""
    made: Compressor[Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", from_config(self.config))

    @property
    def advice(self) -> str:
        """Settings that belong to it."""
        under = f"strategy {self.strategy}" if self.strategy else ""
        return "; ".join(filter(None, (under, self.needs)))


def candidates(situation: Situation) -> tuple[Candidate, ...]:
    """Those of the lane, the baseline first, then from gentle to hard."""
    return _clear(situation.uploads) if situation.lane == "clear" else _masked()


def rung_of_auto(uploads: int) -> int:
    """The index in BITS of the default's most compressed profile in a task of so many `uploads`. A
    plan does not know the number of devices, so profiles in reserve for frequent ones do not
    count."""
    num_levels = len(rate_levels(uploads=uploads))
    return num_levels - 1 - reserves(num_levels, uploads)["reserve"]


def _auto(uploads: int) -> Candidate:
    rung = rung_of_auto(uploads)
    advice = f"a task without profiles and strategy; {BITS[rung]:g} bit a value"
    if rung < USUAL:
        advice += (
            " in so short a task, less where devices upload nine times or more; its loss was "
            f"measured at {BITS[USUAL]:g} bit"
        )
    return Candidate(AUTO, rate_levels(uploads=uploads)[rung]["compressor"], 1.0, needs=advice)


def _feedback(inner: Config) -> Config:
    return {"id": "error_feedback", "inner": inner}


def _by_tensor(large: Config, small: Config | None = None) -> Config:
    small_terms = {} if small is None else {"small": small}
    return {"id": "per_tensor", "large": large, **small_terms}


def _topk(fraction: float, bits: int = 0) -> Config:
    return {"id": "topk", "fraction": fraction, "magnitude_bits": bits}


def _in_context(inner: Config) -> Config:
    return {"id": "coded", "inner": inner, "contexts": "previous"}


def _cafe(inner: Config, factor: float) -> Config:
    return {"id": "cafe", "inner": inner, "factor": factor}


_MOMENTUM = "fedavgm, momentum 0.8"
_NUMBA = "numba on the devices (extra fast)"
_RESTRICTED = "restricted training"


def _clear(uploads: int) -> tuple[Candidate, ...]:
    return (
        Candidate("float32", {"id": "none"}, 0.0, baseline=True, strategy=_MOMENTUM),
        Candidate("8 bits", _feedback({"id": "quantize", "bits": 8}), 0.1, strategy=_MOMENTUM),
        Candidate("4 bits", _feedback({"id": "quantize", "bits": 4}), 0.2, strategy=_MOMENTUM),
        Candidate(
            "top-k 2 %, 1 bit", _feedback(_by_tensor(_topk(0.02, 1))), 0.5, strategy=_MOMENTUM
        ),
        _auto(uploads),
        Candidate("ecsq .05 bit", {"id": "ecsq", "target": 0.05}, 0.8, strategy=_MOMENTUM),
        Candidate(
            "ternary 1 %, CAFe", _in_context(_cafe({"id": "stc"}, 0.9)), 1.1,
            strategy="fedavg", needs=_NUMBA,
        ),
        Candidate(
            "top-k .1 %, CAFe", _in_context(_cafe(_topk(0.001), 1.0)), 2.2,
            strategy="fedavg", needs=_NUMBA,
        ),
    )  # fmt: skip


def _masked() -> tuple[Candidate, ...]:
    dense: Config = {"id": "quantize", "clip": 0.1}

    def support(fraction: float) -> Config:
        narrow = {"id": "shared_support", "fraction": fraction, "explore": 0.1}
        return _by_tensor(narrow, dense)

    def levels(number: int, headroom: float) -> MaskingTerms:
        return MaskingTerms(levels=number, headroom=headroom, first_range=0.05)

    return (
        Candidate(
            "all, 2^15 levels", dense, 0.0, baseline=True, masking=levels(2**15, 64.0),
            strategy=_MOMENTUM,
        ),
        Candidate("all, 5 levels", dense, 1.1, masking=levels(2, 5.0), strategy=_MOMENTUM),
        Candidate(
            "support 5 %, 9 levels", support(0.05), 0.8, masking=levels(4, 8.0), restricted=True,
            strategy=_MOMENTUM, needs=_RESTRICTED,
        ),
        Candidate(
            "support 2 %, 7 levels", support(0.02), 2.4, masking=levels(3, 6.0), restricted=True,
            strategy=_MOMENTUM, needs=_RESTRICTED,
        ),
    )  # fmt: skip
