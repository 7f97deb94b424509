"""Operators' tokens: made, shown once, expired, revoked, and wrong ones slowed down."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from fedpress_protocols.errors import (
    InvalidToken,
    MalformedRequest,
    NotFound,
    RoleRequired,
    TooManyRequests,
    UnknownTask,
)
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from fedpress_server.identity.limits import Budgets
from fedpress_server.identity.operators import SEEN_WITHIN
from fedpress_server.identity.refusals import BURST, PER_SECOND, Refusals
from fedpress_server.settings import Settings
from tests.devices import ADMIN, ADMIN_TOKEN, Operator, checked
from tests.server.in_process import Clock, Server, Start


def made(operator: Operator, role: str, **more: Any) -> tuple[str, Operator]:
    answer = operator.post("/v1/admin/operators", {"role": role, **more})
    return answer["operator_id"], Operator(operator.http, answer["token"])


def revoke(operator: Operator, operator_id: str) -> Any:
    path = f"/v1/admin/operators/{operator_id}"
    return checked(operator.http.delete(path, headers=operator.headers)).json()


@pytest.mark.both_databases
def test_a_token_is_made_used_listed_and_revoked(
    start: Start, operator: Operator, http: Server, dialect: str, clock: Clock
) -> None:
    name, viewer = made(operator, "viewer", note="for the wall", expires_in=60)
    assert viewer.get("/v1/tasks") == []
    with pytest.raises(
        RoleRequired,
        match="the role viewer is not allowed to do this; required: registrar or admin",
    ):
        viewer.token()
    (listed,) = operator.get("/v1/admin/operators")
    assert "token" not in listed
    assert (listed["operator_id"], listed["note"]) == (name, "for the wall")
    assert listed["created_by"] == "settings-token"
    assert revoke(operator, name)["revoked_at"] == clock.now
    clock.advance(1)
    assert revoke(operator, name)["revoked_at"] == clock.now - 1  # again, nothing is changed
    with pytest.raises(InvalidToken, match="was revoked"):
        viewer.get("/v1/tasks")
    with pytest.raises(NotFound):
        revoke(operator, "nobody")


@pytest.mark.both_databases
def test_the_last_round_that_can_be_asked_for_is_nobody_s(operator: Operator) -> None:
    for number in (2**31 - 1, 2**31 - 2):
        with pytest.raises(NotFound):
            operator.get(f"/v1/tasks/digits/rounds/{number}")


def test_refusals_that_could_not_be_written_are_told_later(clock: Clock) -> None:
    counted = Counter[str]()
    refusals = Refusals(clock, lambda reason: counted.update([reason]))
    for _ in range(3):
        refusals.note("role", "10.0.0.1", "ada")
    assert refusals.take() is not None
    assert refusals.take() is None
    refusals.note("role", "10.0.0.1", "ada")
    assert refusals.take() is not None
    refusals.put_back()
    refusals.note("role", "10.0.0.1", "ada")
    assert refusals._refused.total() == 2
    assert counted.total() == 5


def test_a_token_expires(operator: Operator, clock: Clock) -> None:
    _, viewer = made(operator, "viewer", expires_in=60)
    clock.advance(59)
    assert viewer.get("/v1/tasks") == []
    clock.advance(1)
    with pytest.raises(InvalidToken, match="has expired"):
        viewer.get("/v1/tasks")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"role": "root"},
        {"role": "viewer", "expires_in": 0},
        {"role": "viewer", "expires_in": 1e12},
        {"role": "viewer", "note": "x" * 257},
        {"role": "viewer", "note": "a\x00b"},
        {"role": "viewer", "token": "mine"},
    ],
)
def test_what_no_token_can_be_is_refused(operator: Operator, asked: dict[str, Any]) -> None:
    with pytest.raises(MalformedRequest):
        operator.post("/v1/admin/operators", asked)


def test_an_admin_makes_others_and_outlives_the_settings_token(
    start: Start, clock: Clock, tmp_path: Path
) -> None:
    with start() as http:
        _, admin = made(Operator(http), "admin")
        name, _ = made(admin, "operator")
        assert admin.get("/v1/admin/operators")[0]["created_by"]
    with start(admin_token=None) as http:
        admin.http = http
        assert {each["operator_id"] for each in admin.get("/v1/admin/operators")} >= {name}
        with pytest.raises(InvalidToken, match="the operator's token is wrong"):
            Operator(http).get("/v1/admin/operators")


def test_only_hashes_are_kept(start: Start, tmp_path: Path) -> None:
    with start() as http:
        operator = Operator(http)
        secret = operator.post("/v1/admin/operators", {"role": "admin"})["token"]
    folder = tmp_path / "data"
    for file in (each for each in folder.rglob("*") if each.is_file()):
        assert secret.encode() not in file.read_bytes(), file
        assert ADMIN_TOKEN.encode() not in file.read_bytes(), file
    with closing(sqlite3.connect(folder / "fedpress.db")) as connection:
        assert connection.execute("SELECT count(*) FROM operators").fetchone() == (1,)


def test_lists_are_paged(operator: Operator) -> None:
    names = {made(operator, "viewer")[0] for _ in range(5)}
    found, path = [], "/v1/admin/operators?limit=2"
    while path:
        answer = checked(operator.http.get(path, headers=operator.headers))
        assert len(answer.json()) <= 2
        found += [each["operator_id"] for each in answer.json()]
        path = answer.links.get("next", {}).get("url", "")
    assert found == sorted(names)


class TestServersOfOneDatabase:
    @pytest.fixture
    def pair(
        self, start: Start, cluster: Any, tmp_path: Path
    ) -> Iterator[tuple[Operator, Operator]]:
        url = cluster.new()
        with ExitStack() as stack:
            servers = [
                stack.enter_context(start(data_dir=tmp_path / f"{number}", database_url=url))
                for number in range(1)
            ]
            key = tmp_path / "0" / "server-key.pem"
            authority = tmp_path / "0" / "authority-key.pem"
            files = {"server_key_file": key, "authority_key_file": authority}
            servers.append(
                stack.enter_context(start(data_dir=tmp_path / "1", database_url=url, **files))
            )
            yield Operator(servers[0]), Operator(servers[1])
        cluster.give_back(url)

    def test_a_new_token_is_good_everywhere_at_once_and_a_revoked_one_within_a_second(
        self, pair: tuple[Operator, Operator], clock: Clock
    ) -> None:
        one, other = pair
        assert other.get("/v1/tasks") == []
        name, viewer = made(one, "viewer")
        elsewhere = Operator(other.http, viewer.headers["Authorization"].split()[1])
        assert elsewhere.get("/v1/tasks") == []
        revoke(one, name)
        with pytest.raises(InvalidToken):
            viewer.get("/v1/tasks")
        clock.advance(SEEN_WITHIN)
        with pytest.raises(InvalidToken, match="was revoked"):
            elsewhere.get("/v1/tasks")


def refusals(http: Server) -> dict[str, float]:
    text = http.get("/metrics", headers=ADMIN).text
    rows = [line for line in text.splitlines() if line.startswith("fedpress_operator_refusals_tot")]
    return {row.split('"')[1]: float(row.split()[-1]) for row in rows}


def test_wrong_tokens_are_slowed_down_and_right_ones_are_not(
    operator: Operator, http: Server, clock: Clock
) -> None:
    _, viewer = made(operator, "viewer")
    stranger = Operator(http, "fpo_" + "x" * 32)
    for _ in range(int(BURST)):
        with pytest.raises(InvalidToken):
            stranger.get("/v1/tasks")
    with pytest.raises(TooManyRequests) as told:
        stranger.get("/v1/tasks")
    assert 1 <= told.value.members["retry_after"] <= 1 / PER_SECOND
    assert viewer.get("/v1/tasks") == []
    assert operator.get("/v1/tasks") == []
    assert made(operator, "viewer")[1].get("/v1/tasks") == []
    assert refusals(http) == {"unknown": BURST, "too-many": 1}
    clock.advance(1 / PER_SECOND)
    with pytest.raises(InvalidToken):
        stranger.get("/v1/tasks")
    with pytest.raises(TooManyRequests):
        stranger.get("/v1/tasks")


def test_a_short_token_of_the_settings_cannot_be_tried_without_end(
    start: Start, clock: Clock
) -> None:
    """Who guesses it after the budget is spent is not told so; others are not kept out by that."""
    with start(admin_token="a-short-password") as http:
        operator = Operator(http, "a-short-password")
        _, admin = made(operator, "admin")
        for number in range(int(BURST)):
            with pytest.raises(InvalidToken):
                Operator(http, f"guess-{number}").get("/v1/tasks")
        with pytest.raises(TooManyRequests):
            operator.get("/v1/tasks")
        assert admin.get("/v1/tasks") == []
        clock.advance(1 / PER_SECOND)
        assert operator.get("/v1/tasks") == []


def test_a_budget_is_bounded_in_memory_and_a_flood_frees_nobody() -> None:
    budgets = Budgets(burst=3, per_second=0.1)
    for _ in range(5):
        budgets.spend("held back", 0.0)
    assert budgets.wait("held back", 0.0) == pytest.approx(10)
    for number in range(20_000):
        budgets.spend(f"one of many {number}", 1.0)
    assert len(budgets._spent) <= 4096
    assert budgets.wait("held back", 1.0) == pytest.approx(9)
    assert budgets.wait("nobody", 1.0) == 0
    assert budgets.wait("held back", 40.0) == 0


def test_the_digest_of_the_settings_tells_them_apart_and_holds_no_secret(tmp_path: Path) -> None:
    def digest(**settings: Any) -> str:
        return Settings(data_dir=tmp_path, **settings).public_digest

    assert digest() == digest(admin_token="x" * 16 + "y")
    assert digest(database_url="postgresql://a:4f0c9d2b@h/d") == digest()
    assert digest(port=8181) != digest()


@pytest.mark.both_databases
def test_a_task_s_configuration_can_be_read_as_it_stands(operator: Operator, model: Model) -> None:
    operator.begin(model, rounds=3, cohort={"size": 2, "minimum": 1}, round_seconds=60)
    task = operator.get("/v1/tasks")[0]["task"]
    found = operator.get(f"/v1/admin/tasks/{task}/configuration")
    assert (found["rounds"], found["round_seconds"]) == (3, 60)
    assert found["cohort"]["minimum"] == 1
    assert found["retention"] == {"last": 10, "every": None}  # a default, written out
    assert isinstance(found["seed"], int)  # drawn, where the creator gave none
    assert TaskConfig.model_validate(found, strict=False).task == task
    with pytest.raises(UnknownTask):
        operator.get("/v1/admin/tasks/nobody/configuration")
