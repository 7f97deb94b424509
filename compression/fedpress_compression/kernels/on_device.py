"""Kernels in Triton, for a GPU: the same results as `reference`, bit for bit.

FEDPRESS_KERNELS=triton selects them; all other kernels are numba's or numpy's. Without a GPU they
run under Triton's interpreter (TRITON_INTERPRET=1), which is for tests alone.

The kernels of `reference` have numpy arrays for arguments and results, which cross the bus; the
functions whose names begin with `device_` have tensors of `DEVICE`.
"""

from __future__ import annotations

import math
import os
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from fedpress_compression.errors import ConfigurationError, DecodingError
from fedpress_compression.kernels import reference
from fedpress_compression.kernels.wire import (
    LANE_BITS,
    LANES,
    LEAST_STATE,
    Ints,
    Octets,
    Reals,
    Tables,
)

__all__: list[str] = []
__all__ += reference.__all__

_HOST = import_module(
    f"fedpress_compression.kernels.{'compiled' if find_spec('numba') else 'reference'}"
)
globals().update({name: getattr(_HOST, name) for name in __all__})

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not _INTERPRETED and not torch.cuda.is_available():
    raise ConfigurationError(
        "FEDPRESS_KERNELS=triton needs a GPU that torch can use, and finds none",
        hint="unset it: the other kernels give the same bytes; tests set TRITON_INTERPRET=1",
    )
DEVICE = torch.device("cpu" if _INTERPRETED else "cuda")
_BLOCK, _WIDE = 1024, 4096  # wide where programs take turns at one number
_SAMPLES, _STRIDE, _BINS = 1 << 17, 16, 1 << 15
_ONE, _MASK = tl.constexpr(1 << LANE_BITS), tl.constexpr((1 << LANE_BITS) - 1)
_BITS, _GROUP, _LEAST = tl.constexpr(LANE_BITS), tl.constexpr(LANES), tl.constexpr(LEAST_STATE)


def _tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def _blocks(num: int) -> tuple[int]:
    return (triton.cdiv(num, _BLOCK),)


# The largest entries, in one pass over memory where a sample tells which are likely to be.


@triton.jit
def _added(vector, other, at, inside, ADD: tl.constexpr):
    x = tl.load(vector + at, mask=inside, other=0.0)
    if ADD:
        x = x + tl.load(other + at, mask=inside, other=0.0)
    return x


@triton.jit
def _magnitude(x):
    """Its order as an integer is that of |x|; infinity and NaN are above all numbers."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _sample(vector, other, sample, num, stride, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """The magnitude of one entry in each `stride`, at a place that changes from one to the next: a
    fixed one would meet the period of a matrix's rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    place = at.to(tl.int64) * stride + (tl.randint(0, at).to(tl.int64) & 0x7FFFFFFF) % stride
    x = _added(vector, other, place, inside, ADD)
    tl.store(sample + at, _magnitude(x), mask=inside)


