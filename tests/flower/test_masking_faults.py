"""Clients that fail or lie in masked rounds are named and left out; who vouches for whom."""

import hashlib
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from fedpress.authority import EnrolmentAuthority, Request, device_key, make_authority
from fedpress_client import MaskingRules
from fedpress_flower import envelope
from fedpress_flower.server import Plan
from fedpress_protocols.masking.messages import MaskedInput, Reveal, Shares, parse
from fedpress_protocols.signatures import DeviceKey, to_base64url
from fedpress_strategies import from_config
from tests.flower.fleet import step_of
from tests.flower.masked_fleet import FINE, HALF, MaskedFleet, strategy_of
from tests.flower.test_masking import HONEST, TRUSTING, _session_of, go, report_of
from tests.flower.test_mod_and_strategy import SHAPES, training

logging.getLogger("flwr").setLevel(logging.ERROR)

COUNT = 8


def ours_of(**options: Any) -> Any:
    return strategy_of(from_config({"id": "fedavg"}), fraction_evaluate=0.0, **options)


def saying(reply: Message, said: Any) -> Message:
    """The reply with something else said in it."""
    record = ConfigRecord({**reply.content[envelope.RECORD], envelope.SAID: said})
    return Message(RecordDict({**reply.content, envelope.RECORD: record}), metadata=reply.metadata)


def with_body(reply: Message, body: bytes, stype: str = envelope.MASKED_STYPE) -> Message:
    array = ArrayRecord({envelope.BODY: Array("uint8", (len(body),), stype, body)})
    return Message(
        RecordDict({**reply.content, envelope.BODY_RECORD: array}), metadata=reply.metadata
    )


def body_of(reply: Message) -> bytes:
    return bytes(reply.content[envelope.BODY_RECORD][envelope.BODY].data)


def raising(message: Message, reply: Message) -> Message:
    return Message(Error(2, "RuntimeError: the disk is full"), reply_to=message)


def naked(message: Message, reply: Message) -> Message:
    """As a client without the mod."""
    arrays = ArrayRecord({n: Array(np.zeros(s, np.float32)) for n, s in SHAPES.items()})
    return Message(RecordDict({"arrays": arrays}), metadata=reply.metadata)


def empty(message: Message, reply: Message) -> Message:
    return Message(RecordDict({envelope.RECORD: ConfigRecord({})}), metadata=reply.metadata)


def wrongly_typed(message: Message, reply: Message) -> Message:
    return saying(reply, "text")


def rubbish(message: Message, reply: Message) -> Message:
    return saying(reply, b"\xff" * 40)


def cut(message: Message, reply: Message) -> Message:
    return saying(reply, bytes(reply.content[envelope.RECORD][envelope.SAID])[:-1])


def forged(message: Message, reply: Message) -> Message:
    said = bytearray(reply.content[envelope.RECORD][envelope.SAID])
    said[-1] ^= 1
    return saying(reply, bytes(said))


LIES = [raising, naked, empty, wrongly_typed, rubbish, cut, forged]


@pytest.mark.parametrize("at", ["train", "shares", "masked", "consent", "reveal"])
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_who_fails_or_talks_rubbish_is_named_and_the_round_goes_on(
    lie: Any, at: str, tmp_path: Path
) -> None:
    fleet = MaskedFleet(tmp_path, COUNT, training, lies={(1, 3, at): lie})
    made = ours_of()
    models = go(fleet, made)
    report = report_of(made)
    is_in = at in ("consent", "reveal")
    assert report.included == tuple(n for n in range(1, COUNT + 1) if is_in or n != 3)
    told = report.faults if is_in else report.dropped
    if (lie, at) == (forged, "consent") or at != "consent":
        assert [*told] == [3]
        assert told[3]
    mean = fleet.mean(1, report.included)
    np.testing.assert_array_equal(models[1], mean.astype(np.float32))


def test_bodies_that_are_not_those_announced_are_never_mixed_in(tmp_path: Path) -> None:
    def flipped(message: Message, reply: Message) -> Message:
        return with_body(reply, bytes([body_of(reply)[0] ^ 1]) + body_of(reply)[1:])

    def longer(message: Message, reply: Message) -> Message:
        return with_body(reply, body_of(reply) + bytes(8))

    def other_type(message: Message, reply: Message) -> Message:
        return with_body(reply, body_of(reply), "numpy.ndarray")

    def without(message: Message, reply: Message) -> Message:
        content = RecordDict({envelope.RECORD: reply.content[envelope.RECORD]})
        return Message(content, metadata=reply.metadata)

    def lengthened(message: Message, reply: Message) -> Message:
        """A header of its own for a longer body."""
        body = body_of(reply) + bytes(8)
        header = parse(bytes(reply.content[envelope.RECORD][envelope.SAID]))
        assert isinstance(header, MaskedInput)
        other = replace(header, sha256=hashlib.sha256(body).digest(), length=len(body))
        node = message.metadata.dst_node_id
        return with_body(
            saying(reply, other.signed(fleet.key(node), session_id(fleet, node)).to_bytes()), body
        )

    lies = [flipped, longer, other_type, without, lengthened]
    count = 18
    fleet = MaskedFleet(
        tmp_path, count, training, lies={(1, n, "masked"): lie for n, lie in enumerate(lies, 1)}
    )
    made = ours_of()
    models = go(fleet, made)
    report = report_of(made)
    assert report.included == tuple(range(len(lies) + 1, count + 1))
    np.testing.assert_array_equal(models[1], fleet.mean(1, report.included).astype(np.float32))


