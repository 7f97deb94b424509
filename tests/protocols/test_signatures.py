"""Signed requests and documents: what verifies, and that nothing else does."""

from __future__ import annotations

import base64
import hashlib
import json
import runpy
import secrets
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import assume, given
from hypothesis import strategies as st

from fedpress_protocols.errors import (
    ClockSkew,
    ConfigurationError,
    DigestMismatch,
    FedpressError,
    InvalidSignature,
    LengthRequired,
    MalformedRequest,
    ReplayedRequest,
    Unavailable,
)
from fedpress_protocols.signatures import (
    COMPONENTS,
    MAX_LIFETIME,
    Content,
    DeviceKey,
    ParsedSignature,
    ReplayGuard,
    Target,
    canonical_json,
    from_base64url,
    key_id_of,
    parse_content_digest,
    parse_signature,
    sign_document,
    sign_request,
    signature_base,
    signed_headers,
    to_base64url,
    verify_document,
    verify_request,
    verify_signature,
)

VECTORS = Path(__file__).parents[2] / "protocols" / "vectors"
GOLDEN: dict[str, Any] = json.loads((VECTORS / "signatures.json").read_text())
KEY = DeviceKey.from_bytes(bytes(range(32)))
OTHER = DeviceKey.from_bytes(bytes(range(32, 64)))
NOW = 1_790_000_000
NONCE = bytes(range(16))
TARGET = Target("PUT", "fl.example.org", "/v1/uploads/7f3a", "part=1")
BODY = b"a pressed update"
EMPTY = Content.of(b"").digest_header


def signed(
    target: Target = TARGET,
    body: bytes = BODY,
    *,
    created: int = NOW,
    nonce: bytes = NONCE,
    lifetime: int = MAX_LIFETIME,
) -> dict[str, str]:
    """The headers of a good request by lower-case name, as a server sees them."""
    headers = sign_request(
        KEY, target, Content.of(body), created=created, nonce=nonce, lifetime=lifetime
    )
    return {name.lower(): value for name, value in headers.items()}


def verify(headers: dict[str, str], target: Target = TARGET, now: float = NOW) -> Content:
    return verify_request(parse_signature(headers), KEY.public, target, headers, now=now)


# The primitive and the golden vectors


def test_the_signature_base_is_the_one_of_rfc_9421() -> None:
    """RFC 9421, appendix B.2.6, with the key of B.1.4; Ed25519 leaves nothing to chance."""
    key = DeviceKey.from_bytes(from_base64url("n4Ni-HpISpVObnQMW0wOhCKROaIKqKtW_2ZYb2p9KcU", 32))
    assert to_base64url(key.public) == "JrQLj5P_89iXES9-vFgrIy29clF9CC_oPPsw3c5D0bs"
    base = signature_base(
        [
            ("date", "Tue, 20 Apr 2021 02:07:55 GMT"),
            ("@method", "POST"),
            ("@path", "/foo"),
            ("@authority", "example.com"),
            ("content-type", "application/json"),
            ("content-length", "18"),
        ],
        '("date" "@method" "@path" "@authority" "content-type" "content-length")'
        ';created=1618884473;keyid="test-key-ed25519"',
    )
    expected = base64.b64decode(
        "wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKRCw=="
    )
    assert key.sign(base) == expected
    verify_signature(key.public, base, expected)


def test_content_digests_are_the_ones_of_rfc_9530() -> None:
    """RFC 9530, appendices B.1 and B.2."""
    body = b'{"hello": "world"}\n'
    header = Content.of(body).digest_header
    assert header == "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"
    assert EMPTY == "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"
    assert parse_content_digest(header) == hashlib.sha256(body).digest()


def test_the_golden_vectors_are_what_their_script_writes() -> None:
    script = runpy.run_path(str(VECTORS / "make_signature_vectors.py"))
    assert (VECTORS / "signatures.json").read_text() == script["text"]()


def test_the_examples_of_the_specification_are_golden() -> None:
    text = (VECTORS.parent / "SPEC-signatures.md").read_text()
    request, document = GOLDEN["requests"][0], GOLDEN["documents"][0]
    assert f"\n{request['signature_base']}\n" in text
    for name, value in request["headers"].items():
        assert f"\n{name.title()}: {value}\n" in text
    for value in (document["document"], document["signed"]):
        assert f"\n{canonical_json(value).decode()}\n" in text


