"""Compilation of kernels, and machine instructions that numba does not expose.

Kernels are compiled once and cached in `__pycache__` beside the source, in the user's cache folder
if that is not writable, or in NUMBA_CACHE_DIR; if none is writable, each process compiles again.
With a prebuilt library nothing is compiled, and numba is not needed. numba checks no bounds: every
kernel that reads a body does, and documents it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fedpress_compression.kernels import CHOSEN

_log = logging.getLogger(__name__)

if CHOSEN == "prebuilt":  # pragma: no cover - in processes of their own
    from fedpress_compression.kernels import prebuilt
else:
    import numba.extending
    from llvmlite import ir
    from numba.core import cgutils, types

    _BYTE, _WORD = ir.IntType(8), ir.IntType(64)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` at its first call, cached across processes if possible; or find it in the
    prebuilt library."""
    if CHOSEN == "prebuilt":  # pragma: no cover - in processes of their own
        return prebuilt.kernel(function)
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # raised by numba if no cache folder is writable
        _log.info(
            "%s is compiled again by every process: set NUMBA_CACHE_DIR to a writable folder",
            function.__name__,
        )
        return numba.njit(nogil=True, error_model="numpy")(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's decorator of that name. A prebuilt library has the instruction in its kernels."""
    return function if CHOSEN == "prebuilt" else numba.extending.intrinsic(function)


def _at(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:  # pragma: no cover
    """The address of an item of a contiguous array. Runs when numba compiles, not when its cache
    is warm."""
    parts = cgutils.create_struct_proxy(kind)(context, builder, array)
    return builder.gep(parts.data, [index])


@intrinsic
def load64(typing: Any, octets: Any, at: Any) -> Any:
    """The 8 bytes from octets[at] on, the first lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        word = builder.load(builder.bitcast(address, _WORD.as_pointer()))
        word.align = 1
        return word

    return types.uint64(octets, at), generate


@intrinsic
def store64(typing: Any, octets: Any, at: Any, word: Any) -> Any:
    """Write 8 bytes from octets[at] on, the lowest first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        builder.store(arguments[2], builder.bitcast(address, _WORD.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(octets, at, types.uint64), generate


@intrinsic
def add_two(typing: Any, sums: Any, at: Any, addends: Any, first: Any) -> Any:
    """sums[at : at + 2] += addends[first : first + 2], both int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = ir.VectorType(_WORD, 2).as_pointer()
        places = []
        for array in (0, 2):
            address = _at(
                context, builder, signature.args[array], arguments[array], arguments[array + 1]
            )
            places.append(builder.bitcast(address, pair))
        words = [builder.load(place) for place in places]
        for word in words:
            word.align = 8
        builder.store(builder.add(*words), places[0]).align = 8
        return context.get_dummy_value()

    return types.void(sums, at, addends, first), generate


@intrinsic
def leading_zeros(typing: Any, word: Any) -> Any:
    """The count for a 64-bit number other than 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def trailing_zeros(typing: Any, word: Any) -> Any:
    """The count for a 64-bit number other than 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], wanted some hundred steps from now; the index may be
    any."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer()] + [number] * 3)
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.bitcast(address, _BYTE.as_pointer())
        builder.call(ask, [pointer, number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


def _reached(builder: Any, words: Any, threshold: Any) -> Any:  # pragma: no cover
    """A bit for each of 16 uint32: its lower 31 bits reach `threshold`."""
    number = ir.IntType(32)
    lanes = ir.VectorType(number, 16)
    magnitudes = builder.and_(words, ir.Constant(lanes, [0x7FFFFFFF] * 16))
    blank = ir.Constant(lanes, ir.Undefined)
    one = builder.insert_element(blank, threshold, number(0))
    order = ir.Constant(lanes, [0] * 16)
    reached = builder.icmp_unsigned(">=", magnitudes, builder.shuffle_vector(one, blank, order))
    return builder.zext(builder.bitcast(reached, ir.IntType(16)), _WORD)


@intrinsic
def at_least16(typing: Any, words: Any, at: Any, threshold: Any) -> Any:
    """A bit for each of the 16 uint32 from words[at] on: its lower 31 bits reach `threshold`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = ir.VectorType(ir.IntType(32), 16)
        address = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        words = builder.load(builder.bitcast(address, lanes.as_pointer()))
        words.align = 4
        return _reached(builder, words, arguments[2])

    return types.uint64(words, at, types.uint32), generate


@intrinsic
def add16(
    typing: Any, vector: Any, factor: Any, other: Any, total: Any, at: Any, threshold: Any
) -> Any:
    """Write 16 float32 sums, `vector` times `factor` plus `other`, to total[at : at + 16], which
    begins a cache line, past the caches: it need not be read for that. Returns a bit for each: its
    magnitude reaches `threshold`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = ir.VectorType(ir.FloatType(), 16)
        places = [
            builder.bitcast(
                _at(context, builder, signature.args[k], arguments[k], arguments[4]),
                lanes.as_pointer(),
            )
            for k in (0, 2, 3)
        ]
        operands = [builder.load(place) for place in places[:2]]
        for some in operands:
            some.align = 4
        blank = ir.Constant(lanes, ir.Undefined)
        one = builder.insert_element(blank, arguments[1], ir.Constant(ir.IntType(32), 0))
        order = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16)
        scaled = builder.fmul(operands[0], builder.shuffle_vector(one, blank, order))
        sums = builder.fadd(scaled, operands[1])
        store = builder.store(sums, places[2])
        store.align = 64
        past = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", past)
        words = builder.bitcast(sums, ir.VectorType(ir.IntType(32), 16))
        return _reached(builder, words, arguments[5])

    return types.uint64(vector, factor, other, total, at, types.uint32), generate


@intrinsic
def nearest(typing: Any, number: Any) -> Any:
    """A float64 rounded to the nearest integer, halves to the even one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.DoubleType()
        function = builder.module.declare_intrinsic("llvm.rint", [kind])
        return builder.call(function, [arguments[0]])

    return types.float64(types.float64), generate
