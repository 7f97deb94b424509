"""The invariants of a masked session that an honest run shows; attacks show the others.

Numbers are those of `docs/secure-aggregation.md`, which says where each is tested.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_protocols import masking
from fedpress_protocols.errors import (
    Conflict,
    FedpressError,
    IncompatiblePlan,
    InvalidSignature,
    StateCorrupt,
)
from fedpress_protocols.masking import client as client_module
from fedpress_protocols.masking import server as server_module
from fedpress_protocols.masking import unmasking
from fedpress_protocols.masking.client import MaskingClient
from fedpress_protocols.masking.graph import COMPLETE_UP_TO, Adversary, parameters
from fedpress_protocols.masking.keystream import add_keystreams
from fedpress_protocols.masking.messages import (
    Abandoned,
    Advertise,
    Consents,
    Inbox,
    MaskedInput,
    Receipt,
    Reveal,
    Roster,
    ServerMessage,
    Shares,
    Survivors,
)
from fedpress_protocols.masking.server import (
    DeadlinePassed,
    Event,
    Unmasked,
    UnmaskFailed,
    from_record,
    to_record,
)
from fedpress_protocols.masking.transcript import VectorSpec
from tests.protocols.masking.session import (
    SERVER,
    Session,
    config,
    identity,
    policy,
    replayed,
)

PACKAGE = Path(str(masking.__file__)).parent


def masked(n: int = 4, **changes: Any) -> Session:
    """Every client has masked and nobody has sent."""
    session = Session(n, {"corrupt": 0, **changes})
    session.play("advertise", None, {})
    session.play("share", Roster, {})
    for device in session.devices:
        session.hear(device, Inbox)
        device.mask()
    return session


def test_secrets_come_from_the_operating_system_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 1: no generator but os.urandom is even imported."""
    for path in sorted(PACKAGE.glob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name.split(".")[0] for alias in node.names}
                assert not names & {"random", "secrets", "default_rng"}, path.name
            if isinstance(node, ast.Attribute) and path.name in ("client.py", "keys.py"):
                assert node.attr != "random", path.name
    drawn: list[int] = []

    def urandom(count: int) -> bytes:
        drawn.append(count)
        return bytes([len(drawn)]) * count

    session = Session(3)
    session.begin(session.devices[1])  # modules that are imported late draw for themselves
    monkeypatch.setattr("fedpress_protocols.masking.keys.os.urandom", urandom)
    monkeypatch.setattr("fedpress_protocols.masking.client.os.urandom", urandom)
    session.begin(session.devices[0])
    state = session.devices[0].client._state
    assert drawn == [32, 32, 32, 32]
    assert [state.mask_secret, state.seed, state.channel_secret] == [
        bytes([i]) * 32 for i in (1, 2, 3)
    ]


@pytest.mark.parametrize("suite", ["chacha20", "aes-128-ctr"])
def test_a_masked_word_is_uniform_over_the_ring(suite: str) -> None:
    """Invariant 2: every bit of it is a fair coin, whatever was masked."""
    session = masked(vectors=(VectorSpec("x", 16_384, 1),), suite=suite)
    device = session.devices[0]
    segment = session.config.packing.segments[0]
    words = session.config.packing.from_bytes(device.body)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little").reshape(words.size, 64)
    ones = bits[:, : segment.word_bits].sum(axis=0)
    assert segment.word_bits >= 56
    assert np.all(np.abs(ones - words.size / 2) < 6 * np.sqrt(words.size) / 2)
    assert np.unique(words).size == words.size


def test_every_session_has_secrets_of_its_own() -> None:
    """Invariant 4: of everything that one draws, nothing is drawn again."""
    seen: set[bytes] = set()
    for _ in range(2):
        session = Session(3)
        for device in session.devices:
            session.begin(device)
            state = device.client._state
            message = device.client.outgoing
            assert isinstance(message, Advertise)
            seen |= {state.mask_secret, state.seed, state.channel_secret, message.nonce}
            seen |= {message.mask_key, message.channel_key}
    assert len(seen) == 2 * 3 * 6


def test_a_clients_own_mask_is_always_on() -> None:
    """Invariant 5: with every pairwise mask gone, the sum is still hidden, by each b alone."""
    session = masked()
    packing = session.config.packing
    total = sum(
        (packing.from_bytes(device.body) for device in session.devices),
        start=np.zeros(packing.num_words, np.uint64),
    )
    plain = sum(
        (packing.pack(device.values) for device in session.devices),
        start=np.zeros(packing.num_words, np.uint64),
    )
    own = [device.client._state.masks[0].signed for device in session.devices]
    for left_on in range(len(own)):
        words = total.copy()
        taken = [(material, -sign) for i, (material, sign) in enumerate(own) if i != left_on]
        add_keystreams(words, taken, session.config.suite)
        assert packing.to_bytes(words) != packing.to_bytes(plain)
    add_keystreams(words := total.copy(), [(m, -s) for m, s in own], session.config.suite)
    assert packing.to_bytes(words) == packing.to_bytes(plain)


