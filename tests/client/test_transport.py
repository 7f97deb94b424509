"""The API over a link that fails: what is tried again, what is not, and what goes out each time."""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedpress_client import HttpTransport, Retries
from fedpress_protocols.errors import (
    BodyTooLarge,
    ClockSkew,
    ConfigurationError,
    DigestMismatch,
    InvalidUpdate,
    MalformedRequest,
    NotFound,
    ReplayedRequest,
    RoundClosed,
    ServerError,
    StorageFull,
    TransportError,
    Unavailable,
    UnknownModel,
    UnknownTask,
)
from fedpress_protocols.messages import CheckInRequest, EnrolRequest, EvaluationReport, UploadAck
from fedpress_protocols.signatures import (
    Content,
    DeviceKey,
    Target,
    parse_signature,
    to_base64url,
    verify_request,
)

KEY = DeviceKey.generate()
NOW = 1_800_000_000.0
BODY = bytes(range(200))
DIGEST = hashlib.sha256(BODY).hexdigest()


class Server:
    """Answers from a list, one after the other; checks every request's signature."""

    def __init__(self, *answers: Any, now: float = NOW) -> None:
        self.answers = list(answers)
        self.now = now
        self.requests: list[httpx.Request] = []
        self.nonces: set[bytes] = set()
        self.slept: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        headers = {name.lower(): value for name, value in request.headers.items()}
        parsed = parse_signature(headers)
        target = Target.from_url(request.method, str(request.url))
        content = verify_request(parsed, KEY.public, target, headers, now=parsed.created)
        content.check(Content.of(request.content))
        assert parsed.nonce not in self.nonces
        self.nonces.add(parsed.nonce)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer(request)
        # A made-up Response is read already; the real ones still have their body to come.
        if answer.is_stream_consumed:
            answer = raw(answer.content, status=answer.status_code, **answer.headers)
        return answer

    def transport(self, url: str = "http://server:8000/", **options: Any) -> HttpTransport:
        return HttpTransport(
            url,
            KEY,
            sleep=self.slept.append,
            clock=lambda: NOW,
            random=lambda: 0.5,
            http=httpx.MockTransport(self),
            **options,
        )


def ack(status: int = 201) -> httpx.Response:
    done = UploadAck(assignment="a", upload=DIGEST, received_at=1.0)
    return httpx.Response(status, content=done.model_dump_json())


def problem(error: Any, **headers: str) -> httpx.Response:
    return httpx.Response(error.status, json=error.to_problem(), headers=headers)


def raw(*chunks: bytes, status: int = 200, fail: bool = False, **headers: str) -> httpx.Response:
    class Stream(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from chunks
            if fail:
                raise httpx.ReadError("connection reset")

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, stream=Stream(), headers=named)


@pytest.mark.parametrize(
    ("failures", "pauses"),
    [
        ([httpx.ConnectError("refused"), httpx.ReadTimeout("slow")], [0.25, 0.5]),
        ([httpx.RemoteProtocolError("cut")] * 4, [0.25, 0.5, 1.0, 2.0]),
        ([httpx.Response(503, headers={"Retry-After": "7"})], [7.25]),
        ([problem(Unavailable(retry_after=3))], [3.25]),
        ([problem(StorageFull())], [0.25]),
        ([httpx.Response(429, text="slow down"), httpx.Response(502, text="<html>")], [0.25, 0.5]),
        ([httpx.Response(500, headers={"Retry-After": formatdate(NOW + 9)})], [9.25]),
        ([httpx.Response(503, headers={"Retry-After": "soon"})], [0.25]),
        ([httpx.Response(503, headers={"Retry-After": "1e9"})], [3600.25]),
        ([httpx.Response(200, text="<html>log in here</html>")], [0.25]),
        ([problem(DigestMismatch())] * 2, [0.25, 0.5]),
        ([problem(ReplayedRequest())], [0.25]),
    ],
)
def test_the_same_bytes_go_out_until_they_arrive(failures: list[Any], pauses: list[float]) -> None:
    server = Server(*failures, ack())
    transport = server.transport(retries=Retries(patience=1e9))
    assert transport.upload("a", BODY).upload == DIGEST
    assert server.slept == pauses
    assert {request.content for request in server.requests} == {BODY}
    assert {str(request.url) for request in server.requests} == {
        "http://server:8000/v1/assignments/a/update"
    }


