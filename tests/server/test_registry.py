"""The registry of models: versions with their lineage, aliases, retention, and what it may take."""

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedpress_protocols import __version__
from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    MalformedRequest,
    NotFound,
    Unavailable,
    UnknownModel,
)
from fedpress_protocols.messages import RetentionTerms, TaskSummary
from fedpress_protocols.model import Model
from fedpress_protocols.registry import Alias, Collected, ModelLineage, ModelVersion
from fedpress_server.registry import versions as registry
from fedpress_server.registry.retention import keeps
from fedpress_server.registry.versions import MOST_MOVES
from fedpress_server.storage import schema
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.tables import alias_moves
from tests.devices import Device, Operator, checked
from tests.lengths import examples
from tests.server.in_process import Clock, Enrolled, Server, Start, include_one, ones

pytestmark = pytest.mark.both_databases

ALONE = {"size": 1, "minimum": 1}
MONTH = 30 * 86400.0


def begin(operator: Operator, model: Model, task: str = "digits", **config: Any) -> None:
    operator.begin(model, task, **{"cohort": ALONE, "rounds": 50} | config)


def train(device: Device, model: Model, rounds: int, task: str = "digits", by: float = 1.0) -> str:
    """So many rounds by this device alone; the model after them."""
    made = ""
    for _ in range(rounds):
        answer = device.check_in(task, include_one(device, model, task, by), wait=30)
        assert answer is not None
        made = answer.task.model
    return made


def versions(operator: Operator, task: str = "digits", query: str = "") -> list[ModelVersion]:
    found = operator.get(f"/v1/admin/tasks/{task}/versions{query}")
    return [ModelVersion.model_validate(each) for each in found]


def version(operator: Operator, which: str, task: str = "digits") -> ModelLineage:
    return ModelLineage.model_validate(operator.get(f"/v1/admin/tasks/{task}/versions/{which}"))


def promote(
    operator: Operator, number: int, alias: str = "production", expect: Any = "any"
) -> Alias:
    body = {"version": number, "expect": expect}
    path = f"/v1/admin/tasks/digits/aliases/{alias}"
    answer = operator.http.put(path, headers=operator.headers, json=body)
    return Alias.model_validate(checked(answer).json())


def roll_back(operator: Operator, alias: str = "production", expect: Any = "any") -> Alias:
    path = f"/v1/admin/tasks/digits/aliases/{alias}/rollback"
    return Alias.model_validate(operator.post(path, {"expect": expect}))


def collect(operator: Operator, *, dry_run: bool = False) -> Collected:
    return Collected.model_validate(operator.post("/v1/admin/models/collect", {"dry_run": dry_run}))


def gone(found: Collected, task: str = "digits") -> list[int]:
    return sorted(each.versions[task] for each in found.models)


# Versions