def test_a_client_alone_is_masked_once_and_with_each_neighbour() -> None:
    """Invariants 5 and 13: one own mask, and one for each that shared."""
    session = Session(5, {"corrupt": 0, "adversary": "semi-honest"})
    session.play("advertise", None, {})
    session.play("share", Roster, {4: "share"})
    device = session.devices[0]
    session.hear(device, Inbox)
    state = device.client._state
    assert len(state.masks) == 1 + len(state.sharers - {state.slot}) == 4


@pytest.mark.parametrize("n", [3, 10, 100, 128, 129, 300])
@pytest.mark.parametrize("adversary", ["semi-honest", "malicious"])
def test_no_two_answers_of_a_cohort_give_both_secrets(n: int, adversary: Any) -> None:
    """Invariant 7: 2t > k + a, where a server may lie; t > a in any case."""
    found = parameters(n, corrupt=0.1, dropout=0.05, adversary=adversary)
    corrupt = n // 10
    holders = n if n <= COMPLETE_UP_TO else found.degree
    if adversary == "malicious":
        assert 2 * found.threshold > holders + min(corrupt, holders)
    if n <= COMPLETE_UP_TO:
        assert found.threshold > corrupt


def test_nothing_of_a_client_is_in_the_clear() -> None:
    """Invariant 17: counts, weights and losses are vectors of the sum; beside the body nothing
    depends on them but its digest, and the signature over that."""
    session = Session(4, {"corrupt": 0})
    session.play("advertise", None, {})
    session.play("share", Roster, {})
    device = session.devices[0]
    session.hear(device, Inbox)
    assert "examples" in device.values
    ready, headers = device.client, []
    for sign in (1, -1):
        device.values = {k: sign * v for k, v in device.values.items()}
        state = replace(ready._state, content=session.content_of(device))
        device.client = replace(ready, _state=state)
        device.mask()
        headers.append(device.client.outgoing)
    one, other = headers
    assert isinstance(one, MaskedInput)
    assert isinstance(other, MaskedInput)
    assert one.sha256 != other.sha256
    blank = bytes(32), bytes(64)
    one, other = (replace(m, sha256=blank[0], signature=blank[1]) for m in (one, other))
    assert one == other


def test_secrets_are_never_printed_and_leave_the_record_when_they_are_spent() -> None:
    """Invariant 20."""
    for name in (client_module, server_module):
        source = inspect.getsource(name)
        assert not re.search(r"\bprint\(|logging|logger", source)
    session = Session(4, {"corrupt": 0})
    session.begin(session.devices[0])
    device = session.devices[0]
    state = device.client._state
    secrets = [state.mask_secret, state.seed, state.channel_secret]
    printed = f"{device.client!r} {state!r} {device.client.on!r}"
    assert not any(repr(secret)[2:-1] in printed or secret.hex() in printed for secret in secrets)
    assert all(secret in device.record for secret in secrets)
    session.play("advertise", None, {0: "advertise"})
    session = Session(4, {"corrupt": 0})
    session.play("advertise", None, {})
    device = session.devices[0]
    state = device.client._state
    secrets = [state.mask_secret, state.seed, state.channel_secret]
    session.play("share", Roster, {})
    session.play("mask", Inbox, {})
    assert not any(secret in device.record for secret in secrets)
    masks = [mask.material for mask in device.client._state.masks]
    shares = [held.mask_share for held in device.client._state.held_shares if held.mask_share]
    assert all(mask in device.record for mask in masks)
    session.play("consent", Survivors, {})
    assert not any(mask in device.record for mask in masks)
    assert all(share in device.record for share in shares)
    session.play("reveal", Consents, {})
    assert not any(share in device.record for share in shares)
    session.hear(device, Receipt)
    assert device.client.outgoing is None
    assert len(device.record) < 600


def test_secrets_are_compared_in_constant_time() -> None:
    """Invariant 20: by `same`, wherever one side is a secret's."""
    source = inspect.getsource(unmasking._Recovery._is_right)
    assert source.count("return same(") == 2
    assert "==" not in source


def test_accumulators_are_words_of_the_ring() -> None:
    """Invariant 21: nothing is rounded or widened on the way."""
    session = Session(4, {"adversary": "semi-honest", "corrupt": 0}).run()
    assert session.words.dtype == np.uint64


