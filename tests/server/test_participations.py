"""Participations in private tasks, read from the rows that check-ins and uploads leave."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.messages import PrivacyStatus, RoundStatus
from fedpress_protocols.plan import RoundPlan
from fedpress_server.storage import privacy, records
from fedpress_server.storage.tables import assignments, declines, metadata, rounds, uploads
from tests.protocols.test_masked_payload import plan_fields

PRIVATE = {
    "lane": "central", "clip": 0.05, "noise_multiplier": 2.1, "participations": 5, "epsilon": 6.0,
}  # fmt: skip
ADAPTIVE = {**PRIVATE, "adaptive": {"quantile": 0.4, "count_noise": 7.0}}


@pytest.fixture
def connection() -> Iterator[Connection]:
    engine = sa.create_engine("sqlite://")
    metadata.create_all(engine)
    with engine.begin() as made:
        yield made
    engine.dispose()


def assign(connection: Connection, task: str, number: int, attempt: int, *clients: str) -> None:
    """Devices that have work; one in capitals has sent its body, too."""
    for position, client in enumerate(clients):
        row: dict[str, Any] = {
            "assignment": f"{task}-{number}-{attempt}-{client.lower()}", "task": task,
            "round": number, "attempt": attempt, "client_id": client.lower(), "profile": "only",
            "position": position, "assigned_at": 0.0,
        }  # fmt: skip
        connection.execute(sa.insert(assignments), row)
        if client.isupper():
            body = {"digest": "0" * 64, "num_bytes": 1, "num_examples": 1, "received_at": 0.0}
            connection.execute(sa.insert(uploads), {"assignment": row["assignment"], **body})


def decline(connection: Connection, task: str, number: int, client: str, reason: str) -> None:
    row = {"task": task, "round": number, "attempt": 1, "reason": reason}
    assignment = f"{task}-{number}-1-{client}"
    connection.execute(sa.insert(declines), {"assignment": assignment, **row})


def open_round(connection: Connection, number: int, attempt: int, **terms: Any) -> RoundStatus:
    fields = plan_fields({"id": "shared_support", "fraction": 0.5}, lane="clear", masking=None)
    fields["fixed_point"] |= {"max_examples": 1, "max_abs": 0.05}
    plan = RoundPlan.model_validate({**fields, "round": number, "attempt": attempt, **terms})
    status = RoundStatus(
        task=plan.task, round=number, attempt=attempt, state="committed", base_model="0" * 64,
        assigned=0, received=0, included=0, minimum=1, size=1, opened_at=0.0, deadline=1.0,
        upload_bytes=0, wire_upload_bytes=0, download_bytes=0, num_examples=0,
    )  # fmt: skip
    shown = status.model_dump(exclude={"published", "session", "course"})
    row = {each.name: shown[each.name] for each in rounds.c if each.name in shown}
    row["plan"] = plan.to_json()
    connection.execute(sa.insert(rounds), row)
    return status


def test_participations_are_the_bodies_sent_before_an_attempt(connection: Connection) -> None:
    assign(connection, "a", 1, 1, "X", "Y", "z")
    assign(connection, "a", 2, 1, "X", "z")
    assign(connection, "a", 2, 2, "X", "Y")
    assign(connection, "b", 1, 1, "Y", "Z")
    for key, most, spent, largest in [
        (("a", 1, 1), 1, "", 0),
        (("a", 1, 2), 1, "xy", 1),
        (("a", 2, 1), 1, "xy", 1),
        (("a", 2, 1), 2, "", 1),
        (("a", 2, 2), 2, "x", 2),
        (("a", 3, 1), 2, "xy", 3),
        (("a", 3, 1), 3, "x", 3),
        (("a", 3, 1), 4, "", 3),
        (("b", 2, 1), 1, "yz", 1),
    ]:
        assert privacy.participations(connection, key, most) == (frozenset(spent), largest), key


def test_whoever_says_that_its_budget_is_spent_has_no_participations_left(
    connection: Connection,
) -> None:
    assign(connection, "a", 1, 1, "u", "v", "w", "X")
    assign(connection, "b", 1, 1, "x")
    decline(connection, "a", 1, "u", "privacy-budget")
    decline(connection, "a", 1, "v", "too-slow")
    decline(connection, "b", 1, "x", "privacy-budget")
    assert privacy.participations(connection, ("a", 1, 1), 5) == (frozenset(), 0)
    assert privacy.participations(connection, ("a", 2, 1), 5) == (frozenset("u"), 1)
    assert privacy.participations(connection, ("b", 2, 1), 5) == (frozenset("x"), 0)


def test_devices_rest_for_the_separation_less_one_round_after_a_body(
    connection: Connection,
) -> None:
    assign(connection, "a", 3, 1, "W")
    assign(connection, "a", 4, 1, "X", "y")
    assign(connection, "a", 5, 1, "Y", "z")
    assign(connection, "a", 6, 1, "V")
    assign(connection, "b", 5, 1, "Z")
    for separation, resting in [(1, ""), (2, "y"), (3, "xy"), (4, "wxy")]:
        assert privacy.resting(connection, ("a", 6, 2), separation) == frozenset(resting)
    assert privacy.resting(connection, ("a", 7, 1), 2) == frozenset("v")


def test_a_task_has_one_secret_of_32_bytes_for_its_noise(connection: Connection) -> None:
    secrets = {task: privacy.noise_secret(connection, task) for task in "ab"}
    assert secrets["a"] != secrets["b"]
    assert [len(secret) for secret in secrets.values()] == [32, 32]
    assert secrets == {task: privacy.noise_secret(connection, task) for task in "ab"}


def test_the_last_clip_is_that_of_the_newest_attempt(connection: Connection) -> None:
    for number, attempt, clip in [(1, 1, 0.1), (2, 1, 0.2), (2, 2, 0.3)]:
        open_round(connection, number, attempt, privacy={**PRIVATE, "clip": clip})
    assert privacy.last_clip(connection, "digits") == 0.3
    open_round(connection, 3, 1)
    assert privacy.last_clip(connection, "digits") is None


def test_what_is_spent_is_that_up_to_each_attempt(connection: Connection) -> None:
    statuses = [
        open_round(connection, number, attempt, privacy=ADAPTIVE, report=["within-clip"])
        for number, attempt in [(1, 1), (2, 1), (2, 2), (3, 1)]
    ]
    assign(connection, "digits", 1, 1, "X", "y")
    assign(connection, "digits", 2, 1, "X", "z")
    assign(connection, "digits", 2, 2, "Y")
    assign(connection, "digits", 3, 1, "X")
    assign(connection, "digits", 4, 1, "X")
    assign(connection, "other", 1, 1, "X")
    expected = {(1, 1): 1, (2, 1): 2, (2, 2): 2, (3, 1): 3}
    for subset in (statuses, statuses[::-1], statuses[2:3], statuses[1:]):
        shown = privacy.with_privacy(connection, "digits", subset)
        assert [(each.round, each.attempt) for each in shown] == [
            (each.round, each.attempt) for each in subset
        ]
        for each in shown:
            assert each.privacy is not None
            assert each.privacy.participations == expected[each.round, each.attempt]
            assert (each.privacy.quantile, each.privacy.clip) == (0.4, 0.05)
            assert each.privacy.max_epsilon == 6.0 > each.privacy.epsilon > 0
    assert privacy.with_privacy(connection, "digits", []) == []


def test_a_round_without_privacy_terms_has_spent_nothing(connection: Connection) -> None:
    plain, private = open_round(connection, 1, 1), open_round(connection, 2, 1, privacy=PRIVATE)
    assert privacy.with_privacy(connection, "digits", [plain]) == [plain]
    (first, second) = privacy.with_privacy(connection, "digits", [plain, private])
    assert first == plain
    assert second.privacy is not None
    assert (second.privacy.participations, second.privacy.epsilon) == (0, 0.0)
    assert second.privacy.quantile is None


# The same from the whole history, in plain words

Attempt = tuple[int, int]
Sent = Sequence[tuple[Attempt, str]]
"""Who sent, or declined, in which attempt."""


def all_participations(
    bodies: Sent, refusals: Sent, here: Attempt, most: int
) -> tuple[frozenset[str], int]:
    counts = Counter(client for attempt, client in bodies if attempt < here)
    refused = {client for attempt, client in refusals if attempt < here}
    spent = {client for client, count in counts.items() if count >= most}
    return frozenset(spent | refused), max(counts.values(), default=0)


def all_spent(bodies: Sent, here: Attempt) -> int:
    counts = Counter(client for attempt, client in bodies if attempt <= here)
    return max(counts.values(), default=0)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_counted_is_what_the_whole_history_tells(connection: Connection, seed: int) -> None:
    chance = random.Random(seed)
    bodies, refusals = list[tuple[Attempt, str]](), list[tuple[Attempt, str]]()
    attempts = [(number, each) for number in range(1, 7) for each in range(1, 4)]
    attempts = sorted(chance.sample(attempts, 11))
    statuses = []
    for number, attempt in attempts:
        terms = {"privacy": PRIVATE} if chance.random() < 0.8 else {}
        statuses.append(open_round(connection, number, attempt, **terms))
        for task in ("other", "digits"):
            clients = chance.sample("uvwxyz", chance.randrange(7))
            whose = [chance.choice([each, each.upper()]) for each in clients]
            assign(connection, task, number, attempt, *whose)
        bodies += [((number, attempt), each.lower()) for each in whose if each.isupper()]
        for client in whose:
            if attempt == 1 and client.islower() and chance.random() < 0.2:
                decline(connection, "digits", number, client, "privacy-budget")
                refusals.append(((number, attempt), client))
    for here in [*attempts, (9, 1)]:
        for most in (1, 2, 3, 99):
            found = privacy.participations(connection, ("digits", *here), most)
            assert found == all_participations(bodies, refusals, here, most)
    for _ in range(30):
        page = chance.sample(statuses, chance.randint(1, len(statuses)))
        shown = privacy.with_privacy(connection, "digits", page)
        for before, after in zip(page, shown, strict=True):
            here = before.round, before.attempt
            plan = RoundPlan.from_json(records.plan_of(connection, ("digits", *here)))
            expected = None
            if plan.privacy is not None:
                expected = PrivacyStatus.of(plan, all_spent(bodies, here))
            assert after == before.model_copy(update={"privacy": expected})


def test_of_the_rounds_before_a_page_no_body_is_read(connection: Connection) -> None:
    statuses = []
    for number in range(1, 21):
        statuses.append(open_round(connection, number, 1, privacy=PRIVATE))
        assign(connection, "digits", number, 1, *"UVWXYZ")
    read = list[Any]()

    def counted(cursor: Any, row: Any) -> Any:
        read.append(row)
        return row

    driver: Any = connection.connection.driver_connection
    driver.row_factory = counted
    (first, last) = privacy.with_privacy(connection, "digits", statuses[-2:])
    assert [each.privacy and each.privacy.participations for each in (first, last)] == [19, 20]
    # Two plans, twelve bodies, six clients that sent them, the most before.
    assert len(read) <= 2 + 12 + 6 + 1
    read.clear()
    assert privacy.participations(connection, ("digits", 21, 1), 30) == (frozenset(), 20)
    assert len(read) == 1
