"""Values to symbols and back, as compressors need it: rounded to a grid, or byte by byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_compression.tensors import Vector

Rounding = Literal["nearest", "stochastic"]
Bytes = npt.NDArray[np.uint8]

LARGEST = np.finfo(np.float32).max
_PART = 2**18
_MOVED = 0.01


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raise ValueError unless `value` is a whole number in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, not {value}")


def check_share(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a number in (0, 1]."""
    if isinstance(value, bool) or not 0 < value <= 1:
        raise ValueError(f"{name} must lie in (0, 1], not {value}")


def check_positive(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a positive float32."""
    is_positive = 1e-37 < value < float(LARGEST)  # a plan's integer may be beyond all floats
    if isinstance(value, bool) or not is_positive:
        raise ValueError(f"{name} must lie between 1e-37 and 3e38, not {value}")


def check_rounding(value: str) -> None:
    if value not in ("nearest", "stochastic"):
        raise ValueError(f"rounding is nearest or stochastic, not {value!r}")


def flatness(values: npt.NDArray[np.floating]) -> float:
    """How nearly all of `values` [d] have one magnitude, 0 to 1: the squared mean of their
    magnitudes over the mean of their squares. 1 where all have, 2 / pi where values are normally
    distributed; 0 of zeros alone.

    Values below a hundredth of the mean magnitude are left out, as zeros are: weight decay moves
    those, too, that no gradient does.
    """
    largest = max(float(values.max(initial=0)), -float(values.min(initial=0)))
    if not 0 < largest < math.inf:
        return 0.0
    count, total, _ = _moments(values, largest, 0.0)
    count, total, squares = _moments(values, largest, _MOVED * total / count)
    return min(1.0, total**2 / (count * squares))


def _moments(
    values: npt.NDArray[np.floating], unit: float, least: float
) -> tuple[int, float, float]:
    """How many magnitudes are above `least`, in units of `unit`, their sum and that of their
    squares."""
    count, total, squares = 0, 0.0, 0.0
    for start in range(0, values.size, _PART):
        magnitudes = np.abs(values[start : start + _PART]) / unit
        kept = magnitudes[magnitudes > least]
        count += kept.size
        total += float(kept.sum())
        squares += float(kept @ kept)
    return count, total, squares


def levels_of(bits: int) -> int:
    """L: the symbols of `bits` bits stand for -L .. L steps, zero among them."""
    return int(2 ** (bits - 1) - 1)


def rounded(
    scaled: npt.NDArray[np.float64], rounding: Rounding, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Whole numbers: the nearest, ties to even, or the one below or above with the mean kept."""
    if rounding == "nearest":
        return np.rint(scaled)
    floor = np.floor(scaled)
    return floor + (rng.random(scaled.size) < scaled - floor)


def to_symbols(
    values: Vector,
    step: npt.NDArray[np.float32] | np.float32,
    levels: int,
    rounding: Rounding,
    rng: np.random.Generator,
) -> Bytes:
    """Round `values` / `step`, clip to -levels .. levels, count from there; for a step of 0, 0."""
    noise = rng.random(values.size) if rounding == "stochastic" else None
    if np.ndim(step) == 0:
        return kernels.quantise(values, float(step), levels, noise)
    wide = step.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(wide > 0, values.astype(np.float64) / wide, 0.0)
    whole = np.rint(scaled) if noise is None else np.floor(scaled)
    if noise is not None:
        whole += noise < scaled - whole
    return (np.clip(whole, -levels, levels) + levels).astype(np.uint8)


def from_symbols(
    symbols: npt.NDArray[np.generic],
    step: npt.NDArray[np.float32] | np.float32,
    levels: int,
    num_summands: int = 1,
) -> Vector:
    """float32(symbol - levels * num_summands) * step, one float32 product."""
    signed = (symbols.astype(np.int64) - levels * num_summands).astype(np.float32)
    with np.errstate(over="ignore"):  # a forged step; Update.check refuses what comes of it
        return cast(Vector, signed * step)


def shared_step(clip: float, levels: int) -> np.float32:
    """The step of a grid that a plan fixes: `clip` / `levels`, never above float32."""
    return np.float32(clip / levels)


def to_planes(values: Vector) -> tuple[Bytes, ...]:
    """The bytes of little-endian float32, the lowest first, one array for each."""
    octets = values.astype("<f4").view(np.uint8).reshape(-1, 4)
    return tuple(np.ascontiguousarray(octets[:, plane]) for plane in range(4))


def from_planes(planes: Sequence[npt.NDArray[np.generic]]) -> Vector:
    """The inverse; forged bytes may make NaN, which Update.check refuses."""
    octets = np.stack([plane.astype(np.uint8) for plane in planes], axis=1)
    return np.ascontiguousarray(octets).view("<f4").ravel().astype(np.float32)