def test_no_sum_has_fewer_survivors_than_the_noise_was_drawn_for() -> None:
    """Invariant 22, as far as the machines carry it: noise for `minimum` survivors is enough, since
    the plan that says so is bound into every mask, and no sum of fewer is unmasked."""
    base = config(6, minimum=5, corrupt=0)
    assert base.digest != replace(base, plan=bytes(32)).digest
    for lost in (1, 2):
        drops = dict.fromkeys(range(lost), "mask")
        session = Session(6, {"minimum": 5, "corrupt": 0, "adversary": "semi-honest"}).run(drops)
        assert (session.server.phase == "finished") == (lost == 1)
    assert session.server.reason.startswith("only 4 clients answered while the session was masking")


def test_only_a_receipt_that_lists_the_client_includes_its_update() -> None:
    """Invariants 15 and 23: pending until then, whatever else is heard or given up."""
    session = masked(5)
    for device in session.devices:
        assert device.client.outcome == "pending"
        session.post(device)
    device, quitter = session.devices[:2]
    quitter.keep(quitter.client.give_up("the battery is empty"))
    assert quitter.client.outcome == "pending"
    session.play("consent", Survivors, {1: "consent"})
    session.play("reveal", Consents, {1: "consent"})
    assert device.client.phase == "revealed"
    assert device.client.survivors == session.server.survivors
    assert device.client.outcome == "pending"
    for each in session.devices:
        session.hear(each, Receipt)
        assert each.client.outcome == "included"


def test_what_was_abandoned_is_in_no_sum() -> None:
    """Invariants 15 and 23."""
    session = masked(4)
    device = session.devices[0]
    device.hear(Abandoned("why not").signed(SERVER, session.config.digest))
    assert device.client.outcome == "not-included"
    assert device.client.reason == "why not"
    receipt = Receipt(session.server.sid, frozenset({0, 1, 2, 3}), bytes(32))
    device.hear(receipt.signed(SERVER, session.config.digest))
    assert device.client.outcome == "not-included"  # settled once


def records_of(session: Session) -> list[tuple[Session, bytes]]:
    """The record of the first device in every phase that a client can be in."""
    device, records = session.devices[0], []
    for phase, awaited in (
        ("advertise", None),
        ("share", Roster),
        ("mask", Inbox),
        ("consent", Survivors),
        ("reveal", Consents),
    ):
        if awaited is Inbox:
            session.hear(device, Inbox)
            records.append((session, device.record))  # ready
            device.mask()
            session.post(device)
            records.append((session, device.record))
            session.play(phase, awaited, {0: "advertise"})
            continue
        session.play(phase, awaited, {})
        records.append((session, device.record))
    session.hear(device, Receipt)
    records.append((session, device.record))
    gone = MaskingClient.from_bytes(records[3][1], identity=device.key, policy=device.policy)
    records.append((session, gone.give_up("gone").record))
    return records


def test_the_clients_machine_is_total() -> None:
    """Invariant 24: any message of the server in any phase is taken, heard before, or the end."""
    session = Session(4, {"corrupt": 0})
    records = records_of(session)
    device = session.devices[0]
    sid, digest = session.server.sid, session.config.digest
    said: dict[str, ServerMessage] = {}
    for events in range(len(session.log)):
        server, _ = replayed(session, events)
        for kind in (Roster, Inbox, Survivors, Consents):
            if device.key.public in server.advertised and not server.is_over:
                answer = server.answer(kind, device.key.public)
                if answer is not None:
                    said[answer.NAME] = answer
    said["receipt"] = session.answer(device, Receipt)
    said["abandoned"] = Abandoned("x").signed(SERVER, digest)
    said["offer"] = session.server.offer
    assert len(said) == 7
    taken = {
        ("advertised", "roster"): "shared",
        ("shared", "inbox"): "ready",
        ("masked", "survivors"): "consented",
        ("consented", "consents"): "revealed",
    }
    heard = {
        "advertised": [],
        "shared": ["roster"],
        "ready": ["roster", "inbox"],
        "masked": ["roster", "inbox"],
        "consented": ["roster", "inbox", "survivors"],
        "revealed": ["roster", "inbox", "survivors", "consents"],
        "withdrawn": ["roster", "inbox", "survivors", "consents"],
        "over": list(said),
    }
    phases = set()
    for _, record in records:
        before = MaskingClient.from_bytes(record, identity=device.key, policy=device.policy)
        phases.add(before.phase)
        for name, message in said.items():
            try:
                after = before.on(message, session.now).written()
            except InvalidSignature:  # the client has no session's id yet to check it by
                assert before.phase == "advertised"
                assert name in ("inbox", "survivors", "consents")
                continue
            if (before.phase, name) in taken:
                assert after.phase == taken[before.phase, name]
            elif name in heard[before.phase]:
                assert after.phase == before.phase
                assert after.outgoing == before.outgoing
            elif name in ("receipt", "abandoned"):
                assert after.phase == "over"
            else:
                assert after.phase in ("withdrawn", "over")
                assert after.outgoing is None
    assert phases == set(heard)
    assert device.client.sid == sid