@pytest.mark.parametrize("vector", GOLDEN["requests"], ids=lambda vector: vector["name"])
def test_golden_requests_verify_without_this_code(vector: dict[str, Any]) -> None:
    """The specification's steps, from the headers alone, with `cryptography` and the standard
    library."""
    headers, body = vector["headers"], bytes.fromhex(vector["body"])
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    assert headers["content-digest"] == f"sha-256=:{digest}:"
    assert headers["content-length"] == str(len(body))
    base = "\n".join(
        (
            f'"@method": {vector["method"]}',
            f'"@authority": {vector["authority"]}',
            f'"@path": {vector["path"]}',
            f'"@query": ?{vector["query"]}',
            f'"content-digest": {headers["content-digest"]}',
            f'"content-length": {headers["content-length"]}',
            f'"@signature-params": {headers["signature-input"].removeprefix("fp=")}',
        )
    )
    assert base == vector["signature_base"]
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(GOLDEN["keys"][0]["public"]))
    signature = headers["signature"].removeprefix("fp=:").removesuffix(":")
    public.verify(base64.b64decode(signature), base.encode())


@pytest.mark.parametrize("vector", GOLDEN["requests"], ids=lambda vector: vector["name"])
def test_golden_requests_are_signed_and_verified_alike(vector: dict[str, Any]) -> None:
    content = Content.of(bytes.fromhex(vector["body"]))
    target = Target.from_url(vector["method"], vector["url"])
    headers = sign_request(
        DeviceKey.from_bytes(bytes.fromhex(GOLDEN["keys"][0]["secret"])),
        target,
        content,
        created=vector["created"],
        nonce=bytes.fromhex(vector["nonce"]),
        lifetime=vector["lifetime"],
    )
    assert {name.lower(): value for name, value in headers.items()} == vector["headers"]
    parts = (vector[part] for part in ("method", "authority", "path", "query"))
    assert verify(vector["headers"], Target(*parts)) == content


@pytest.mark.parametrize("vector", GOLDEN["changed"], ids=lambda vector: vector["name"])
def test_golden_changes_are_answered_as_written(vector: dict[str, Any]) -> None:
    request = next(r for r in GOLDEN["requests"] if r["name"] == vector["request"])
    change = dict(vector["change"])
    now = change.pop("now", request["created"])
    parts = {part: request[part] for part in ("method", "authority", "path", "query")}
    parts |= {name: value for name, value in change.items() if name in parts}
    headers = request["headers"] | change
    headers = {k: v for k, v in headers.items() if k not in parts and v is not None}
    if vector["error"] is None:
        verify(headers, Target(**parts), now)
        return
    with pytest.raises(FedpressError) as caught:
        verify(headers, Target(**parts), now)
    assert caught.value.slug == vector["error"]


# An independent implementation


def _oracle() -> tuple[Any, Any]:
    pytest.importorskip("http_message_signatures")
    import http_message_signatures as hms

    class Keys(hms.HTTPSignatureKeyResolver):
        def resolve_public_key(self, key_id: str) -> Any:
            return Ed25519PublicKey.from_public_bytes(KEY.public) if key_id == KEY.key_id else None

        def resolve_private_key(self, key_id: str) -> Any:
            return serialization.load_pem_private_key(KEY.to_pem(), password=None)

    return hms, {"signature_algorithm": hms.algorithms.ED25519, "key_resolver": Keys()}


