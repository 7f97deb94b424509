"""One compressor for the large matrices, another for what is too small or too dear to sparsify."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedpress_compression.coding.fields import Layout, Symbols
from fedpress_compression.compressor import (
    Compressor,
    Knowledge,
    Properties,
    Public,
    Stateful,
    compressor,
    properties,
)
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.linear import LinearMap, SideBySide, as_linear, restricts, support_of
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_compression.update import Indices, Update

KINDS = ("bias", "norm", "embedding", "matrix", "linear", "convolution")
_KIND = "kind:"
_EMBEDDINGS = ("embed", "wte", "wpe")


def kinds_of(tensor: TensorSpec) -> tuple[str, ...]:
    """The kinds of a tensor, by its name and shape in the usual libraries.

    A bias begins or ends the last part of its name with `bias`; anything else of fewer than two
    dimensions scales or normalises; two dimensions under a name with embed, wte or wpe embed. The
    rest are matrices: linear ones of two dimensions, convolutions of more.
    """
    last = tensor.name.rpartition(".")[2]
    if last.startswith("bias") or last.endswith("bias"):
        return ("bias",)
    if len(tensor.shape) < 2:
        return ("norm",)
    lowered = tensor.name.lower()
    if len(tensor.shape) > 2:
        return "matrix", "convolution"
    if any(word in lowered for word in _EMBEDDINGS):
        return ("embedding",)
    return "matrix", "linear"


@compressor("per_tensor")
@dataclass(frozen=True)
class PerTensor(Stateful):
    """Each tensor goes to the first of these that fits it:

    the compressor in `rules` whose pattern (shell style, in the order given) matches its name, or
    whose pattern is `kind:` and its kind (bias, norm, embedding, linear, convolution, or matrix for
    either of the last two; see `kinds_of`);
    `small`, if it has fewer than `min_size` values or, with `spare_1d`, one dimension or none;
    `large`. The tensors of one compressor are compressed together, as one vector in the model's
    order. By default biases and norms are quantised to 8 bits, since sent raw they would dominate
    a small upload and left out they would stall.
    """

    large: Compressor[Any] = field(default_factory=TopK)
    small: Compressor[Any] = field(default_factory=Quantize)
    min_size: int = 1024
    spare_1d: bool = True
    rules: tuple[tuple[str, Compressor[Any]], ...] = ()

    def __post_init__(self) -> None:
        for rule in self.rules:
            if not isinstance(rule, tuple) or len(rule) != 2 or not isinstance(rule[0], str):
                raise ValueError("rules are pairs of a name pattern and a compressor")
            kind = rule[0].removeprefix(_KIND)
            if kind != rule[0] and kind not in KINDS:
                raise ValueError(f"no tensor is of kind {kind!r}; kinds are {', '.join(KINDS)}")
        for inner in (self.large, self.small, *self._rule_members()):
            if not hasattr(inner, "wire_id"):
                raise ValueError(f"{inner!r} is not a compressor")
            if getattr(inner, "keeps_residual", False):
                raise ValueError("error feedback goes around per_tensor, not into it")
        size: object = self.min_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ValueError(f"min_size must be 0 or more, not {size}")
        if not isinstance(self.spare_1d, bool):
            raise ValueError(f"spare_1d is true or false, not {self.spare_1d!r}")

    @property
    def commutes_with_sum(self) -> bool:
        return all(inner.commutes_with_sum for inner in self._members())

    @property
    def needs(self) -> frozenset[Knowledge]:
        return frozenset().union(*(inner.needs for inner in self._members()))

    @property
    def properties(self) -> Properties:
        inner = [properties(member) for member in self._members()]

        def together(states: list[str]) -> str:
            return ", ".join(sorted({state for state in states if state != "none"})) or "none"

        return Properties(
            rate="that of its members",
            unbiased=all(member.unbiased for member in inner),
            contractive=all(member.contractive for member in inner),
            non_expansive=all(member.suits_feedback for member in inner),
            client_state=together([member.client_state for member in inner]),
            server_state=together([member.server_state for member in inner]),
            source="that of its members",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return tuple(
            f for inner, names in self._groups(spec) for f in inner.layout(spec.select(names))
        )

    def init(self, spec: ModelSpec) -> tuple[Any, ...]:
        return tuple(inner.init(spec.select(names)) for inner, names in self._groups(spec))

    def compress(
        self, update: Vector, state: tuple[Any, ...], public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, tuple[Any, ...]]:
        symbols: list[Any] = []
        states = []
        for (inner, names), before in zip(self._groups(public.spec), state, strict=True):
            part = np.concatenate([update[public.spec.slices[name]] for name in names])
            inside = public.part(names)
            parts, after = inner.compress(part, before, inside, rng)
            symbols.extend(parts)
            states.append(after)
        return tuple(symbols), tuple(states)

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        pieces: list[Any] = []
        start = 0
        for inner, names in self._groups(public.spec):
            inside = public.part(names)
            stop = start + len(inner.layout(inside.spec))
            part = inner.decompress(symbols[start:stop], inside, num_summands)
            slices = tuple(public.spec.slices[name] for name in names)
            pieces.extend(part.placed(slices, public.spec.size).pieces)
            start = stop
        return Update(public.spec.size, tuple(pieces))

    @property
    def restricts(self) -> bool:
        return any(restricts(inner) for inner in self._members())

    def support(self, public: Public) -> Indices | None:
        taken = np.ones(public.spec.size, bool)
        for inner, names in self._groups(public.spec):
            inside = public.part(names)
            support = support_of(inner, inside)
            if support is None:
                continue
            of_part = np.zeros(inside.spec.size, bool)
            of_part[support] = True
            for name, where in inside.spec.slices.items():
                taken[public.spec.slices[name]] = of_part[where]
        return np.flatnonzero(taken)

    def linear_map(self, public: Public) -> LinearMap:
        groups = [
            (as_linear(inner).linear_map(public.part(names)), tuple(names))
            for inner, names in self._groups(public.spec)
        ]
        return SideBySide(public.spec, tuple(groups))

    def _members(self) -> tuple[Compressor[Any], ...]:
        return (*self._rule_members(), self.small, self.large)

    def _rule_members(self) -> tuple[Compressor[Any], ...]:
        return tuple(inner for _, inner in self.rules)

    def _member_of(self, tensor: TensorSpec) -> int:
        kinds = kinds_of(tensor)
        for index, (pattern, _) in enumerate(self.rules):
            is_kind = pattern.startswith(_KIND) and pattern.removeprefix(_KIND) in kinds
            if is_kind or fnmatch.fnmatchcase(tensor.name, pattern):
                return index
        one_dimensional = self.spare_1d and len(tensor.shape) < 2
        return len(self.rules) + (0 if tensor.size < self.min_size or one_dimensional else 1)

    def _groups(self, spec: ModelSpec) -> list[tuple[Compressor[Any], list[str]]]:
        """Members that have tensors, with the names of theirs in the model's order."""
        names: list[list[str]] = [[] for _ in self._members()]
        for tensor in spec.trained:
            names[self._member_of(tensor)].append(tensor.name)
        return [pair for pair in zip(self._members(), names, strict=True) if pair[1]]