def test_pauses_stop_growing_and_patience_ends() -> None:
    server = Server(*[httpx.ConnectError("refused")] * 30)
    with pytest.raises(TransportError, match="refused"):
        server.transport(retries=Retries(base=1, cap=10, patience=30)).task("t")
    assert server.slept == [0.5, 1, 2, 4, 5, 5, 5, 5]


def test_the_longest_pause_that_a_server_may_ask_for_is_waited_for() -> None:
    away = httpx.Response(503, headers={"retry-after": "86400"})
    server = Server(away, httpx.Response(200, json=check_in_answer()["task"]))
    server.transport(retries=Retries()).task("t")
    assert server.slept == [pytest.approx(3600, abs=1)]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (problem(RoundClosed(round=4)), RoundClosed),
        (problem(InvalidUpdate("NaN")), InvalidUpdate),
        (httpx.Response(404, text="nginx"), None),
        (httpx.Response(413, content=b"\xff\xfe"), BodyTooLarge),
        (httpx.Response(400, json=["no", "problem"]), MalformedRequest),
        (httpx.Response(409, json={"type": "urn:fedpress:problem:state-locked"}), ServerError),
        (httpx.Response(201, json={"something": "else"}), TransportError),
    ],
)
def test_what_waiting_does_not_mend_is_raised_at_once(answer: Any, error: Any) -> None:
    server = Server(answer)
    with pytest.raises(error or Exception) as caught:
        server.transport().upload("a", BODY)
    assert server.slept == []
    if error is RoundClosed:
        assert caught.value.members == {"round": 4}


@pytest.mark.parametrize(
    "answer", [problem(NotFound("no route '/api/v1/tasks/t'")), httpx.Response(404, text="nginx")]
)
def test_a_path_in_the_url_is_named_where_nothing_answers_below_it(answer: httpx.Response) -> None:
    server = Server(answer)
    with pytest.raises(NotFound, match=r"the server at http://server:8000/api: ") as caught:
        server.transport(url="http://server:8000/api/").task("t")
    assert caught.value.hint.startswith("give the server's URL without the path /api")


def test_an_unknown_task_is_that_below_a_path_too() -> None:
    server = Server(problem(UnknownTask("no task t")))
    with pytest.raises(UnknownTask, match="no task t"):
        server.transport(url="http://server:8000/api").task("t")


def test_a_redirect_is_refused() -> None:
    server = Server(httpx.Response(307, headers={"Location": "http://elsewhere/"}))
    with pytest.raises(TransportError, match=r"elsewhere.*not followed"):
        server.transport().upload("a", BODY)
    assert len(server.requests) == 1


@pytest.mark.parametrize("told", ["member", "date"])
def test_a_wrong_clock_is_corrected_once(told: str) -> None:
    skewed = ClockSkew(server_time=NOW - 5000) if told == "member" else ClockSkew()
    answer = problem(skewed, Date=formatdate(NOW - 5000))
    server = Server(answer, ack(), ack())
    transport = server.transport()
    transport.upload("a", BODY)
    transport.upload("a", BODY)
    created = [parse_signature(dict(r.headers)).created - NOW for r in server.requests]
    assert created == [0, -5000, -5000]
    assert server.slept == [0.0]
    with pytest.raises(ClockSkew):
        Server(problem(skewed), problem(skewed)).transport().upload("a", BODY)


def test_a_bearer_token_goes_to_enrolment_only() -> None:
    key = to_base64url(KEY.public)
    answer = {"client_id": "c", "server_key": key, "server_time": NOW}
    server = Server(httpx.Response(201, json=answer), httpx.Response(204), httpx.Response(204))
    transport = server.transport()
    assert transport.enrol("secret", EnrolRequest(public_key=key)).client_id == "c"
    transport.report("t", EvaluationReport(model=DIGEST, num_examples=1, metrics={"a": 1.0}))
    assert transport.decline("a", "too-slow", 12.5) is None
    assert server.requests[-1].url.query == b"reason=too-slow&needed_seconds=12.500"
    assert [r.headers.get("authorization") for r in server.requests] == [
        "Bearer secret",
        None,
        None,
    ]


