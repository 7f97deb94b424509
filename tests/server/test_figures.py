"""What is kept of a task's history beside it: the same figures as from all of it, for less."""

import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from statistics import median
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Connection

from fedpress_protocols.messages import EvaluationReport, EvaluationTerms, RoundStatus
from fedpress_protocols.model import Model
from fedpress_server.coordination.adaptive import Bodies, bodies_of
from fedpress_server.coordination.commands import ReceivedUpload
from fedpress_server.coordination.journal import note_delivered, write_received
from fedpress_server.rounds.selection import Candidate
from fedpress_server.storage import evaluation, participants, records
from fedpress_server.storage.database import Database
from fedpress_server.storage.engines import opened
from fedpress_server.storage.evaluation import Score, best, reason_to_stop
from fedpress_server.storage.records import AssignmentRecord, ModelRecord, UploadRecord
from fedpress_server.storage.scoreboard import Scoreboard
from fedpress_server.storage.tables import (
    assignments,
    class_counts,
    evaluations,
    measures,
    models,
    rounds,
    uploads,
)
from fedpress_strategies.policies.facts import Tally
from tests.devices import Device, Operator
from tests.server.in_process import Enrolled, Server

both_databases = pytest.mark.both_databases
TASK = "digits"
TERMS = EvaluationTerms(metric="accuracy", goal="highest", patience=3, least_clients=2)


def digest_of(name: object) -> str:
    return sha256(str(name).encode()).hexdigest()


# The same from the whole history, in SQL alone

_SAME = sa.and_(
    *(evaluations.c[name] == measures.c[name] for name in ("task", "model", "client_id"))
)
_MEAN = sa.func.sum(evaluations.c.num_examples * measures.c.value) / sa.func.sum(
    evaluations.c.num_examples
)
_IS_COUNTED = measures.c.value.between(-evaluation.MAX_METRIC, evaluation.MAX_METRIC)


def all_scores(connection: Connection, metric: str, least: int) -> list[Score]:
    found = connection.execute(
        sa.select(measures.c.model, _MEAN)
        .join(evaluations, _SAME)
        .where(measures.c.task == TASK, measures.c.metric == metric, _IS_COUNTED)
        .group_by(measures.c.model)
        .having(sa.func.count() >= least)
    )
    values = {model: mean for model, mean in found}
    history = connection.execute(
        sa.select(rounds.c.round, rounds.c.base_model, rounds.c.model)
        .where(rounds.c.task == TASK)
        .order_by(rounds.c.round, rounds.c.attempt)
    ).all()
    models: dict[str, int] = {}
    for row in history:
        models.setdefault(row.base_model, row.round - 1)
        if row.model is not None:
            models.setdefault(row.model, row.round)
    return [Score(number, model, values.get(model)) for model, number in models.items()]


def all_counted(connection: Connection, least: int) -> dict[str, dict[str, Tally]]:
    row = class_counts.c
    enough = (
        sa.select(row.model)
        .where(row.task == TASK)
        .group_by(row.model)
        .having(sa.func.count(sa.distinct(row.client_id)) >= least)
    )
    found = connection.execute(
        sa.select(row.model, row.label, sa.func.sum(row.num_examples), sa.func.sum(row.correct))
        .where(row.task == TASK, row.model.in_(enough))
        .group_by(row.model, row.label)
    )
    by_model: dict[str, dict[str, Tally]] = {}
    for model, label, num_examples, correct in found:
        by_model.setdefault(model, {})[label] = Tally(int(num_examples), int(correct))
    return by_model


def all_candidates(connection: Connection, client_ids: Sequence[str]) -> list[Candidate]:
    whose, upload_of = assignments.c.client_id, assignments.c.assignment == uploads.c.assignment
    given = connection.execute(
        sa.select(whose, sa.func.count(), sa.func.count(uploads.c.assignment))
        .select_from(assignments.outerjoin(uploads, upload_of))
        .where(assignments.c.task == TASK)
        .group_by(whose)
    )
    counts = {client_id: (num_given, delivered) for client_id, num_given, delivered in given}
    staged = sa.select(whose, uploads.c.received_at.label("at")).join(uploads, upload_of)
    staged = staged.where(assignments.c.task == TASK)
    examples = staged.add_columns(uploads.c.num_examples.label("value"))
    reported = staged.add_columns(uploads.c.loss.label("value")).where(uploads.c.loss.is_not(None))
    measured = (
        sa.select(measures.c.client_id, evaluations.c.reported_at.label("at"), measures.c.value)
        .join(evaluations, _SAME)
        .where(measures.c.task == TASK, measures.c.metric == "loss", _IS_COUNTED)
    )

    def newest(told: Any) -> dict[str, Any]:
        row = told.subquery().c
        rank = sa.func.row_number().over(partition_by=row.client_id, order_by=row.at.desc())
        ranked = sa.select(row.client_id, row.value, rank.label("rank")).subquery().c
        query = sa.select(ranked.client_id, ranked.value).where(ranked.rank == 1)
        return {client_id: value for client_id, value in connection.execute(query)}

    num_examples = newest(examples.where(uploads.c.num_examples > 0))
    loss = newest(sa.union_all(reported, measured))
    return [
        Candidate(each, num_examples.get(each), loss.get(each), *counts.get(each, (0, 0)))
        for each in client_ids
    ]