URLS = (
    "https://fl.example.org/v1/uploads/7f3a?part=1",
    "http://127.0.0.1:8000/",
    "http://[::1]:8000/v1/rounds?task=a%20b&from=3",
    "https://fl.example.org/a%2Fb/~c:d",
)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("body", [b"", BODY])
def test_http_message_signatures_verifies_what_we_sign(url: str, body: bytes) -> None:
    hms, settings = _oracle()
    content, target = Content.of(body), Target.from_url("POST", url)
    created = int(time.time())
    headers = sign_request(KEY, target, content, created=created, nonce=secrets.token_bytes(16))
    message = SimpleNamespace(method="POST", url=url, headers=headers)
    verifier = hms.HTTPMessageVerifier(**settings)
    (result,) = verifier.verify(
        message, expect_tag="fedpress-v1", require_components=COMPONENTS, body=body
    )
    assert result.label == "fp"
    assert result.body == body
    for name, value in (("method", "PUT"), ("url", url + "x")):
        changed = SimpleNamespace(**{**vars(message), name: value})
        with pytest.raises(hms.InvalidSignature):
            verifier.verify(changed, expect_tag="fedpress-v1")


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("body", [b"", BODY])
def test_we_verify_what_http_message_signatures_signs(url: str, body: bytes) -> None:
    """It orders parameters in its own way, so it is asked for the base and headers in ours."""
    hms, settings = _oracle()
    signer = hms.HTTPMessageSigner(**settings)
    content = Content.of(body)
    headers = {"Content-Digest": content.digest_header, "Content-Length": str(content.length)}
    message = SimpleNamespace(method="POST", url=url, headers=headers)
    base, params, _ = signer._build_signature_base(
        message,
        covered_component_ids=signer._parse_covered_component_ids(COMPONENTS),
        signature_params={
            "created": NOW,
            "expires": NOW + 60,
            "nonce": to_base64url(NONCE),
            "keyid": KEY.key_id,
            "alg": "ed25519",
            "tag": "fedpress-v1",
        },
    )
    prepared = hms.PreparedSignature(base.encode(), str(params), "fp", "ed25519")
    signer.apply(message, prepared, KEY.sign(base.encode()))
    lower = {name.lower(): value for name, value in message.headers.items()}
    assert verify(lower, Target.from_url("POST", url)) == content


# Requests: any change is refused


texts = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20)
targets = st.builds(
    Target,
    st.sampled_from(("GET", "POST", "PUT", "DELETE")),
    st.from_regex(r"[a-z0-9.\-]{1,20}(:[0-9]{1,5})?", fullmatch=True),
    texts.map(lambda text: "/" + text.replace("?", "").replace("#", "")),
    texts.map(lambda text: text.replace("#", "")),
)


@given(targets, targets, st.binary(max_size=40), st.binary(max_size=40))
def test_only_the_signed_target_and_body_verify(
    target: Target, other: Target, body: bytes, other_body: bytes
) -> None:
    headers = signed(target, body)
    assert verify(headers, target) == Content.of(body)
    for part in ("method", "authority", "path", "query"):
        changed = replace(target, **{part: getattr(other, part)})
        if changed != target:
            with pytest.raises(InvalidSignature):
                verify(headers, changed)
    assume(other_body != body)
    for name in ("content-digest", "content-length"):
        changed_headers = headers | {name: signed(target, other_body)[name]}
        if changed_headers != headers:
            with pytest.raises(InvalidSignature):
                verify(changed_headers, target)


@given(
    st.integers(-10, 10),
    st.integers(1, MAX_LIFETIME),
    st.binary(min_size=16, max_size=16),
    st.sampled_from((KEY, OTHER)),
)
def test_only_the_signed_parameters_verify(
    shift: int, lifetime: int, nonce: bytes, key: DeviceKey
) -> None:
    good = signed(created=NOW, nonce=NONCE, lifetime=150)
    params = {
        "created": NOW + shift,
        "expires": NOW + lifetime,
        "nonce": to_base64url(nonce),
        "keyid": key.key_id,
    }
    text = good["signature-input"]
    for name, value in params.items():
        old = text.split(f"{name}=")[1].split(";")[0]
        new = f'"{value}"' if isinstance(value, str) else str(value)
        changed = text.replace(f"{name}={old}", f"{name}={new}")
        if changed != text:
            # The time is looked at first, so that it is the signature that refuses here.
            with pytest.raises(InvalidSignature):
                verify(good | {"signature-input": changed}, now=NOW)


