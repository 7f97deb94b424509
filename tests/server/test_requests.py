"""Who may ask, and what is refused before it is answered: errors come out as themselves."""

import pytest

from fedpress_protocols.errors import (
    AlreadyExists,
    BodyTooLarge,
    ClockSkew,
    DigestMismatch,
    InvalidSignature,
    InvalidToken,
    MalformedRequest,
    NotFound,
    ReplayedRequest,
    UnknownDevice,
    WireVersionMismatch,
)
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content, DeviceKey, to_base64url
from tests.devices import Device, Operator, checked
from tests.server.in_process import Clock, Enrolled, Server, Start

# Enrolment


def test_an_unknown_token_enrols_nobody(http: Server, operator: Operator, clock: Clock) -> None:
    with pytest.raises(InvalidToken, match="unknown") as caught:
        Device(http, clock).enrol("fpe_made_up")
    assert caught.value.status == 401


def test_a_used_up_token_enrols_nobody_else(http: Server, operator: Operator, clock: Clock) -> None:
    token = operator.token(uses=2)
    for _ in range(2):
        Device(http, clock).enrol(token)
    with pytest.raises(InvalidToken, match="used up"):
        Device(http, clock).enrol(token)


def test_an_expired_token_enrols_nobody(http: Server, operator: Operator, clock: Clock) -> None:
    token = operator.token(expires_in=10)
    clock.advance(10)
    with pytest.raises(InvalidToken, match="expired"):
        Device(http, clock).enrol(token)


def test_enrolling_again_is_the_same_device_and_no_second_use(
    http: Server, operator: Operator, clock: Clock
) -> None:
    token = operator.token(uses=2)
    device = Device(http, clock)
    first = device.enrol(token, "kitchen")
    clock.advance(7200)
    assert device.enrol(token, "kitchen").client_id == first.client_id
    assert [client["name"] for client in operator.get("/v1/admin/clients")] == ["kitchen"]


def test_a_lost_answer_is_told_from_a_first_one_by_its_status(
    http: Server, operator: Operator, clock: Clock
) -> None:
    token, device = operator.token(), Device(http, clock)
    statuses = []
    http.event_hooks["response"] = [lambda answer: statuses.append(answer.status_code)]
    device.enrol(token)
    device.enrol(token)
    assert statuses == [201, 200]


def test_a_key_enrols_with_one_token_only(http: Server, operator: Operator, clock: Clock) -> None:
    device = Device(http, clock)
    device.enrol(operator.token())
    with pytest.raises(AlreadyExists):
        device.enrol(operator.token())


def test_enrolment_needs_the_very_key(http: Server, operator: Operator, clock: Clock) -> None:
    victim, thief = Device(http, clock), Device(http, clock)
    token = operator.token()

    def enrol_signed_by(key: DeviceKey) -> None:
        signing, victim.key = victim.key, key
        try:
            victim.enrol(token)
        finally:
            victim.key = signing

    body = b'{"public_key": "' + b"A" * 43 + b'"}'
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with pytest.raises(InvalidSignature, match="expected the key to enrol"):
        checked(thief.request("POST", "/v1/enrol", body, headers))
    enrol_signed_by(victim.key)


def test_enrolment_without_a_token_is_refused(http: Server, clock: Clock) -> None:
    with pytest.raises(InvalidToken, match="no bearer token"):
        Device(http, clock).json("POST", "/v1/enrol", '{"public_key": "' + "A" * 43 + '"}')


def test_enrolling_takes_no_place_in_the_memory_of_nonces(
    http: Server, operator: Operator, clock: Clock
) -> None:
    device = Device(http, clock)
    body = f'{{"public_key": "{to_base64url(device.key.public)}"}}'.encode()
    signed = device.sign("POST", "/v1/enrol", Content.of(body))
    signed |= {"Content-Type": "application/json"}

    def enrol(token: str) -> int:
        headers = {**signed, "Authorization": f"Bearer {token}"}
        return checked(http.post("/v1/enrol", headers=headers, content=body)).status_code

    for _ in range(2):
        with pytest.raises(InvalidToken, match="unknown"):
            enrol("fpe_made_up")
    token = operator.token()
    assert [enrol(token), enrol(token)] == [201, 200]


