"""Writes signatures.json, the golden vectors of SPEC-signatures.md; the same bytes every time.

PYTHONPATH=protocols python protocols/vectors/make_signature_vectors.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedpress_protocols.errors import FedpressError
from fedpress_protocols.signatures import (
    COMPONENTS,
    Content,
    DeviceKey,
    Target,
    canonical_json,
    parse_signature,
    sign_document,
    sign_request,
    signature_base,
    to_base64url,
    verify_document,
    verify_request,
)

PATH = Path(__file__).with_name("signatures.json")

KEY = DeviceKey.from_bytes(bytes(range(32)))
SERVER_KEY = DeviceKey.from_bytes(bytes(range(32, 64)))
CREATED = 1_790_000_000
NONCE = bytes(range(16))

REQUESTS = (
    ("a check-in", "POST", "https://fl.example.org/v1/tasks/digits/check-in", b"{}", 300),
    ("nothing to send, no query", "GET", "https://FL.example.org:443/v1/tasks", b"", 300),
    ("a port and a query", "GET", "http://127.0.0.1:8000/v1/rounds?task=a%20b&from=3", b"", 60),
    ("an upload", "PUT", "https://fl.example.org/v1/uploads/7f3a", bytes(range(256)) * 4, 120),
    ("an IPv6 host, an empty query", "DELETE", "http://[::1]:8000/v1/device?", b"", 1),
)

CANONICAL = (
    ("null, true and false", [None, True, False]),
    ("whole floats", {"a": 1.0, "b": -0.0, "c": 9007199254740991, "d": -9007199254740991}),
    # The example of RFC 8785, section 3.2.3: U+1F600 sorts before U+FB33.
    (
        "keys by UTF-16 code units",
        {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6, "\xf6": 7},
    ),
    ("escapes", '\x00\x08\t\n\x0b\x0c\r"\\/\x1f\x7f\u2028\xe9'),
    ("nested", {"b": [{"z": [], "a": {}}], "a": ""}),
)

RECEIPT = {
    "receipt": {
        "assignment": "7f3a",
        "client_id": "c-1",
        "issued_at": CREATED,
        "model": "ab" * 32,
        "outcome": "included",
        "round": 3,
        "upload": None,
    }
}


def request_vector(name: str, method: str, url: str, body: bytes, lifetime: int) -> dict[str, Any]:
    target, content = Target.from_url(method, url), Content.of(body)
    headers = sign_request(KEY, target, content, created=CREATED, nonce=NONCE, lifetime=lifetime)
    lower = {key.lower(): value for key, value in headers.items()}
    parsed = parse_signature(lower)
    values = (
        target.method,
        target.authority,
        target.path,
        "?" + target.query,
        content.digest_header,
        str(content.length),
    )
    return {
        "name": name,
        "method": method,
        "url": url,
        "body": body.hex(),
        "created": CREATED,
        "lifetime": lifetime,
        "nonce": NONCE.hex(),
        "authority": target.authority,
        "path": target.path,
        "query": target.query,
        "headers": lower,
        "signature_base": signature_base(
            zip(COMPONENTS, values, strict=True), parsed.params
        ).decode(),
    }


def changed_requests(good: dict[str, Any], empty: dict[str, Any]) -> list[dict[str, Any]]:
    """Variants of two good requests; `error` is what they must give, null if they are good too."""
    signature_input, signature = (
        good["headers"]["signature-input"],
        good["headers"]["signature"],
    )
    changes: list[tuple[str, dict[str, Any]]] = [
        ("another method", {"method": "PATCH"}),
        ("another authority", {"authority": "fl.example.com"}),
        ("another path", {"path": good["path"] + "/"}),
        ("another query", {"query": "a=1"}),
        ("another digest", {"content-digest": Content.of(b"other").digest_header}),
        ("a digest of another kind", {"content-digest": "sha-512=:AAAA:"}),
        ("no digest", {"content-digest": None}),
        ("another length", {"content-length": "3"}),
        ("a length with a sign", {"content-length": "+2"}),
        ("no length", {"content-length": None}),
        ("chunked", {"transfer-encoding": "chunked"}),
        ("not signed", {"signature-input": None, "signature": None}),
        ("in its last second", {"now": CREATED + 300}),
        ("expired", {"now": CREATED + 301}),
        ("as far ahead as is borne with", {"now": CREATED - 300}),
        ("too far ahead", {"now": CREATED - 301}),
    ]
    for name, old, new in (
        ("created moved", f"created={CREATED}", f"created={CREATED + 1}"),
        ("expires moved", f"expires={CREATED + 300}", f"expires={CREATED + 299}"),
        ("lives too long", f"expires={CREATED + 300}", f"expires={CREATED + 301}"),
        ("expires when created", f"expires={CREATED + 300}", f"expires={CREATED}"),
        ("another nonce", to_base64url(NONCE), to_base64url(NONCE[::-1])),
        ("a nonce with loose bits", to_base64url(NONCE), to_base64url(NONCE)[:-1] + "x"),
        ("another key", KEY.key_id, SERVER_KEY.key_id),
        ("another algorithm", '"ed25519"', '"hmac-sha256"'),
        ("another tag", '"fedpress-v1"', '"fedpress-v2"'),
        ("another label", "fp=(", "sig1=("),
        ("a component missing", ' "@query"', ""),
        ("a component twice", '"@query"', '"@query" "@query"'),
        ("an unknown component", '"@query"', '"@query" "date"'),
        ("components out of order", '"@method" "@authority"', '"@authority" "@method"'),
        ("a parameter missing", ';alg="ed25519"', ""),
        ("a parameter twice", ';alg="ed25519"', ';alg="ed25519";alg="ed25519"'),
        ("an unknown parameter", ';alg="ed25519"', ';alg="ed25519";foo=1'),
        ("another space", '"@method" "@authority"', '"@method"  "@authority"'),
        ("a leading zero", f"created={CREATED}", f"created=0{CREATED}"),
    ):
        if old not in signature_input:
            raise AssertionError(f"{name}: {old} is not there to change")
        changes.append((name, {"signature-input": signature_input.replace(old, new)}))
    changes += [
        ("two signatures", {"signature": signature + ", sig2=:AAAA:"}),
        ("a signature cut short", {"signature": "fp=:AAAA:"}),
        ("a changed signature", {"signature": "fp=:" + "A" * 86 + "==:"}),
    ]
    vectors = [(good, name, change) for name, change in changes]
    vectors += [
        (empty, "no length where nothing is sent", {"content-length": None}),
        (empty, "chunked where nothing is sent", {"transfer-encoding": "chunked"}),
        (empty, "a length where nothing is sent", {"content-length": "1"}),
    ]
    return [
        {
            "request": request["name"],
            "name": name,
            "change": change,
            "error": error_of(request, change),
        }
        for request, name, change in vectors
    ]


def error_of(good: dict[str, Any], change: dict[str, Any]) -> str | None:
    """The type of the error that a changed request gives; None if it is accepted."""
    headers = {
        name: value
        for name, value in {**good["headers"], **change}.items()
        if name not in {"method", "authority", "path", "query", "now"} and value is not None
    }
    try:
        target = Target(
            *(change.get(part, good[part]) for part in ("method", "authority", "path", "query"))
        )
        now = change.get("now", CREATED)
        verify_request(parse_signature(headers), KEY.public, target, headers, now=now)
    except FedpressError as exc:
        return exc.slug
    return None


def vectors() -> dict[str, Any]:
    requests = [request_vector(*request) for request in REQUESTS]
    context = "fedpress receipt v1"
    signed = sign_document(RECEIPT, SERVER_KEY, context=context)
    verify_document(signed, SERVER_KEY.public, context=context)
    return {
        "keys": [
            {
                "secret": key.to_bytes().hex(),
                "public": key.public.hex(),
                "key_id": key.key_id,
            }
            for key in (KEY, SERVER_KEY)
        ],
        "requests": requests,
        "changed": changed_requests(requests[0], requests[1]),
        "canonical_json": [
            {"name": name, "value": value, "canonical": canonical_json(value).hex()}
            for name, value in CANONICAL
        ],
        "documents": [{"context": context, "document": RECEIPT, "signed": signed}],
    }


def text() -> str:
    return json.dumps(vectors(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