@given(st.integers(0, 511))
def test_a_signature_with_one_bit_changed_is_refused(bit: int) -> None:
    headers = signed()
    raw = bytearray(base64.b64decode(headers["signature"][4:-1]))
    raw[bit // 8] ^= 1 << bit % 8
    headers["signature"] = f"fp=:{base64.b64encode(raw).decode()}:"
    with pytest.raises(InvalidSignature):
        verify(headers)


def test_another_key_verifies_nothing() -> None:
    headers = signed()
    for public in (OTHER.public, bytes(32), b"\xff" * 32, b"short"):
        with pytest.raises(InvalidSignature):
            verify_request(parse_signature(headers), public, TARGET, headers, now=NOW)


@pytest.mark.parametrize(
    ("now", "accepted"),
    [
        (NOW - 301, False),
        (NOW - 300, True),
        (NOW, True),
        (NOW + 60, True),
        (NOW + 60.1, False),
        (NOW + 10**9, False),
    ],
)
def test_a_request_is_good_from_its_skew_to_its_expiry(now: float, accepted: bool) -> None:
    headers = signed(lifetime=60)
    if accepted:
        verify(headers, now=now)
        return
    with pytest.raises(ClockSkew) as caught:
        verify(headers, now=now)
    assert caught.value.members == {"server_time": now}


def test_signing_refuses_what_no_server_would_take() -> None:
    content = Content.of(b"")
    for nonce, lifetime in ((NONCE, 0), (NONCE, 301), (NONCE[1:], 300)):
        with pytest.raises(ConfigurationError):
            sign_request(KEY, TARGET, content, created=NOW, nonce=nonce, lifetime=lifetime)


@pytest.mark.parametrize(
    ("header", "value", "words"),
    [
        ("signature-input", "", "not signed"),
        ("signature", "", "not signed"),
        ("signature-input", "sig1=()", "one list labelled 'fp'"),
        ("signature-input", "fp=token", "one list labelled 'fp'"),
        ("signature-input", 'fp=("@method"', "is missing"),
        ("signature-input", "fp=()", "unknown component ''"),
        ("signature-input", 'fp=("@method" "@scheme")', "unknown component '\"@scheme\"'"),
        ("signature-input", 'fp=("@path" "@path")', 'component "@path" more than once'),
    ],
)
def test_a_signature_in_another_form_is_told_what_is_wrong(
    header: str, value: str, words: str
) -> None:
    with pytest.raises(InvalidSignature) as caught:
        parse_signature(signed() | {header: value})
    assert words in caught.value.detail


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"@query" ', "", 'component "@query" is missing'),
        ('"@method" "@authority"', '"@authority" "@method"', "components out of order"),
        (")", ")x", "'x' after the list"),
        (";tag=", ";tog=", "unknown parameter 'tog'"),
        (';alg="ed25519"', "", "parameter alg is missing"),
        (f";created={NOW}", "", "parameter created is missing"),
        (';alg="ed25519"', ';alg="ed25519";alg="ed25519"', "parameter alg more than once"),
        (
            f";created={NOW};expires={NOW + 300}",
            f";expires={NOW + 300};created={NOW}",
            "parameters out of order",
        ),
        ('"ed25519"', "ed25519", 'alg=ed25519, expected "ed25519"'),
        ("fedpress-v1", "fedpress-v2", 'tag="fedpress-v2", expected'),
        (f"created={NOW}", "created=-1", "created=-1 is not a count of seconds"),
        (f"created={NOW}", f"created={NOW}.0", "is not a count of seconds"),
        (f"created={NOW}", "created=" + "9" * 16, "is not a count of seconds"),
        (f"expires={NOW + 300}", f"expires={NOW + 301}", "outside (0, 300]"),
        (f"expires={NOW + 300}", f"expires={NOW}", "outside (0, 300]"),
        (to_base64url(NONCE), to_base64url(NONCE)[:-1], "nonce: "),
        (to_base64url(NONCE), to_base64url(NONCE)[:-1] + "x", "nonce: "),
        (to_base64url(NONCE), "+" * 22, "nonce: "),
        (f'"{to_base64url(NONCE)}"', to_base64url(NONCE), "not a quoted string"),
        (KEY.key_id, "device 1", "keyid: "),
    ],
)
def test_parameters_in_another_form_are_told_what_is_wrong(old: str, new: str, words: str) -> None:
    headers = signed()
    assert old in headers["signature-input"]
    headers["signature-input"] = headers["signature-input"].replace(old, new)
    with pytest.raises(InvalidSignature) as caught:
        parse_signature(headers)
    assert words in caught.value.detail


@pytest.mark.parametrize("length", ["", "-1", "+1", "01", "1.0", "٣", "1" * 16, "16, 16"])
def test_a_length_in_another_form_is_refused(length: str) -> None:
    with pytest.raises(MalformedRequest):
        verify(signed() | {"content-length": length})


def test_a_request_without_length_or_digest_is_refused() -> None:
    good = signed()
    with pytest.raises(LengthRequired):
        verify({k: v for k, v in good.items() if k != "content-length"})
    with pytest.raises(LengthRequired):
        verify(good | {"transfer-encoding": "chunked"})
    with pytest.raises(MalformedRequest, match="no Content-Digest"):
        verify({k: v for k, v in good.items() if k != "content-digest"})