def test_nothing_new_is_an_answer() -> None:
    server = Server(httpx.Response(204, headers={"Retry-After": "5"}), httpx.Response(202))
    transport = server.transport()
    assert transport.check_in("t", CheckInRequest(wait=20)) == (None, 5.0, None)
    assert server.requests[0].extensions["timeout"]["read"] == 50
    assert transport.receipt("a") == 1.0


def check_in_answer(**changes: Any) -> dict[str, Any]:
    task = {"task": "t", "state": "running", "model": DIGEST, "spec": DIGEST, "round": 0}
    return {
        "task": {**task, "rounds": 3},
        "receipts": [],
        "assignment": None,
        "retry_after": 2.0,
        "server_time": NOW,
        **changes,
    }


def test_an_assignment_that_cannot_be_read_does_not_hide_the_rest() -> None:
    unreadable = {"assignment": "a7", "client_id": "c", "plan": {"lane": "masked"}}
    server = Server(
        httpx.Response(200, json=check_in_answer(assignment=unreadable)),
        httpx.Response(200, json=check_in_answer(assignment={}, receipts=3)),
        httpx.Response(200, json=check_in_answer(extra=1)),
        httpx.Response(200, json=check_in_answer()),
    )
    transport = server.transport()
    news = transport.check_in("t", CheckInRequest())
    assert news.response is not None
    assert news.response.assignment is None
    assert news.unfit is not None
    assert news.unfit[0] == "a7"
    second = transport.check_in("t", CheckInRequest())
    assert second.response is not None
    assert second.response.retry_after == 2.0
    assert len(server.slept) == 2


def test_tasks_are_listed() -> None:
    rows = [check_in_answer()["task"]]
    server = Server(
        httpx.Response(200, json=rows),
        httpx.Response(200, json=rows[0]),
        httpx.Response(200, json=3),
        httpx.Response(200, json=[{}]),
    )
    transport = server.transport()
    assert [task.task for task in transport.tasks()] == ["t"]
    assert transport.task("t").rounds == 3
    for _ in range(2):
        with pytest.raises(TransportError, match="something else"):
            transport.tasks()


# Models


def part(start: int, stop: int, total: int = 200, **options: Any) -> Callable[..., httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["range"] == f"bytes={start}-"
        span = f"bytes {start}-{total - 1}/{total}"
        return raw(BODY[start:stop], status=206, content_range=span, **options)

    return answer


def test_a_model_is_resumed_where_the_connection_broke() -> None:
    server = Server(
        raw(BODY[:50], content_length="200", fail=True),
        httpx.ConnectError("no route"),
        part(50, 120, content_length="150"),
        part(120, 200, content_length="80"),
    )
    transport = server.transport(retries=Retries(patience=1.0))
    assert transport.model(DIGEST, 1000, "digits") == BODY
    assert transport.traffic.body_down == 200
    assert transport.traffic.wire_down > 200


def test_a_server_without_ranges_sends_it_all_again() -> None:
    server = Server(raw(BODY[:50], fail=True), raw(BODY), raw(b"x" * 10, fail=True))
    server.answers.append(httpx.Response(416))
    server.answers.append(raw(BODY))
    transport = server.transport()
    assert transport.model(DIGEST, 1000, "digits") == BODY
    assert transport.model(DIGEST, 1000, "digits") == BODY
    server = Server(raw(BODY[:50], fail=True), raw(b"", status=206, content_range="x"), raw(BODY))
    assert server.transport().model(DIGEST, 1000, "digits") == BODY


def test_a_model_of_other_bytes_or_too_many_is_refused() -> None:
    server = Server(*(raw(BODY[::-1]) for _ in range(3)))
    with pytest.raises(DigestMismatch, match="other bytes"):
        server.transport().model(DIGEST, 1000, "digits")
    for answer in (raw(BODY, content_length="200"), raw(BODY)):
        with pytest.raises(BodyTooLarge):
            Server(answer).transport().model(DIGEST, 100, "digits")
    with pytest.raises(UnknownModel):
        Server(problem(UnknownModel())).transport().model(DIGEST, 100, "digits")


# Set-up and accounting


def test_every_attempt_is_counted() -> None:
    server = Server(httpx.ReadTimeout("slow"), httpx.ConnectError("refused"), ack())
    transport = server.transport()
    transport.upload("a", BODY)
    sent = server.requests[-1]
    head = f"PUT {sent.url.path} HTTP/1.1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in sent.headers.items()
    )
    assert transport.traffic.body_up == 400, "once lost on the way, once arrived"
    assert transport.traffic.wire_up == pytest.approx(2 * (len(head) + 2 + 200), abs=8)


