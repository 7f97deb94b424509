"""A choice of entropy coder for another compressor's symbols: static codes, the range coder or
interleaved lanes, and the side information that the range coder models them by."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from fedpress_compression.coding.fields import (
    Alphabet,
    Coder,
    Field,
    Grid,
    Integers,
    Known,
    Layout,
    Positions,
)
from fedpress_compression.compressor import (
    Compressor,
    Knowledge,
    Properties,
    Wrapper,
    check_inner,
    compressor,
    properties,
)
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.contexts import grid_of
from fedpress_compression.tensors import ModelSpec


@compressor("coded")
@dataclass(frozen=True, slots=True)
class Coded(Wrapper):
    """The symbols of `inner` in fewer bytes, for more work; nothing changes of what they hold.

    With `range` or `auto` the range coder learns what each row and column of a tensor is like;
    `auto` keeps a field's static code where that is shorter. `contexts` tells it of each
    coordinate how far up the last step (`previous`) or the way since the first model (`drift`)
    ranks there: a device that has not followed the task fetches one more model for it. `activity`
    tells of an average of the last steps, in a map that the server publishes with every round:
    about half a bit for each value of the model. It goes into per_tensor, where each member has
    coordinates of its own, and into error feedback.

    A support costs work for every coordinate, at both ends: 0.1 s for a million with numba,
    several seconds without.

    With `lanes` static tables take the place of what the range coder learns, where that is shorter
    than the static code: most of its gain for a tenth of its work to decode, in lanes that a GPU
    can decode side by side.
    """

    inner: Compressor[Any] = field(default_factory=TopK)
    coder: Coder = "auto"
    contexts: Literal["none"] | Known = "none"

    def __post_init__(self) -> None:
        check_inner(self.inner, "coded")
        if getattr(self.inner, "wire_id", "") == "per_tensor":
            raise ValueError("coded goes into per_tensor, not around it")
        if self.coder not in get_args(Coder):
            raise ValueError(f"coder is huffman, range, auto or lanes, not {self.coder!r}")
        if self.contexts not in ("none", *get_args(Known)):
            known = ", ".join(get_args(Known))
            raise ValueError(f"contexts are none or one of {known}, not {self.contexts!r}")
        if self.contexts != "none" and self.coder in ("huffman", "lanes"):
            codes = "Huffman codes" if self.coder == "huffman" else "lanes"
            raise ValueError(f"{codes} have no contexts: choose range or auto")

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.inner.needs | (frozenset() if self.contexts == "none" else {self.contexts})

    @property
    def properties(self) -> Properties:
        inner = properties(self.inner)
        return replace(inner, rate=f"under that of its inner: {inner.rate}")

    def layout(self, spec: ModelSpec) -> Layout:
        grid = grid_of(spec, None if self.contexts == "none" else self.contexts)
        return tuple(self._coded(each, grid) for each in self.inner.layout(spec))

    def _coded(self, given: Field, grid: Grid) -> Field:
        """The field under this coder, on `grid` if it runs over all of its coordinates."""
        match given:
            case Positions(size):
                return replace(given, coder=self.coder, grid=grid if size == grid.size else None)
            case Alphabet(_, count) | Integers(_, count):
                return replace(given, coder=self.coder, grid=grid if count == grid.size else None)
        return given
