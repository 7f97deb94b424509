"""Signed requests and signed documents, both under Ed25519 keys; SPEC-signatures.md is the norm.

A request carries a fixed profile of HTTP Message Signatures (RFC 9421): one label, one list of
components, one order of parameters. A verifier of the fixed form has nothing to negotiate, so there
is nothing to downgrade. Everything signed is in the header, so a server refuses a stranger before
it reads a byte of the body; the body is bound by its SHA-256 (RFC 9530) and its length.

    server:  signed_headers → parse_signature → (look up the key) → verify_request → ReplayGuard
             → read the body → Content.check

No clock and no randomness in here: `now`, in Unix seconds, and nonces come in by hand.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from cryptography.exceptions import InvalidSignature as _Refused
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedpress_protocols.errors import (
    ClockSkew,
    ConfigurationError,
    DigestMismatch,
    InvalidSignature,
    LengthRequired,
    MalformedRequest,
    ReplayedRequest,
    Unavailable,
)

LABEL = "fp"
TAG = "fedpress-v1"
COMPONENTS = ("@method", "@authority", "@path", "@query", "content-digest", "content-length")
PARAMETERS = ("created", "expires", "nonce", "keyid", "alg", "tag")
MAX_LIFETIME = 300
"""Seconds between `created` and `expires`, at most."""
NONCE_BYTES = 16

_COVERED = " ".join(f'"{name}"' for name in COMPONENTS)
_INTEGER = re.compile(r"0|[1-9][0-9]{0,14}")  # as RFC 8941 bounds them
_METHOD = re.compile(r"[A-Z]{1,32}")
_AUTHORITY = re.compile(r"[a-z0-9._~\-\[\]:]{1,320}")
_PATH = re.compile(r"/[!\"$->@-~]*")  # printable ASCII without # and ?
_QUERY = re.compile(r"[!\"$-~]*")
_URL = re.compile(r"[!-~]+")
_BASE64URL = re.compile(r"[A-Za-z0-9_-]*")
_BYTES = re.compile(r"([a-z0-9-]+)=:([A-Za-z0-9+/]+={0,2}):")
_CONTEXT = re.compile(r"[ -~]{1,64}")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_BODILESS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})
_SIGNED_HEADERS = frozenset(
    {
        "host",
        "content-digest",
        "content-length",
        "transfer-encoding",
        "signature-input",
        "signature",
    }
)
_DOCUMENT_DOMAIN = b"fedpress document\x00"
_MAX_SAFE_INTEGER = 2**53 - 1
_MAX_DEPTH = 32


# Keys


def to_base64url(data: bytes) -> str:
    """RFC 4648, section 5, without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_base64url(text: str, length: int) -> bytes:
    """The `length` bytes that `text` stands for; raises MalformedRequest.

    Only the one canonical spelling is taken, so that equal bytes are equal texts.
    """
    data = b""
    if _BASE64URL.fullmatch(text) and len(text) == -(-length * 4 // 3):
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if len(data) != length or to_base64url(data) != text:
        raise MalformedRequest(f"{text[:64]!r} is not {length} bytes in base64url without padding")
    return data


def key_id_of(public: bytes) -> str:
    """The name of a public key: the first 16 bytes of its SHA-256, base64url, 22 characters."""
    return to_base64url(hashlib.sha256(public).digest()[:16])


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKey:
    """An Ed25519 private key; a server signs its receipts with one of its own."""

    _private: Ed25519PrivateKey = field(repr=False)
    public: bytes = field(init=False)
    """The 32 bytes of the public key."""
    key_id: str = field(init=False)

    def __post_init__(self) -> None:
        public = self._private.public_key().public_bytes_raw()
        object.__setattr__(self, "public", public)
        object.__setattr__(self, "key_id", key_id_of(public))

    @classmethod
    def generate(cls) -> DeviceKey:
        """A new key, from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, secret: bytes) -> DeviceKey:
        """From the 32 bytes of RFC 8032's secret key; raises ConfigurationError."""
        if len(secret) != 32:
            raise ConfigurationError(f"a secret key of {len(secret)} bytes, expected 32")
        return cls(Ed25519PrivateKey.from_private_bytes(secret))

    @classmethod
    def from_pem(cls, pem: bytes) -> DeviceKey:
        """From an unencrypted PKCS #8 file; raises ConfigurationError."""
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
            raise ConfigurationError("not an unencrypted private key in PEM") from exc
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigurationError("the private key is not an Ed25519 key")
        return cls(key)

    def to_bytes(self) -> bytes:
        """The 32 secret bytes."""
        return self._private.private_bytes_raw()

    def to_pem(self) -> bytes:
        """Unencrypted PKCS #8 in PEM: the caller must restrict access to the file."""
        return self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def sign(self, message: bytes) -> bytes:
        """Sign `message`: 64 bytes (RFC 8032), deterministic."""
        return self._private.sign(message)


def verify_signature(public_key: bytes, message: bytes, signature: bytes) -> None:
    """Verify `signature` of `message` under `public_key` (32 bytes); raises InvalidSignature."""
    try:
        _public_key(public_key).verify(signature, message)
    except (_Refused, ValueError) as exc:
        raise InvalidSignature(f"key {key_id_of(public_key)} did not make this signature") from exc


@lru_cache(maxsize=16384)
def _public_key(public_key: bytes) -> Ed25519PublicKey:
    """Parse a public key; raises ValueError. Cached: 32 bytes each."""
    return Ed25519PublicKey.from_public_bytes(public_key)


# Signed content


@dataclass(frozen=True, slots=True)
class Content:
    """The length and digest of a body, as covered by a signature."""

    sha256: bytes
    length: int

    @classmethod
    def of(cls, body: bytes) -> Content:
        return cls(hashlib.sha256(body).digest(), len(body))

    def check(self, received: Content) -> None:
        """Raise DigestMismatch unless the body `received` has this length and digest."""
        if received.length != self.length:
            raise DigestMismatch(f"a body of {received.length} bytes, expected {self.length}")
        if received.sha256 != self.sha256:
            raise DigestMismatch(
                f"the body has SHA-256 {received.sha256.hex()}, expected {self.sha256.hex()}"
            )

    @property
    def digest_header(self) -> str:
        """The Content-Digest of RFC 9530."""
        return f"sha-256=:{base64.b64encode(self.sha256).decode()}:"


def parse_content_digest(header: str) -> bytes:
    """The SHA-256 in a Content-Digest; raises MalformedRequest for any other form or algorithm."""
    digest = _sf_bytes(header, "sha-256", 32)
    if digest is None:
        raise MalformedRequest(f"Content-Digest {header[:64]!r}, expected sha-256=:<base64>: alone")
    return digest


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a request, as written on the wire; raises MalformedRequest.

    `authority` is the Host header in lower case, without the scheme's default port. `path` and
    `query` are percent-encoded, exactly as sent; `query` is without its question mark.
    """

    method: str
    authority: str
    path: str
    query: str = ""

    def __post_init__(self) -> None:
        # None of these can smuggle a line break, and so another line, into a signature base.
        for name, value, pattern in (
            ("method", self.method, _METHOD),
            ("authority", self.authority, _AUTHORITY),
            ("path", self.path, _PATH),
            ("query", self.query, _QUERY),
        ):
            if not pattern.fullmatch(value):
                raise MalformedRequest(f"the {name} {value[:64]!r} cannot be signed")

    @classmethod
    def from_url(cls, method: str, url: str) -> Target:
        """From an absolute URL that is already percent-encoded."""
        if not _URL.fullmatch(url):  # urlsplit would silently drop a tab or a line break
            raise MalformedRequest(f"{url[:64]!r} has characters that a URL must percent-encode")
        try:
            parts = urlsplit(url)
        except ValueError as exc:
            raise MalformedRequest(f"{url[:64]!r} is not a URL") from exc
        if parts.scheme not in _DEFAULT_PORTS:
            raise MalformedRequest(f"{url[:64]!r} does not begin with https:// or http://")
        if "@" in parts.netloc:
            raise MalformedRequest("a URL must not contain a user or password")
        authority = parts.netloc.lower().removesuffix(_DEFAULT_PORTS[parts.scheme])
        return cls(method, authority, parts.path or "/", parts.query)


def signature_base(components: Iterable[tuple[str, str]], params: str) -> bytes:
    """The signature base of RFC 9421, section 2.5. `params` is the value of @signature-params."""
    lines = [f'"{name}": {value}' for name, value in (*components, ("@signature-params", params))]
    return "\n".join(lines).encode()


def _request_base(target: Target, content: Content, params: str) -> bytes:
    values = (
        target.method,
        target.authority,
        target.path,
        "?" + target.query,
        content.digest_header,
        str(content.length),
    )
    return signature_base(zip(COMPONENTS, values, strict=True), params)


# The device


def sign_request(
    key: DeviceKey,
    target: Target,
    content: Content,
    *,
    created: int,
    nonce: bytes,
    lifetime: int = MAX_LIFETIME,
) -> dict[str, str]:
    """Return the four headers of a signed request.

    `nonce` is 16 bytes, fresh and random for every request, a retry included; `lifetime` is in
    seconds. A long one tolerates a device's slow clock.
    """
    if len(nonce) != NONCE_BYTES:
        raise ConfigurationError(f"a nonce of {len(nonce)} bytes, expected {NONCE_BYTES}")
    if not 0 < lifetime <= MAX_LIFETIME:
        raise ConfigurationError(f"a lifetime of {lifetime} s outside (0, {MAX_LIFETIME}]")
    params = (
        f"({_COVERED});created={created};expires={created + lifetime}"
        f';nonce="{to_base64url(nonce)}";keyid="{key.key_id}";alg="ed25519";tag="{TAG}"'
    )
    signature = key.sign(_request_base(target, content, params))
    return {
        "Content-Digest": content.digest_header,
        "Content-Length": str(content.length),
        "Signature-Input": f"{LABEL}={params}",
        "Signature": f"{LABEL}=:{base64.b64encode(signature).decode()}:",
    }


# The server


@dataclass(frozen=True, slots=True)
class ParsedSignature:
    """The parsed signature headers of a request; not trusted until verified."""

    key_id: str
    created: int
    expires: int
    nonce: bytes
    signature: bytes
    params: str
    """The value of @signature-params, as received."""


def signed_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers relevant to signatures, by lower-case name.

    `raw` is what ASGI calls `scope["headers"]`. A second copy of any of them is refused with
    InvalidSignature: two parties could each read another one.
    """
    by_name: dict[str, str] = {}
    for raw_name, value in raw:
        name = raw_name.decode("latin-1").lower()
        if name in _SIGNED_HEADERS:
            if name in by_name:
                raise InvalidSignature(f"more than one {name} header")
            by_name[name] = value.decode("latin-1").strip(" \t")
    return by_name


def parse_signature(headers: Mapping[str, str]) -> ParsedSignature:
    """Read Signature-Input and Signature in the profile's one form, byte for byte.

    `headers` is the result of `signed_headers`. Raises InvalidSignature, which names the component
    that is missing, unknown, repeated or out of order.
    """
    header = headers.get("signature-input", "")
    signature_header = headers.get("signature", "")
    if not header or not signature_header:
        raise InvalidSignature(
            "the request is not signed: Signature-Input and Signature are required"
        )
    if not header.startswith(f"{LABEL}=("):
        raise InvalidSignature(
            f"Signature-Input {header[:32]!r}, expected one list labelled {LABEL!r}"
        )
    params = header[len(LABEL) + 1 :]
    covered, _, tail = params[1:].partition(")")
    _expect("component", covered.split(" "), _COVERED.split(" "))
    head, *items = tail.split(";")
    if head:
        raise InvalidSignature(f"{head[:32]!r} after the list of components")
    pairs = [item.partition("=")[::2] for item in items]
    _expect("parameter", [name for name, _ in pairs], PARAMETERS)
    values = dict(pairs)
    for name, constant in (("alg", '"ed25519"'), ("tag", f'"{TAG}"')):
        if values[name] != constant:
            raise InvalidSignature(f"{name}={values[name][:64]}, expected {constant}")
    created, expires = _seconds(values, "created"), _seconds(values, "expires")
    if not 0 < expires - created <= MAX_LIFETIME:
        raise InvalidSignature(
            f"expires {expires - created} s after created, outside (0, {MAX_LIFETIME}]"
        )
    signature = _sf_bytes(signature_header, LABEL, 64)
    if signature is None:
        raise InvalidSignature(f"Signature is not {LABEL}=:<64 bytes in base64>: alone")
    return ParsedSignature(
        key_id=to_base64url(_quoted_bytes(values, "keyid")),
        created=created,
        expires=expires,
        nonce=_quoted_bytes(values, "nonce"),
        signature=signature,
        params=params,
    )


def verify_request(
    parsed: ParsedSignature,
    public_key: bytes,
    target: Target,
    headers: Mapping[str, str],
    *,
    now: float,
    max_skew: float = MAX_LIFETIME,
) -> Content:
    """Verify a request's key, target and time, and return the content that its body must have.

    `target` is built from the request line and the Host as received. Raises ClockSkew (with
    `server_time`) for a request signed more than `max_skew` seconds ahead of `now` or expired,
    InvalidSignature, LengthRequired, or MalformedRequest for a length or digest in another form.
    """
    content = _declared_content(target.method, headers)
    if parsed.created > now + max_skew or parsed.expires < now:
        raise ClockSkew(
            f"signed at {parsed.created} until {parsed.expires}, but the server's clock is at "
            f"{now:.0f}",
            server_time=now,
        )
    verify_signature(public_key, _request_base(target, content, parsed.params), parsed.signature)
    return content


def _declared_content(method: str, headers: Mapping[str, str]) -> Content:
    length = headers.get("content-length")
    if length is None and method in _BODILESS:
        length = "0"  # proxies may drop a zero, which means the same (RFC 9112, section 6.3)
    if length is None or "transfer-encoding" in headers:
        raise LengthRequired
    if not _INTEGER.fullmatch(length):
        raise MalformedRequest(f"Content-Length {length[:32]!r} is not a plain decimal number")
    digest = headers.get("content-digest")
    if digest is None:
        raise MalformedRequest("the request has no Content-Digest")
    return Content(parse_content_digest(digest), int(length))


def _expect(kind: str, actual: Sequence[str], expected: Sequence[str]) -> None:
    """Raise InvalidSignature that describes how `actual` differs from `expected`."""
    if tuple(actual) == tuple(expected):
        return
    for name in actual:
        if name not in expected:
            raise InvalidSignature(f"unknown {kind} {name[:64]!r}")
        if actual.count(name) > 1:
            raise InvalidSignature(f"{kind} {name} more than once")
    for name in expected:
        if name not in actual:
            raise InvalidSignature(f"{kind} {name} is missing")
    raise InvalidSignature(f"{kind}s out of order, expected {' '.join(expected)}")


def _seconds(values: Mapping[str, str], name: str) -> int:
    if not _INTEGER.fullmatch(values[name]):
        raise InvalidSignature(f"{name}={values[name][:32]} is not a count of seconds")
    return int(values[name])


def _quoted_bytes(values: Mapping[str, str], name: str) -> bytes:
    text = values[name]
    try:
        if len(text) < 2 or text[0] != '"' or text[-1] != '"':
            raise MalformedRequest(f"{text[:32]} is not a quoted string")
        return from_base64url(text[1:-1], 16)
    except MalformedRequest as exc:
        raise InvalidSignature(f"{name}: {exc.detail}") from exc


def _sf_bytes(header: str, name: str, length: int) -> bytes | None:
    """The bytes of a dictionary with one member, a byte sequence (RFC 8941); None for other
    forms."""
    match = _BYTES.fullmatch(header)
    if match is None or match[1] != name:
        return None
    try:
        data = binascii.a2b_base64(match[2])
    except ValueError:
        return None
    canonical = base64.b64encode(data).decode() == match[2]
    return data if canonical and len(data) == length else None


class ReplayGuard:
    """Replay protection: remembers the nonces of verified requests until they expire.

    It is local to a process, so operations must be idempotent anyway; it makes a replay fail early.
    Requests signed before `opened`, the start of this guard, are refused, since an earlier process
    may have accepted them; only requests of a device whose clock is ahead can be replayed across a
    restart. Memory is bounded by `capacity` nonces of some 300 bytes each. When it is full, the
    keys with most nonces are trimmed to an equal share, their newest, and requests that they signed
    before are refused from then on. So neither a few busy keys nor a large fleet blocks a request
    that was just signed. One key has at most `per_key` nonces. Not thread-safe.
    """

    def __init__(self, *, opened: float = 0, capacity: int = 200_000, per_key: int = 4_096) -> None:
        self._opened = int(opened)
        self._capacity = capacity
        self._per_key = per_key
        self._size = 0
        self._nonces: dict[str, dict[bytes, int]] = {}
        """By key: expiry times by nonce."""
        self._oldest: dict[str, int] = {}
        """By key: the least accepted `created`, if later than `opened`."""
        self._expiring: dict[int, list[_Seen]] = {}
        self._order: list[int] = []  # a heap of _expiring's keys
        self._latest = 0.0

    def __len__(self) -> int:
        return self._size

    def check(self, verified: ParsedSignature, now: float) -> None:
        """Remember a request whose signature has just been verified.

        Raises ReplayedRequest if the nonce was used before, ClockSkew (with `server_time`) if that
        is unknown, and Unavailable (with `retry_after`, seconds) for a key with too many nonces.
        """
        key_id, nonce, expires = verified.key_id, verified.nonce, verified.expires
        self._latest = max(self._latest, now)
        self._forget(self._latest)
        nonces = self._nonces.get(key_id, {})
        if nonce in nonces:
            raise ReplayedRequest(f"nonce {to_base64url(nonce)} of key {key_id} was used before")
        if len(nonces) >= self._per_key:
            raise Unavailable(
                f"key {key_id} has reached the limit of remembered requests",
                retry_after=max(1, min(nonces.values()) + 1 - int(now)),
            )
        if self._size >= self._capacity:
            self._make_room()
        # If the clock was set back, nonces that expired by the later time are forgotten.
        oldest = max(self._opened, self._oldest.get(key_id, 0))
        if verified.created < oldest or expires < self._latest:
            raise ClockSkew(
                f"signed at {verified.created}, before the requests that this server remembers",
                server_time=now,
            )
        self._nonces.setdefault(key_id, {})[nonce] = expires
        if expires not in self._expiring:
            self._expiring[expires] = []
            heappush(self._order, expires)
        self._expiring[expires].append(_Seen(key_id, nonce, verified.created))
        self._size += 1

    def _forget(self, now: float) -> None:
        while self._order and self._order[0] < now:
            for key_id, nonce, _ in self._expiring.pop(heappop(self._order)):
                nonces = self._nonces[key_id]
                del nonces[nonce]
                if not nonces:
                    del self._nonces[key_id]
                self._size -= 1

    def _make_room(self) -> None:
        """Forget half of the nonces, those of the keys with most nonces first, and refuse what
        these keys signed before their newest. Scans all nonces, once per half of the capacity."""
        signed: dict[str, list[int]] = {}
        for some in self._expiring.values():
            for key_id, _, created in some:
                signed.setdefault(key_id, []).append(created)
        self._oldest = {
            key_id: oldest
            for key_id, oldest in self._oldest.items()
            if oldest + MAX_LIFETIME >= self._latest  # or everything that it refuses has expired
        }
        share = max(1, self._capacity // (2 * len(signed)))
        at_once = max(share, 3 * self._capacity // (4 * len(signed)))
        for key_id, times in signed.items():
            if len(times) > share:
                oldest = sorted(times)[-share]
                if sum(created >= oldest for created in times) > at_once:
                    oldest += 1  # too many within one second: refuse that second as a whole
                self._oldest[key_id] = max(oldest, self._oldest.get(key_id, 0))
        if (
            2 * len(signed) > self._capacity
        ):  # more keys than room: keep the newer half of all nonces
            times = sorted(created for each in signed.values() for created in each)
            self._opened = max(self._opened, times[len(times) // 2] + 1)
        self._nonces, self._size = {}, 0
        for expires, some in self._expiring.items():
            newest = [
                each
                for each in some
                if each.created >= max(self._opened, self._oldest.get(each.key_id, 0))
            ]
            self._expiring[expires] = newest
            self._size += len(newest)
            for key_id, nonce, _ in newest:
                self._nonces.setdefault(key_id, {})[nonce] = expires


class _Seen(NamedTuple):
    key_id: str
    nonce: bytes
    created: int


# Documents


def canonical_json(value: Any) -> bytes:
    """The canonical UTF-8 form of a JSON value: RFC 8785, over a subset of JSON.

    Objects with text keys, arrays, texts, true, false, null and whole numbers within 2**53 - 1 of
    zero; a float that is whole counts as the integer it equals. Any other number, a lone surrogate
    and a value within more than 32 others raise MalformedRequest: a fraction travels as text.
    """
    try:
        return json.dumps(
            _canonical(value, 0), ensure_ascii=False, separators=(",", ":"), allow_nan=False
        ).encode()
    except UnicodeEncodeError as exc:
        raise MalformedRequest("a text with half a surrogate pair cannot be signed") from exc


def _canonical(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise MalformedRequest(
            f"a document nested more than {_MAX_DEPTH} levels deep cannot be signed"
        )
    match value:
        case None | bool() | str():
            return value
        case int() | float():
            if value != value or abs(value) > _MAX_SAFE_INTEGER or value != int(value):
                raise MalformedRequest(
                    "a fraction, or a number beyond 2**53 - 1, cannot be signed: send it as text"
                )
            return int(value)
        case list() | tuple():
            return [_canonical(item, depth + 1) for item in value]
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise MalformedRequest(f"the key {key!r} is not text")
            # RFC 8785, section 3.2.3: by UTF-16 code units, not by code points.
            ordered = sorted(value, key=lambda key: key.encode("utf-16-be"))
            return {key: _canonical(value[key], depth + 1) for key in ordered}
        case _:
            raise MalformedRequest(f"a {type(value).__name__} is not JSON")


def _document_message(document: Mapping[str, Any], context: str) -> bytes:
    if not _CONTEXT.fullmatch(context):
        raise ConfigurationError(
            f"context {context!r}, expected 1 to 64 printable ASCII characters"
        )
    # A request's base starts with a quotation mark, so the two cannot be confused.
    return _DOCUMENT_DOMAIN + context.encode() + b"\x00" + canonical_json(document)


def sign_document(document: Mapping[str, Any], key: DeviceKey, *, context: str) -> dict[str, Any]:
    """Return `document` with `key_id` and `signature` added.

    `context` names the kind of statement ("fedpress receipt v1"); a signature is invalid under any
    other context. Raises MalformedRequest for a document that `canonical_json` refuses or that has
    these fields already.
    """
    if reserved := document.keys() & {"key_id", "signature"}:
        raise MalformedRequest(f"the document already has a field {sorted(reserved)[0]!r}")
    signed = {**document, "key_id": key.key_id}
    signature = key.sign(_document_message(signed, context))
    return signed | {"signature": to_base64url(signature)}


def verify_document(
    signed: Mapping[str, Any], public_key: bytes, *, context: str
) -> dict[str, Any]:
    """Verify a signed document and return it without `key_id` and `signature`.

    Raises InvalidSignature unless `public_key` signed it under `context`.
    """
    document = {name: value for name, value in signed.items() if name != "signature"}
    key_id, signature = signed.get("key_id"), signed.get("signature")
    if key_id != key_id_of(public_key):
        raise InvalidSignature(
            f"signed by key {str(key_id)[:64]!r}, expected {key_id_of(public_key)}"
        )
    if not isinstance(signature, str):
        raise InvalidSignature("the document has no signature")
    try:
        message = _document_message(document, context)
        signature_bytes = from_base64url(signature, 64)
    except MalformedRequest as exc:
        raise InvalidSignature(exc.detail) from exc
    verify_signature(public_key, message, signature_bytes)
    del document["key_id"]
    return document
