"""Lossless coding of compressed updates: symbols to bytes and back, under a layout."""

from fedpress_protocols.coding.codec import decode, encode
from fedpress_protocols.coding.fields import (
    Alphabet,
    Field,
    Layout,
    Positions,
    Reals,
    Symbols,
    check_symbols,
)

__all__ = [
    "Alphabet",
    "Field",
    "Layout",
    "Positions",
    "Reals",
    "Symbols",
    "check_symbols",
    "decode",
    "encode",
]
