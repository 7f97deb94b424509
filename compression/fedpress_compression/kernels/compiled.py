"""All kernels compiled by numba, now or before; the same results as `reference`, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpress_compression.kernels import (
    codes_compiled,
    field_compiled,
    huffman_compiled,
    lanes_compiled,
    numbers_compiled,
    range_compiled,
    reference,
    tables_compiled,
    vectors_compiled,
)

if TYPE_CHECKING:
    from fedpress_compression.kernels.reference import *  # noqa: F403

__all__: list[str] = []
__all__ += reference.__all__

MODULES = (
    codes_compiled,
    field_compiled,
    huffman_compiled,
    lanes_compiled,
    numbers_compiled,
    range_compiled,
    tables_compiled,
    vectors_compiled,
)
for _module in MODULES:
    globals().update({name: vars(_module)[name] for name in __all__ if name in vars(_module)})
