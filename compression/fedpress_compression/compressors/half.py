"""Every value in 16 bits: bfloat16, or float16 in steps that suit the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding.fields import Alphabet, Layout, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.tensors import ModelSpec, Vector, from_bfloat16, to_bfloat16
from fedpress_compression.update import Update

Dtype = Literal["bfloat16", "float16"]
_LEAST = -126
"""A scale is at least 2**-126, a normal float32."""
_LARGEST = np.uint32(0x7F7F0000).view(np.float32)
"""Of bfloat16."""


@compressor("half")
@dataclass(frozen=True, slots=True)
class Half(Stateless):
    """Round every value to the nearest of 16 bits; under error feedback nothing is lost.

    bfloat16 keeps 8 significant bits at any magnitude. float16 keeps 11, of values down to
    2**-30 of their tensor's largest; it is of the values over a power of two for each tensor, so
    that updates of any size fit. The bytes are coded: of bfloat16 about 11 bits a value remain, of
    float16 about 14.
    """

    dtype: Dtype = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype is bfloat16 or float16, not {self.dtype!r}")

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="16, before coding",
            contractive=True,
            source="IEEE 754-2019, binary16; its float32 cut to 16 bits",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        octets = Alphabet(256, spec.size), Alphabet(256, spec.size)
        return octets if self.dtype == "bfloat16" else (*octets, Reals(len(spec.trained)))

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        if self.dtype == "bfloat16":
            return _octets(to_bfloat16(np.clip(update, -_LARGEST, _LARGEST))), None
        scales = np.zeros(len(public.spec.trained), "<f4")
        halves = np.zeros(update.size, np.float16)
        for index, where in enumerate(public.spec.slices.values()):
            largest = np.abs(update[where]).max(initial=np.float32(0))
            if largest:
                exponent = max(int(np.frexp(largest)[1]) - 16, _LEAST)
                scales[index] = np.ldexp(np.float32(1), exponent)
                halves[where] = np.clip(np.ldexp(update[where], -exponent), -65504, 65504)
        return (*_octets(halves.view(np.uint16)), scales), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        low, high = (part.astype(np.uint16) for part in symbols[:2])
        whole = low | high << np.uint16(8)
        if self.dtype == "bfloat16":
            return Update.from_dense(from_bfloat16(whole))
        values = whole.view(np.float16).astype(np.float32)
        scales = symbols[2].astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # forged; Update.check refuses it
            for scale, where in zip(scales, public.spec.slices.values(), strict=True):
                values[where] *= scale
        return Update.from_dense(values)


def _octets(halves: npt.NDArray[np.uint16]) -> tuple[npt.NDArray[np.uint8], ...]:
    """The bytes of 16-bit words, the lower first."""
    return (halves & np.uint16(0xFF)).astype(np.uint8), (halves >> np.uint16(8)).astype(np.uint8)