@pytest.mark.parametrize(
    ("failure", "is_away"),
    [
        (problem(Unavailable(retry_after=3)), True),
        (problem(StorageFull(retry_after=3)), True),
        (httpx.ConnectError("refused"), True),
        (httpx.ReadTimeout("slow"), True),
        (httpx.WriteError("reset"), False),
        (httpx.Response(429), False),
    ],
)
def test_seconds_are_counted_in_which_the_server_was_away(failure: Any, is_away: bool) -> None:
    now = NOW

    def stalls(request: httpx.Request) -> httpx.Response:
        nonlocal now
        now += 30.0
        if isinstance(failure, Exception):
            raise failure
        return raw(failure.content, status=failure.status_code, **failure.headers)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    server = Server(stalls, stalls, ack())
    transport = HttpTransport(
        "http://server:8000", KEY, sleep=sleep, clock=lambda: now, random=lambda: 0.5,
        http=httpx.MockTransport(server),
    )  # fmt: skip
    transport.upload("a", BODY)
    assert transport.traffic.seconds_away == pytest.approx(now - NOW if is_away else 0.0)
    assert now > NOW + 60


@pytest.mark.parametrize(
    "url",
    ["server:8000", "ftp://server", "http://u:p@server", "http://", "http://s?x=1", "http://a b"],
)
def test_a_url_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="the server's URL"):
        HttpTransport(url, KEY)


def test_a_ca_bundle_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="CA bundle"):
        HttpTransport("https://server", KEY, verify=str(tmp_path / "missing.pem"))
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ConfigurationError, match="CA bundle"):
        HttpTransport("https://server", KEY, verify=str(tmp_path / "empty.pem"))


ONCE: dict[str, Any] = {
    "retries": Retries(patience=0.0),
    "sleep": lambda seconds: None,
    "random": lambda: 0.9,
}


def test_authorities_are_read_for_connections_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than all else at a start, and a transport in the process has none."""
    read, real = [], httpx.create_ssl_context

    def reads() -> ssl.SSLContext:
        read.append(real())
        return read[-1]

    monkeypatch.setattr(httpx, "create_ssl_context", reads)
    Server().transport().close()
    assert not read
    HttpTransport("https://server.test", KEY).close()
    assert len(read) == 1


def test_a_dead_proxy_is_told_as_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    given = HttpTransport("http://server.test", KEY, proxy="http://me:secret@127.0.0.1:9", **ONCE)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    found = HttpTransport("http://server.test", KEY, **ONCE)
    for transport in (given, found):
        with pytest.raises(TransportError, match=r"the proxy http://127.0.0.1:9, on the way") as e:
            transport.tasks()
        assert "NO_PROXY" in e.value.hint
        assert "secret" not in str(e.value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(TransportError, match=r"^http://127.0.0.1:9: "):
        HttpTransport("http://127.0.0.1:9", KEY, **ONCE).tasks()
    with pytest.raises(ConfigurationError, match="proxy server:3128"):
        HttpTransport("http://server.test", KEY, proxy="server:3128")


def proxy_of(transport: HttpTransport) -> bytes:
    """The host of the proxy to http://server."""
    way: Any = transport._link._http._transport_for_url(httpx.URL("http://server/"))
    return bytes(way._pool._proxy_url.host)


def test_a_proxy_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = HttpTransport("http://server", KEY, proxy="http://proxy:3128")
    assert proxy_of(transport) == b"proxy"
    transport.close()
    monkeypatch.setenv("HTTP_PROXY", "http://other:3128")
    transport = HttpTransport("http://server", KEY)
    assert proxy_of(transport) == b"other"
    transport.close()


def test_answers_are_bounded() -> None:
    big = json.dumps({"x": "y" * (9 * 2**20)})
    with pytest.raises(BodyTooLarge):
        Server(httpx.Response(200, text=big)).transport().task("t")