def session_id(fleet: MaskedFleet, node: int) -> bytes:
    return _session_of(fleet, node)


def swapped(fleet: MaskedFleet, count: int) -> Any:
    """Shares for the wrong peers: the first `count` are sealed for one another."""

    def lie(message: Message, reply: Message) -> Message:
        node = message.metadata.dst_node_id
        shares = parse(bytes(reply.content[envelope.RECORD][envelope.SAID]))
        assert isinstance(shares, Shares)
        sealed = [*shares.sealed[1:count], shares.sealed[0], *shares.sealed[count:]]
        other = replace(shares, sealed=tuple(sealed))
        return saying(reply, other.signed(fleet.key(node), session_id(fleet, node)).to_bytes())

    return lie


def test_shares_for_the_wrong_peer_cost_that_peer_and_name_the_liar(tmp_path: Path) -> None:
    fleet = MaskedFleet(tmp_path, 12, training)
    fleet.lies = {(1, 5, "shares"): swapped(fleet, 2)}
    made = ours_of()
    models = go(fleet, made)
    report = report_of(made)
    assert len(report.included) == 10
    for reason in report.dropped.values():
        assert "could not open what was sealed for it" in reason
        assert "node 5" in reason
    np.testing.assert_array_equal(models[1], fleet.mean(1, report.included).astype(np.float32))


def test_shares_for_the_wrong_peers_everywhere_end_the_session_and_cost_nothing_else(
    tmp_path: Path,
) -> None:
    fleet = MaskedFleet(tmp_path, 8, training)
    fleet.lies = {(1, 5, "shares"): swapped(fleet, 7)}
    made = ours_of()
    models = go(fleet, made, 2)
    report = report_of(made)
    assert not report.included
    assert sum("node 5" in reason for reason in report.dropped.values()) == 7
    np.testing.assert_array_equal(models[1], models[0])
    assert len(report_of(made, 2).included) == 8
    assert {fleet.ledger(node).not_included for node in range(1, 9)} == {1}


def test_wrong_shares_at_the_end_are_found_and_passed_over(tmp_path: Path) -> None:
    """The sum is right, and the report names who gave them."""
    liars: list[int] = []

    def lie(message: Message, reply: Message) -> Message:
        node = message.metadata.dst_node_id
        reveal = parse(bytes(reply.content[envelope.RECORD][envelope.SAID]))
        assert isinstance(reveal, Reveal)
        if reveal.sender:
            return reply
        liars.append(node)  # of more owners than can be corrupt
        other = replace(reveal, shares=bytes(byte ^ 1 for byte in reveal.shares))
        return saying(reply, other.signed(fleet.key(node), session_id(fleet, node)).to_bytes())

    fleet = MaskedFleet(tmp_path, 9, training, rules=TRUSTING)
    fleet.lies = {(1, node, "reveal"): lie for node in range(1, 10)}
    made = ours_of(masking=HONEST)
    models = go(fleet, made)
    report = report_of(made)
    assert len(report.included) == 9
    assert [*report.faults] == liars
    assert len(liars) == 1
    np.testing.assert_array_equal(models[1], fleet.mean(1, report.included).astype(np.float32))


def test_too_many_wrong_shares_end_the_session(tmp_path: Path) -> None:
    fleet = MaskedFleet(tmp_path, 5, training)
    fleet.lies = {(1, node, "reveal"): raising for node in (1, 2)}
    made = ours_of()
    models = go(fleet, made, 2)
    assert "too few" in report_of(made).abandoned
    assert "disk is full" in report_of(made).dropped[1]
    np.testing.assert_array_equal(models[1], models[0])
    assert len(report_of(made, 2).included) == 5


@pytest.mark.parametrize("fault", ["raises", "nan", "shapes", "weight", "metrics"])
def test_training_that_goes_wrong_costs_one_client(fault: str, tmp_path: Path) -> None:
    def unruly(message: Message, context: Context) -> Message:
        reply = training(message, context)
        if context.node_id != 2 or int(message.content["config"]["server-round"]) != 1:
            return reply
        match fault:
            case "raises":
                raise RuntimeError("no data here")
            case "nan":
                reply.content["arrays"]["w"] = Array(np.full(SHAPES["w"], np.nan, np.float32))
            case "shapes":
                reply.content["arrays"]["w"] = Array(np.zeros((5, 4), np.float32))
            case "weight":
                reply.content["metrics"]["num-examples"] = -1
            case "metrics":
                del reply.content["metrics"]
        return reply

    fleet = MaskedFleet(tmp_path, 5, unruly, on_discard=lambda discard: None)
    made = ours_of()
    go(fleet, made, 2)
    assert report_of(made).included == (1, 3, 4, 5)
    assert report_of(made).dropped[2].startswith("failed: ")
    assert report_of(made, 2).included == (1, 2, 3, 4, 5)


