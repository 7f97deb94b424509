"""Successive refinement: a second compressor sends what the first one leaves (Equitz and Cover
1991, IEEE Trans. Inf. Theory 37(2); of quantisers in stages, Juang and Gray 1982)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from fedpress_compression.coding import encode
from fedpress_compression.coding.fields import Layout, Symbols
from fedpress_compression.compressor import (
    ADDED,
    Compressor,
    Knowledge,
    Properties,
    Public,
    Stateless,
    check_finite,
    check_inner,
    compressor,
    properties,
)
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.ecsq import Ecsq, cost_at
from fedpress_compression.compressors.lowrank import Components, LowRank, bits_of
from fedpress_compression.contexts import grid_of
from fedpress_compression.matrices import Matrix
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update


@compressor("successive_refinement")
@dataclass(frozen=True, slots=True)
class SuccessiveRefinement(Stateless):
    """`first` compresses the update, `second` what the first one lost; both go in one upload, which
    stands for the sum of the two.

    For an update that is structure and detail: its low-rank part and the rest, or its outliers by
    top-k and the bulk by few levels. A target of `second` is about what `first` leaves: `ecsq` at
    an nmse of .5 halves the error once more. Each stage costs its bytes whether it helps or not:
    measure with `fedpress bench rate-distortion` before choosing. The stages keep no state, and
    where both draw in public they draw the same; feedback, clipping and the coder go around both.

    With `target_of` "whole", for `lowrank` and then `ecsq`, the target is that of the whole upload:
    an nmse of the update, or bits for the fields of both stages. Then `rank` and `bits` of `first`
    are upper limits. The encoder takes the components of each matrix that pay, none if none does,
    and rounds them as the target asks, by the bits and the error that it expects of both stages
    (Shoham and Gersho 1988, IEEE Trans. ASSP 36(9)). What is not factored goes to `second` alone:
    `rest` sends zeros, for which `half` takes the fewest bytes. A component that is left out costs
    the 4 bytes of its scale. The receiver does not have to know. It takes 2 to 5 times the work of
    `second` alone.
    """

    first: Compressor[Any] = field(default_factory=LowRank)
    second: Compressor[Any] = field(default_factory=Ecsq)
    target_of: Literal["rest", "whole"] = field(default="rest", metadata=ADDED)

    def __post_init__(self) -> None:
        for name, stage in (("first", self.first), ("second", self.second)):
            check_inner(stage, "successive_refinement")
            state = properties(stage).client_state
            if state != "none" or stage.needs & {"own", "basis"}:
                keeps = state if state != "none" else "what its own uploads stood for"
                raise ValueError(
                    f"{name} is {getattr(stage, 'wire_id', '')!r}, which keeps {keeps} from round"
                    " to round: a stage must keep nothing (topk, lowrank, ecsq, quantize ...)"
                )

        if self.target_of not in ("rest", "whole"):
            raise ValueError(f"target_of is rest or whole, not {self.target_of!r}")
        if self.target_of == "whole" and not (
            isinstance(self.first, LowRank) and isinstance(self.second, Ecsq)
        ):
            raise ValueError(
                "target_of whole takes lowrank as first and ecsq as second, whose bits it knows;"
                " set target_of to rest for other stages"
            )

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.first.needs | self.second.needs

    @property
    def properties(self) -> Properties:
        first, second = properties(self.first), properties(self.second)
        suited = first.suits_feedback and second.suits_feedback
        return Properties(
            rate="the sum of both stages",
            contractive=suited and (first.contractive or second.contractive),
            non_expansive=suited,
            source="Equitz and Cover 1991; Juang and Gray 1982",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return (*self.first.layout(spec), *self.second.layout(spec))

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        first, second = self.first, self.second
        if self.target_of == "whole" and isinstance(first, LowRank) and isinstance(second, Ecsq):
            return _Search(self, first, second, update, public, rng).best(), None
        coarse, _ = first.compress(update, first.init(public.spec), public, rng)
        rest = update.copy()
        first.decompress(coarse, public).add_to(rest, -1.0)
        fine, _ = second.compress(rest, second.init(public.spec), public, rng)
        return (*coarse, *fine), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        fields = len(self.first.layout(public.spec))
        whole = self.first.decompress(symbols[:fields], public).dense()
        with np.errstate(over="ignore", invalid="ignore"):  # forged; Update.check refuses it
            self.second.decompress(symbols[fields:], public).add_to(whole)
        return Update.from_dense(whole)


_SLOPE = 0.14
"""The squared steps of error that a bit is worth, about, at most rates (the `rdo` of `ecsq`)."""
_CLOSE = 0.9
"""The share of the figure without components above which bytes decide, not estimates."""
_TRIALS = 6
_WIDER = 2.0


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the components of `first` that pay where `second` keeps to the target.

    Of two uploads the one with the lower figure is better: fewer bits if the error is given, less
    error if the bits are, less of both together if the step is.
    """

    made: SuccessiveRefinement
    first: LowRank
    second: Ecsq
    update: Vector
    public: Public
    rng: np.random.Generator

    def best(self) -> Symbols:
        components = self.first.components(self.update, self.public, self.rng)
        none = components.none()
        step, without = self._estimate(none)
        best, least = none, without
        for coarse in self._candidates(components, step) if step and components.leading else ():
            _, figure = self._estimate(coarse)
            if figure < least:
                best, least = coarse, figure
        whole = (*best, *self._fine(best, self.second.rdo)[1])
        if best is none or least < _CLOSE * without:
            return whole
        alone = (*none, *self._fine(none, self.second.rdo)[1])
        return min(alone, whole, key=self._measured)

    def _candidates(self, components: Components, step: float) -> list[Symbols]:
        """The components that pay at two steps near each other, between which the target is met;
        `step` is the one that meets it without any."""
        near, far = list[Symbols](), list[Symbols]()
        held, missed = step, step
        wider = _WIDER if self.second.control == "nmse" else 1 / _WIDER
        for _ in range(1 if self.second.control == "step" else _TRIALS):

            def cost(rest: Matrix, step: float = step) -> float:
                error, bits = cost_at(rest, step, self.second.theta)
                return error + _SLOPE * bits

            coarse = components.worth(step, _SLOPE, cost)
            if self._is_met(coarse, step):
                near, held = [coarse], step
            else:
                far, missed = [coarse], step
            if near and far:
                step = math.sqrt(held * missed)
            else:
                step = held * wider if near else missed / wider
        return near + far

    def _is_met(self, coarse: Symbols, step: float) -> bool:
        error, bits = self._cost(self._rest(coarse), step)
        if self.second.control == "nmse":
            return error <= self.second.target * _squares(self.update)
        return bits / 8 <= self._budget(coarse)

    def _estimate(self, coarse: Symbols) -> tuple[float, float]:
        """The step of `second` after `coarse`, and the figure of both."""
        rest, fine = self._fine(coarse, 0.0)
        step = float(fine[-1][0])
        error, bits = self._cost(rest, step) if step else (_squares(rest), 0.0)
        if self.second.control == "bits":
            second_layout = self.second.layout(self.public.spec)
            is_within = len(encode(fine, second_layout)) <= self._budget(coarse)
            error = error if is_within else math.inf
        return step, self._figure(error, bits + sum(map(bits_of, coarse)))

    def _measured(self, symbols: Symbols) -> float:
        """The figure of an upload as the range coder takes it."""
        layout = Coded(self.made).layout(self.public.spec)
        rest = self.update.copy()
        self.made.decompress(symbols, self.public).add_to(rest, -1.0)
        return self._figure(_squares(rest), 8 * len(encode(symbols, layout)))

    def _figure(self, error: float, bits: float) -> float:
        match self.second.control:
            case "nmse":
                return bits
            case "bits":
                return error
            case _:
                return error / self.second.target**2 + _SLOPE * bits

    def _fine(self, coarse: Symbols, rdo: float) -> tuple[Vector, Symbols]:
        """What `coarse` leaves, and the symbols of it by `second` at what is left of its target; of
        zeros if nothing is."""
        rest = sent = self._rest(coarse)
        second = replace(self.second, rdo=rdo)
        if self.second.control == "nmse":
            most, left = self.second.target * _squares(self.update), _squares(rest)
            if most < left:
                second = replace(second, target=most / left)
            else:
                sent = np.zeros_like(rest)
        elif self.second.control == "bits":
            bits = 8 * max(self._budget(coarse), 1) / max(rest.size, 1)
            second = replace(second, target=bits, min_bytes=0)
        return rest, second.compress(sent, None, self.public, self.rng)[0]

    def _rest(self, coarse: Symbols) -> Vector:
        rest = self.update.copy()
        self.first.decompress(coarse, self.public).add_to(rest, -1.0)
        return rest

    def _budget(self, coarse: Symbols) -> float:
        """Bytes left to `second`."""
        whole = max(self.second.target * self.update.size / 8, self.second.min_bytes)
        return whole - len(encode(coarse, self.first.layout(self.public.spec)))

    def _cost(self, rest: Vector, step: float) -> tuple[float, float]:
        """The squared error and the bits of `rest` at `step`."""
        errors, bits, start = 0.0, 0.0, 0
        for rows, columns in grid_of(self.public.spec).matrices:
            part = rest[start : start + rows * columns].reshape(rows, columns)
            error, more = cost_at(part, step, self.second.theta)
            errors, bits, start = errors + error * step**2, bits + more, start + part.size
        return errors, bits


def _squares(values: Vector) -> float:
    return float(np.square(values.astype(np.float64)).sum())