def test_a_zero_length_that_a_proxy_drops_is_not_missed() -> None:
    target = replace(TARGET, method="GET")
    headers = signed(target, b"")
    del headers["content-length"]
    assert verify(headers, target) == Content.of(b"")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "sha-256",
        "sha-256=::",
        "sha-256=:AAAA:",
        "sha-256=:AAA:",
        "sha-256=:A:",
        "sha-512=:" + "A" * 86 + "==:",
        EMPTY + ", " + EMPTY,
        EMPTY.replace("=:", ":"),
        EMPTY[:-3] + "V=:",
        EMPTY + "\n",
    ],
)
def test_a_digest_in_another_form_is_refused(header: str) -> None:
    with pytest.raises(MalformedRequest):
        parse_content_digest(header)


def test_a_body_other_than_the_signed_one_is_refused() -> None:
    content = verify(signed())
    content.check(Content.of(BODY))
    for body in (BODY[:-1], BODY + b"!", BODY.upper()):
        with pytest.raises(DigestMismatch):
            content.check(Content.of(body))


def test_a_second_copy_of_a_header_that_counts_is_refused() -> None:
    raw = [(name.encode(), value.encode()) for name, value in signed().items()]
    raw += [(b"Host", b" fl.example.org\t"), (b"accept", b"a"), (b"accept", b"b")]
    assert signed_headers(raw) == signed() | {"host": "fl.example.org"}
    for name, value in [*raw[:5], (b"SIGNATURE", b"")]:
        with pytest.raises(InvalidSignature, match="more than one"):
            signed_headers([*raw, (name, value)])


header_texts = st.one_of(
    st.text(max_size=200),
    st.from_regex(r'fp=\(("@?[a-z-]{1,9}" ?){0,7}\)(;[a-z]{1,7}="?[\w+-]{0,24}"?){0,7}'),
    st.from_regex(r"fp=:[A-Za-z0-9+/]{0,100}={0,3}:", fullmatch=True),
)


@given(
    st.dictionaries(
        st.sampled_from(("signature-input", "signature", "content-digest", "content-length")),
        header_texts,
    )
)
def test_any_headers_give_a_typed_error(changes: dict[str, str]) -> None:
    assume(changes)
    with pytest.raises(FedpressError):
        verify(signed() | changes)


@given(st.integers(0), st.integers(0, 2), st.text(max_size=3))
def test_any_edit_of_a_good_signature_input_is_refused(at: int, cut: int, text: str) -> None:
    headers = signed()
    good = headers["signature-input"]
    at %= len(good)
    headers["signature-input"] = good[:at] + text + good[at + cut :]
    assume(headers["signature-input"] != good)
    with pytest.raises((InvalidSignature, ClockSkew)):
        verify(headers)


_SIGNED = (
    *("host", "content-digest", "content-length"),
    *("transfer-encoding", "signature-input", "signature"),
)
_RAW = st.tuples(
    st.binary(max_size=20) | st.sampled_from([name.encode() for name in _SIGNED]),
    st.binary(max_size=20),
)


@given(st.lists(_RAW))
def test_any_raw_headers_are_read_or_refused(raw: list[tuple[bytes, bytes]]) -> None:
    names = [name.decode("latin-1").lower() for name, _ in raw]
    told = [name for name in names if name in _SIGNED]
    if len(set(told)) < len(told):
        with pytest.raises(InvalidSignature, match="more than one"):
            signed_headers(raw)
    else:
        assert sorted(signed_headers(raw)) == sorted(told)


# Targets and keys


@pytest.mark.parametrize(
    ("url", "authority", "path", "query"),
    [
        ("https://FL.Example.org", "fl.example.org", "/", ""),
        ("https://fl.example.org:443/a?", "fl.example.org", "/a", ""),
        ("https://fl.example.org:80/a?b#c", "fl.example.org:80", "/a", "b"),
        ("http://fl.example.org:80/?a=/?b", "fl.example.org", "/", "a=/?b"),
        ("http://[2001:DB8::1]:8000/%7Ea", "[2001:db8::1]:8000", "/%7Ea", ""),
    ],
)
def test_a_url_gives_what_goes_over_the_wire(
    url: str, authority: str, path: str, query: str
) -> None:
    assert Target.from_url("GET", url) == Target("GET", authority, path, query)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/path",
        "ftp://host/",
        "http://user:secret@host/",
        "http://[::1/",
        "http:///path",
        "http://host/a b",
        "http://host/a\nb",
        "http://host/ä",
    ],
)
def test_a_url_that_cannot_be_signed_is_refused(url: str) -> None:
    with pytest.raises(MalformedRequest):
        Target.from_url("GET", url)