# A history


@dataclass
class History:
    """A task's rows, written as the server writes them, by chance."""

    database: Database
    call: Callable[..., Any]
    clients: list[str]
    first: str
    chance: random.Random
    number: int = 1
    attempt: int = 1
    models: list[str] = field(default_factory=list)
    at: float = 1e9
    open: list[tuple[tuple[str, int, int], str, str]] = field(default_factory=list)
    given: set[tuple[tuple[str, int, int], str]] = field(default_factory=set)
    count: int = 0

    def __post_init__(self) -> None:
        self.models.append(self.first)

    def write(self, work: Callable[[Connection], Any]) -> Any:
        return self.call(self.database.write, work)

    def read(self, work: Callable[[Connection], Any]) -> Any:
        return self.call(self.database.read, work)

    def tick(self) -> float:
        """Another time, now and then of a clock that was set back; never one that was before."""
        self.count += 1
        self.at += self.chance.choice([1.0, 1.0, 5.0, -3.0])
        return self.at + self.count / 4096

    def step(self) -> None:
        kinds = [self.assign, self.assign, self.upload, self.report, self.report, self.close]
        self.chance.choice(kinds)()

    @property
    def key(self) -> tuple[str, int, int]:
        return TASK, self.number, self.attempt

    def assign(self) -> None:
        client_id, now = self.chance.choice(self.clients), self.tick()
        if (self.key, client_id) in self.given:
            return
        self.given.add((self.key, client_id))
        name, key = f"a{self.count}", self.key

        def work(connection: Connection) -> None:
            row = AssignmentRecord(name, *key, client_id, self.count, "whole", now, None)
            records.add_assignments(connection, [row])
            participants.add_assignment(connection, TASK, client_id)

        self.write(work)
        self.open.append((key, name, client_id))

    def upload(self) -> None:
        now, mine = self.tick(), [each for each in self.open if each[0] == self.key]
        if not mine:
            return
        taken = self.chance.choice(mine)
        key, name, client_id = taken
        loss = self.chance.choice([None, self.chance.random()])
        row = UploadRecord(name, digest_of(name), 10, self.chance.randrange(3), 0.0, loss)
        received = [ReceivedUpload(key, row, {"received": 1}, (client_id, None))]

        def work(connection: Connection) -> None:
            write_received(connection, received, now)
            note_delivered(connection, received, now)

        self.write(work)
        self.open.remove(taken)

    def report(self) -> None:
        client_id, now = self.chance.choice(self.clients), self.tick()
        recent = self.models[-3:] if self.chance.random() < 0.7 else self.models
        metrics = {
            name: self.chance.choice([self.chance.random(), 10.0 * self.chance.random(), 1e16])
            for name in ("accuracy", "loss", "other")
            if self.chance.random() < 0.7
        }
        counts = {"num_examples": 4, "correct": self.chance.randrange(5)}
        report = EvaluationReport.model_validate(
            {
                "model": self.chance.choice(recent),
                "num_examples": self.chance.randrange(8, 100),
                "metrics": metrics,
                "classes": {"a": counts, "b": counts} if self.chance.random() < 0.5 else {},
            }
        )

        def work(connection: Connection) -> None:
            evaluation.keep(connection, TASK, client_id, report, "", now)
            evaluation.note_loss(connection, TASK, client_id, report, now)

        self.write(work)

    def close(self) -> None:
        """The attempt ends, with a model, with one that there was before, or with none."""
        now, key = self.tick(), self.key
        ends = self.chance.choice(["none", "model", "model", "model", "old", "stop"])
        made = None
        if ends in ("model", "stop"):
            made = digest_of(f"model {self.count}")
        elif ends == "old":
            made = self.chance.choice(self.models)
        base = self.models[-1] if made is None else made
        if ends == "stop" and self.chance.random() < 0.5:  # and goes on from another
            base = digest_of(f"brought {self.count}")
        self.number, self.attempt = key[1] + (made is not None), 1 if made else key[2] + 1
        begun = self.key

        def work(connection: Connection) -> None:
            for each in {base, made or base}:
                records.add_model(connection, ModelRecord(each, "s", 1, now))
            state = "abandoned" if made is None else "committed"
            why = {"stop": "accuracy was 0.5 after round 2", "none": "too few"}.get(ends, "")
            records.update_round(connection, key, state=state, reason=why, model=made)
            records.open_round(
                connection,
                begun,
                plan="{}",
                base_model=base,
                size=1,
                minimum=1,
                opened_at=now,
                deadline=now,
            )

        self.write(work)
        self.models += [each for each in (made, base) if each is not None]

    def board(self) -> Scoreboard:
        return Scoreboard(TASK, ("accuracy", "loss"), has_classes=True)

    def check(self, board: Scoreboard) -> None:
        def compare(connection: Connection) -> None:
            for metric, least in (("accuracy", 2), ("loss", 1)):
                everything = all_scores(connection, metric, least)
                found = board.scores(connection, metric, least)
                known = [each for each in everything if each.value is not None]
                if connection.dialect.name == "postgresql":  # adds in another order each time
                    names = [(each.round, each.model) for each in known]
                    assert [(each.round, each.model) for each in found] == names
                    values = [each.value for each in known]
                    assert [each.value for each in found] == pytest.approx(values, rel=1e-13)
                    continue
                assert found == known
                if metric == "accuracy":
                    assert best(found, TERMS) == best(everything, TERMS)
                    assert reason_to_stop(found, TERMS) == reason_to_stop(everything, TERMS)
            numbers = {each.model: each.round for each in everything}
            counted = all_counted(connection, 2)
            found_classes = board.counted(connection, 2)
            assert set(found_classes) == {numbers[model] for model in counted}
            for model, classes in counted.items():
                if list(numbers.values()).count(numbers[model]) == 1:
                    assert found_classes[numbers[model]] == classes
            assert participants.candidates(connection, TASK, self.clients) == all_candidates(
                connection, self.clients
            )
            stopped = sa.select(sa.func.max(rounds.c.round)).where(
                rounds.c.task == TASK, rounds.c.state == "committed", rounds.c.reason != ""
            )
            last = connection.execute(stopped).scalar_one() or 0
            assert evaluation.last_stop(connection, TASK) == last
            assert evaluation.place_of(connection, TASK, digest_of("nobody's")) is None

        self.read(compare)


