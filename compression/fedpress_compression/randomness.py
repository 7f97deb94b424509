"""Randomness that both ends share: a specified stream, the same on every machine and in every year.

numpy's generators promise no stable streams across versions, so nothing that crosses the wire may
hang on them. This is the ChaCha20 key stream (RFC 8439, section 2.4) under a key derived from the
plan's public seed and a label; each label is a stream of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from fedpress_compression.errors import ConfigurationError

_DOMAIN = b"fedpress public randomness v1\x00"
_ZEROS = bytes(16)


@dataclass(frozen=True, slots=True)
class PublicRandomness:
    """Streams from a 32-byte `seed` that is public; never a source of secrets."""

    seed: bytes

    def __post_init__(self) -> None:
        if len(self.seed) != 32:
            raise ConfigurationError(f"a public seed of {len(self.seed)} bytes, expected 32")

    def stream(self, label: str) -> PublicStream:
        """The stream for `label`; the same label gives the same stream from its beginning."""
        key = hashlib.sha256(_DOMAIN + self.seed + label.encode()).digest()
        return PublicStream(key)


class PublicStream:
    """A ChaCha20 key stream read as little-endian 64-bit words, in order."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(ChaCha20(key, _ZEROS), mode=None).encryptor()

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """The next `count` words, uniform in [0, 2**64)."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), "<u8").astype(np.uint64)

    def below(self, bound: int, count: int) -> npt.NDArray[np.int64]:
        """The next `count` integers, uniform in [0, bound), 1 <= bound < 2**63.

        Words at or above the largest multiple of `bound` are passed over, the rest taken modulo
        `bound`: exact, and simple to specify.
        """
        if not 1 <= bound < 2**63:
            raise ConfigurationError(f"a bound of {bound} outside [1, 2**63)")
        limit = 2**64 // bound * bound
        drawn: list[npt.NDArray[np.uint64]] = []
        missing = count
        while missing:
            words = self.words(missing)
            accepted = words if limit == 2**64 else words[words < np.uint64(limit)]
            drawn.append(accepted % np.uint64(bound))
            missing -= accepted.size
        empty = np.empty(0, np.uint64)
        return np.concatenate(drawn or [empty]).astype(np.int64)

    def bits(self, count: int) -> npt.NDArray[np.uint8]:
        """`count` fair bits from the next ceil(count / 64) words, each from its lowest bit up."""
        words = self.words(-(-count // 64)).astype("<u8")
        return np.unpackbits(words.view(np.uint8), count=count, bitorder="little")

    def distinct(self, bound: int, count: int) -> npt.NDArray[np.int64]:
        """`count` distinct integers of [0, bound), rising; every such set is as likely.

        Integers are drawn by `below` until `count` different ones have come; if more than half are
        wanted, those to be left out are drawn instead. O(bound) memory.
        """
        if not 0 <= count <= bound:
            raise ConfigurationError(f"{count} distinct integers below {bound}")
        left_out = 2 * count > bound
        wanted = bound - count if left_out else count
        drawn = np.zeros(bound, bool)
        missing = wanted
        while missing:  # never more than are missing, so the stream stops where the last is found
            drawn[self.below(bound, missing)] = True
            missing = wanted - int(np.count_nonzero(drawn))
        return np.flatnonzero(drawn != left_out)