@pytest.mark.parametrize(
    "parts",
    [
        ("get", "host", "/", ""),
        ("GET ", "host", "/", ""),
        ("GET", "", "/", ""),
        ("GET", "Host", "/", ""),
        ("GET", 'host\n"@path": /b', "/", ""),
        ("GET", "host", "", ""),
        ("GET", "host", "*", ""),
        ("GET", "host", "/a?b", ""),
        ("GET", "host", "/a\n", ""),
        ("GET", "host", "/", "a#b"),
        ("GET", "host", "/", "a\r\n"),
        ("GET", "host", "/", "ä"),
    ],
)
def test_a_target_cannot_smuggle_a_line(parts: tuple[str, str, str, str]) -> None:
    with pytest.raises(MalformedRequest):
        Target(*parts)


def test_a_key_survives_its_files() -> None:
    key = DeviceKey.generate()
    for again in (DeviceKey.from_bytes(key.to_bytes()), DeviceKey.from_pem(key.to_pem())):
        assert (again.public, again.key_id) == (key.public, key.key_id)
        assert again.sign(b"m") == key.sign(b"m")
    assert key.key_id == key_id_of(key.public) != DeviceKey.generate().key_id
    assert len(key.key_id) == 22


def test_a_key_is_not_printed() -> None:
    key = DeviceKey.generate()
    assert key.key_id in repr(key)
    assert "_private" not in repr(key)


def test_what_is_no_ed25519_key_is_refused() -> None:
    other_kind = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for pem in (b"", b"-----BEGIN PRIVATE KEY-----", other_kind):
        with pytest.raises(ConfigurationError):
            DeviceKey.from_pem(pem)
    with pytest.raises(ConfigurationError):
        DeviceKey.from_bytes(bytes(31))


@given(st.binary(max_size=40))
def test_base64url_goes_there_and_back(data: bytes) -> None:
    assert from_base64url(to_base64url(data), len(data)) == data


@given(st.text(max_size=24))
def test_base64url_has_one_spelling(text: str) -> None:
    try:
        data = from_base64url(text, 16)
    except MalformedRequest:
        return
    assert to_base64url(data) == text


# Replays


def parsed(
    number: int = 0, *, key: DeviceKey = KEY, created: int = NOW, lifetime: int = 300
) -> Any:
    nonce = number.to_bytes(16, "big")
    return ParsedSignature(key.key_id, created, created + lifetime, nonce, bytes(64), "")


def test_a_nonce_is_good_once_per_key() -> None:
    guard = ReplayGuard()
    guard.check(parsed(), NOW)
    for again in (parsed(), parsed(created=NOW + 100, lifetime=300)):
        with pytest.raises(ReplayedRequest):
            guard.check(again, NOW + 299)
    guard.check(parsed(1), NOW)
    guard.check(parsed(key=OTHER), NOW)
    assert len(guard) == 3


def test_a_nonce_is_remembered_to_its_last_second() -> None:
    guard = ReplayGuard()
    guard.check(parsed(lifetime=10), NOW)
    with pytest.raises(ReplayedRequest):
        guard.check(parsed(lifetime=10), NOW + 10)
    guard.check(parsed(1), NOW + 10.5)
    assert len(guard) == 1


def test_a_clock_set_back_opens_no_door() -> None:
    guard = ReplayGuard()
    guard.check(parsed(lifetime=10), NOW)
    guard.check(parsed(1), NOW + 100)
    with pytest.raises(ClockSkew) as caught:
        guard.check(parsed(lifetime=10), NOW + 5)
    assert caught.value.members == {"server_time": NOW + 5}


def test_a_restart_opens_no_door() -> None:
    guard = ReplayGuard(opened=NOW + 5.5)
    with pytest.raises(ClockSkew):
        guard.check(parsed(), NOW + 6)
    guard.check(parsed(created=NOW + 5), NOW + 6)