@triton.jit
def _collect(vector, other, total, state, keys, room, num, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Count the entries of a magnitude of state[0] or more in state[1], and write keys of the first
    `room`, blocks in any order; of a sum, which is stored, in the same pass.

    A key rises as the magnitude falls, and by the index among equals.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    x = _added(vector, other, at, inside, ADD)
    if ADD:
        tl.store(total + at, x, mask=inside)
    magnitude = _magnitude(x)
    chosen = inside & (magnitude >= tl.load(state))
    counted = chosen.to(tl.int32)
    start = tl.atomic_add(state + 1, tl.sum(counted, axis=0).to(tl.int64), sem="relaxed")
    slot = start + tl.cumsum(counted, axis=0) - 1
    key = ((0x7FFFFFFF - magnitude).to(tl.int64) << 32) | at
    tl.store(keys + slot, key, mask=chosen & (slot < room))


@triton.jit
def _count(vector, counts, num, BLOCK: tl.constexpr):
    """Count the entries that are not 0 by the upper half of their magnitude."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    magnitude = _magnitude(tl.load(vector + at, mask=at < num, other=0.0))
    one = tl.full((BLOCK,), 1, tl.int64)
    tl.atomic_add(counts + (magnitude >> 16), one, mask=magnitude != 0, sem="relaxed")


def _surely(mean: float) -> int:
    """What the number of rare events of this mean hardly ever exceeds: 5 standard deviations."""
    return math.ceil(mean + 5 * math.sqrt(mean) + 5)


def _collected(
    vector: torch.Tensor,
    other: torch.Tensor | None,
    total: torch.Tensor | None,
    least: torch.Tensor,
    room: int,
) -> tuple[torch.Tensor, int, int]:
    """The keys of `room` entries at most of a magnitude of `least` or more, how many such entries
    there are, and `least`."""
    num, add = vector.numel(), other is not None
    state = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    state[0] = least
    keys = torch.empty(room, dtype=torch.int64, device=DEVICE)
    _collect[(triton.cdiv(num, _WIDE),)](
        *(vector, other if add else vector, total if add else vector),
        *(state, keys, room, num, add, _WIDE),
        num_warps=8,
    )
    reached, found = state.tolist()  # waits for the device, once where the sample serves
    return keys[:found], found, reached


def _counted(vector: torch.Tensor, k: int) -> torch.Tensor:
    """The keys of the k largest and of others that share the upper half of the k-th."""
    counts = torch.zeros(_BINS, dtype=torch.int64, device=DEVICE)
    _count[_blocks(vector.numel())](vector, counts, vector.numel(), _BLOCK)
    reached = counts.flip(0).cumsum(0)  # how many are as large or larger, from the largest down
    short = (reached < k).sum()  # of the bins that do not yet reach k
    least = ((_BINS - 1 - short) << 16).clamp(min=1)
    room = int(reached[short.clamp(max=_BINS - 1)])
    return _collected(vector, None, None, least, room)[0]


def device_largest(
    vector: torch.Tensor, other: torch.Tensor | None, k: int, total: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rising indices of the k largest of `vector`, or of its sum with `other` (an update and a
    residual), which is written to `total`; and these entries. Indices are int32 below 2**31.

    Those that reach a threshold guessed from a sample are collected, in one pass. The k largest are
    among them if they are k or more, or all that are not 0. Otherwise, or where they do not fit,
    all are counted first: so the sample decides about the time alone, and is the same each time.
    """
    num = vector.numel()
    if num > 1 << 32:
        raise ConfigurationError(
            f"a vector of {num} values where the kernels of a GPU select from 2**32 at most",
            hint="unset FEDPRESS_KERNELS",
        )
    dtype = torch.int32 if num < 1 << 31 else torch.int64
    if not num:
        return torch.empty(0, dtype=dtype, device=DEVICE), vector
    add = other is not None
    stride = max(_STRIDE, triton.cdiv(num, _SAMPLES))
    rank = _surely(k / stride)  # k / stride of the k largest are expected in the sample
    room = k + stride * _surely(rank)
    sampled = room < num
    if sampled:
        sample = torch.empty(num // stride, dtype=torch.int32, device=DEVICE)
        _sample[_blocks(sample.numel())](
            vector, other if add else vector, sample, sample.numel(), stride, add, _BLOCK
        )
        least = sample.sort(descending=True).values[rank].clamp(min=1)
        keys, found, reached = _collected(vector, other, total, least, room)
        sampled = found <= room and (found >= k or reached == 1)
    elif other is not None:
        torch.add(vector, other, out=total)
    searched = vector if total is None else total
    if not sampled:
        keys = _counted(searched, k)
    places = (keys.sort().values[:k] & 0xFFFFFFFF).to(dtype).sort().values
    return places, searched[places.long()]


def _on_host(places: torch.Tensor, values: torch.Tensor) -> tuple[Ints, Reals]:
    return places.cpu().numpy().astype(np.int64), values.cpu().numpy()


def largest(vector: Reals, k: int) -> tuple[Ints, Reals]:
    return _on_host(*device_largest(_tensor(vector), None, k, None))


def add_largest(
    vector: Reals, other: Reals, k: int, total: Reals, scale: float = 1.0
) -> tuple[Ints, Reals]:
    vector = vector if scale == 1 else np.float32(scale) * vector
    found = torch.empty(vector.size, dtype=torch.float32, device=DEVICE)
    largest = _on_host(*device_largest(_tensor(vector), _tensor(other), k, found))
    total[:] = found.cpu().numpy()
    return largest


# Symbols of few bits.


@triton.jit
def _quantise(vector, noise, symbols, step, levels, num, NOISE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    scaled = tl.load(vector + at, mask=inside, other=0.0).to(tl.float64) / tl.load(step)
    below = tl.floor(scaled)
    rest = scaled - below
    if NOISE:
        up = tl.load(noise + at, mask=inside, other=0.0) < rest
    else:
        odd = below - 2 * tl.floor(below / 2) != 0
        up = (rest > 0.5) | ((rest == 0.5) & odd)
    rounded = below + up.to(tl.float64)
    rounded = tl.minimum(tl.maximum(rounded, -levels), levels) + levels
    tl.store(symbols + at, rounded.to(tl.int32).to(tl.uint8), mask=inside)


def device_quantise(
    vector: torch.Tensor, step: float, levels: int, noise: torch.Tensor | None
) -> torch.Tensor:
    """The symbols of `quantise` for a step above 0."""
    num = vector.numel()
    symbols = torch.empty(num, dtype=torch.uint8, device=DEVICE)
    width = torch.tensor(step, dtype=torch.float64, device=DEVICE)
    drawn = vector if noise is None else noise
    if num:
        _quantise[_blocks(num)](
            vector, drawn, symbols, width, float(levels), num, noise is not None, _BLOCK
        )
    return symbols


def quantise(
    vector: Reals, step: float, levels: int, noise: npt.NDArray[np.float64] | None
) -> Octets:
    if not step > 0:
        return np.full(vector.size, levels, np.uint8)
    drawn = None if noise is None else _tensor(noise)
    return device_quantise(_tensor(vector), step, levels, drawn).cpu().numpy()


@triton.jit
def _pack(symbols, octets, num, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Eight symbols of WIDTH bits to WIDTH bytes."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.zeros((BLOCK,), tl.int64)
    for i in tl.static_range(8):
        at = row * 8 + i
        symbol = tl.load(symbols + at, mask=at < num, other=0).to(tl.int64)
        word = word | (symbol << (WIDTH * i))
    for i in tl.static_range(WIDTH):
        at = row * WIDTH + i
        inside = at < (num * WIDTH + 7) // 8
        tl.store(octets + at, ((word >> (8 * i)) & 255).to(tl.uint8), mask=inside)


def device_pack(symbols: torch.Tensor, width: int) -> torch.Tensor:
    """The bytes of `write_octets`; with a width of 1, of signs."""
    num = symbols.numel()
    octets = torch.empty((num * width + 7) // 8, dtype=torch.uint8, device=DEVICE)
    if num:
        _pack[_blocks((num + 7) // 8)](symbols, octets, num, width, _BLOCK)
    return octets


def write_octets(symbols: Octets, width: int) -> bytes:
    return device_pack(_tensor(symbols), width).cpu().numpy().tobytes()


# Lanes: a group to a program, as a warp.


@triton.jit
def _encode(
    symbols, contexts, tables, sums, states, words, num_words, num, lanes, most, A: tl.constexpr
):
    """Write the words of a group before the end of its part of `words`, as many as symbols."""
    group = tl.program_id(0).to(tl.int64)
    lane = group * _GROUP + tl.arange(0, _GROUP)
    start = num * tl.minimum(lane, lanes) // lanes
    stop = num * tl.minimum(lane + 1, lanes) // lanes
    end = num * tl.minimum((group + 1) * _GROUP, lanes) // lanes
    at = end
    x = tl.full((_GROUP,), _LEAST, tl.int64)
    for back in range(most):
        place = start + (most - 1 - back)
        takes = place < stop
        entry = tl.load(contexts + place, mask=takes, other=0).to(tl.int64) * A
        entry += tl.load(symbols + place, mask=takes, other=0).to(tl.int64)
        chance = tl.load(tables + entry, mask=takes, other=1)
        full = takes & (x >= (chance << (32 - _BITS)))
        counted = full.to(tl.int64)
        at -= tl.sum(counted, axis=0)
        ranks = tl.cumsum(counted, axis=0) - 1
        tl.store(words + at + ranks, (x & 0xFFFF).to(tl.int32), mask=full)
        x = tl.where(full, x >> 16, x)
        coded = ((x // chance) << _BITS) + x % chance + tl.load(sums + entry, mask=takes, other=0)
        x = tl.where(takes, coded, x)
    tl.store(states + lane, x, mask=lane < lanes)
    tl.store(num_words + group, end - at)


def device_encode(
    symbols: torch.Tensor, contexts: torch.Tensor, tables: torch.Tensor, num_lanes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The number of words of each group, the states and the words; `tables` are int64."""
    num, num_groups = symbols.numel(), triton.cdiv(num_lanes, LANES)
    states = torch.empty(num_lanes, dtype=torch.int64, device=DEVICE)
    words = torch.empty(num, dtype=torch.int32, device=DEVICE)
    num_words = torch.empty(num_groups, dtype=torch.int64, device=DEVICE)
    _encode[(num_groups,)](
        *(symbols, contexts, tables, tables.cumsum(1) - tables, states, words, num_words),
        *(num, num_lanes, triton.cdiv(num, num_lanes), tables.shape[1]),
    )
    last = torch.arange(1, num_groups + 1, device=DEVICE) * LANES
    ends = num * last.clamp(max=num_lanes) // num_lanes
    owner = torch.repeat_interleave(torch.arange(num_groups, device=DEVICE), num_words)
    first = ends - num_words.cumsum(0)
    return num_words, states, words[torch.arange(owner.numel(), device=DEVICE) + first[owner]]


def encode_lanes(
    symbols: Octets, contexts: Octets, tables: Tables, num_lanes: int
) -> tuple[Ints, Octets]:
    arrays = _tensor(symbols), _tensor(contexts), _tensor(tables.astype(np.int64))
    num_words, states, words = (
        each.cpu().numpy() for each in device_encode(*arrays, num_lanes=num_lanes)
    )
    head, rest = states.astype("<u4").view(np.uint8), words.astype("<u2").view(np.uint8)
    return num_words, np.concatenate([head, rest])


@triton.jit
def _decode(
    stream, states, starts, ends, classes, memory, tables, sums, slots, symbols, ended,
    num, lanes, most, per_class, A: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    lane = group * _GROUP + tl.arange(0, _GROUP)
    start = num * tl.minimum(lane, lanes) // lanes
    stop = num * tl.minimum(lane + 1, lanes) // lanes
    at, end = tl.load(starts + group), tl.load(ends + group)
    x = tl.load(states + lane, mask=lane < lanes, other=_LEAST)
    last = tl.zeros((_GROUP,), tl.int64)
    for step in range(most):
        place = start + step
        takes = place < stop
        row = tl.load(classes + place, mask=takes, other=0).to(tl.int64) * per_class
        row += tl.load(memory + last).to(tl.int64)
        slot = x & _MASK
        symbol = tl.load(slots + row * _ONE + slot).to(tl.int64)
        chance, below = tl.load(tables + row * A + symbol), tl.load(sums + row * A + symbol)
        y = chance * (x >> _BITS) + slot - below
        empty = takes & (y < _LEAST)
        counted = empty.to(tl.int64)
        word = at + tl.cumsum(counted, axis=0) - 1
        y = tl.where(
            empty, (y << 16) | tl.load(stream + word, mask=empty & (word < end), other=0), y
        )
        at += tl.sum(counted, axis=0)
        x, last = tl.where(takes, y, x), tl.where(takes, symbol, last)
        tl.store(symbols + place, symbol.to(tl.uint8), mask=takes)
    wrong = tl.sum((x != _LEAST).to(tl.int64), axis=0) + (at != end).to(tl.int64)
    tl.store(ended + group, wrong)


def device_decode(
    states: torch.Tensor,
    words: torch.Tensor,
    num_words: torch.Tensor,
    classes: torch.Tensor,
    memory: torch.Tensor,
    tables: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The symbols, and for each group 0 if its lanes end as they began; all int64 but the symbols,
    classes and memory, which are uint8."""
    num, num_lanes = classes.numel(), states.numel()
    every = torch.arange(tables.shape[1], dtype=torch.uint8, device=DEVICE).repeat(len(tables))
    slots = torch.repeat_interleave(every, tables.ravel())
    ends = num_words.cumsum(0)
    symbols = torch.empty(num, dtype=torch.uint8, device=DEVICE)
    wrong = torch.empty_like(num_words)
    _decode[(num_words.numel(),)](
        *(words, states, ends - num_words, ends, classes, memory),
        *(tables, tables.cumsum(1) - tables, slots, symbols, wrong, num, num_lanes),
        *(triton.cdiv(num, num_lanes), int(memory.max()) + 1, tables.shape[1]),
    )
    return symbols, wrong


def decode_lanes(
    octets: Octets,
    at: int,
    num_words: Ints,
    classes: Octets,
    memory: Octets,
    tables: Tables,
    num_lanes: int,
) -> Octets:
    body = octets[at : at + 4 * num_lanes + 2 * int(num_words.sum())]
    states = body[: 4 * num_lanes].view("<u4").astype(np.int64)
    words = body[4 * num_lanes :].view("<u2").astype(np.int64)
    symbols, wrong = device_decode(
        *(_tensor(states), _tensor(words), _tensor(num_words)),
        *(_tensor(classes), _tensor(memory), _tensor(tables.astype(np.int64))),
    )
    if wrong.any():
        raise DecodingError("lanes that do not end as they began, or need more words")
    return symbols.cpu().numpy()


# Sums.


@triton.jit
def _add_table(total, where, symbols, table, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    place = tl.load(where + at, mask=inside, other=0)
    value = tl.load(table + tl.load(symbols + at, mask=inside, other=0).to(tl.int64))
    tl.store(total + place, tl.load(total + place, mask=inside) + value, mask=inside)


def device_add_table_at(
    total: torch.Tensor, where: torch.Tensor, symbols: torch.Tensor, table: torch.Tensor
) -> None:
    if where.numel():
        _add_table[_blocks(where.numel())](total, where, symbols, table, where.numel(), _BLOCK)


def add_table_at(total: Ints, where: Ints, symbols: Octets, table: Ints) -> None:
    summed = _tensor(total)
    device_add_table_at(summed, _tensor(where), _tensor(symbols), _tensor(table))
    total[:] = summed.cpu().numpy()