@pytest.mark.both_databases
def test_every_committed_round_is_a_version_with_its_lineage(
    operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    begin(operator, model, cohort={"size": 2, "minimum": 2})
    devices = [enrolled() for _ in range(2)]
    bodies = []
    for device, by in zip(devices, (1.0, 2.0), strict=True):
        assignment = device.assignment("digits")
        bodies.append(device.body_for(assignment, ones(model, by)))
        device.upload(assignment.assignment, bodies[-1])
    answer = devices[0].check_in("digits", wait=30)
    assert answer is not None
    first, second = version(operator, "0"), version(operator, "1")
    assert (first.model, first.parent, first.num_updates) == (model.digest, None, 0)
    assert (second.parent, second.ancestors) == (model.digest, (model.digest,))
    assert second.model == answer.task.model
    assert second.updates == tuple(sorted(hashlib.sha256(body).hexdigest() for body in bodies))
    assert (second.attempt, second.num_updates, second.code) == (1, 2, __version__)
    assert second.created_at == clock.now
    assert second.is_newest
    assert not first.is_newest
    assert second.config == first.config != "0" * 64


def test_an_update_that_was_not_included_is_in_no_version(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    begin(operator, model, cohort={"size": 2, "minimum": 1})
    there, late = enrolled(), enrolled()
    included = there.assignment("digits")
    late.assignment("digits")
    there.upload(included.assignment, there.body_for(included, ones(model)))
    clock.advance(61)
    http.tick()
    assert there.check_in("digits", wait=30) is not None
    assert version(operator, "1").num_updates == 1


def test_a_list_of_versions_goes_on_where_it_ended(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    begin(operator, model)
    train(enrolled(), model, 5)
    assert [each.version for each in versions(operator)] == [5, 4, 3, 2, 1, 0]
    page = versions(operator, query="?limit=2")
    assert [each.version for each in page] == [5, 4]
    assert [each.version for each in versions(operator, query="?limit=2&before=4")] == [3, 2]
    assert len(version(operator, "newest").ancestors) == 5


def test_a_version_that_is_not_there_is_not_found(operator: Operator, model: Model) -> None:
    begin(operator, model)
    for which in ("7", "best", "production", "999999999999"):
        with pytest.raises(NotFound):
            version(operator, which)
    with pytest.raises(MalformedRequest):
        version(operator, "%20")
    with pytest.raises(NotFound):
        versions(operator, "nothing")


@pytest.mark.both_databases
def test_the_best_version_is_the_one_that_devices_measured_best(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    begin(operator, model, evaluation={"metric": "accuracy", "goal": "highest"})
    device = enrolled()
    for accuracy in (0.5, 0.9, 0.2):
        made = train(device, model, 1)
        body = {"model": made, "num_examples": 5, "metrics": {"accuracy": accuracy}}
        device.json("POST", "/v1/tasks/digits/evaluations", json.dumps(body))
    train(device, model, 1)
    assert version(operator, "best").version == 2
    assert [each.version for each in versions(operator) if each.is_best] == [2]


def test_a_continued_task_goes_on_with_its_numbers(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    begin(operator, model, rounds=2)
    device = enrolled()
    train(device, model, 2)
    other = model.with_parameters(model.parameters + 5)
    operator.bring(other)
    more = {"after_round": 2, "rounds": 1, "model": other.digest}
    operator.post("/v1/admin/tasks/digits/continue", more)
    train(device, model, 1)
    third = version(operator, "3")
    assert third.parent == other.digest
    assert third.ancestors == (other.digest,)


# Aliases


@pytest.mark.both_databases
def test_an_alias_is_promoted_and_rolled_back_to_where_it_was(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    begin(operator, model)
    train(enrolled(), model, 4)
    for number in (1, 3, 4):
        assert promote(operator, number).version == number
    assert version(operator, "production").version == 4
    assert roll_back(operator).version == 3
    promote(operator, 2)
    assert roll_back(operator).version == 3
    assert roll_back(operator).version == 1
    with pytest.raises(Conflict, match="nothing to roll back to"):
        roll_back(operator)
    found = [Alias.model_validate(each) for each in operator.get("/v1/admin/tasks/digits/aliases")]
    assert [(move.version, move.undone_at is None) for move in found[0].history] == [
        *((1, True), (3, False), (4, False), (2, False)),
    ]
    assert [each.aliases for each in versions(operator) if each.version == 1] == [("production",)]


def test_a_move_happens_only_from_where_it_was_expected_to(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    begin(operator, model)
    train(enrolled(), model, 3)
    promote(operator, 1, expect="none")
    with pytest.raises(Conflict, match="points to version 1, not to nothing"):
        promote(operator, 2, expect="none")
    promote(operator, 2, expect=1)
    with pytest.raises(Conflict, match="points to version 2, not to version 1") as caught:
        promote(operator, 3, expect=1)
    assert caught.value.members["version"] == 2
    with pytest.raises(Conflict, match="points to version 2"):
        roll_back(operator, expect=1)
    assert roll_back(operator, expect=2).version == 1
    with pytest.raises(Conflict):  # the same request again does not go back twice
        roll_back(operator, expect=2)


@pytest.mark.both_databases
def test_of_two_promotions_that_expect_the_same_one_moves_the_alias(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    begin(operator, model)
    train(enrolled(), model, 3)
    promote(operator, 1)
    outcomes: list[str] = []

    def move(number: int) -> None:
        try:
            promote(operator, number, expect=1)
            outcomes.append("moved")
        except Conflict:
            outcomes.append("refused")

    threads = [threading.Thread(target=move, args=(number,)) for number in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["moved", "refused"]


@pytest.mark.both_databases
def test_of_an_alias_that_moves_often_the_newest_moves_are_shown(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, dialect: str
) -> None:
    """And it points to where it has stood before them, if all of them were undone."""
    begin(operator, model)
    train(enrolled(), model, 2)
    promote(operator, 1)
    promote(operator, 2)
    promote(operator, 0, "candidate")
    move = {"task": "digits", "alias": "production", "version": 0, "moved_at": 1.0}
    undone = [move | {"seq": seq, "undone_at": 2.0} for seq in range(3, 1503)]
    http.call(http.app.services.database.write, lambda c: c.execute(sa.insert(alias_moves), undone))
    found = [Alias.model_validate(each) for each in operator.get("/v1/admin/tasks/digits/aliases")]
    assert [(each.alias, each.version) for each in found] == [("candidate", 0), ("production", 2)]
    assert len(found[1].history) == MOST_MOVES
    assert {each.version for each in found[1].history} == {0}
    assert version(operator, "production").version == 2
    assert roll_back(operator, expect=2).version == 1
    with pytest.raises(Conflict, match="has only ever pointed to"):
        roll_back(operator, expect=1)
    assert version(operator, "1").aliases == ("production",)


def test_a_promotion_again_is_no_move(operator: Operator, enrolled: Enrolled, model: Model) -> None:
    begin(operator, model)
    train(enrolled(), model, 2)
    promote(operator, 1)
    promote(operator, 2)
    promote(operator, 2)
    assert roll_back(operator).version == 1


def test_names_that_mean_a_version_already_are_no_aliases(operator: Operator, model: Model) -> None:
    begin(operator, model)
    for name in ("newest", "best", "12"):
        with pytest.raises(ConfigurationError, match="already selects a version"):
            promote(operator, 0, name)
    with pytest.raises(NotFound, match="no version 9"):
        promote(operator, 9)
    with pytest.raises(NotFound, match="no alias"):
        roll_back(operator, "candidate")


def test_the_registry_is_for_operators_alone(http: Server, operator: Operator) -> None:
    for path in ("/v1/admin/tasks/digits/versions", "/v1/admin/tasks/digits/aliases"):
        assert http.get(path).status_code == 401
    assert http.post("/v1/admin/models/collect").status_code == 401


# Retention


@pytest.fixture
def kept(start: Start, clock: Clock) -> Iterator[Server]:
    """A server whose grace is an hour."""
    with start(retention_grace=3600.0) as http:
        yield http


def device_of(http: Server, clock: Clock) -> Device:
    device = Device(http, clock)
    device.enrol(Operator(http).token())
    return device


def files(http: Server) -> set[str]:
    return {name.rpartition("/")[2].partition(".")[0] for name in payloads(http).names("models")}


def payloads(http: Server) -> Payloads:
    found: Payloads = http.app.services.payloads
    return found


@pytest.mark.both_databases
def test_a_policy_gives_up_what_it_does_not_keep_and_nothing_else(
    kept: Server, clock: Clock, model: Model
) -> None:
    operator, device = Operator(kept), device_of(kept, clock)
    begin(operator, model, retention={"last": 2, "every": 4})
    train(device, model, 9)
    promote(operator, 3)
    promote(operator, 5)
    clock.advance(MONTH)
    before = files(kept)
    told = collect(operator, dry_run=True)
    assert gone(told) == [1, 2, 6, 7]  # not 3 and 5, nor 4 and 8, nor 9 and the first
    assert files(kept) == before
    done = collect(operator)
    assert done.models == told.models
    assert done.num_bytes == sum(each.num_bytes for each in told.models) > 0
    assert before - files(kept) == {each.model for each in told.models}
    assert collect(operator).models == ()
    rows = {each.version: each for each in versions(operator)}
    assert sorted(n for n, each in rows.items() if each.collected_at == clock.now) == [1, 2, 6, 7]
    assert train(device, model, 1)


def test_by_default_the_newest_ten_versions_stay(kept: Server, clock: Clock, model: Model) -> None:
    operator, device = Operator(kept), device_of(kept, clock)
    begin(operator, model)
    train(device, model, 13)
    clock.advance(MONTH)
    assert gone(collect(operator)) == [1, 2, 3]


def test_without_a_policy_everything_stays(kept: Server, clock: Clock, model: Model) -> None:
    operator, device = Operator(kept), device_of(kept, clock)
    begin(operator, model, retention=None)
    train(device, model, 12)
    clock.advance(MONTH)
    assert collect(operator).models == ()


def test_what_is_younger_than_the_grace_stays(kept: Server, clock: Clock, model: Model) -> None:
    operator, device = Operator(kept), device_of(kept, clock)
    begin(operator, model, retention={"last": 1})
    train(device, model, 3)
    clock.advance(3000)
    train(device, model, 3)
    clock.advance(3000)
    assert gone(collect(operator)) == [1, 2, 3]
    clock.advance(3000)
    assert gone(collect(operator)) == [4, 5]


def test_the_best_model_stays(kept: Server, clock: Clock, model: Model) -> None:
    operator, device = Operator(kept), device_of(kept, clock)
    terms = {"metric": "accuracy", "goal": "highest"}
    begin(operator, model, retention={"last": 1}, evaluation=terms)
    for accuracy in (0.5, 0.9, 0.2):
        made = train(device, model, 1)
        body = {"model": made, "num_examples": 5, "metrics": {"accuracy": accuracy}}
        device.json("POST", "/v1/tasks/digits/evaluations", json.dumps(body))
    train(device, model, 2)
    clock.advance(MONTH)
    assert gone(collect(operator)) == [1, 3, 4]


def test_what_an_assignment_that_is_open_was_given_stays(
    kept: Server, clock: Clock, model: Model
) -> None:
    """In an asynchronous task a slow device still trains a model of long ago."""
    operator, quick, slow = Operator(kept), device_of(kept, clock), device_of(kept, clock)
    begin(
        operator,
        model,
        retention={"last": 1},
        strategy={"id": "fedbuff"},
        asynchronous={"concurrency": 4, "max_staleness": 40},
        round_seconds=10 * MONTH,
    )
    train(quick, model, 2)
    held = slow.assignment("digits")
    train(quick, model, 3)
    clock.advance(MONTH)
    assert gone(collect(operator)) == [1, 3, 4]
    assert slow.model(held.plan.model).digest == held.plan.model
    slow.upload(held.assignment, slow.body_for(held, ones(model)))


def test_a_model_of_two_tasks_goes_when_both_give_it_up(
    kept: Server, clock: Clock, model: Model
) -> None:
    operator, device = Operator(kept), device_of(kept, clock)
    begin(operator, model, retention={"last": 1})
    begin(operator, model, "twin", retention={"last": 3})
    train(device, model, 4)
    train(device, model, 4, "twin")
    assert {each.model for each in versions(operator)} == {
        each.model for each in versions(operator, "twin")
    }
    clock.advance(MONTH)
    found = collect(operator)
    assert [each.versions for each in found.models] == [{"digits": 1, "twin": 1}]


def test_a_task_that_begins_with_anothers_version_keeps_it(
    kept: Server, clock: Clock, model: Model
) -> None:
    operator, device = Operator(kept), device_of(kept, clock)
    begin(operator, model, retention={"last": 1})
    second = train(device, model, 2)
    train(device, model, 3)
    fields = {
        "task": "next",
        "model": second,
        "rounds": 1,
        "profiles": [{"name": "whole", "compressor": {"id": "none"}}],
        "cohort": ALONE,
    }
    operator.post("/v1/admin/tasks", fields)
    clock.advance(MONTH)
    assert gone(collect(operator)) == [1, 3, 4]


def test_whoever_asks_for_what_is_gone_is_told_why(
    kept: Server, clock: Clock, model: Model
) -> None:
    operator, device = Operator(kept), device_of(kept, clock)
    begin(operator, model, retention={"last": 1})
    train(device, model, 3)
    clock.advance(MONTH)
    lost = next(iter(collect(operator).models)).model
    with pytest.raises(UnknownModel, match="given up by the retention") as caught:
        device.model(lost)
    assert "newest model" in caught.value.hint
    with pytest.raises(Conflict, match="was deleted by"):
        promote(operator, 1)
    with pytest.raises(UnknownModel):
        operator.post(
            "/v1/admin/tasks/digits/continue", {"after_round": 3, "rounds": 1, "model": lost}
        )


def test_retention_leaves_the_model_before_the_last_that_ef21_continues_with(
    kept: Server, clock: Clock, model: Model
) -> None:
    operator, device = Operator(kept), device_of(kept, clock)
    profiles = [{"name": "only", "compressor": {"id": "ef21"}}]
    begin(operator, model, rounds=4, retention={"last": 1}, profiles=profiles)
    more = {"after_round": 4, "rounds": 1, "model": train(device, model, 4)}
    clock.advance(MONTH)
    assert gone(collect(operator)) == [1]
    operator.post("/v1/admin/tasks/digits/continue", more)
    train(device, model, 1)


@pytest.mark.both_databases
def test_what_an_operator_brings_again_is_there_again_and_stays(
    kept: Server, clock: Clock, model: Model
) -> None:
    operator, device = Operator(kept), device_of(kept, clock)
    begin(operator, model, retention={"last": 1})
    saved = device.model(train(device, model, 1))
    train(device, model, 2)
    clock.advance(MONTH)
    assert gone(collect(operator)) == [1, 2]
    operator.bring(saved)
    assert device.model(saved.digest).digest == saved.digest
    clock.advance(MONTH)
    assert collect(operator).models == ()
    assert [e.version for e in versions(operator) if e.collected_at is not None] == [2]


@pytest.mark.both_databases
def test_a_round_that_makes_a_model_again_has_its_file(
    kept: Server, clock: Clock, model: Model
) -> None:
    """Another task with the same seed makes bit for bit what the first one has given up."""
    operator, device = Operator(kept), device_of(kept, clock)
    begin(operator, model, retention={"last": 1})
    train(device, model, 3)
    clock.advance(MONTH)
    lost = [each.model for each in collect(operator).models]
    begin(operator, model, "again")
    made = train(device, model, 1, "again")
    assert made in lost
    assert device.model(made).digest == made
    assert {each.version for each in versions(operator) if each.collected_at} == {2}


def test_a_start_removes_what_a_killed_collection_left(
    start: Start, clock: Clock, model: Model
) -> None:
    with start(retention_grace=3600.0) as http:
        operator, device = Operator(http), device_of(http, clock)
        begin(operator, model, retention={"last": 1})
        train(device, model, 3)
        clock.advance(MONTH)
        dropped: list[str] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(payloads(http), "drop", dropped.append)
            lost = {each.model for each in collect(operator).models}
        assert lost <= files(http)
        assert {model_name(digest) for digest in lost} == set(dropped)
    with start(retention_grace=3600.0) as http:
        assert collect(Operator(http)).models == ()
        assert not lost & files(http)


def test_retention_is_collected_by_itself_once_it_is_time(
    start: Start, clock: Clock, model: Model
) -> None:
    with start(retention_grace=3600.0, retention_seconds=7200.0) as http:
        operator, device = Operator(http), device_of(http, clock)
        begin(operator, model, retention={"last": 1}, round_seconds=MONTH)
        train(device, model, 3)
        clock.advance(7000)
        http.tick()
        http.call(_settled)
        assert not any(each.collected_at for each in versions(operator))
        clock.advance(300)
        http.tick()
        for _ in range(100):
            http.call(_settled)
            if len(files(http)) == 2:
                break
        assert len(files(http)) == 2  # the first and the newest


async def _settled() -> None:
    await asyncio.sleep(0.02)


@given(st.integers(1, 6), st.one_of(st.none(), st.integers(1, 7)), st.integers(0, 40))
def test_a_policy_keeps_the_last_and_one_of_every(last: int, every: int | None, top: int) -> None:
    terms = RetentionTerms(last=last, every=every)
    kept = {number for number in range(top + 1) if keeps(terms, number, top - number)}
    due = {0, *range(max(0, top - last + 1), top + 1)}
    if every is not None:
        due |= set(range(0, top + 1, every))
    assert kept == due
    assert all(keeps(None, number, top - number) for number in range(top + 1))


@settings(
    max_examples=examples(3, 6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.sampled_from(("promote", "undo", "train", "collect")), max_size=12))
def test_no_list_of_actions_takes_what_is_needed(
    start: Start, clock: Clock, model: Model, tmp_path_factory: Any, actions: list[str]
) -> None:
    """After every action: the newest, what aliases point to or may go back to, and every version
    that is not marked, have their files."""
    folder: Path = tmp_path_factory.mktemp("data")
    with start(data_dir=folder, retention_grace=1.0) as http:
        operator, device = Operator(http), device_of(http, clock)
        begin(operator, model, retention={"last": 2})
        train(device, model, 1)
        for place, action in enumerate(actions):
            rows = [each for each in versions(operator) if each.collected_at is None]
            if action == "promote":
                promote(operator, rows[place % len(rows)].version)
            elif action == "undo":
                with contextlib.suppress(Conflict, NotFound):
                    roll_back(operator)
            elif action == "train":
                train(device, model, 1, by=float(place + 2))
            else:
                clock.advance(10)
                collect(operator)
            there = files(http)
            rows = versions(operator)
            assert rows[0].model in there
            for each in rows:
                assert (each.model in there) == (each.collected_at is None)
            for alias in operator.get("/v1/admin/tasks/digits/aliases"):
                assert {move["model"] for move in alias["history"]} <= there


# Upgrades


@pytest.mark.both_databases
def test_versions_of_rounds_before_the_registry_are_made_by_the_migration(
    start: Start, clock: Clock, model: Model
) -> None:
    with start() as http:
        operator, device = Operator(http), device_of(http, clock)
        begin(operator, model)
        train(device, model, 2)
        before = [version(operator, str(number)) for number in (2, 1, 0)]
        url = http.app.services.settings.resolved_database_url
    engine = sa.create_engine(url)
    config = schema._config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0011")
        connection.execute(sa.text("DELETE FROM schema_releases"))
    engine.dispose()
    with start() as http:
        after = [version(Operator(http), str(number)) for number in (2, 1, 0)]
    unknown = {"config": "0" * 64, "code": ""}
    assert after == [each.model_copy(update=unknown) for each in before]


def test_a_task_summary_and_the_registry_agree(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    begin(operator, model)
    train(enrolled(), model, 2)
    told = TaskSummary.model_validate(operator.get("/v1/tasks/digits"))
    assert version(operator, "newest").model == told.model
    assert version(operator, "newest").version == told.round


def test_keeping_again_what_was_removed_meanwhile_asks_for_it_once_more(
    kept: Server, clock: Clock, model: Model
) -> None:
    operator, device = Operator(kept), device_of(kept, clock)
    begin(operator, model, retention={"last": 1})
    train(device, model, 2)
    clock.advance(MONTH)
    lost = collect(operator).models[0].model
    database = kept.app.services.database

    async def keep() -> None:
        await database.write(lambda c: registry.keep_again(c, payloads(kept), {lost}))

    with pytest.raises(Unavailable, match="was being removed"):
        kept.call(keep)