def test_one_identity_serves_one_node(tmp_path: Path) -> None:
    """A node that gives another's key at the door, and one that repeats another's words."""
    heard: list[bytes] = []

    def hearing(message: Message, reply: Message) -> Message:
        heard.append(bytes(reply.content[envelope.RECORD][envelope.SAID]))
        return reply

    def copying(message: Message, reply: Message) -> Message:
        return saying(reply, heard[-1])

    for at, why in (("join", "signature"), ("train", "certificate of another node")):
        call = 0 if at == "join" else 1
        lies = {(call, 1, at): hearing, (call, 2, at): copying}
        fleet = MaskedFleet(tmp_path / at, 5, training, lies=lies)
        made = ours_of()
        go(fleet, made)
        assert [*report_of(made).dropped] == [2]
        assert why in report_of(made).dropped[2]


# Who vouches


def apart(folder: Path, fleet: MaskedFleet, certified: int, population: str = "fedpress") -> str:
    """An authority elsewhere: it certifies the first nodes' keys, whose owners name it."""
    public = make_authority(folder / "authority.key")
    authority = EnrolmentAuthority(folder / "authority.key", lambda: "", time.time)
    for node, context in fleet.contexts.items():
        state = folder / f"node-{node}"
        certificate = state / "device.cert"
        context.node_config["fedpress-state-dir"] = str(state)
        context.node_config["fedpress-authority"] = public
        context.node_config["fedpress-certificate"] = str(certificate)
        key = device_key(state)
        if node <= certified:
            asked = Request(key, f"site-{node}")
            (made,) = authority.issue([asked], population=population, days=1)
            certificate.write_bytes(made.to_bytes())
    return public


def test_an_authority_elsewhere_certifies_whom_the_others_believe(tmp_path: Path) -> None:
    fleet = MaskedFleet(tmp_path, 6, training, state_dir=None, durable=True)
    made = ours_of(authority=apart(tmp_path, fleet, certified=5), masking=FINE)
    go(fleet, made)
    report = report_of(made)
    assert report.included == (1, 2, 3, 4, 5)
    assert "device.cert" in report.dropped[6]
    assert not [message for message in fleet.sent if step_of(message) == "join"]


def test_a_server_that_vouches_itself_is_refused_by_who_names_another(tmp_path: Path) -> None:
    elsewhere = to_base64url(DeviceKey.generate().public)
    rules = MaskingRules(authority=elsewhere)
    fleet = MaskedFleet(tmp_path, 4, training, rules=rules)
    made = ours_of()
    go(fleet, made)
    assert all("pinned is" in reason for reason in report_of(made).dropped.values())
    keys = {"authority": DeviceKey.generate(), "key": DeviceKey.generate()}
    made = ours_of(**keys)
    rules = MaskingRules(authority=made.authority)
    fleet = MaskedFleet(tmp_path / "known", 4, training, rules=rules, server_key=made.server_key)
    go(fleet, made)
    assert len(report_of(made).included) == 4


def test_another_servers_key_is_refused(tmp_path: Path) -> None:
    stranger = to_base64url(DeviceKey.generate().public)
    fleet = MaskedFleet(tmp_path, 4, training, server_key=stranger)
    made = ours_of()
    go(fleet, made)
    assert all("pinned is" in reason for reason in report_of(made).dropped.values())
    fleet = MaskedFleet(tmp_path / "first", 4, training)
    go(fleet, ours_of())
    another = strategy_of(
        from_config({"id": "fedavg"}),
        Plan(HALF, minimum=3, seed=3),
        fraction_evaluate=0.0,
    )
    go(fleet, another)
    assert all("signs by" in reason for reason in report_of(another).dropped.values())


def test_names_that_lead_out_of_the_state_folder_are_refused(tmp_path: Path) -> None:
    fleet = MaskedFleet(tmp_path, 4, training)
    made = ours_of()
    go(fleet, made)
    message = fleet.sent_to(1, "join")
    fleet.contexts[1].state.clear()
    before = sorted(tmp_path.rglob("*"))
    for task, client in (("../../x", "1"), ("flower", "../x"), ("", "1"), ("flower", "a/b")):
        record: Any = message.content[envelope.RECORD]
        record[envelope.TASK], record[envelope.CLIENT] = task, client
        assert "MalformedRequest" in fleet.ask_again(message).error.reason
    assert sorted(tmp_path.rglob("*")) == before


def test_a_message_of_an_earlier_round_is_refused(tmp_path: Path) -> None:
    fleet = MaskedFleet(tmp_path, 4, training)
    made = ours_of()
    go(fleet, made, 2)
    for step in ("train", "shares", "masked"):
        answer = fleet.ask_again(fleet.sent_to(2, step, 1))
        assert "Conflict" in answer.error.reason