def test_a_key_that_used_up_its_room_waits_for_it() -> None:
    guard = ReplayGuard(capacity=10, per_key=2)
    guard.check(parsed(0, lifetime=30), NOW)
    guard.check(parsed(1, lifetime=20), NOW)
    with pytest.raises(Unavailable) as caught:
        guard.check(parsed(2), NOW)
    assert caught.value.members == {"retry_after": 21}
    guard.check(parsed(2, key=OTHER), NOW)
    guard.check(parsed(2), NOW + 21)


def flood(guard: ReplayGuard, keys: int, each: int, created: int, now: float) -> list[Any]:
    """What `keys` other keys sign, `each` so often; those of it that the guard accepted."""
    accepted = []
    for number in range(each):
        for who in range(keys):
            nonce = (created * each + number).to_bytes(16, "big")
            one = ParsedSignature(f"key {who}", created, created + 300, nonce, bytes(64), "")
            try:
                guard.check(one, now)
            except (Unavailable, ClockSkew):
                continue
            accepted.append(one)
    return accepted


@pytest.mark.parametrize("ahead", [0, 300], ids=["now", "ahead of the clock"])
def test_a_full_guard_takes_what_was_signed_now(ahead: int) -> None:
    """Whatever others sign, and for whenever they say that they did."""
    guard = ReplayGuard(capacity=400, per_key=100)
    for number in range(300):
        flood(guard, 49, 2, NOW + number + ahead, NOW + number)
        guard.check(parsed(number, created=NOW + number), NOW + number)
        assert len(guard) <= 400


def test_what_a_full_guard_forgot_it_refuses() -> None:
    guard = ReplayGuard(capacity=100, per_key=50)
    accepted = [
        one for number in range(40) for one in flood(guard, 3, 4, NOW + number, NOW + number)
    ]
    assert len(guard) < len(accepted)
    for one in accepted:
        with pytest.raises((ReplayedRequest, ClockSkew, Unavailable)):
            guard.check(one, NOW + 40)


def test_too_many_of_one_key_within_one_second_are_forgotten_and_refused_as_a_whole() -> None:
    guard = ReplayGuard(capacity=100, per_key=100)
    requests = [
        ParsedSignature("device", NOW, NOW + 60, number.to_bytes(16), bytes(64), "")
        for number in range(101)
    ]
    for one in requests[:100]:
        guard.check(one, NOW)
    later = ParsedSignature("other", NOW + 1, NOW + 61, bytes(16), bytes(64), "")
    guard.check(later, NOW + 1)
    for one in requests:
        with pytest.raises((ReplayedRequest, ClockSkew, Unavailable)):
            guard.check(one, NOW + 1)
    guard.check(ParsedSignature("device", NOW + 1, NOW + 61, bytes(16), bytes(64), ""), NOW + 1)


def test_a_fleet_that_is_larger_than_the_guard_is_served() -> None:
    """Every device once, in ten times as many seconds as the guard has room for."""
    guard = ReplayGuard(capacity=200)
    for number in range(2000):
        now = NOW + number // 50
        one = ParsedSignature(f"device {number}", now, now + 60, bytes(16), bytes(64), "")
        guard.check(one, now)
        with pytest.raises((ReplayedRequest, ClockSkew)):
            guard.check(one, now)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 5),
            st.integers(1, 30),
            st.integers(0, 20),
            st.integers(-10, 10),
        ),
        max_size=60,
    )
)
def test_no_request_is_accepted_twice(steps: list[tuple[int, int, int, int, int]]) -> None:
    """Against a guard that remembers everything; the clock only goes forward."""
    keys = (KEY, OTHER, DeviceKey.from_bytes(bytes(32)), DeviceKey.from_bytes(b"k" * 32))
    guard, accepted, now = ReplayGuard(capacity=8, per_key=6), dict[Any, int](), NOW
    for who, number, lifetime, step, skew in steps:
        now += step
        request = parsed(number, key=keys[who], created=now + skew, lifetime=lifetime)
        name = (request.key_id, request.nonce)
        accepted = {n: expires for n, expires in accepted.items() if expires >= now}
        try:
            guard.check(request, now)
        except (ReplayedRequest, ClockSkew, Unavailable):
            continue
        assert name not in accepted
        accepted[name] = request.expires
        assert len(guard) <= 8


