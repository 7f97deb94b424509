"""The profiles that are worth a look, and what each was measured to cost in accuracy.

Losses are points of accuracy below the best float32 baseline of the same table, means of seeds 0 to
2: `clear` profiles by `benchmarks/digits_bytes_to_accuracy.py`, `masked` ones by
`benchmarks/masked_bytes_to_accuracy.py`; that of auto by `benchmarks/accuracy_vs_bytes.py`, seeds 0
and 1. All are of the digits. docs/planning.md has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedpress.planning.situation import Lane
from fedpress_compression.compressor import Compressor, from_config
from fedpress_protocols.defaults import BITS, USUAL
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
    advice: str = ""
    """Settings that belong to it."""
    made: Compressor[Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", from_config(self.config))


def candidates(lane: Lane) -> tuple[Candidate, ...]:
    """Those of a lane, the baseline first, then from gentle to hard."""
    return _clear() if lane == "clear" else _masked()


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


_MOMENTUM = "strategy fedavgm, momentum 0.8"
_NUMBA = "numba on the devices (extra fast)"
_AVERAGE = "strategy fedavg"


def _clear() -> tuple[Candidate, ...]:
    return (
        Candidate("float32", {"id": "none"}, 0.0, baseline=True, advice=_MOMENTUM),
        Candidate("8 bits", _feedback({"id": "quantize", "bits": 8}), 0.1, advice=_MOMENTUM),
        Candidate("4 bits", _feedback({"id": "quantize", "bits": 4}), 0.2, advice=_MOMENTUM),
        Candidate(
            "top-k 2 %, 1 bit", _feedback(_by_tensor(_topk(0.02, 1))), 0.5, advice=_MOMENTUM
        ),
        Candidate(
            AUTO, _feedback({"id": "ecsq", "target": BITS[USUAL]}), 1.0,
            advice="a task without profiles and strategy; bytes are those of the rate it comes to",
        ),
        Candidate("ecsq .05 bit", {"id": "ecsq", "target": 0.05}, 0.8, advice=_MOMENTUM),
        Candidate(
            "ternary 1 %, CAFe", _in_context(_cafe({"id": "stc"}, 0.9)), 1.1,
            advice=f"{_AVERAGE}; {_NUMBA}",
        ),
        Candidate(
            "top-k .1 %, CAFe", _in_context(_cafe(_topk(0.001), 1.0)), 2.2,
            advice=f"{_AVERAGE}; {_NUMBA}",
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
            advice=_MOMENTUM,
        ),
        Candidate("all, 5 levels", dense, 1.1, masking=levels(2, 5.0), advice=_MOMENTUM),
        Candidate(
            "support 5 %, 9 levels", support(0.05), 0.8, masking=levels(4, 8.0), restricted=True,
            advice=f"restricted training; {_MOMENTUM}",
        ),
        Candidate(
            "support 2 %, 7 levels", support(0.02), 2.4, masking=levels(3, 6.0), restricted=True,
            advice=f"restricted training; {_MOMENTUM}",
        ),
    )  # fmt: skip