@pytest.fixture
def devices(enrolled: Enrolled) -> list[Device]:
    return [enrolled() for _ in range(5)]


@pytest.fixture
def begun(
    http: Server, operator: Operator, devices: list[Device], model: Model
) -> Callable[[int], History]:
    operator.begin(model, rounds=10**6, selection={"policy": "uniform"})

    def make(seed: int) -> History:
        names = [str(device.client_id) for device in devices]
        state = http.app.services
        return History(state.database, http.call, names, model.digest, random.Random(seed))

    return make


@both_databases
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_what_is_kept_is_what_the_whole_history_tells(
    begun: Callable[[int], History], seed: int
) -> None:
    history = begun(seed)
    board = history.board()
    for turn in range(150):
        history.step()
        if turn % history.chance.choice([1, 7, 20]) == 0:
            history.check(board)  # which has looked before
    history.check(board)
    history.check(history.board())  # and one that has not


@both_databases
def test_a_database_of_before_tells_the_same(http: Server, begun: Callable[[int], History]) -> None:
    history = begun(11)
    for _ in range(200):
        history.step()
    url = http.app.services.settings.resolved_database_url

    def migrated(connection: sa.Connection) -> None:
        config = Config()
        config.set_main_option("script_location", "fedpress_server:migrations")
        config.attributes["connection"] = connection
        command.downgrade(config, "0017")
        command.upgrade(config, "head")

    backend = opened(url)
    with backend.altering().connect() as connection, connection.begin():
        migrated(connection)
    backend.dispose()
    history.check(history.board())
    for _ in range(50):
        history.step()
    history.check(history.board())


# Less


def work_of(connection: Connection, read: Callable[[Connection], Any]) -> int:
    """Instructions of its machine that SQLite spent: some for each row that it looked at."""
    raw: Any = connection.connection.dbapi_connection
    assert isinstance(raw, sqlite3.Connection)
    done = 0

    def count() -> None:
        nonlocal done
        done += 1

    raw.set_progress_handler(count, 1)
    read(connection)
    raw.set_progress_handler(None, 1)
    return done


