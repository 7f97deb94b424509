"""Lossless coding of compressed updates: symbols to bytes and back, under a layout."""

from fedpress_compression.coding.alphabets import Grouped
from fedpress_compression.coding.codec import Found, decode, encode, encode_fields, find
from fedpress_compression.coding.fields import (
    Alphabet,
    Coder,
    Contexts,
    Field,
    Grid,
    Integers,
    Known,
    Layout,
    Positions,
    Reals,
    Symbols,
    check_symbols,
)

__all__ = [
    "Alphabet",
    "Coder",
    "Contexts",
    "Field",
    "Found",
    "Grid",
    "Grouped",
    "Integers",
    "Known",
    "Layout",
    "Positions",
    "Reals",
    "Symbols",
    "check_symbols",
    "decode",
    "encode",
    "encode_fields",
    "find",
]
