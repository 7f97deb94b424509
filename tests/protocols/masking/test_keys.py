"""Two clients agree on a mask and on a channel, in one session and in no other."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import mlkem
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st

from fedpress_protocols.errors import ConfigurationError, InvalidKey, InvalidSeal
from fedpress_protocols.masking import keys
from fedpress_protocols.masking.keys import (
    HYBRID_PUBLIC_BYTES,
    HYBRID_SEAL_BYTES,
    INTRODUCTION_BYTES,
    PUBLIC_BYTES,
    SEAL_BYTES,
    ChannelKey,
    MaskKey,
    check_public,
    commitment,
    derive,
    new_secret,
    same,
    self_mask,
    wipe,
)
from fedpress_protocols.masking.transcript import statement
from fedpress_protocols.signatures import DeviceKey, verify_signature

SID, OTHER_SID = bytes(32), bytes(31) + b"\1"
CFG, OTHER_CFG = b"\2" * 32, b"\3" * 32
BOTH = pytest.mark.parametrize("hybrid", [False, True], ids=["x25519", "hybrid"])


def of_hex(text: str) -> bytes:
    return bytes.fromhex("".join(text.split()))


# The standards' own vectors, through the code that is used.


def exchange(private: bytes, public: bytes) -> bytes:
    return keys._exchange(X25519PrivateKey.from_private_bytes(private), public, hybrid=False)


@pytest.mark.parametrize(
    ("scalar", "coordinate", "due"),
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (  # of section 6.1: Bob's key, Alice's public one
            "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
            "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a",
            "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742",
        ),
    ],
)
def test_exchanges_are_those_of_rfc_7748_section_5_2(
    scalar: str, coordinate: str, due: str
) -> None:
    assert exchange(of_hex(scalar), of_hex(coordinate)).hex() == due


def test_exchanges_iterated_are_those_of_rfc_7748_section_5_2() -> None:
    k = u = bytes([9]) + bytes(31)
    for i in range(1000):
        k, u = exchange(k, u), k
        if i == 0:
            assert k.hex() == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert k.hex() == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"


def test_the_public_key_is_that_of_rfc_7748_section_6_1() -> None:
    private = of_hex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    public = keys._public(X25519PrivateKey.from_private_bytes(private), None)
    assert public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"


@pytest.mark.parametrize(
    ("secret", "salt", "info", "due"),
    [
        (
            b"\x0b" * 22,
            bytes(range(13)),
            bytes(range(0xF0, 0xFA)),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)),
            bytes(range(0x60, 0xB0)),
            bytes(range(0xB0, 0x100)),
            """b11e398dc80327a1c8e7f78c596a4934 4f012eda2d4efad8a050cc4c19afa97c
               59045a99cac7827271cb41c65e590e09 da3275600c2f09b8367793a9aca3db71
               cc30c58179ec3e87c14c01d5c1f3434f 1d87""",
        ),
        (
            b"\x0b" * 22,
            b"",
            b"",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_derivation_is_that_of_rfc_5869_appendix_a(
    secret: bytes, salt: bytes, info: bytes, due: str
) -> None:
    found = derive(secret, salt=salt, info=info, length=len(of_hex(due)))
    assert found == of_hex(due)


def test_seals_are_those_of_rfc_8439_section_2_8_2() -> None:
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for "
        b"the future, sunscreen would be it."
    )
    cipher = ChaCha20Poly1305(bytes(range(0x80, 0xA0)))
    nonce, aad = of_hex("070000004041424344454647"), of_hex("50515253c0c1c2c3c4c5c6c7")
    due = of_hex(
        """d31a8d34648e60db7b86afbc53ef7ec2 a4aded51296e08fea9e2b5a736ee62d6
           3dbea45e8ca9671282fafb69da92728b 1a71de0a9e060b2905d6a5b67ecd3b36
           92ddbd7f2d778b8c9803aee328091b58 fab324e4fad675945585808b4831d7bc
           3ff4def08e4b7a9de576d26586cec64b 6116
           1ae10b594f09e26a7e902ecbd0600691"""
    )
    assert cipher.encrypt(nonce, text, aad) == due


@pytest.mark.parametrize(
    ("secret", "public", "message", "signature"),
    [
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            """e5564300c360ac729086e2cc806e828a 84877f1eb8e5d974d873e06522490155
               5fb8821590a33bacc61e39701cf9b46b d25bf5f0595bbe24655141438e7a100b""",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            """92a009a9f0d4cab8720e820b5f642540 a2b27b5416503f8fb3762223ebdb69da
               085ac1e43e15996e458f3613d0f11d8c 387b2eaeb4302aeeb00d291612bb0c00""",
        ),
    ],
)
def test_signatures_are_those_of_rfc_8032_section_7_1(
    secret: str, public: str, message: str, signature: str
) -> None:
    key = DeviceKey.from_bytes(of_hex(secret))
    assert key.public == of_hex(public)
    assert key.sign(of_hex(message)) == of_hex(signature)
    verify_signature(key.public, of_hex(message), of_hex(signature))


# Masks.


def pair(hybrid: bool) -> tuple[MaskKey, MaskKey]:
    return MaskKey(b"\1" * 32, hybrid=hybrid), MaskKey(b"\2" * 32, hybrid=hybrid)


@BOTH
def test_both_ends_of_a_pair_find_the_same_mask(hybrid: bool) -> None:
    low, high = pair(hybrid)
    assert len(low.public) == (HYBRID_PUBLIC_BYTES if hybrid else PUBLIC_BYTES)
    introduction = low.introduce(high.public, sid=SID, own=3, peer=8)
    assert len(introduction) == (INTRODUCTION_BYTES if hybrid else 0)
    assert high.introduce(low.public, sid=SID, own=8, peer=3) == b""
    first = low.pair_mask(high.public, sid=SID, cfg_hash=CFG, own=3, peer=8)
    second = high.pair_mask(
        low.public, sid=SID, cfg_hash=CFG, own=8, peer=3, introduction=introduction
    )
    assert first == second
    assert len(first) == 48
    # Whoever puts either secret together from its shares finds it too.
    again = MaskKey(bytearray(b"\2" * 32), hybrid=hybrid)
    assert again.public == high.public
    assert first == again.pair_mask(
        low.public, sid=SID, cfg_hash=CFG, own=8, peer=3, introduction=introduction
    )


@BOTH
def test_no_two_contexts_share_a_mask(hybrid: bool) -> None:
    low, high = pair(hybrid)
    third = MaskKey(b"\3" * 32, hybrid=hybrid)
    found = [
        low.pair_mask(high.public, sid=SID, cfg_hash=CFG, own=3, peer=8),
        low.pair_mask(high.public, sid=OTHER_SID, cfg_hash=CFG, own=3, peer=8),
        low.pair_mask(high.public, sid=SID, cfg_hash=OTHER_CFG, own=3, peer=8),
        low.pair_mask(high.public, sid=SID, cfg_hash=CFG, own=2, peer=8),
        low.pair_mask(high.public, sid=SID, cfg_hash=CFG, own=3, peer=9),
        low.pair_mask(third.public, sid=SID, cfg_hash=CFG, own=3, peer=8),
        self_mask(b"\1" * 32, sid=SID, slot=3),
        self_mask(b"\1" * 32, sid=OTHER_SID, slot=3),
        self_mask(b"\1" * 32, sid=SID, slot=4),
        self_mask(b"\2" * 32, sid=SID, slot=3),
    ]
    assert len(set(found)) == len(found)
    assert {len(each) for each in found} == {48}
    assert len({each[:16] for each in found}) == len(found)  # AES keys differ too


def test_with_ml_kem_the_exchange_alone_is_not_enough() -> None:
    """Who broke X25519 and has both classic secrets still lacks what was wrapped."""
    low, high = pair(True)
    whole = low.pair_mask(high.public, sid=SID, cfg_hash=CFG, own=3, peer=8)
    shared = keys._exchange(low._private, high.public, hybrid=True)
    info = statement("pm", keys._slot(3), keys._slot(8), CFG)
    assert derive(shared, salt=SID, info=info, length=48) != whole
    wrapped = low._wrapped(SID, 8)
    assert derive(shared + wrapped, salt=SID, info=info, length=48) == whole


@pytest.mark.parametrize("at", [0, 1087, 1088, 1135])
def test_an_introduction_that_was_changed_is_refused(at: int) -> None:
    low, high = pair(True)
    introduction = bytearray(low.introduce(high.public, sid=SID, own=3, peer=8))
    introduction[at] ^= 1
    with pytest.raises(InvalidSeal):
        high.pair_mask(
            low.public, sid=SID, cfg_hash=CFG, own=8, peer=3, introduction=bytes(introduction)
        )


def test_an_introduction_is_of_one_pair_in_one_session() -> None:
    low, high = pair(True)
    introduction = low.introduce(high.public, sid=SID, own=3, peer=8)
    for context in (
        {"sid": OTHER_SID, "own": 8, "peer": 3, "introduction": introduction},
        {"sid": SID, "own": 9, "peer": 3, "introduction": introduction},
        {"sid": SID, "own": 8, "peer": 4, "introduction": introduction},
        {"sid": SID, "own": 8, "peer": 3},
        {"sid": SID, "own": 8, "peer": 3, "introduction": introduction[:-1]},
        {"sid": SID, "own": 8, "peer": 3, "introduction": introduction + b"\0"},
    ):
        with pytest.raises(InvalidSeal):
            high.pair_mask(low.public, cfg_hash=CFG, **context)  # type: ignore[arg-type]


SMALL_ORDER = [
    bytes(32),
    b"\1" + bytes(31),
    of_hex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    of_hex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    of_hex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
]


@BOTH
@pytest.mark.parametrize("point", SMALL_ORDER, ids=lambda point: point.hex()[:8])
def test_a_public_key_of_small_order_is_refused(point: bytes, hybrid: bool) -> None:
    low, high = pair(hybrid)
    public = point + high.public[PUBLIC_BYTES:]
    with pytest.raises(InvalidKey, match="small order"):
        low.pair_mask(public, sid=SID, cfg_hash=CFG, own=3, peer=8)
    with pytest.raises(InvalidKey, match="small order"):
        ChannelKey(b"\1" * 32, hybrid=hybrid).seal(public, b"", sid=SID, own=3, peer=8)
    with pytest.raises(InvalidKey, match="small order"):
        check_public(public, hybrid=hybrid)


@BOTH
def test_a_public_key_has_one_spelling(hybrid: bool) -> None:
    """RFC 7748, section 5, reads these as other keys: one could serve twice in unlike bytes."""
    low, high = pair(hybrid)
    check_public(high.public, hybrid=hybrid)
    coordinate = int.from_bytes(high.public[:PUBLIC_BYTES], "little")
    for other in (coordinate + 2**255, 2**255 - 19, 2**255 - 10, 2**256 - 1):
        public = other.to_bytes(32, "little") + high.public[PUBLIC_BYTES:]
        with pytest.raises(InvalidKey, match="non-canonical"):
            check_public(public, hybrid=hybrid)
        with pytest.raises(InvalidKey, match="non-canonical"):
            low.pair_mask(public, sid=SID, cfg_hash=CFG, own=3, peer=8)


@BOTH
def test_a_public_key_of_another_length_is_refused(hybrid: bool) -> None:
    low, _ = pair(hybrid)
    for wrong in (b"", bytes(31), bytes(33), pair(not hybrid)[1].public):
        with pytest.raises(InvalidKey, match=f"a public key of {len(wrong)} bytes"):
            low.pair_mask(wrong, sid=SID, cfg_hash=CFG, own=3, peer=8)


def test_a_public_key_that_ml_kem_does_not_know_is_refused() -> None:
    low, high = pair(True)
    with pytest.raises(InvalidKey, match="not an ML-KEM-768 public key"):
        low.introduce(high.public[:-1], sid=SID, own=3, peer=8)
    unreduced = high.public[:PUBLIC_BYTES] + b"\xff" * (HYBRID_PUBLIC_BYTES - PUBLIC_BYTES)
    with pytest.raises(InvalidKey, match="not an ML-KEM-768 public key"):
        check_public(unreduced, hybrid=True)


# Channels.


def channels(hybrid: bool) -> tuple[ChannelKey, ChannelKey]:
    return ChannelKey(b"\1" * 32, hybrid=hybrid), ChannelKey(b"\2" * 32, hybrid=hybrid)


@BOTH
@given(message=st.binary(max_size=100), associated=st.binary(max_size=10))
def test_what_is_sealed_is_opened(hybrid: bool, message: bytes, associated: bytes) -> None:
    sender, receiver = channels(hybrid)
    sealed = sender.seal(receiver.public, message, sid=SID, own=3, peer=8, associated=associated)
    assert len(sealed) == len(message) + (HYBRID_SEAL_BYTES if hybrid else SEAL_BYTES)
    opened = receiver.open(sender.public, sealed, sid=SID, own=8, peer=3, associated=associated)
    assert opened == message


@BOTH
def test_a_seal_is_of_one_sender_for_one_receiver_in_one_session(hybrid: bool) -> None:
    sender, receiver = channels(hybrid)
    other = ChannelKey(b"\3" * 32, hybrid=hybrid)
    sealed = sender.seal(receiver.public, b"share", sid=SID, own=3, peer=8)
    good: dict[str, Any] = {"sid": SID, "own": 8, "peer": 3}
    assert receiver.open(sender.public, sealed, **good) == b"share"
    for wrong in (
        {"sid": OTHER_SID},
        {"own": 9},
        {"peer": 4},
        {"own": 3, "peer": 8},
        {"associated": b"\0"},
    ):
        with pytest.raises(InvalidSeal):
            receiver.open(sender.public, sealed, **(good | wrong))
    with pytest.raises(InvalidSeal):
        receiver.open(other.public, sealed, **good)
    with pytest.raises(InvalidSeal):
        other.open(sender.public, sealed, **good)
    with pytest.raises(InvalidSeal):  # sent back to where it came from
        sender.open(receiver.public, sealed, sid=SID, own=3, peer=8)


def test_each_direction_of_a_channel_has_a_key_of_its_own() -> None:
    """Invariant 10: under one key and one nonce, two messages would tell their difference."""
    one, other = channels(False)
    message = bytes(80)
    there = one.seal(other.public, message, sid=SID, own=3, peer=8)
    back = other.seal(one.public, message, sid=SID, own=8, peer=3)
    assert there[:80] != back[:80]


@BOTH
def test_every_bit_of_a_seal_counts(hybrid: bool) -> None:
    sender, receiver = channels(hybrid)
    sealed = sender.seal(receiver.public, b"share", sid=SID, own=3, peer=8)
    for at in {0, 1, len(sealed) // 2, len(sealed) - 21, len(sealed) - 1}:
        changed = bytearray(sealed)
        changed[at] ^= 1
        with pytest.raises(InvalidSeal):
            receiver.open(sender.public, bytes(changed), sid=SID, own=8, peer=3)
    for cut in (b"", sealed[:10], sealed[:-1], sealed + b"\0"):
        with pytest.raises(InvalidSeal):
            receiver.open(sender.public, cut, sid=SID, own=8, peer=3)


@BOTH
def test_a_key_seals_one_message_for_each_neighbour_and_session(hybrid: bool) -> None:
    sender, receiver = channels(hybrid)
    sender.seal(receiver.public, b"share", sid=SID, own=3, peer=8)
    with pytest.raises(ConfigurationError, match="a second message to slot 8"):
        sender.seal(receiver.public, b"other", sid=SID, own=3, peer=8)
    sender.seal(receiver.public, b"other", sid=SID, own=3, peer=9)
    sender.seal(receiver.public, b"other", sid=OTHER_SID, own=3, peer=8)


def test_with_ml_kem_equal_messages_are_sealed_unlike() -> None:
    sealed = [
        channels(True)[0].seal(channels(True)[1].public, b"share", sid=SID, own=3, peer=8)
        for _ in range(2)
    ]
    assert sealed[0] != sealed[1]


# Secrets.


def test_secrets_are_fresh_and_can_be_wiped() -> None:
    secret, other = new_secret(), new_secret()
    assert len(secret) == 32
    assert secret != other
    key = MaskKey(secret)
    key.wipe()
    assert key._secret == bytes(32)
    assert secret != bytes(32)  # the caller's own
    wipe(secret, other)
    assert secret == other == bytes(32)


def test_a_secret_gives_unlike_keys_for_unlike_ends() -> None:
    secret = b"\1" * 32
    mask, channel = MaskKey(secret, hybrid=True), ChannelKey(secret, hybrid=True)
    classic = MaskKey(secret)
    assert mask.public[:32] == classic.public
    assert mask.public[:32] != channel.public[:32]
    assert mask.public[32:] != channel.public[32:]
    with pytest.raises(ConfigurationError, match="a secret of 31 bytes"):
        MaskKey(secret[1:])
    with pytest.raises(ConfigurationError, match="a secret of 33 bytes"):
        ChannelKey(secret + b"\1")


def test_a_commitment_binds_seed_slot_and_session() -> None:
    seed = bytearray(b"\1" * 32)
    made = commitment(seed, sid=SID, slot=3)
    assert len(made) == 32
    assert same(made, commitment(bytes(seed), sid=SID, slot=3))
    others = [
        commitment(b"\2" * 32, sid=SID, slot=3),
        commitment(seed, sid=OTHER_SID, slot=3),
        commitment(seed, sid=SID, slot=4),
    ]
    assert not any(same(made, other) for other in others)
    assert not same(made, made[:-1])


def test_without_ml_kem_hybrid_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lacking:
        @staticmethod
        def from_seed_bytes(seed: bytes) -> None:
            raise UnsupportedAlgorithm("no")

    monkeypatch.setattr(mlkem, "MLKEM768PrivateKey", Lacking)
    with pytest.raises(
        ConfigurationError, match="OpenSSL of the installed cryptography has no ML-KEM"
    ):
        MaskKey(bytes(32), hybrid=True)
    name = "cryptography.hazmat.primitives.asymmetric"
    monkeypatch.setitem(sys.modules, f"{name}.mlkem", None)
    monkeypatch.delattr(sys.modules[name], "mlkem")
    with pytest.raises(ConfigurationError, match="installed version of cryptography has no ML-KEM"):
        MaskKey(bytes(32), hybrid=True)
    MaskKey(bytes(32))