def long(history: History, more: int) -> None:
    """With as many more rounds, measured by every client and delivered by one."""

    def write(connection: Connection) -> None:
        begin = history.number + 1
        made = [digest_of(f"long {number}") for number in range(begin, begin + more)]
        for digest in made:
            records.add_model(connection, ModelRecord(digest, "s", 1, 1e9))
        bases = [history.models[-1], *made[:-1]]
        for number, (base, digest) in enumerate(zip(bases, made, strict=True), begin):
            key = (TASK, number, 1)
            records.open_round(
                connection,
                key,
                plan="{}",
                base_model=base,
                size=1,
                minimum=1,
                opened_at=1e9,
                deadline=1e9,
            )
            records.update_round(connection, key, state="committed", model=digest)
            client_id = history.clients[number % 2]
            name = f"long {number}"
            row = AssignmentRecord(name, *key, client_id, 0, "whole", 1e9, None)
            records.add_assignments(connection, [row])
            participants.add_assignment(connection, TASK, client_id)
            at = 1e9 + number
            upload = UploadRecord(name, digest_of(name), 10, 3, at, 0.5)
            received = [ReceivedUpload(key, upload, {"received": 1}, (client_id, None))]
            write_received(connection, received, at)
            note_delivered(connection, received, at)
            report = EvaluationReport(model=digest, num_examples=3, metrics={"accuracy": 0.5})
            evaluation.keep(connection, TASK, client_id, report, "", at)
            evaluation.note_loss(connection, TASK, client_id, report, at)
        history.number, history.attempt = begin + more - 1, 1
        history.models += made

    history.write(write)


@pytest.mark.slow
def test_a_step_reads_no_more_where_the_history_is_ten_times_as_long(
    begun: Callable[[int], History],
) -> None:
    history, board = begun(3), None
    found: list[dict[str, int]] = []
    for more in (200, 1800):
        long(history, more)
        board = history.board()
        history.read(partial(board.rated, terms=TERMS))  # the first time, of all
        long(history, 3)

        def measured(connection: Connection, board: Scoreboard = board) -> dict[str, int]:
            first = history.models[1]
            return {
                "scores": work_of(connection, lambda c: board.rated(c, TERMS)),
                "last stop": work_of(connection, lambda c: evaluation.last_stop(c, TASK)),
                "candidates": work_of(
                    connection, lambda c: participants.candidates(c, TASK, history.clients)
                ),
                "a model": work_of(connection, lambda c: evaluation.place_of(c, TASK, first)),
                "a page": work_of(
                    connection, lambda c: records.round_history(c, TASK, (150, 0), 50)
                ),
            }

        found.append(history.read(measured))
    few, many = found
    assert min(few.values()) > 0
    assert many == few


# Reads that do not grow with the history


def committed(history: History, numbers: range) -> None:
    """Rounds of one update each, every fourth after an attempt that was given up."""
    row = {
        "task": TASK,
        "plan": "p",
        "reason": "",
        "size": 1,
        "minimum": 1,
        "assigned": 1,
        "received": 1,
        "included": 1,
        "num_examples": 1,
        "upload_bytes": 1,
        "wire_upload_bytes": 1,
        "download_bytes": 1,
        "opened_at": 1.0,
        "deadline": 2.0,
    }
    made, given, staged, ended = [], [], [], []
    for number in numbers:
        base = history.models[-1]
        history.models.append(digest_of(f"model {number}"))
        made.append(
            {"digest": history.models[-1], "spec": digest_of(0), "num_bytes": 1, "created_at": 0.0}
        )
        attempts = 2 if number % 4 == 0 else 1
        for attempt in range(1, attempts + 1):
            is_last = attempt == attempts
            ended.append(
                row
                | {"round": number, "attempt": attempt, "base_model": base}
                | {"state": "committed" if is_last else "abandoned"}
                | {"model": history.models[-1] if is_last else None}
            )
        name = f"round-{number}"
        given.append(
            {"assignment": name, "task": TASK, "round": number, "attempt": attempts}
            | {"client_id": history.clients[0], "position": 0, "profile": f"p{number % 2}"}
            | {"assigned_at": float(number), "receipt": "r"}
        )
        staged.append(
            {"assignment": name, "digest": digest_of(name), "num_bytes": 100 + number}
            | {"num_examples": 1, "received_at": number + 0.5, "began_at": number + 0.25}
        )

    def work(connection: Connection) -> None:
        for table, rows in ((models, made), (rounds, ended), (assignments, given)):
            connection.execute(sa.insert(table), rows)
        connection.execute(sa.insert(uploads), staged)

    history.write(work)


