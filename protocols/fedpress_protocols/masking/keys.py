"""Keys of a masked session: pairwise key agreement, bound to the session.

A client draws a mask secret S, a self-mask seed b and a channel secret for one session and never
reuses them. All key derivation is HKDF-SHA256 (RFC 5869) with the session's id as salt and
a statement as info. With `hybrid`, ML-KEM-768 (FIPS 203) stands beside X25519 (RFC 7748), so that
recorded traffic stays confidential even if X25519 is broken: a key pair of each is derived from the
secret, and a secret reconstructed from its shares gives everything that its owner could derive.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedpress_protocols.errors import ConfigurationError, InvalidKey, InvalidSeal
from fedpress_protocols.masking.keystream import MATERIAL_BYTES
from fedpress_protocols.masking.transcript import digest, statement

SECRET_BYTES = 32
PUBLIC_BYTES = 32
HYBRID_PUBLIC_BYTES = PUBLIC_BYTES + 1184
SEAL_BYTES = 16
"""Bytes that `ChannelKey.seal` adds to a message; HYBRID_SEAL_BYTES with ML-KEM."""
HYBRID_SEAL_BYTES = 1088 + SEAL_BYTES
INTRODUCTION_BYTES = 1088 + SECRET_BYTES + SEAL_BYTES
"""Length of `MaskKey.introduce` with ML-KEM; without it, 0."""

_CIPHERTEXT = 1088
_NONCE = bytes(12)  # every key seals one message
_FIELD = 2**255 - 19
_ANY = X25519PrivateKey.from_private_bytes(bytes(32))


def new_secret() -> bytearray:
    """32 bytes from the operating system; a bytearray, so that `wipe` can reach it."""
    return bytearray(os.urandom(SECRET_BYTES))


def wipe(*secrets: bytearray) -> None:
    """Overwrite secrets with zeros: best effort, since Python copies objects freely."""
    for secret in secrets:
        secret[:] = bytes(len(secret))


def same(one: bytes | bytearray, other: bytes | bytearray) -> bool:
    """Compare two byte strings in constant time."""
    return hmac.compare_digest(one, other)


def derive(secret: bytes | bytearray, *, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """`length` bytes of HKDF-SHA256 (RFC 5869)."""
    return HKDF(SHA256(), length, salt, info).derive(bytes(secret))


def commitment(seed: bytes | bytearray, *, sid: bytes, slot: int) -> bytes:
    """32 bytes that commit the client in `slot` to its self-mask seed b without revealing it."""
    return digest("b", sid, _slot(slot), bytes(seed))


def self_mask(seed: bytes | bytearray, *, sid: bytes, slot: int) -> bytes:
    """The key material (48 bytes) of the client's own mask, from its seed b."""
    return derive(seed, salt=sid, info=statement("sm", _slot(slot)), length=MATERIAL_BYTES)


def check_public(public: bytes, *, hybrid: bool) -> None:
    """Raise InvalidKey for a public key with which no secret can be agreed.

    The server checks it early, since clients withdraw if the roster has one such key.
    """
    _exchange(_ANY, public, hybrid=hybrid)
    if hybrid:
        _kem_public(public)


