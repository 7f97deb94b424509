"""rANS in interleaved lanes, in numpy (Duda 2013, arXiv:1311.2540; lanes as in Giesen 2014,
arXiv:1402.3392): all lanes take a step together, each a symbol, as the threads of a GPU would.

Lane j of T has symbols n j // T to n (j + 1) // T. Up to 32 lanes form a group, which shares a
string of 16-bit words: at each step, its lanes take a word if they need one, in their order. So
groups decode independently, and the lanes of a group in lockstep. protocols/SPEC-coding.md says all
of it exactly.
"""

from __future__ import annotations

import numpy as np

from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.wire import (
    LANE_BITS,
    LANES,
    LEAST_STATE,
    Ints,
    Octets,
    Tables,
)

_MASK = np.uint64((1 << LANE_BITS) - 1)
_WORD, _BITS = np.uint64(16), np.uint64(LANE_BITS)


def encode_lanes(
    symbols: Octets, contexts: Octets, tables: Tables, num_lanes: int
) -> tuple[Ints, Octets]:
    """Encode symbols [n], 1 <= `num_lanes` <= n, each under its row of `tables` [c, alphabet].

    A row is frequencies that sum to 4096, not 0 for a symbol that occurs. Returns the number of
    words of each group, and as bytes the states of the lanes and the words.
    """
    starts, most = _lanes(symbols.size, num_lanes)
    sums = _sums(tables)
    states = np.full(num_lanes, LEAST_STATE, np.uint64)
    steps: list[tuple[Ints, Ints]] = []
    for step in range(most - 1, -1, -1):
        lanes = np.flatnonzero(starts[:-1] + step < starts[1:])
        at = starts[lanes] + step
        rows, which = contexts[at].astype(np.int64), symbols[at].astype(np.int64)
        chances = tables[rows, which].astype(np.uint64)
        x = states[lanes]
        full = x >= chances << np.uint64(32 - LANE_BITS)
        steps.append((lanes[full], (x[full] & np.uint64(0xFFFF)).astype(np.int64)))
        x = np.where(full, x >> _WORD, x)
        low = x % chances + sums[rows, which]
        states[lanes] = (x // chances << _BITS) + low
    steps.reverse()
    groups = np.concatenate([lanes for lanes, _ in steps]) // LANES
    words = np.concatenate([words for _, words in steps])[np.argsort(groups, kind="stable")]
    head, rest = states.astype("<u4").view(np.uint8), words.astype("<u2").view(np.uint8)
    return np.bincount(groups, minlength=-(-num_lanes // LANES)), np.concatenate([head, rest])


def decode_lanes(
    octets: Octets,
    at: int,
    num_words: Ints,
    classes: Octets,
    memory: Octets,
    tables: Tables,
    num_lanes: int,
) -> Octets:
    """Decode the output of `encode_lanes` at byte `at`, of as many words as `num_words` says.

    A symbol's row of `tables` is its class times the number of `memory`'s values, plus the one of
    the symbol before it in its lane, or of 0. `octets` holds all states and words, and frequencies
    sum to 4096. Raises DecodingError unless all lanes end as they began.
    """
    starts, most = _lanes(classes.size, num_lanes)
    states = octets[at : at + 4 * num_lanes].view("<u4").astype(np.uint64)
    at += 4 * num_lanes
    stream = octets[at : at + 2 * int(num_words.sum())].view("<u2").astype(np.uint64)
    ends = np.cumsum(num_words)
    following, per_class = ends - num_words, int(memory.max()) + 1
    sums = _sums(tables)
    flat = tables.astype(np.int64).ravel()
    every = np.tile(np.arange(tables.shape[1]), len(tables)).astype(np.uint8)
    slots = np.repeat(every, flat).reshape(len(tables), 1 << LANE_BITS)
    symbols = np.zeros(classes.size, np.uint8)
    last = np.zeros(num_lanes, np.uint8)
    for step in range(most):
        lanes = np.flatnonzero(starts[:-1] + step < starts[1:])
        place = starts[lanes] + step
        rows = classes[place].astype(np.int64) * per_class + memory[last[lanes]]
        x = states[lanes]
        slot = x & _MASK
        which = slots[rows, slot.astype(np.int64)]
        x = tables[rows, which] * (x >> _BITS) + slot - sums[rows, which]
        empty = np.flatnonzero(x < LEAST_STATE)
        groups = lanes[empty] // LANES
        ranks = np.arange(empty.size) - np.searchsorted(groups, groups)
        taken = following[groups] + ranks
        if (taken >= ends[groups]).any():
            raise DecodingError("lanes that need more words than they have")
        x[empty] = x[empty] << _WORD | stream[taken]
        following += np.bincount(groups, minlength=following.size)
        states[lanes], last[lanes], symbols[place] = x, which, which
    if (states != LEAST_STATE).any() or (following != ends).any():
        raise DecodingError("lanes that do not end as they began")
    return symbols


def _lanes(num: int, num_lanes: int) -> tuple[Ints, int]:
    """The bounds of the lanes' symbols, and the most symbols of a lane."""
    starts = np.arange(num_lanes + 1, dtype=np.int64) * num // num_lanes
    return starts, -(-num // num_lanes)


def _sums(tables: Tables) -> Tables:
    """For each frequency, the sum of those before it."""
    sums: Tables = np.cumsum(tables, axis=1) - tables
    return sums
