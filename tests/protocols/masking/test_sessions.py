"""Whole sessions: the sum is exact whoever drops out and when, or there is no sum at all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_protocols.errors import Conflict, FedpressError, UpdateConflict
from fedpress_protocols.masking.messages import (
    Advertise,
    Consents,
    Inbox,
    Listing,
    Receipt,
    Roster,
    RosterRow,
    ServerMessage,
    Survivors,
)
from fedpress_protocols.masking.server import (
    TRANSITIONS,
    Abandon,
    Aborted,
    Enter,
    Finish,
    MaskingServer,
    diagram,
    from_record,
)
from fedpress_protocols.masking.transcript import Record, VectorSpec
from tests.protocols.masking.session import PHASES, Session, replayed

ROOT = Path(__file__).parents[3]
ANSWERS: tuple[type[ServerMessage], ...] = (Roster, Inbox, Survivors, Consents, Receipt)
PROFILES = [
    {},
    {"adversary": "semi-honest"},
    {"hybrid": True},
    {"suite": "aes-128-ctr", "adversary": "semi-honest"},
]


def left_after(phase: str, n: int, drops: dict[int, str]) -> int:
    return n - sum(PHASES[when] <= PHASES[phase] for when in drops.values())


def can_finish(session: Session, drops: dict[int, str]) -> bool:
    """By the rules of a complete graph: enough of the roster are left in every phase."""
    config = session.config
    n = left_after("advertise", session.n, drops)
    if n < 2 or n < config.least(n):
        return False
    threshold = config.parameters(n).threshold
    least = max(threshold, config.least(n))
    stay = {phase: left_after(phase, session.n, drops) for phase in PHASES}
    if config.adversary == "malicious" and stay["consent"] < threshold:
        return False
    return stay["share"] >= least and stay["mask"] >= least and stay["reveal"] >= threshold


def check(session: Session, drops: dict[int, str]) -> None:
    """The sum is exact and its members know it, or nobody's input is in any sum."""
    finished = session.server.phase == "finished"
    for number, device in enumerate(session.devices):
        if not device.record:
            continue
        is_in = finished and drops.get(number) not in ("share", "mask")
        assert device.client.outcome == ("included" if is_in else "not-included")
        assert device.client.phase == "over"
    if finished:
        assert session.sums == session.expected
        assert len(session.survivors) == left_after("mask", session.n, drops)
    else:
        assert session.words is None


@pytest.mark.parametrize("changes", PROFILES)
@pytest.mark.parametrize("n", [3, 10])
def test_with_nobody_lost_the_sum_is_the_plain_sum(n: int, changes: dict[str, Any]) -> None:
    session = Session(n, changes).run()
    assert session.server.phase == "finished"
    check(session, {})
    assert session.now == session.server.deadline - session.config.seconds.reveal  # never waited


@pytest.mark.parametrize("adversary", ["malicious", "semi-honest"])
@pytest.mark.parametrize("phase", PHASES)
def test_one_of_ten_lost_in_any_phase(phase: str, adversary: str) -> None:
    session = Session(10, {"adversary": adversary}).run({4: phase})
    assert session.server.phase == "finished"
    check(session, {4: phase})


@given(
    n=st.integers(2, 8),
    drops=st.dictionaries(st.integers(0, 7), st.sampled_from(sorted(PHASES)), max_size=5),
    changes=st.sampled_from(PROFILES),
)
def test_whoever_is_lost_the_sum_is_exact_or_there_is_none(
    n: int, drops: dict[int, str], changes: dict[str, Any]
) -> None:
    drops = {number: when for number, when in drops.items() if number < n}
    if changes.get("adversary") == "semi-honest":
        drops = {number: "reveal" if w == "consent" else w for number, w in drops.items()}
    session = Session(n, {"corrupt": 0, "minimum": 2, **changes}).run(drops)
    assert (session.server.phase == "finished") == can_finish(session, drops)
    check(session, drops)


@pytest.mark.slow
def test_a_hundred_clients_with_drop_outs_in_every_phase() -> None:
    """n = 100, complete graph; three lost in each phase."""
    drops = {7 * i + j: phase for i, phase in enumerate(PHASES) for j in range(3)}
    session = Session(100, {"vectors": (VectorSpec("update", 64, 300),)}).run(drops)
    assert session.server.phase == "finished"
    check(session, drops)


