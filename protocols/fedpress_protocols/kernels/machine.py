"""How kernels are compiled, and the few machine instructions that numba has no name for.

Compiled once and kept in `__pycache__` beside the source, in the user's cache folder where that
cannot be written, or in NUMBA_CACHE_DIR; where none of them can be written, anew by each process.
numba checks no bounds: every kernel that reads a body does, and says so where it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_log = logging.getLogger(__name__)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` when it is first called; kept from process to process where it can be."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba's word for a cache that cannot be written anywhere
        _log.info("%s is compiled anew: set NUMBA_CACHE_DIR to keep it", function.__name__)
        return numba.njit(nogil=True, error_model="numpy")(function)


_BYTE, _WORD = ir.IntType(8), ir.IntType(64)


def _at(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:  # pragma: no cover
    """The address of an item of a contiguous array. Runs when numba compiles, not when its cache
    is warm."""
    parts = cgutils.create_struct_proxy(kind)(context, builder, array)
    return builder.gep(parts.data, [index])


@intrinsic
def load64(typing: Any, octets: Any, at: Any) -> Any:
    """The 8 bytes from octets[at] on, the first lowest."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        address = _at(context, builder, signature.args[0], given[0], given[1])
        word = builder.load(builder.bitcast(address, _WORD.as_pointer()))
        word.align = 1
        return word

    return types.uint64(octets, at), generate


@intrinsic
def store64(typing: Any, octets: Any, at: Any, word: Any) -> Any:
    """Write 8 bytes from octets[at] on, the lowest first."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        address = _at(context, builder, signature.args[0], given[0], given[1])
        builder.store(given[2], builder.bitcast(address, _WORD.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(octets, at, types.uint64), generate


@intrinsic
def store16(typing: Any, octets: Any, at: Any, half: Any) -> Any:
    """Write 2 bytes from octets[at] on, the lower first."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        address = _at(context, builder, signature.args[0], given[0], given[1])
        builder.store(given[2], builder.bitcast(address, ir.IntType(16).as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(octets, at, types.uint16), generate


@intrinsic
def leading_zeros(typing: Any, word: Any) -> Any:
    """Of a 64-bit number other than 0."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.ctlz(given[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def trailing_zeros(typing: Any, word: Any) -> Any:
    """Of a 64-bit number other than 0."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.cttz(given[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], to be written soon."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        address = _at(context, builder, signature.args[0], given[0], given[1])
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer()] + [number] * 3)
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.bitcast(address, _BYTE.as_pointer())
        builder.call(ask, [pointer, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def at_least16(typing: Any, words: Any, at: Any, threshold: Any) -> Any:
    """A bit for each of the 16 uint32 from words[at] on: its lower 31 bits reach `threshold`."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        number = ir.IntType(32)
        lanes = ir.VectorType(number, 16)
        address = _at(context, builder, signature.args[0], given[0], given[1])
        found = builder.load(builder.bitcast(address, lanes.as_pointer()))
        found.align = 4
        magnitudes = builder.and_(found, ir.Constant(lanes, [0x7FFFFFFF] * 16))
        blank = ir.Constant(lanes, ir.Undefined)
        one = builder.insert_element(blank, given[2], number(0))
        order = ir.Constant(ir.VectorType(number, 16), [0] * 16)
        reached = builder.icmp_unsigned(">=", magnitudes, builder.shuffle_vector(one, blank, order))
        return builder.zext(builder.bitcast(reached, ir.IntType(16)), _WORD)

    return types.uint64(words, at, types.uint32), generate


@intrinsic
def nearest(typing: Any, number: Any) -> Any:
    """A float64 rounded to the nearest integer, halves to the even one."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.DoubleType()
        function = builder.module.declare_intrinsic("llvm.rint", [kind])
        return builder.call(function, [given[0]])

    return types.float64(types.float64), generate