def test_the_servers_machine_is_total() -> None:
    """Invariant 24: an event out of place gives the same session, and no effects."""
    session = Session(4, {"corrupt": 0}).run()
    later = [from_record(record) for _, record in session.log]
    others: list[Event] = [DeadlinePassed(), Unmasked("00" * 32), UnmaskFailed("x")]
    for events in range(len(session.log) + 1):
        server, _ = replayed(session, events)
        for event in [*later[events + 1 :], *later[:events], *others]:
            after, effects = server.on(event, session.now)
            assert (after == server) == (not effects)
            due = server_module._DUE.get(type(event), ())
            if due and server.phase not in due:
                assert not effects
        with pytest.raises((Conflict, FedpressError)):
            session_of_stranger(session, server)


def session_of_stranger(session: Session, server: Any) -> None:
    server.admit(Reveal(0, bytes(32), b""), identity(77).public, session.now)


def test_events_are_json_and_back() -> None:
    for event in (DeadlinePassed(), Unmasked("ab"), UnmaskFailed("x"), server_module.Aborted("y")):
        assert from_record(to_record(event)) == event
    message = Shares(1, bytes(32), ()).signed(SERVER, bytes(32))
    assert from_record(to_record(message)) == message


def test_a_record_that_is_none_is_said_to_be_corrupt() -> None:
    session = masked(3)
    device = session.devices[0]
    for bad in (b"", device.record[:-1], device.record + b"\0", bytes(100)):
        with pytest.raises(StateCorrupt, match="not the record of a masked session"):
            MaskingClient.from_bytes(bad, identity=device.key, policy=policy())
    later = replace(device.client._state, version=3).to_bytes()
    with pytest.raises(StateCorrupt, match="version 3, expected 2"):
        MaskingClient.from_bytes(later, identity=device.key, policy=policy())


def test_the_survivors_are_frozen_before_a_share_is_asked_for() -> None:
    """Invariants 16 and 25: the event that freezes them is on record before the answer exists, and
    nothing changes them afterwards."""
    session = Session(5, {"corrupt": 0, "adversary": "semi-honest"}).run({4: "mask"})
    key = session.devices[0].key.public
    sets = set()
    for state in session.states:
        if state.phase in ("revealing", "unmasking"):
            assert isinstance(state.answer(Survivors, key), Survivors)
            sets.add(state.survivors)
        elif not state.is_over and key in state.advertised:
            assert state.answer(Survivors, key) is None
            assert not state.survivors
    assert len(sets) == 1


def test_a_policy_that_asks_for_less_takes_more() -> None:
    strict = config(10, hybrid=True)
    policy(adversary="malicious", corrupt=0.1, hybrid=True, minimum=3).check(strict)
    policy().check(strict)


def test_every_invariant_has_a_test_that_names_its_number() -> None:
    named: set[int] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for tree in ast.walk(ast.parse(path.read_text())):
            if isinstance(tree, ast.FunctionDef) and tree.name.startswith("test_"):
                for found in re.findall(r"Invariants? ([\d, and]+)", ast.get_docstring(tree) or ""):
                    named.update(int(number) for number in re.findall(r"\d+", found))
    assert named == set(range(1, 26))


def test_the_parameters_on_the_page_are_the_searchs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "secure-aggregation.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| (\d+, .*) \|$", page, re.MULTILINE)
    assert len(rows) == 11
    adversaries: tuple[Adversary, ...] = ("semi-honest", "malicious")
    profiles = [
        (adversary, corrupt, dropout)
        for adversary in adversaries
        for corrupt, dropout in ((0.05, 0.05), (0.1, 0.05), (0.05, 0.3), (0.1, 0.3))
    ]
    for n, cells in rows:
        for cell, (adversary, corrupt, dropout) in zip(cells.split(" | "), profiles, strict=True):
            if cell == "none":
                with pytest.raises(IncompatiblePlan, match="no sparse graph"):
                    parameters(
                        int(n.replace(",", "")),
                        corrupt=corrupt,
                        dropout=dropout,
                        adversary=adversary,
                    )
                continue
            found = parameters(
                int(n.replace(",", "")), corrupt=corrupt, dropout=dropout, adversary=adversary
            )
            assert cell == f"{found.degree}, {found.threshold}"
