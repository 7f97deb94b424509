"""Packing of signed integers into words of Z_2^64, so that the sum of a cohort's words is exact.

A word carries a few digits: word = sum of x_l * base**l mod 2**64. The base is a power of two, so
that digits are lanes of bits, or any odd number, if lanes would leave too many bits unused. Sums
are read back as balanced digits, and are exact as long as none exceeds the bound of the base.

Only the low bits of a word that its digits need are sent: a sum mod 2**64 is also correct mod 2**w,
and a mask that is uniform over 64 bits is uniform over any w of them. So a cohort whose sums need
13 or 17 bits sends 13 or 17 bits per coordinate, not 16 or 21.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

MAX_SUM = 2**62 - 1
"""Maximum magnitude of a sum."""

_WORD = 64
_LANES = range(8, 33)
"""Lane widths with a kernel."""
_TOLERATED = 64 / 63
"""Bits per word, and words, that a simpler shape may waste: whole words are preferred to cut ones,
lanes to other bases."""


def lane_bits_for(bound: int, n: int) -> int:
    """The least width of a lane that holds every sum of up to `n` integers in [-bound, bound]."""
    return (bound * n).bit_length() + 1


@dataclass(frozen=True, slots=True)
class Bounded:
    """`length` integers under the name `name`, each client's in [-bound, bound].

    With `single` one client's may be as large as that; still no sum of n may exceed n * bound.
    """

    name: str
    length: int
    bound: int
    single: int | None = None

    def __post_init__(self) -> None:
        if self.length < 1 or self.bound < 1:
            raise ConfigurationError(
                f"{self.name}: length {self.length} and bound {self.bound} must be positive"
            )


@dataclass(frozen=True, slots=True)
class Segment:
    """The packing of a vector: `digits` of `base` in each word, of which `word_bits` are sent."""

    vector: Bounded
    max_sum: int
    """The largest magnitude of a sum."""
    base: int
    digits: int
    word_bits: int

    @classmethod
    def of(cls, vector: Bounded, n: int) -> Segment:
        """The shape with (nearly) the fewest bits for the sums of up to `n` clients.

        Raises IncompatiblePlan if a sum could exceed MAX_SUM.
        """
        max_sum = vector.bound * n
        if n < 1 or max_sum > MAX_SUM:
            raise IncompatiblePlan(
                f"{vector.name}: sums of {n} integers up to {vector.bound}, outside [1, {MAX_SUM}]",
                hint="lower the bound or the cohort",
            )
        segments = [cls(vector, max_sum, *shape) for shape in _shapes(max_sum)]
        least = min(each.num_bytes for each in segments)
        return next(each for each in segments if each.num_bytes <= _TOLERATED * least + 8)

    @property
    def num_words(self) -> int:
        return -(-self.vector.length // self.digits)

    @property
    def num_bytes(self) -> int:
        return -(-self.num_words * self.word_bits // 8)

    @property
    def lane_bits(self) -> int | None:
        """The width of a lane; None if the base is not a power of two."""
        return None if self.base % 2 else self.base.bit_length() - 1

    def pack(self, values: npt.NDArray[np.signedinteger], *, as_sum: bool = False) -> Words:
        """Pack [length] integers into [num_words]; raises InvalidUpdate for any beyond what a
        client, or with `as_sum` a sum, may have."""
        bound = self.max_sum if as_sum else self.vector.single or self.vector.bound
        if values.shape != (self.vector.length,) or values.dtype.kind != "i":
            raise InvalidUpdate(
                f"{self.vector.name}: {values.dtype} {values.shape}, expected {self.vector.length} "
                f"signed integers"
            )
        if int(values.min()) < -bound or int(values.max()) > bound:
            raise InvalidUpdate(f"{self.vector.name}: an integer beyond {bound} in magnitude")
        if self.lane_bits is not None:
            return kernels.pack_lanes(np.ascontiguousarray(values, np.int64), self.lane_bits)
        filled = np.zeros(self.num_words * self.digits, np.int64)
        filled[: values.size] = values
        columns = filled.view(np.uint64).reshape(-1, self.digits)
        words = columns[:, -1].copy()
        for place in range(self.digits - 2, -1, -1):
            words *= np.uint64(self.base)
            words += columns[:, place]
        return words

    def unpack(self, words: Words) -> Ints:
        """Unpack [num_words] words into [length] sums; bits beyond `word_bits` are ignored.

        Raises InvalidUpdate if they cannot be sums of this cohort: a mask was not removed, or a
        client exceeded the bound.
        """
        count = self.num_words * self.digits
        if self.lane_bits is not None:
            sums = kernels.unpack_lanes(words, self.lane_bits, count)
            beyond = False
        else:
            up = np.uint64(_WORD - self.word_bits)
            rest = (words << up).view(np.int64) >> up.astype(np.int64)
            sums = np.empty(count, np.int64)
            columns = sums.reshape(-1, self.digits)
            for place in range(self.digits):
                quotient = rest // self.base
                rest -= quotient * self.base
                above = rest > self.max_sum
                columns[:, place] = rest - self.base * above
                rest = quotient + above
            beyond = bool(rest.any())
        length, most = self.vector.length, self.max_sum
        if beyond or sums[length:].any() or int(sums.max()) > most or int(sums.min()) < -most:
            raise InvalidUpdate(
                f"{self.vector.name}: the words hold a sum beyond {most}",
                hint="a mask was not removed, or a client exceeded the bound",
            )
        return sums[:length]

    def to_bytes(self, words: Words) -> bytes:
        """The low `word_bits` of every word, concatenated, lowest bit first."""
        if self.word_bits == _WORD:
            return words.astype("<u8", copy=False).tobytes()
        group, per_group = self._group
        filled = np.zeros(-(-words.size // group) * group, np.uint64)
        np.bitwise_and(words, np.uint64(2**self.word_bits - 1), out=filled[: words.size])
        columns = np.ascontiguousarray(filled.reshape(-1, group).T)
        packed = np.zeros((per_group, columns.shape[1]), np.uint64)
        for column, (at, shift) in zip(columns, self._places, strict=True):
            packed[at] |= column << np.uint64(shift)
            if shift + self.word_bits > _WORD:
                packed[at + 1] |= column >> np.uint64(_WORD - shift)
        return packed.T.astype("<u8").tobytes()[: self.num_bytes]

    def from_bytes(self, data: bytes | memoryview) -> Words:
        """[num_words], their low `word_bits` from [num_bytes] and the others 0; it may be a view.

        Raises InvalidUpdate for another length, or a bit set after the last word.
        """
        if len(data) != self.num_bytes:
            raise InvalidUpdate(f"{self.vector.name}: {len(data)} bytes, expected {self.num_bytes}")
        if self.word_bits == _WORD:
            return np.frombuffer(data, "<u8").astype(np.uint64, copy=False)
        if data[-1] >> ((self.num_words * self.word_bits - 1) % 8 + 1):
            raise InvalidUpdate(f"{self.vector.name}: a bit set after the last word")
        group, per_group = self._group
        filled = np.zeros(-(-self.num_words // group) * per_group, "<u8")
        filled.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        packed = np.ascontiguousarray(filled.astype(np.uint64).reshape(-1, per_group).T)
        columns = np.empty((group, packed.shape[1]), np.uint64)
        for column, (at, shift) in zip(columns, self._places, strict=True):
            np.right_shift(packed[at], np.uint64(shift), out=column)
            if shift + self.word_bits > _WORD:
                column |= packed[at + 1] << np.uint64(_WORD - shift)
            column &= np.uint64(2**self.word_bits - 1)
        return columns.T.reshape(-1)[: self.num_words].copy()

    @property
    def _group(self) -> tuple[int, int]:
        """The number of words whose cut bits fill whole words, and that number of whole words."""
        common = math.gcd(self.word_bits, _WORD)
        return _WORD // common, self.word_bits // common

    @property
    def _places(self) -> Iterator[tuple[int, int]]:
        return (divmod(i * self.word_bits, _WORD) for i in range(self._group[0]))


def _shapes(max_sum: int) -> Iterator[tuple[int, int, int]]:
    """Every (base, digits, word_bits) for such sums: simpler ones first, then those with few
    words."""
    bits = max(lane_bits_for(max_sum, 1), _LANES.start)
    if bits in _LANES:
        lanes = _WORD // bits
        yield 2 ** (_WORD // lanes), lanes, _WORD
        yield 2**bits, lanes, lanes * bits
    base = 2 * max_sum + 1
    for digits in range(int(_WORD / math.log2(base)) + 1, 0, -1):
        if (word_bits := (base**digits - 1).bit_length()) <= _WORD:
            yield base, digits, word_bits


@dataclass(frozen=True, slots=True)
class Packing:
    """Vectors of different bounds, concatenated in one array of words and in one body."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, vectors: Sequence[Bounded], n: int) -> Packing:
        """For the sums of up to `n` clients, n the size of the largest cohort; the same vectors and
        n always give the same packing. Raises IncompatiblePlan, ConfigurationError."""
        names = {vector.name for vector in vectors}
        if not vectors or len(names) != len(vectors):
            raise ConfigurationError(f"{len(vectors)} vectors with {len(names)} distinct names")
        return cls(tuple(Segment.of(vector, n) for vector in vectors))

    @property
    def num_words(self) -> int:
        return sum(segment.num_words for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        """Length of a body in bytes."""
        return sum(segment.num_bytes for segment in self.segments)

    def pack(
        self, values: Mapping[str, npt.NDArray[np.signedinteger]], *, as_sum: bool = False
    ) -> Words:
        """Pack the integers of each vector into [num_words]; raises InvalidUpdate for an integer
        beyond its bound or, with `as_sum`, that of sums, and for another set of names."""
        if values.keys() != {segment.vector.name for segment in self.segments}:
            raise InvalidUpdate(f"vectors {sorted(values)}, expected those of the plan")
        parts = [each.pack(values[each.vector.name], as_sum=as_sum) for each in self.segments]
        return np.concatenate(parts)

    def unpack(self, words: Words) -> dict[str, Ints]:
        """Unpack the sums of each vector, in int64; raises InvalidUpdate for impossible sums."""
        parts = self._parts(words, [each.num_words for each in self.segments])
        pairs = zip(self.segments, parts, strict=True)
        return {each.vector.name: each.unpack(part) for each, part in pairs}

    def to_bytes(self, words: Words) -> bytes:
        """The body: the used bits of each segment, padded to a byte with zeros."""
        parts = self._parts(words, [each.num_words for each in self.segments])
        pairs = zip(self.segments, parts, strict=True)
        return b"".join(each.to_bytes(part) for each, part in pairs)

    def from_bytes(self, data: bytes | memoryview) -> Words:
        """Parse a body into [num_words]; the result may be a read-only view.

        Raises InvalidUpdate for another length, or a padding bit that is set.
        """
        if len(data) != self.num_bytes:
            raise InvalidUpdate(f"a body of {len(data)} bytes, expected {self.num_bytes}")
        words, at = [], 0
        for segment in self.segments:
            words.append(segment.from_bytes(memoryview(data)[at : at + segment.num_bytes]))
            at += segment.num_bytes
        return words[0] if len(words) == 1 else np.concatenate(words)

    def _parts(self, words: Words, sizes: Sequence[int]) -> list[Words]:
        if words.shape != (self.num_words,) or words.dtype != np.uint64:
            raise InvalidUpdate(
                f"words of {words.dtype} {words.shape}, expected {self.num_words} uint64"
            )
        return np.split(words, np.cumsum(sizes[:-1]))
