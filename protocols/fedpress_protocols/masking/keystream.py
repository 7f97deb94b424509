"""Masks: key streams of ChaCha20 or AES-128-CTR, added to words of Z_2^64 while generated.

A stream is identified by 48 bytes from a key derivation, so no nonce repeats under a key: for
ChaCha20 (RFC 8439, section 2.4) the key is the first 32, the nonce the next 12 and the counter
begins at 0; for AES-128-CTR (NIST SP 800-38A, section 6.5) the key is the first 16 and the first
counter block the next 16. Words are little-endian and uniform over 2**64.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES, ChaCha20
from cryptography.hazmat.primitives.ciphers.modes import CTR

from fedpress_protocols.errors import ConfigurationError

Suite = Literal["chacha20", "aes-128-ctr"]
Words = npt.NDArray[np.uint64]

SUITES: tuple[Suite, ...] = ("chacha20", "aes-128-ctr")
MATERIAL_BYTES = 48
MAX_WORDS = 2**35
"""Maximum words of a stream: ChaCha20 counts 2**32 blocks of 64 bytes."""

_CHUNK = 2**15
"""Words generated at once, 256 KiB: a chunk of the masks and of the stream fit into the cache."""
_ZEROS = memoryview(bytes(8 * _CHUNK))


def add_keystream(
    words: Words, key_material: bytes, suite: Suite, sign: int = 1, offset: int = 0
) -> None:
    """Compute words += sign * (the stream from its word `offset`), mod 2**64; `sign` is 1 or -1."""
    add_keystreams(words, [(key_material, sign)], suite, offset)


def add_keystreams(
    words: Words,
    masks: Sequence[tuple[bytes, int]],
    suite: Suite,
    offset: int = 0,
    threads: int = 1,
) -> None:
    """Add many streams (key material, sign) in one pass over `words`.

    `words` is uint64, contiguous and in native byte order. `threads` threads divide it among
    themselves (the ciphers and numpy release the GIL). Raises ConfigurationError before anything is
    added.
    """
    _check(words, masks, suite, offset)
    if threads == 1 or words.size <= _CHUNK:
        return _add(words, masks, suite, offset)
    share = -(-words.size // (threads * _CHUNK)) * _CHUNK
    starts = range(0, words.size, share)
    with ThreadPoolExecutor(len(starts)) as pool:
        results = [
            pool.submit(_add, words[at : at + share], masks, suite, offset + at) for at in starts
        ]
        for each in results:
            each.result()


def _check(words: Words, masks: Sequence[tuple[bytes, int]], suite: str, offset: int) -> None:
    if words.dtype != np.uint64 or not words.flags.c_contiguous or not words.flags.writeable:
        raise ConfigurationError(f"words of {words.dtype}, expected writable contiguous uint64")
    if suite not in SUITES:
        raise ConfigurationError(f"suite must be one of {', '.join(SUITES)}, not {suite!r}")
    if not 0 <= offset <= MAX_WORDS - words.size:
        raise ConfigurationError(
            f"{words.size} words from offset {offset}, but a stream has only {MAX_WORDS}"
        )
    for material, sign in masks:
        if len(material) != MATERIAL_BYTES or sign not in (1, -1):
            raise ConfigurationError(
                f"{len(material)} bytes of key material and a sign of {sign}, "
                f"expected {MATERIAL_BYTES} bytes and 1 or -1"
            )


def _add(words: Words, masks: Sequence[tuple[bytes, int]], suite: Suite, offset: int) -> None:
    streams = [
        (_stream(material, suite, offset), np.add if sign > 0 else np.subtract)
        for material, sign in masks
    ]
    buffer = np.empty(min(_CHUNK, words.size), "<u8")
    octets = buffer.data.cast("B")
    for at in range(0, words.size, _CHUNK):
        chunk = words[at : at + _CHUNK]
        part, into, zeros = buffer[: chunk.size], octets[: chunk.nbytes], _ZEROS[: chunk.nbytes]
        for stream, add in streams:
            stream.update_into(zeros, into)
            add(chunk, part, out=chunk)


def _stream(material: bytes, suite: Suite, offset: int) -> Any:
    """A cipher positioned at the first byte of word `offset`."""
    size = 64 if suite == "chacha20" else 16
    block, skip = divmod(8 * offset, size)
    if suite == "chacha20":
        nonce = block.to_bytes(4, "little") + material[32:44]
        stream = Cipher(ChaCha20(material[:32], nonce), mode=None).encryptor()
    else:
        counter = (int.from_bytes(material[16:32], "big") + block) % 2**128
        mode = CTR(counter.to_bytes(16, "big"))
        stream = Cipher(AES(material[:16]), mode).encryptor()
    stream.update(_ZEROS[:skip])
    return stream