class MaskKey:
    """The key of a client's pairwise masks, derived from the 32-byte `secret` S.

    `public` (32 bytes, or 1216 with `hybrid`) goes into the roster. The server makes the same
    object from a reconstructed secret, and compares its `public` with the roster's.
    """

    def __init__(self, secret: bytes | bytearray, *, hybrid: bool = False) -> None:
        self._secret = _checked_secret(secret)
        self._private = _x25519(secret, "mask-sk")
        self._kem = _kem_private(secret, "mask-kem") if hybrid else None
        self.public = _public(self._private, self._kem)

    def introduce(self, peer_public: bytes, *, sid: bytes, own: int, peer: int) -> bytes:
        """The introduction that the client in slot `own` sends to its neighbour in slot `peer`
        through the server, which stores it: empty without `hybrid` or to a lower slot, otherwise
        1136 bytes, randomized.

        It wraps a secret derived from S under ML-KEM, so that the secret of either end gives the
        common mask. The sender's signature or seal must cover it. Raises InvalidKey.
        """
        if self._kem is None or peer < own:
            return b""
        shared, ciphertext = _kem_public(peer_public).encapsulate()
        key = derive(shared, salt=sid, info=statement("in", _slot(own), _slot(peer), ciphertext))
        wrapped = ChaCha20Poly1305(key).encrypt(_NONCE, self._wrapped(sid, peer), None)
        return bytes(ciphertext) + wrapped

    def pair_mask(
        self,
        peer_public: bytes,
        *,
        sid: bytes,
        cfg_hash: bytes,
        own: int,
        peer: int,
        introduction: bytes = b"",
    ) -> bytes:
        """The key material (48 bytes) of the common mask of the clients in slots `own` and `peer`:
        the same for both, and unique to the session and its configuration. The lower slot adds the
        mask, the higher one subtracts it.

        `introduction` is the one that the lower slot sent to the higher; it is ignored if `own` is
        the lower. Raises InvalidKey for a public key of small order or of another length,
        InvalidSeal for an introduction that is not this pair's.
        """
        shared = _exchange(self._private, peer_public, hybrid=self._kem is not None)
        if self._kem is not None:
            if own < peer:
                shared += self._wrapped(sid, peer)
            else:
                shared += self._introduced(introduction, sid, own, peer)
        low, high = sorted((own, peer))
        info = statement("pm", _slot(low), _slot(high), cfg_hash)
        return derive(shared, salt=sid, info=info, length=MATERIAL_BYTES)

    def wipe(self) -> None:
        """Overwrite S; copies within the libraries are freed with the object."""
        wipe(self._secret)

    def _wrapped(self, sid: bytes, peer: int) -> bytes:
        return derive(self._secret, salt=sid, info=statement("pw", _slot(peer)))

    def _introduced(self, introduction: bytes, sid: bytes, own: int, peer: int) -> bytes:
        ciphertext, wrapped = introduction[:_CIPHERTEXT], introduction[_CIPHERTEXT:]
        shared = _decapsulate(self._kem, ciphertext)
        info = statement("in", _slot(peer), _slot(own), ciphertext)
        return _open(derive(shared, salt=sid, info=info), wrapped, None, peer)


class ChannelKey:
    """The key with which a client seals shares for its neighbours and opens theirs.

    Each direction between two clients has its own key, which seals one message: a second one for
    the same neighbour in the same session is refused. A caller that persists `secret` across a
    restart must persist the sealed messages too, and resend those.
    """

    def __init__(self, secret: bytes | bytearray, *, hybrid: bool = False) -> None:
        self._private = _x25519(_checked_secret(secret), "channel-sk")
        self._kem = _kem_private(secret, "channel-kem") if hybrid else None
        self._sealed: set[tuple[bytes, int]] = set()
        self.public = _public(self._private, self._kem)

    def seal(
        self,
        peer_public: bytes,
        message: bytes,
        *,
        sid: bytes,
        own: int,
        peer: int,
        associated: bytes = b"",
    ) -> bytes:
        """Seal `message` for `peer` with ChaCha20-Poly1305 (RFC 8439, section 2.8); 16 bytes
        longer, 1104 with `hybrid`. `associated` is authenticated with it and not sent.

        Raises InvalidKey, and ConfigurationError for a second message to `peer`.
        """
        if (sid, peer) in self._sealed:
            raise ConfigurationError(f"a second message to slot {peer}: the key may seal only one")
        shared = _exchange(self._private, peer_public, hybrid=self._kem is not None)
        ciphertext = b""
        if self._kem is not None:
            encapsulated, ciphertext = _kem_public(peer_public).encapsulate()
            shared += encapsulated
        key = _channel(shared, sid, own, peer, ciphertext)
        self._sealed.add((sid, peer))
        box = ChaCha20Poly1305(key).encrypt(_NONCE, message, _aad(sid, own, peer, associated))
        return ciphertext + box

    def open(
        self,
        peer_public: bytes,
        sealed: bytes,
        *,
        sid: bytes,
        own: int,
        peer: int,
        associated: bytes = b"",
    ) -> bytes:
        """Open the message that `peer` sealed for `own`; raises InvalidKey or InvalidSeal."""
        shared = _exchange(self._private, peer_public, hybrid=self._kem is not None)
        ciphertext = b""
        if self._kem is not None:
            ciphertext, sealed = sealed[:_CIPHERTEXT], sealed[_CIPHERTEXT:]
            shared += _decapsulate(self._kem, ciphertext)
        key = _channel(shared, sid, peer, own, ciphertext)
        return _open(key, sealed, _aad(sid, peer, own, associated), peer)


