"""Masks are the standards' key streams, word by word, from wherever one begins."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.masking import keystream
from fedpress_protocols.masking.keystream import (
    MATERIAL_BYTES,
    MAX_WORDS,
    SUITES,
    Suite,
    add_keystream,
    add_keystreams,
)

suites = st.sampled_from(SUITES)
materials = st.binary(min_size=48, max_size=48)


def stream(material: bytes, suite: Suite, count: int, offset: int = 0) -> npt.NDArray[np.uint64]:
    words = np.zeros(count, np.uint64)
    add_keystream(words, material, suite, 1, offset)
    return words


def octets(words: npt.NDArray[np.uint64]) -> bytes:
    return words.astype("<u8").tobytes()


def of_hex(text: str) -> bytes:
    return bytes.fromhex("".join(text.split()))


def test_chacha20_gives_the_ciphertext_of_rfc_8439_section_2_4_2() -> None:
    """Its counter begins at 1: a block, 8 words, on."""
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for "
        b"the future, sunscreen would be it."
    )
    due = of_hex(
        """6e2e359a2568f98041ba0728dd0d6981 e97e7aec1d4360c20a27afccfd9fae0b
           f91b65c5524733ab8f593dabcd62b357 1639d624e65152ab8f530c359f0861d8
           07ca0dbf500d6a6156a38e088a22b65e 52bc514d16ccf806818ce91ab7793736
           5af90bbf74a35be6b40b8eedf2785e42 874d"""
    )
    material = bytes(range(32)) + of_hex("000000000000004a00000000") + bytes(4)
    found = octets(stream(material, "chacha20", 15, offset=8))[: len(text)]
    assert bytes(a ^ b for a, b in zip(found, text, strict=True)) == due


def test_chacha20_gives_the_blocks_of_rfc_8439_appendix_a_1() -> None:
    """Test vectors 1 and 2: a key and a nonce of zeros, blocks 0 and 1."""
    due = of_hex(
        """76b8e0ada0f13d90405d6ae55386bd28 bdd219b8a08ded1aa836efcc8b770dc7
           da41597c5157488d7724e03fb8d84a37 6a43b8f41518a11cc387b669b2ee6586
           9f07e7be5551387a98ba977c732d080d cb0f29a048e3656912c6533e32ee7aed
           29b721769ce64e43d57133b074d839d5 31ed1f28510afb45ace10a1f4b794d6f"""
    )
    assert octets(stream(bytes(48), "chacha20", 16)) == due


def test_aes_gives_the_output_blocks_of_sp_800_38a_section_f_5_1() -> None:
    key = of_hex("2b7e151628aed2a6abf7158809cf4f3c")
    counter = of_hex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    text = of_hex(
        """6bc1bee22e409f96e93d7e117393172a ae2d8a571e03ac9c9eb76fac45af8e51
           30c81c46a35ce411e5fbc1191a0a52ef f69f2445df4f9b17ad2b417be66c3710"""
    )
    due = of_hex(
        """874d6191b620e3261bef6864990db6ce 9806f66b7970fdff8617187bb9fffdff
           5ae4df3edbd5d35e5b4f09020db03eab 1e031dda2fbe03d1792170a0f3009cee"""
    )
    found = octets(stream(key + counter + bytes(16), "aes-128-ctr", 8))
    assert bytes(a ^ b for a, b in zip(found, text, strict=True)) == due


@given(materials, suites, st.integers(0, 200), st.integers(0, 100))
def test_a_stream_may_be_entered_anywhere(
    material: bytes, suite: Suite, offset: int, count: int
) -> None:
    whole = stream(material, suite, offset + count)
    assert (stream(material, suite, count, offset) == whole[offset:]).all()


@pytest.mark.parametrize("suite", SUITES)
def test_streams_go_on_over_chunks_and_threads(suite: Suite) -> None:
    chunk = keystream._CHUNK
    count = 3 * chunk + 77
    masks = [(os.urandom(48), sign) for sign in (1, -1, 1)]
    due = np.arange(count, dtype=np.uint64)
    for material, sign in masks:
        pieces = [
            stream(material, suite, min(1000, count - at), at) for at in range(0, count, 1000)
        ]
        due = due + np.concatenate(pieces) if sign > 0 else due - np.concatenate(pieces)
    for threads in (1, 2, 3, 8):
        words = np.arange(count, dtype=np.uint64)
        add_keystreams(words, masks, suite, threads=threads)
        assert (words == due).all()
        words = np.arange(count, dtype=np.uint64)[5:]
        add_keystreams(words, masks, suite, offset=5, threads=threads)
        assert (words == due[5:]).all()


@settings(max_examples=30)
@given(st.lists(materials, max_size=4), suites, st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_what_was_added_is_taken_off(
    found: list[bytes], suite: Suite, count: int, seed: int
) -> None:
    clear = np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)
    words = clear.copy()
    add_keystreams(words, [(material, 1) for material in found], suite)
    for material in found:
        add_keystream(words, material, suite, -1)
    assert (words == clear).all()


def test_the_counter_of_aes_runs_over() -> None:
    last = stream(bytes(16) + b"\xff" * 16 + bytes(16), "aes-128-ctr", 4)
    first = stream(bytes(48), "aes-128-ctr", 2)
    assert (last[2:] == first).all()


def test_a_stream_ends_where_the_counter_of_chacha20_does() -> None:
    assert stream(bytes(48), "chacha20", 8, MAX_WORDS - 8).any()
    with pytest.raises(ConfigurationError, match="8 words from offset 34359738361"):
        stream(bytes(48), "chacha20", 8, MAX_WORDS - 7)
    with pytest.raises(ConfigurationError, match="from offset -1"):
        stream(bytes(48), "chacha20", 8, -1)


@pytest.mark.parametrize("suite", SUITES)
def test_every_word_of_the_ring_is_as_likely(suite: Suite) -> None:
    """Bytes, and each bit, of a million words: chi-squared at 1e-4, six deviations."""
    words = stream(bytes(range(48)), suite, 1_000_000)
    counts = np.bincount(words.view(np.uint8), minlength=256)
    assert ((counts - 31250.0) ** 2 / 31250).sum() < 347.7
    bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 64).sum(axis=0, dtype=np.int64)
    assert (np.abs(bits - 500_000) < 3_000).all()


def test_each_kind_of_wrong_argument_is_refused_and_nothing_added() -> None:
    words = np.zeros(4, np.uint64)
    good = (bytes(MATERIAL_BYTES), 1)
    for masks, suite, said in (
        ([good, (bytes(47), 1)], "chacha20", "47 bytes of key material"),
        ([good, (bytes(48), 2)], "chacha20", "a sign of 2"),
        ([good], "rot13", "suite must be one of chacha20, aes-128-ctr"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            add_keystreams(words, masks, suite)  # type: ignore[arg-type]
    assert not words.any()
    frozen = np.zeros(4, np.uint64)
    frozen.setflags(write=False)
    for wrong in (np.zeros(4, np.int64), np.zeros(8, np.uint64)[::2], frozen):
        with pytest.raises(ConfigurationError, match="expected writable contiguous uint64"):
            add_keystreams(wrong, [good], "chacha20")  # type: ignore[arg-type]
