"""The masked lane's encoding: updates to integers that add up under masks, and the sum to an
update.

    update → project → times weight → whole steps  ─ sum over the cohort ─  → steps → lift → mean

A compressor that commutes with the sum maps an update to numbers (`linear`). Their quantization to
integers is the same for all: one public step for each number, stochastic rounding
(Suresh et al. 2017, arXiv:1611.00429, Section 2.2), and a bound that excludes overflow of
the cohort's sum. Example counts, clipping counts and reported numbers travel in the same sum, since
nothing else may leave the device.

Under privacy terms the step follows from the clip instead, every client's integers carry its share
of the noise, and no count or report travels at all. The update that a client takes for sent is the
one before noise, so noise never comes to be left over.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedpress_compression.compressor import Public
from fedpress_compression.linear import Numbers, as_linear, support_of
from fedpress_compression.tensors import Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import IncompatiblePlan, InvalidUpdate
from fedpress_protocols.masking.keystream import MATERIAL_BYTES, add_keystream
from fedpress_protocols.masking.ring import MAX_SUM, Bounded, Packing
from fedpress_protocols.plan import MaskingTerms, RoundPlan
from fedpress_protocols.privacy.grid import Grid, grid_of
from fedpress_protocols.upload import check_report

Ints = npt.NDArray[np.int64]

SECRET_BYTES = MATERIAL_BYTES
_VALUES, _EXAMPLES, _WEIGHT, _CLIPPED = "values", "examples", "weight", "clipped"
_REPORT = "report "
_REPORTED = 2**24
"""The largest magnitude in `upload.REPORT_BOUNDS`."""
_FINEST = 20
"""Maximum fractional bits of a reported number."""
_DOMAIN = b"fedpress masked support v1\x00"


@dataclass(frozen=True, slots=True)
class Contribution:
    """One client's contribution to the sum: `integers` by vector, and the `update` that they
    encode, in the client's own units, independent of its weight."""

    integers: Mapping[str, Ints]
    update: Update


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The decoded sum of `num_clients` contributions.

    `numbers` [n] are the weighted mean of the linear map of their updates, and `mean` is lifted
    from them. `num_examples` is the cohort's; `report` has the means of what the clients reported,
    each weighted by its examples. `clipped` is the share of numbers that were out of range: if it
    grows, the plan's headroom is too small. Under privacy terms every client counts as one example,
    and `clipped` is 0, since neither is sent.
    """

    numbers: Numbers
    mean: Update
    num_clients: int
    num_examples: int
    report: Mapping[str, float]
    clipped: float


class Payload:
    """The masked lane's compress and decompress, for one plan and its public knowledge.

    A client of weight w, of W at most, sends q = round(number * w / W / step), so its
    contribution in units of its own update is W * step / w * q, independent of all weights. From
    the sum of all q the mean over the weights is W * step / (sum of w) * (sum of q). With no
    `max_weight` in the plan, w = W = 1.

    Raises IncompatiblePlan if the plan is of the clear lane, or its support is not the one derived
    from the published models.
    """

    def __init__(self, plan: RoundPlan, public: Public) -> None:
        if plan.masking is None:
            raise IncompatiblePlan("a plan of the clear lane, expected the masked lane")
        self.plan, self.public = plan, public
        self._terms: MaskingTerms = plan.masking
        self._map = as_linear(plan.profiles[0].compressor).linear_map(public)
        spread = self._map.spread
        self.grid = _grid_of(plan, spread.size)
        """Under privacy terms: the steps, and the noise of one client."""
        if self.grid is not None:
            self._steps: Numbers = np.full(spread.size, self.grid.step)
        else:
            reach = np.where(spread > 0, self._terms.headroom * spread, self._terms.first_range)
            self._steps = reach / self._terms.levels
        if self._terms.support not in (None, self.digest):
            raise IncompatiblePlan(
                f"the published models give a support of digest {self.digest[:12]}, the plan says "
                f"{str(self._terms.support)[:12]}: the server speaks of other models to others, or "
                "one end is at fault",
                hint="nothing was sent; report this to the operator",
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the sent coordinates and their steps, to which masks are bound.

        Hashed are the domain's label, the spec's digest, the number of coordinates and the
        coordinates as 64-bit little-endian integers (2**64 - 1 alone for all), then the steps as
        float64.
        """
        support = support_of(self.plan.profiles[0].compressor, self.public)
        sha256 = hashlib.sha256(_DOMAIN + bytes.fromhex(self.public.spec.digest))
        if support is None:
            sha256.update(b"\xff" * 8)
        else:
            sha256.update(support.size.to_bytes(8, "little") + support.astype("<i8").tobytes())
        sha256.update(self._steps.astype("<f8").tobytes())
        return sha256.hexdigest()

    @cached_property
    def vectors(self) -> tuple[Bounded, ...]:
        """The vectors that each client sends, with their bounds."""
        most_examples, num = self.plan.fixed_point.max_examples, self._steps.size
        if self.grid is not None:
            return (self.grid.vector(_VALUES, self.plan.cohort.size),)
        vectors = [Bounded(_VALUES, num, self._terms.levels), Bounded(_EXAMPLES, 1, most_examples)]
        if self._terms.max_weight is not None:
            vectors.append(Bounded(_WEIGHT, 1, self._terms.max_weight))
        vectors.append(Bounded(_CLIPPED, 1, num))
        largest = _REPORTED * most_examples * 2**self._report_bits
        vectors.extend(Bounded(_REPORT + name, 1, largest) for name in self.plan.report)
        return tuple(vectors)

    @cached_property
    def packing(self) -> Packing:
        """The packing of the vectors into words for up to cohort.size clients."""
        return Packing.of(self.vectors, self.plan.cohort.size)

    def compress(
        self, update: Vector, num_examples: int, report: Mapping[str, float], secret: bytes
    ) -> Contribution:
        """Quantize `update` [spec.size] to integers, with the update that they encode.

        `report` has the plan's numbers; `num_examples` is 1 to max_examples. Rounding draws from
        the ChaCha20 stream of `secret`, SECRET_BYTES known to nobody else and used once. Raises
        InvalidUpdate on NaN and infinity, and for reported numbers out of bounds.

        Under privacy terms the integers have the client's share of the noise, by the system's own
        randomness whatever `secret` is, and the update that they encode is the one before noise.
        """
        maximum = self.plan.fixed_point.max_examples
        if not 1 <= num_examples <= maximum:
            raise InvalidUpdate(f"num_examples must be in [1, {maximum}], not {num_examples}")
        reported = tuple(report[name] for name in self.plan.report)
        check_report(reported, self.plan.report)
        if self.grid is not None:
            plain = self.grid.rounded(self._map.project(update), secret)
            noise = self.grid.noise(os.urandom(SECRET_BYTES))
            return Contribution({_VALUES: plain + noise}, self._map.lift(plain * self._steps))
        weight = min(num_examples, self._most)
        unit = self._steps * (self._most / weight)
        scaled = self._map.project(update) / unit
        levels = self._terms.levels
        values = np.clip(_rounded(scaled, secret), -levels, levels)
        integers = {
            _VALUES: values.astype(np.int64),
            _EXAMPLES: _one(num_examples),
            _CLIPPED: _one(int(np.count_nonzero(np.abs(scaled) > levels))),
        }
        if self._terms.max_weight is not None:
            integers[_WEIGHT] = _one(weight)
        for name, value in zip(self.plan.report, reported, strict=True):
            integers[_REPORT + name] = _one(round(value * 2**self._report_bits) * num_examples)
        return Contribution(integers, self._map.lift(values * unit))

    def decompress(self, sums: Mapping[str, Ints], num_clients: int) -> Aggregate:
        """Decode the `sums` of `num_clients` contributions; raises InvalidUpdate for sums that no
        valid contributions have."""
        for vector in self.vectors:
            vector_sum = sums[vector.name]
            bound = num_clients * vector.bound
            if self.grid is not None:
                bound = self.grid.sum_bound(num_clients)
            if vector_sum.shape != (vector.length,) or (np.abs(vector_sum) > bound).any():
                raise InvalidUpdate(f"{vector.name}: not a valid sum of {num_clients} clients")
        if self.grid is not None:
            numbers = sums[_VALUES] * (self._steps / num_clients)
            mean = self._map.lift(numbers)
            return Aggregate(numbers, mean, num_clients, num_clients, {}, 0.0)
        num_examples = int(sums[_EXAMPLES][0])
        weight = num_clients if self._terms.max_weight is None else int(sums[_WEIGHT][0])
        if not 1 <= num_clients <= min(weight, num_examples):
            raise InvalidUpdate(
                f"a sum of {num_examples} examples and weight {weight} is impossible for "
                f"{num_clients} clients"
            )
        numbers = sums[_VALUES] * (self._steps * (self._most / weight))
        scale = 2**self._report_bits * num_examples
        return Aggregate(
            numbers=numbers,
            mean=self._map.lift(numbers),
            num_clients=num_clients,
            num_examples=num_examples,
            report={name: int(sums[_REPORT + name][0]) / scale for name in self.plan.report},
            clipped=int(sums[_CLIPPED][0]) / (num_clients * self._steps.size),
        )

    @property
    def _most(self) -> int:
        """W, the maximum weight of a client."""
        return self._terms.max_weight or 1

    @property
    def _report_bits(self) -> int:
        """Fractional bits of reported numbers: as many as fit into the sum."""
        largest = _REPORTED * self.plan.fixed_point.max_examples * self.plan.cohort.size
        return min(_FINEST, math.floor(math.log2(max(1, MAX_SUM // largest))))


def _grid_of(plan: RoundPlan, size: int) -> Grid | None:
    terms = plan.privacy
    if terms is None:
        return None
    return grid_of(terms, size, plan.noise_shares, plan.cohort.size)


def _one(value: int) -> Ints:
    return np.array([value], np.int64)


def _rounded(scaled: Numbers, secret: bytes) -> Numbers:
    """Round to the integer below or above; the mean is preserved to 2**-32."""
    words = np.zeros(-(-scaled.size // 2), np.uint64)
    add_keystream(words, secret, "chacha20")
    below = np.floor(scaled)
    return below + (words.view(np.uint32)[: scaled.size] < (scaled - below) * 2.0**32)