# Documents


CONTEXT = "fedpress receipt v1"
numbers = st.integers(-(2**53) + 1, 2**53 - 1)
documents = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name not in {"key_id", "signature"}),
    st.recursive(
        st.none() | st.booleans() | numbers | numbers.map(float) | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=5,
)


@pytest.mark.parametrize("vector", GOLDEN["canonical_json"], ids=lambda vector: vector["name"])
def test_golden_values_have_their_canonical_bytes(vector: dict[str, Any]) -> None:
    assert canonical_json(vector["value"]).hex() == vector["canonical"]


@pytest.mark.parametrize("vector", GOLDEN["documents"], ids=lambda vector: vector["context"])
def test_golden_documents_verify(vector: dict[str, Any]) -> None:
    public = bytes.fromhex(GOLDEN["keys"][1]["public"])
    assert (
        verify_document(vector["signed"], public, context=vector["context"]) == vector["document"]
    )
    message = b"fedpress document\0" + vector["context"].encode() + b"\0"
    unsigned = {k: v for k, v in vector["signed"].items() if k != "signature"}
    message += json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode()
    signature = base64.urlsafe_b64decode(vector["signed"]["signature"] + "==")
    Ed25519PublicKey.from_public_bytes(public).verify(signature, message)


@given(documents)
def test_a_document_survives_the_wire_and_another_order(document: dict[str, Any]) -> None:
    sent = json.dumps(sign_document(document, KEY, context=CONTEXT))
    received = dict(reversed(json.loads(sent).items()))
    assert verify_document(received, KEY.public, context=CONTEXT) == document


@given(documents, documents)
def test_canonical_bytes_tell_values_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert json.loads(canonical_json(one)) == one
    assert (canonical_json(one) == canonical_json(other)) == (
        json.dumps(json.loads(canonical_json(one)), sort_keys=True)
        == json.dumps(json.loads(canonical_json(other)), sort_keys=True)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"round": 4},
        {"round": True},
        {"round": "3"},
        {"more": None},
        {"key_id": OTHER.key_id},
        {"key_id": None},
        {"key_id": KEY.key_id + "="},
        {"signature": None},
        {"signature": ""},
        {"signature": "A" * 86},
        {"signature": "Ä" * 86},
        {"round": 0.5},
        {"round": float("nan")},
    ],
)
def test_a_changed_document_is_refused(change: dict[str, Any]) -> None:
    good = sign_document({"round": 3}, KEY, context=CONTEXT)
    with pytest.raises(InvalidSignature):
        verify_document(good | change, KEY.public, context=CONTEXT)


def test_a_document_with_a_field_less_is_refused() -> None:
    good = sign_document({"round": 3}, KEY, context=CONTEXT)
    for name in good:
        with pytest.raises(InvalidSignature):
            verify_document(
                {k: v for k, v in good.items() if k != name}, KEY.public, context=CONTEXT
            )


def test_a_document_says_nothing_in_another_context() -> None:
    good = sign_document({"round": 3}, KEY, context=CONTEXT)
    with pytest.raises(InvalidSignature):
        verify_document(good, KEY.public, context="fedpress receipt v2")
    with pytest.raises(InvalidSignature, match="signed by key"):
        verify_document(good, OTHER.public, context=CONTEXT)
    for context in ("", "a\0b", "ä", "x" * 65):
        with pytest.raises(ConfigurationError):
            sign_document({}, KEY, context=context)


@pytest.mark.parametrize("name", ["key_id", "signature"])
def test_a_document_cannot_bring_its_own_signature(name: str) -> None:
    with pytest.raises(MalformedRequest, match=name):
        sign_document({name: ""}, KEY, context=CONTEXT)


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        float("nan"),
        float("inf"),
        2**53,
        -(2**53),
        1e300,
        pytest.param(10**5000, id="too long to print"),
        "\ud800",
        {"\udfff": 1},
        {1: 1},
        b"bytes",
        {1, 2},
        object(),
    ],
)
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(MalformedRequest):
        canonical_json({"value": value})


def test_canonical_json_nests_as_deep_as_it_says() -> None:
    value: Any = 0
    for _ in range(32):
        value = [value]
    assert canonical_json(value) == b"[" * 32 + b"0" + b"]" * 32
    with pytest.raises(MalformedRequest):
        canonical_json([value])