def test_a_revoked_device_is_a_stranger(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    device.check_in("digits")
    revoked = operator.post(f"/v1/admin/clients/{device.client_id}/revoke")
    assert revoked["revoked_at"] is not None
    assert operator.post(f"/v1/admin/clients/{device.client_id}/revoke") == revoked
    with pytest.raises(UnknownDevice, match="revoked"):
        device.check_in("digits")
    with pytest.raises(UnknownDevice, match="revoked"):
        device.enrol(operator.token())
    with pytest.raises(NotFound):
        operator.post("/v1/admin/clients/nobody/revoke")


# Signatures


def test_an_unsigned_request_is_refused(http: Server) -> None:
    with pytest.raises(InvalidSignature, match="not signed"):
        checked(http.get("/v1/tasks"))


def test_a_key_that_was_never_enrolled_is_refused(http: Server, clock: Clock) -> None:
    with pytest.raises(UnknownDevice):
        Device(http, clock).json("GET", "/v1/tasks")


def test_a_request_signed_by_another_key_is_refused(http: Server, enrolled: Enrolled) -> None:
    device, other = enrolled(), enrolled()
    mine = device.sign("GET", "/v1/tasks", Content.of(b""))
    theirs = other.sign("GET", "/v1/tasks", Content.of(b""))
    with pytest.raises(InvalidSignature):
        checked(http.get("/v1/tasks", headers=mine | {"Signature": theirs["Signature"]}))


@pytest.mark.parametrize("path", ["/v1/tasks/other", "/v1/tasks?all=1"])
def test_a_request_sent_elsewhere_is_refused(http: Server, enrolled: Enrolled, path: str) -> None:
    signed = enrolled().sign("GET", "/v1/tasks", Content.of(b""))
    with pytest.raises(InvalidSignature):
        checked(http.get(path, headers=signed))


def test_a_changed_body_is_refused(http: Server, operator: Operator, enrolled: Enrolled) -> None:
    body = b'{"wait": 0}'
    signed = enrolled().sign("POST", "/v1/tasks/digits/check-in", Content.of(body))
    signed["Content-Type"] = "application/json"
    with pytest.raises(DigestMismatch):
        checked(http.post("/v1/tasks/digits/check-in", headers=signed, content=b'{"wait": 9}'))


def test_a_replayed_request_is_refused(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    path, body = "/v1/tasks/digits/check-in", b"{}"
    signed = enrolled().sign("POST", path, Content.of(body)) | {"Content-Type": "application/json"}
    assert http.post(path, headers=signed, content=body).status_code == 200
    with pytest.raises(ReplayedRequest):
        checked(http.post(path, headers=signed, content=body))


def test_requests_that_only_read_take_no_memory(http: Server, enrolled: Enrolled) -> None:
    device, guard = enrolled(), http.app.services.authenticator._guard
    before = len(guard)
    signed = device.sign("GET", "/v1/tasks", Content.of(b""))
    for _ in range(3):
        assert http.get("/v1/tasks", headers=signed).status_code == 200
    assert len(guard) == before


@pytest.mark.parametrize("skew", [-301, 301])
def test_a_wrong_clock_is_told_the_time(enrolled: Enrolled, clock: Clock, skew: int) -> None:
    device = enrolled()
    clock.advance(1000)
    with pytest.raises(ClockSkew) as caught:
        checked(device.request("GET", "/v1/tasks", skew=skew))
    assert caught.value.status == 401
    assert caught.value.members["server_time"] == clock.now


def test_a_get_with_a_body_is_refused(enrolled: Enrolled) -> None:
    with pytest.raises(MalformedRequest):
        checked(enrolled().request("GET", "/v1/tasks", b"why?"))


# JSON


@pytest.mark.parametrize(
    "body", ["{", "[]", '{"pending": "x"}', '{"wait": 31}', '{"surprise": 1}', '{"wait": NaN}']
)
def test_malformed_json_says_what_is_off(
    operator: Operator, enrolled: Enrolled, model: Model, body: str
) -> None:
    operator.begin(model)
    with pytest.raises(MalformedRequest) as caught:
        enrolled().json("POST", "/v1/tasks/digits/check-in", body)
    assert caught.value.status == 400
    assert caught.value.detail.startswith("body")


def test_a_large_json_body_is_refused(enrolled: Enrolled) -> None:
    body = '{"pending": [' + " " * 2**20 + "]}"
    with pytest.raises(BodyTooLarge):
        enrolled().json("POST", "/v1/tasks/digits/check-in", body)


def test_a_device_of_another_age_is_told(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    with pytest.raises(WireVersionMismatch, match=r"\[99\]"):
        enrolled().json("POST", "/v1/tasks/digits/check-in", '{"wire_versions": [99]}')


# Operators


def test_the_admin_api_is_closed_without_a_token(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with start(admin_token=None) as http, pytest.raises(InvalidToken, match="no admin token"):
        Operator(http).get("/v1/admin/clients")
    assert "no admin token, so no operator can use it; set FEDPRESS_ADMIN_TOKEN" in caplog.text


@pytest.mark.parametrize("token", ["wrong", "an-admin-token-for-test", "é"])
def test_a_wrong_admin_token_is_refused(http: Server, token: str) -> None:
    operator = Operator(http, "")
    operator.headers = {"Authorization": b"Bearer " + token.encode()}  # type: ignore[dict-item]
    for path in ("/v1/admin/clients", "/v1/tasks"):
        with pytest.raises(InvalidToken):
            operator.get(path)


def test_a_device_has_no_business_with_the_admin_api(enrolled: Enrolled) -> None:
    with pytest.raises(InvalidToken):
        enrolled().json("POST", "/v1/admin/tokens", "{}")


@pytest.mark.parametrize("body", [b"[" * 500_000, b'{"pending":' * 50_000])
def test_nesting_without_end_is_refused(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, body: bytes
) -> None:
    operator.begin(model)
    headers = {"Content-Type": "application/json"}
    answer = enrolled().request("POST", "/v1/tasks/digits/check-in", body, headers)
    assert answer.status_code == 400
    with pytest.raises(MalformedRequest):
        checked(answer)