def _slot(slot: int) -> bytes:
    return slot.to_bytes(4, "little")


def _channel(shared: bytes, sid: bytes, sender: int, receiver: int, ciphertext: bytes) -> bytes:
    info = statement("ch", _slot(sender), _slot(receiver), ciphertext)
    return derive(shared, salt=sid, info=info)


def _aad(sid: bytes, sender: int, receiver: int, associated: bytes) -> bytes:
    return statement("p1", sid, _slot(sender), _slot(receiver), associated)


def _open(key: bytes, sealed: bytes, associated: bytes | None, sender: int) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, associated)
    except InvalidTag as exc:
        raise InvalidSeal(f"the message was not sealed by slot {sender} for this receiver") from exc


def _checked_secret(secret: bytes | bytearray) -> bytearray:
    if len(secret) != SECRET_BYTES:
        raise ConfigurationError(f"a secret of {len(secret)} bytes, expected {SECRET_BYTES}")
    return bytearray(secret)


def _x25519(secret: bytes | bytearray, label: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derive(secret, salt=b"", info=statement(label)))


def _exchange(private: X25519PrivateKey, peer_public: bytes, *, hybrid: bool) -> bytes:
    expected = HYBRID_PUBLIC_BYTES if hybrid else PUBLIC_BYTES
    if len(peer_public) != expected:
        raise InvalidKey(f"a public key of {len(peer_public)} bytes, expected {expected}")
    coordinate = peer_public[:PUBLIC_BYTES]
    if int.from_bytes(coordinate, "little") >= _FIELD:
        raise InvalidKey("a non-canonical X25519 public key")
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(coordinate))
    except ValueError as exc:  # the shared secret would be all zeros: RFC 7748, section 6.1
        raise InvalidKey("an X25519 public key of small order") from exc


def _public(private: X25519PrivateKey, kem: Any) -> bytes:
    public = private.public_key().public_bytes_raw()
    return public if kem is None else public + bytes(kem.public_key().public_bytes_raw())


# ML-KEM-768, only in newer versions of `cryptography`


def _mlkem() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import mlkem
    except ImportError as exc:
        raise ConfigurationError(
            "the installed version of cryptography has no ML-KEM-768",
            hint="upgrade cryptography, or use a plan without hybrid keys",
        ) from exc
    return mlkem


def _kem_private(secret: bytes | bytearray, label: str) -> Any:
    seed = derive(secret, salt=b"", info=statement(label), length=64)
    try:
        return _mlkem().MLKEM768PrivateKey.from_seed_bytes(seed)
    except UnsupportedAlgorithm as exc:
        raise ConfigurationError(
            "the OpenSSL of the installed cryptography has no ML-KEM-768",
            hint="upgrade cryptography, or use a plan without hybrid keys",
        ) from exc


def _kem_public(peer_public: bytes) -> Any:
    try:
        return _mlkem().MLKEM768PublicKey.from_public_bytes(peer_public[PUBLIC_BYTES:])
    except ValueError as exc:
        raise InvalidKey("not an ML-KEM-768 public key") from exc


def _decapsulate(kem: Any, ciphertext: bytes) -> bytes:
    try:
        return bytes(kem.decapsulate(ciphertext))
    except ValueError as exc:
        raise InvalidSeal(
            f"an ML-KEM-768 ciphertext of {len(ciphertext)} bytes, expected {_CIPHERTEXT}"
        ) from exc