@both_databases
def test_the_newest_models_are_found_page_by_page(
    begun: Callable[[int], History], dialect: str
) -> None:
    history = begun(1)
    committed(history, range(2, 60))
    in_order = history.models[::-1]
    for most in (1, 2, 7, 50):
        found = history.read(partial(records.newest_models, task=TASK, most=most))
        assert found == in_order[:most]
    everything = history.read(lambda c: records.newest_models(c, TASK, 1000))
    assert everything == in_order


@both_databases
def test_the_bodies_of_the_newest_uploads_tell(
    begun: Callable[[int], History], dialect: str
) -> None:
    history = begun(1)
    assert history.read(lambda c: bodies_of(c, TASK)) == Bodies({}, None)
    committed(history, range(2, 402))
    found = history.read(lambda c: bodies_of(c, TASK))
    newest = {f"p{odd}": [100 + n for n in range(146, 402) if n % 2 == odd] for odd in (0, 1)}
    assert found == Bodies({name: int(median(sizes)) for name, sizes in newest.items()}, 0.25)


def test_what_is_read_for_a_round_does_not_grow_with_the_rounds_before(
    begun: Callable[[int], History],
) -> None:
    history = begun(1)
    committed(history, range(2, 1002))

    def works() -> list[int]:
        reads = (
            partial(bodies_of, task=TASK),
            partial(records.newest_models, task=TASK, most=5),
            partial(records.plans_in_use, task=TASK),
        )
        return [history.read(partial(work_of, read=read)) for read in reads]

    before = works()
    committed(history, range(1002, 6002))
    assert [after < 1.2 * least for after, least in zip(works(), before, strict=True)] == [True] * 3


# Pages


@pytest.mark.slow
def test_a_task_of_a_hundred_thousand_rounds_is_shown_page_by_page(
    http: Server, operator: Operator, begun: Callable[[int], History]
) -> None:
    history = begun(5)
    row = {
        "task": TASK,
        "attempt": 1,
        "plan": "p" * 2000,
        "state": "committed",
        "reason": "",
        "base_model": history.first,
        "model": history.first,
        "size": 1,
        "minimum": 1,
        "assigned": 1,
        "received": 1,
        "included": 1,
        "num_examples": 1,
        "upload_bytes": 1,
        "wire_upload_bytes": 1,
        "download_bytes": 1,
        "opened_at": 1.0,
        "deadline": 2.0,
    }
    numbers = range(2, 100_001)
    history.write(lambda c: c.execute(sa.insert(rounds), [row | {"round": n} for n in numbers]))
    newest = records.round_history
    work = history.read(lambda c: work_of(c, lambda c: newest(c, TASK, None, 1000)))
    middle = history.read(lambda c: work_of(c, lambda c: newest(c, TASK, (50_000, 0), 1000)))
    assert max(work, middle) < 200_000  # for 1,000 rows of some 30 columns
    answer = operator.http.get(f"/v1/tasks/{TASK}/rounds", headers=operator.headers)
    page = [RoundStatus.model_validate(each) for each in answer.json()]
    assert [each.round for each in page] == list(range(99_001, 100_001))
    assert len(answer.content) < 2**20
    link = f'</v1/tasks/{TASK}/rounds?before=99001.1>; rel="next"'
    assert answer.headers["link"] == link


@both_databases
def test_the_pages_of_a_history_are_all_of_it_once(
    operator: Operator, begun: Callable[[int], History]
) -> None:
    history = begun(7)
    for _ in range(60):
        history.close()
    everything = operator.get(f"/v1/tasks/{TASK}/rounds")
    assert len(everything) == 61
    found: list[Any] = []
    path = f"/v1/tasks/{TASK}/rounds?limit=7"
    while path:
        answer = operator.http.get(path, headers=operator.headers)
        page = answer.json()
        assert 0 < len(page) <= 7
        found = page + found
        path = answer.headers.get("link", "")[1:].partition(">")[0]
    assert found == everything
    number = everything[30]["round"]
    below = operator.get(f"/v1/tasks/{TASK}/rounds?before={number}")
    assert below == [each for each in everything if each["round"] < number]
    assert operator.get(f"/v1/tasks/{TASK}/rounds?before=1") == []