@pytest.mark.soak(only=True)
@pytest.mark.parametrize("adversary", ["malicious", "semi-honest"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_hundred_clients_with_ten_lost_in_one_phase(phase: str, adversary: str) -> None:
    drops = dict.fromkeys(range(30, 40), phase)
    session = Session(100, {"adversary": adversary}).run(drops)
    assert session.server.phase == "finished"
    check(session, drops)


def sparse(n: int, lost: int, **changes: Any) -> None:
    phases = ["advertise", "share", "mask", "reveal"]
    drops = {i * (n // lost): phases[i % len(phases)] for i in range(lost)}
    session = Session(n, {"vectors": (VectorSpec("update", 5, 300),), **changes}).run(drops)
    assert session.server.phase == "finished", session.server.reason
    topology = session.server._closed.topology
    assert not topology.is_complete
    check(session, drops)


def test_a_sparse_graph_with_drop_outs() -> None:
    """n = 140, above the complete graph."""
    sparse(140, 4, adversary="semi-honest")


@pytest.mark.soak(only=True)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("adversary", ["malicious", "semi-honest"])
def test_a_thousand_clients_with_drop_outs(adversary: str) -> None:
    sparse(1000, 40, adversary=adversary)


# Again and again


LOSSES = {0: "advertise", 3: "share", 5: "mask", 7: "reveal"}


@pytest.fixture(scope="module", params=PROFILES[:3], ids=["malicious", "semi-honest", "hybrid"])
def played(request: pytest.FixtureRequest) -> Session:
    session = Session(12, request.param).run(LOSSES)
    assert session.server.phase == "finished"
    return session


def test_a_server_that_begins_again_anywhere_is_where_it_was(played: Session) -> None:
    """Invariant 25: at every prefix of the events, the same state, effects and answers."""
    effects = 0
    for events, state in enumerate(played.states, 1):
        server, again = replayed(played, events)
        assert server == state
        assert again == played.effects[: len(again)]
        assert len(again) > effects
        effects = len(again)
        for device in played.devices[1:6]:
            for kind in ANSWERS:
                assert answered(server, kind, device.key.public) == answered(
                    state, kind, device.key.public
                )
    assert effects == len(played.effects)


def answered(server: MaskingServer, kind: type[ServerMessage], identity: bytes) -> Any:
    try:
        answer = server.answer(kind, identity)
    except FedpressError as exc:
        return type(exc)
    return answer and answer.to_bytes()


def test_an_event_that_was_here_changes_nothing(played: Session) -> None:
    """Invariant 24: whatever comes twice, or after the end, has no place."""
    for events in range(len(played.log)):
        server, _ = replayed(played, events)
        for now, record in played.log[:events]:
            event = from_record(record)
            if type(event).__name__ not in ("DeadlinePassed", "Unmasked"):
                assert server.on(event, now) == (server, ())


def test_sums_do_not_hang_on_the_order_of_bodies(played: Session) -> None:
    server, _ = replayed(played, len(played.log) - 1)
    assert server.phase == "unmasking"
    job = server.recover()
    packing = played.config.packing
    bodies = [packing.from_bytes(played.bodies[slot]) for slot in job.survivors]
    once = packing.to_bytes(job.unmask(reversed(bodies)))
    summed = packing.to_bytes(job.unmask([sum(bodies[1:], bodies[0].copy())], threads=2))
    assert once == summed == packing.to_bytes(played.words)


def test_a_roster_is_written_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each that hears it: the server's work would grow with the square of them."""
    session = Session(12)
    written: Counter[type[Record]] = Counter()
    to_bytes = Record.to_bytes

    def counted(record: Record) -> bytes:
        written[type(record)] += 1
        return to_bytes(record)

    session.play("advertise", None, {})
    monkeypatch.setattr(Record, "to_bytes", counted)
    for device in session.devices:
        answer = session.server.answer(Roster, device.key.public)
        assert answer is not None
        answer.to_bytes()
    assert written[Roster] == len(session.devices)
    assert written[Listing] == 1
    assert written[RosterRow] <= 2 * len(session.devices)
    assert written[Advertise] <= len(session.devices)


def test_a_message_sent_twice_is_answered_as_the_first_time() -> None:
    session = Session(4)
    device = session.devices[0]
    for other in session.devices[:3]:
        session.begin(other)
        assert session.post(other)
    assert not session.post(device)
    session.begin(device)  # a driver that lost its record: fresh keys for the same session
    with pytest.raises(UpdateConflict, match="another advertise"):
        session.post(device)


def test_a_client_that_dies_before_it_hears_says_the_same_again() -> None:
    session = Session(4, {"adversary": "malicious"})
    session.play("advertise", None, {})
    for phase, awaited in (("share", Roster), ("mask", Inbox), ("consent", Survivors)):
        session.play(phase, awaited, {})
        for device in session.devices:
            assert device.read().outgoing == device.client.outgoing
            assert not session.post(device)  # as the first time
            if phase == "mask":
                body = device.body
                device.mask()
                assert device.body == body
    with pytest.raises(Conflict, match="consented has nothing to mask"):
        session.devices[0].mask()


# How it ends without a sum


def test_too_few_clients_at_any_deadline_end_the_session() -> None:
    """Invariant 16."""
    for phase, reason in (
        ("advertise", "only 4 clients answered while the session was advertising"),
        ("share", "only 4 clients answered while the session was sharing"),
        ("mask", "only 4 clients answered while the session was masking"),
        ("consent", "only 4 clients answered while the session was consenting"),
        ("reveal", "only 4 clients answered while the session was revealing"),
    ):
        drops = dict.fromkeys(range(6), phase)
        session = Session(10, {"minimum": 5}).run(drops)
        assert session.server.phase == "abandoned"
        assert session.server.reason.startswith(reason)
        assert session.effects[-1] == Abandon(session.server.reason)
        check(session, drops)
        silent = [d for d in session.devices if d.record]
        assert {device.client.reason for device in silent} == {session.server.reason}


@pytest.mark.parametrize("adversary", ["malicious", "semi-honest"])
def test_survivors_that_cannot_give_every_secret_are_asked_for_none(adversary: str) -> None:
    """Invariant 16: t of the holders of each have to be left, before anybody is told who is."""
    threshold = {"malicious": 7, "semi-honest": 4}[adversary]
    drops = dict.fromkeys(range(11 - threshold), "mask")
    session = Session(10, {"adversary": adversary}).run(drops)
    came = f"only {threshold - 1} clients answered while the session was masking"
    assert session.server.reason.startswith(came)


def test_a_roster_without_a_safe_graph_ends_the_session() -> None:
    """Of 7 as of 5 a third may be lost; of 6, with two lost, too few would be left."""
    changes = {"dropout": 3_500, "corrupt": 0}
    session = Session(7, changes).run({0: "advertise"})
    assert session.server.phase == "abandoned"
    assert session.server.reason.startswith(
        "only 6 clients answered while the session was advertising"
    )
    assert Session(7, changes).run({0: "advertise", 1: "advertise"}).server.phase == "finished"


def test_an_operator_can_end_it_in_any_phase() -> None:
    session = Session(4).run()
    for events in range(len(session.log) + 1):
        server, _ = replayed(session, events)
        after, effects = server.on(Aborted("enough"), session.now)
        if server.is_over:
            assert (after, effects) == (server, ())
        else:
            assert effects == (Abandon("enough"),)
            unspeakable, _ = server.on(Aborted("\ud800"), session.now)
            assert unspeakable.reason == "?"
            assert after.phase == "abandoned"
            assert not any((after.shares, after.masked, after.reveals))


def test_effects_tell_of_every_phase_once(played: Session) -> None:
    entered = [effect.phase for effect in played.effects if isinstance(effect, Enter)]
    assert entered == [
        each for each in played_phases(played) if each not in ("advertising", "finished")
    ]
    finish = [effect for effect in played.effects if isinstance(effect, Finish)]
    assert len(finish) == 1
    assert finish[0].receipt.members == played.server.survivors


def played_phases(session: Session) -> list[str]:
    return list(Counter(["advertising", *(state.phase for state in session.states)]))


def test_the_page_is_drawn_from_the_table() -> None:
    text = diagram()
    assert text in (ROOT / "docs" / "secure-aggregation.md").read_text()
    assert text.count("-->") == len(TRANSITIONS) + 3
    assert "revealing --> unmasking: Reveal or DeadlinePassed, enough shares" in text
