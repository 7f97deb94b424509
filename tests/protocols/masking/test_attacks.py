"""A server that cheats, and clients that do: each attack is run, and refused.

The server's key signs every lie here, so what stops it is the protocol and not the signature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import numpy as np
import pytest

from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    Forbidden,
    IncompatiblePlan,
    InvalidKey,
    InvalidShare,
    InvalidSignature,
    InvalidUpdate,
    MalformedRequest,
    RoundClosed,
    UpdateConflict,
)
from fedpress_protocols.masking import server as server_module
from fedpress_protocols.masking import shamir, unmasking
from fedpress_protocols.masking.client import MaskingClient
from fedpress_protocols.masking.cohort import Cohort
from fedpress_protocols.masking.keys import ChannelKey, MaskKey, commitment, self_mask
from fedpress_protocols.masking.messages import (
    Abandoned,
    Advertise,
    Complaint,
    Consent,
    Consents,
    Inbox,
    Listing,
    MaskedInput,
    Offer,
    Receipt,
    Reveal,
    Roster,
    RosterRow,
    SealedShares,
    Shares,
    Survivors,
    survivors_digest,
)
from fedpress_protocols.masking.server import MaskingServer, Unmasked, UnmaskFailed
from fedpress_protocols.masking.shamir import SHARE_BYTES
from fedpress_protocols.masking.transcript import SessionConfig, VectorSpec
from fedpress_protocols.signatures import Content, DeviceKey
from tests.protocols.masking.session import (
    AUTHORITY,
    SERVER,
    TRAINED,
    Device,
    Session,
    certificate,
    config,
    identity,
    policy,
    replayed,
    values_of,
)


def until(phase: str, n: int = 5, **changes: Any) -> Session:
    """A session that has come to where `phase`'s messages are due, every client having heard."""
    session = Session(n, changes)
    steps = [("advertise", None), ("share", Roster), ("mask", Inbox), ("consent", Survivors)]
    if changes.get("adversary") == "semi-honest":
        steps.pop()
    for name, awaited in [*steps, ("reveal", Consents)]:
        if name == phase:
            return session
        session.play(name, awaited, {})
    raise AssertionError(phase)


def tell(session: Session, device: Device, message: Any) -> None:
    """The server lies, under its own signature."""
    by_config = isinstance(message, Roster | Receipt | Abandoned)
    context = session.config.digest if by_config else session.server.sid
    device.hear(message.signed(SERVER, context), session.now)


def refuses(device: Device, why: str) -> None:
    """It says nothing more, knows no secret, and says why."""
    assert device.client.phase in ("withdrawn", "over", "complained")
    assert device.client.outcome in ("pending", "not-included")
    complains = device.client.phase == "complained"
    assert isinstance(device.client.outgoing, Complaint if complains else NoneType)
    assert why in device.client.reason
    state = device.client._state
    assert not any(
        (state.mask_secret, state.seed, state.channel_secret, state.held_shares, state.masks)
    )


def slot_of(session: Session, device: Device) -> int:
    return session.server._closed.slots[device.key.public]


def phase_of(session: Session) -> str:
    return session.server.phase


def consent_of(device: Device) -> Consent:
    message = device.client.outgoing
    assert isinstance(message, Consent)
    return message


def revealed(session: Session, device: Device) -> dict[int, bytes]:
    message = device.client.outgoing
    assert isinstance(message, Reveal)
    shares = [
        message.shares[at : at + SHARE_BYTES] for at in range(0, len(message.shares), SHARE_BYTES)
    ]
    return dict(
        zip(
            session.server._closed.owners(message.sender, session.server.sharers),
            shares,
            strict=True,
        )
    )


# Lies about who survived


def test_a_client_is_never_asked_for_both_shares_of_another() -> None:
    """Invariants 6 and 25: a second survivor set, with one client declared dead, gets nothing."""
    session = until("reveal", adversary="semi-honest")
    device, other = session.devices[0], slot_of(session, session.devices[1])
    everybody = session.server.survivors
    tell(session, device, Survivors(everybody))
    assert other in revealed(session, device)
    said = device.client.outgoing
    tell(session, device, Survivors(everybody))
    assert device.client.outgoing == said  # the same question: the same answer
    tell(session, device, Survivors(everybody - {other}))
    refuses(device, "unexpected survivors")


def test_of_each_client_one_share_is_given_by_what_became_of_it() -> None:
    """Invariant 6: the seed's of a survivor, the mask secret's of another, never both."""
    session = Session(6, {"adversary": "semi-honest", "corrupt": 0})
    session.play("advertise", None, {})
    session.play("share", Roster, {})
    session.play("mask", Inbox, {3: "mask"})
    device = session.devices[0]
    held = {each.owner: each for each in device.client._state.held_shares}
    session.hear(device, Survivors)
    given = revealed(session, device)
    lost, own = slot_of(session, session.devices[3]), slot_of(session, device)
    assert given.keys() == held.keys()
    for owner, share in given.items():
        assert share == (held[owner].mask_share if owner == lost else held[owner].seed_share)
    assert held[own].mask_share == b""  # of its own it could give no other


@pytest.mark.parametrize("adversary", ["malicious", "semi-honest"])
def test_a_client_that_is_told_it_is_dead_says_nothing(adversary: str) -> None:
    """Invariant 6: self declared dead."""
    phase = "consent" if adversary == "malicious" else "reveal"
    session = until(phase, adversary=adversary)
    device = session.devices[0]
    tell(session, device, Survivors(session.server.survivors - {slot_of(session, device)}))
    refuses(device, "not among the survivors")


def test_different_survivors_for_different_clients_are_not_unmasked() -> None:
    """The malicious profile: a lie to a part leaves no part with enough consents."""
    session = until("consent", 9)
    everybody = session.server.survivors
    cut = [slot_of(session, device) for device in session.devices]
    for lied_to in session.devices[:4]:
        tell(session, lied_to, Survivors(everybody - {cut[8]}))
    for device in session.devices[4:]:
        tell(session, device, Survivors(everybody))
    said = [consent_of(device) for device in session.devices]
    for part in (session.devices[:4], session.devices[4:8]):
        for device in part:
            own = slot_of(session, device)
            group = {slot_of(session, other) for other in part} - {own}
            same = tuple(each for each in said if each.sender in group)
            tell(session, device, Consents(same))
            refuses(device, "consent, at least 7 must")
    # Nor do consents to another set count, or those of nobody near, or forged ones.
    device = session.devices[8]
    own = slot_of(session, device)
    others = tuple(each for each in said if each.sender != own)
    record = device.record
    for consents, why in (
        (others, "consented to another set of survivors"),
        ((replace(others[5], sender=99),), "no surviving neighbour"),
        ((replace(others[5], sender=others[4].sender),), "did not make this signature"),
        ((others[5], others[5]), "2 of this client's neighbours consent"),
    ):
        device.record = record
        device.client = device.read()
        tell(session, device, Consents(consents))
        refuses(device, why)


def test_who_did_not_survive_has_no_say() -> None:
    """A corrupt client, left out of the sum, signs for it all the same."""
    session = until("consent", 9)
    device, lost = session.devices[:2]
    members = session.server.survivors - {slot_of(session, lost)}
    consent = Consent(slot_of(session, lost), survivors_digest(members))
    tell(session, device, Survivors(members))
    tell(session, device, Consents((consent.signed(lost.key, session.server.sid),)))
    refuses(device, "no surviving neighbour")


def test_in_a_sparse_graph_so_many_neighbours_have_to_consent() -> None:
    """Invariant 7: a client that keeps no share of its own seed does not count itself."""
    session = Session(140)
    session.play("advertise", None, {})
    cohort, device = session.server._closed, session.devices[0]
    own, threshold = slot_of(session, device), cohort.topology.threshold
    by_slot = {slot_of(session, each): each for each in session.devices}
    near = cohort.neighbours[own]
    session.hear(device, Roster)
    sealed = []
    for slot in near:
        session.hear(by_slot[slot], Roster)
        shares = by_slot[slot].client.outgoing
        assert isinstance(shares, Shares)
        sealed.append(shares.sealed[cohort.place(slot, own)])
    everybody = frozenset({own, *near})
    tell(session, device, Inbox(everybody, tuple(sealed)))
    device.mask()
    tell(session, device, Survivors(everybody))
    record = device.record
    consents = tuple(
        Consent(slot, survivors_digest(everybody)).signed(by_slot[slot].key, cohort.sid)
        for slot in near[:threshold]
    )
    tell(session, device, Consents(consents[1:]))
    refuses(
        device, f"{threshold - 1} of this client's neighbours consent, at least {threshold} must"
    )
    device.record = record
    device.client = device.read()
    tell(session, device, Consents(consents))
    assert device.client.phase == "revealed"
    assert revealed_owners(session, device, everybody) == list(near)


def revealed_owners(session: Session, device: Device, sharers: frozenset[int]) -> list[int]:
    message = device.client.outgoing
    assert isinstance(message, Reveal)
    owners = session.server._closed.owners(message.sender, sharers)
    assert len(message.shares) == SHARE_BYTES * len(owners)
    return owners


@pytest.mark.parametrize(
    ("members", "why"),
    [
        (lambda s, own: frozenset({*s.server.survivors, 77}), "sent no shares"),
        (lambda s, own: frozenset({own, (own + 1) % 5}), "2 survivors, at least 3"),
        (lambda s, own: frozenset({own, (own + 1) % 5, (own + 2) % 5}), "3 survivors near"),
    ],
    ids=["strangers", "below the minimum", "below the threshold"],
)
def test_survivors_that_cannot_be(members: Callable[[Session, int], Any], why: str) -> None:
    """Invariants 6 and 16: U3 within U2, no smaller than the policy's minimum, t of them near."""
    session = until("consent")
    device = session.devices[0]
    tell(session, device, Survivors(members(session, slot_of(session, device))))
    refuses(device, why)


# Lies about who takes part


def roster_of(session: Session, device: Device) -> Roster:
    answer = session.answer(device, Roster)
    assert isinstance(answer, Roster)
    return answer


def forged(session: Session, roster: Roster, entries: list[Advertise]) -> Roster:
    """The roster of these entries, in order, with rows that fit."""
    entries = sorted(entries, key=lambda entry: entry.row.identity)
    return replace(
        roster, listing=Listing(tuple(each.row for each in entries)), entries=tuple(entries)
    )


def test_a_roster_whose_graph_promises_too_little_is_refused() -> None:
    """Invariant 16: `minimum` of a sparse graph says what the server names, and not what is in a
    sum; a device holds its own minimum to what the graph promises."""
    session = Session(140, {"minimum": 130}, policy=policy(minimum=130))
    session.play("advertise", None, {})
    device = session.devices[0]
    session.hear(device, Roster)
    refuses(device, "whose graph allows a sum of 8")


def with_other_key(entries: list[Advertise]) -> None:
    entries[0] = replace(entries[0], mask_key=bytes([9]) * 32)


def with_swapped_keys(entries: list[Advertise]) -> None:
    one, other = entries[:2]
    entries[:2] = [
        replace(one, mask_key=other.mask_key),
        replace(other, mask_key=one.mask_key),
    ]


def with_invented_client(entries: list[Advertise]) -> None:
    key = identity(1_000)
    authority = identity(1_001)  # the server's own, not the one that clients pin
    vouched = certificate(key)
    vouched = vouched.issue(
        authority,
        identity=key.public,
        client_id="sybil",
        population=vouched.population,
        expires=vouched.expires,
    )
    entries[0] = replace(entries[0], certificate=vouched).signed(key, config(5).digest)


def with_a_copied_key(entries: list[Advertise]) -> None:
    """A corrupt client, certified, advertises another's keys as its own."""
    key = identity(1_000)
    entries[0] = replace(
        entries[0], certificate=certificate(key), mask_key=entries[1].mask_key
    ).signed(key, config(5).digest)


def respelled(public: bytes) -> bytes:
    """The same X25519 key in other bytes: the highest bit does not count (RFC 7748, section 5)."""
    return public[:31] + bytes([public[31] | 0x80]) + public[32:]


def with_a_copied_channel_key(entries: list[Advertise]) -> None:
    """Another's mask key as its channel key."""
    key = identity(1_000)
    entries[0] = replace(
        entries[0], certificate=certificate(key), channel_key=entries[1].mask_key
    ).signed(key, config(5).digest)


def with_a_respelled_key(entries: list[Advertise]) -> None:
    """The same in bytes that are not the same."""
    key = identity(1_000)
    entries[0] = replace(
        entries[0],
        certificate=certificate(key),
        channel_key=respelled(entries[1].channel_key),
    ).signed(key, config(5).digest)


def with_twice_the_same(entries: list[Advertise]) -> None:
    entries[0] = entries[1]


def signed_advertise(session: Session, key: DeviceKey) -> Advertise:
    secrets = bytes([7]) * 32, bytes([8]) * 32
    return Advertise(
        certificate(key), MaskKey(secrets[0]).public, ChannelKey(secrets[1]).public, bytes(32)
    ).signed(key, session.config.digest)


@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (with_other_key, "did not make this signature"),
        (with_swapped_keys, "did not make this signature"),
        (with_invented_client, "did not make this signature"),
        (with_a_copied_key, "a repeated key"),
        (with_a_copied_channel_key, "a repeated key"),
        (with_a_respelled_key, "non-canonical"),
        (with_twice_the_same, "sorted by identity"),
    ],
    ids=[
        "other key",
        "swapped keys",
        "invented client",
        "copied key",
        "copied channel key",
        "respelled key",
        "same client twice",
    ],
)
def test_a_roster_with(tamper: Callable[[list[Advertise]], None], why: str) -> None:
    """Invariant 9: swapped, foreign, duplicate keys."""
    session = until("share")
    device = session.devices[0]
    roster = roster_of(session, device)
    own = device.client.outgoing
    others = [entry for entry in roster.entries if entry != own]
    tamper(others)
    assert isinstance(own, Advertise)
    tell(session, device, forged(session, roster, [own, *others]))
    refuses(device, why)


def test_a_roster_that_is_short_shuffled_or_without_the_client() -> None:
    """Invariants 7, 8 and 9: shrunken roster; the server has no freedom in its order."""
    session = until("share", 6, minimum=4)
    device = session.devices[0]
    roster, own = roster_of(session, device), device.client.outgoing
    assert isinstance(own, Advertise)
    record = device.record
    others = [entry for entry in roster.entries if entry != own]
    hidden = replace(roster, entries=tuple(entry for entry in roster.entries if entry == own))
    rows = roster.listing.rows
    shuffled = replace(roster, listing=Listing(rows[::-1]), entries=roster.entries[::-1])
    other_row = replace(
        roster, listing=Listing(tuple(RosterRow(row.identity, bytes(32)) for row in rows))
    )
    more = [*others, signed_advertise(session, identity(1_000))]
    for bad, why in (
        (forged(session, roster, [own, *more]), "a roster of 7, expected 4 to 6"),
        (forged(session, roster, [own, *others[:2]]), "a roster of 3, expected 4 to 6"),
        (shuffled, "not sorted"),
        (forged(session, roster, others), "without this client's Advertise"),
        (other_row, "without this client's Advertise"),
        (hidden, "entries are not those of the neighbours"),
    ):
        device.record = record
        device.client = device.read()
        tell(session, device, bad)
        refuses(device, why)


def test_different_rosters_for_different_clients_open_no_share() -> None:
    """Invariant 3: the session's id is each client's own, so nothing fits across two rosters."""
    session = until("share", 6)
    left_out = session.devices[5]
    for device in session.devices[:5]:
        full = roster_of(session, device)
        cut = [entry for entry in full.entries if entry.certificate.identity != left_out.key.public]
        lied = forged(session, full, cut) if device is session.devices[0] else full
        tell(session, device, lied)
    said = {device.key.key_id: device.client.outgoing for device in session.devices[:5]}
    one, other = session.devices[:2]
    assert one.client._state.sid != other.client._state.sid
    sealed = said[other.key.key_id]
    assert isinstance(sealed, Shares)
    inbox = Inbox(frozenset(range(5)), (sealed.sealed[0],) * 4)
    one.hear(inbox.signed(SERVER, one.client._state.sid), session.now)
    refuses(one, "for this receiver")


def test_a_replayed_session_finds_other_keys() -> None:
    """Invariant 19: the offer again, and all that was said then: the client is another."""
    session = Session(4, {"adversary": "semi-honest"}).run()
    first, _ = replayed(session, 4)
    device = session.devices[0]
    old = first.answer(Roster, device.key.public)
    assert isinstance(old, Roster)
    session.begin(device)
    device.hear(old, session.now)
    refuses(device, "without this client's Advertise")


def test_an_offer_that_has_expired_is_refused_in_any_phase() -> None:
    """Invariant 19."""
    session = Session(4)
    session.now = session.config.expires
    with pytest.raises(Conflict, match="expired"):
        session.begin(session.devices[0])
    for phase, kind in (
        ("share", Roster),
        ("mask", Inbox),
        ("consent", Survivors),
        ("reveal", Consents),
    ):
        session = until(phase, 4)
        session.now = session.config.expires
        session.hear(session.devices[0], kind)
        refuses(session.devices[0], "expired")


# Lies about the terms


@pytest.mark.parametrize(
    ("changes", "insists", "why"),
    [
        ({"adversary": "semi-honest"}, {"adversary": "malicious"}, "no protection"),
        ({"minimum": 3}, {"minimum": 4}, "3 survivors, fewer than 4"),
        ({"corrupt": 999}, {"corrupt": 0.1}, "0.0999 corrupt clients, less than 0.1"),
        ({"suite": "aes-128-ctr"}, {"suites": ("chacha20",)}, "the suite 'aes-128-ctr'"),
        ({"hybrid": False}, {"hybrid": True}, "no post-quantum keys"),
        ({"population": "others"}, {}, "the population 'others'"),
        ({}, {"server_key": identity(7).public}, "another server's key"),
    ],
)
def test_terms_below_the_devices_policy(
    changes: dict[str, Any], insists: dict[str, Any], why: str
) -> None:
    """Invariant 7: threshold, degree and least cohort are the client's; an offer cannot lower
    them. The offer carries none of them: they follow from caps that the policy bounds."""
    session = Session(5, changes, policy=policy(**insists))
    device = session.devices[0]
    if "server_key" in insists:
        with pytest.raises(InvalidSignature):
            session.begin(device)
        with pytest.raises(IncompatiblePlan, match=why):
            device.policy.check(session.config)
        return
    with pytest.raises(IncompatiblePlan, match=why):
        session.begin(device)
    assert not device.record


@pytest.mark.parametrize("what", ["model", "support", "plan"])
def test_another_model_support_or_plan_is_not_trained_on(what: str) -> None:
    """Invariant 3: the client knows what it trained from."""
    session = Session(5, {what: bytes(32)})
    with pytest.raises(IncompatiblePlan, match=f"a session on the {what} 000000000000"):
        session.begin(session.devices[0])


@pytest.mark.parametrize("what", ["model", "support"])
def test_different_models_or_supports_per_client_give_no_sum(what: str) -> None:
    """Invariant 3: two configurations under one server: keys and signatures do not fit across."""
    session = Session(4)
    other = Session(4, {what: bytes(32)})
    device = other.devices[0]
    device.trained = replace(TRAINED, **{what: bytes(32)})
    other.begin(device)
    with pytest.raises(InvalidSignature):  # even an honest server would not take it for this one
        session.post(device)
    # A server that takes it nevertheless cannot show it to others: its signature is over the other
    # configuration.
    for each in session.devices[1:]:
        session.begin(each)
        session.post(each)
    foreign = device.client.outgoing
    assert isinstance(foreign, Advertise)
    victim = session.devices[1]
    own = victim.client.outgoing
    assert isinstance(own, Advertise)
    ours = [each.client.outgoing for each in session.devices[2:]]
    entries = [each for each in ours if isinstance(each, Advertise)]
    roster = forged(session, Roster(Listing(()), ()), [own, foreign, *entries])
    victim.hear(roster.signed(SERVER, session.config.digest), session.now)
    refuses(victim, "did not make this signature")


def test_an_offer_of_another_server_is_refused() -> None:
    session = Session(4)
    offer = Offer(session.config).signed(identity(9), session.config.digest)
    device = session.devices[0]

    def begin(offer: Offer, **changes: Any) -> None:
        MaskingClient.begin(
            offer,
            **{
                "identity": device.key,
                "certificate": certificate(device.key),
                "policy": device.policy,
                "trained": TRAINED,
                "now": session.now,
                **changes,
            },
        )

    with pytest.raises(InvalidSignature):
        begin(offer)
    with pytest.raises(IncompatiblePlan, match="another key than this device's"):
        begin(session.server.offer, certificate=certificate(identity(9)))
    with pytest.raises(InvalidSignature, match="expired"):
        begin(session.server.offer, certificate=certificate(device.key, expires=1))
    for vectors in ((), (VectorSpec("x", 1, 2**61),), (VectorSpec("x", 0, 1),)):
        empty = config(4, vectors=vectors)
        with pytest.raises(ConfigurationError):
            begin(Offer(empty).signed(SERVER, empty.digest))


# Lies on the way


def test_what_the_server_did_not_sign_changes_nothing() -> None:
    session = until("consent", 4)
    device = session.devices[0]
    record = device.record
    for message in (
        session.answer(device, Survivors),
        Abandoned("x"),
        Receipt(session.server.sid, session.server.survivors, bytes(32)),
    ):
        for forger in (AUTHORITY, identity(3)):
            with pytest.raises(InvalidSignature):
                device.hear(message.signed(forger, session.server.sid), session.now)
    assert device.record == record


def test_entries_of_a_roster_that_the_server_did_not_sign_change_nothing() -> None:
    """Whoever is on the way cannot make a client withdraw by changing them."""
    session = until("share")
    device = session.devices[0]
    roster, record = roster_of(session, device), device.record
    other = replace(roster.entries[0], nonce=bytes(32))
    for entries in ((), roster.entries[1:], roster.entries[::-1], (other, *roster.entries[1:])):
        with pytest.raises(InvalidSignature):
            device.hear(replace(roster, entries=entries), session.now)
    assert device.record == record


def test_a_client_that_has_withdrawn_notes_nothing_but_the_end() -> None:
    """However much it is told: its record does not grow."""
    session = until("reveal")
    device, sid = session.devices[0], session.server.sid
    device.keep(device.client.give_up("the battery is empty"))
    record = device.record
    for message in (
        roster_of(session, device),
        session.answer(device, Inbox),
        Survivors(frozenset({1})).signed(SERVER, sid),
        Survivors(frozenset({2})).signed(SERVER, sid),
        Receipt(bytes(32), frozenset(), bytes(32)).signed(SERVER, session.config.digest),
        session.server.offer,
    ):
        device.hear(message, session.now)
        assert device.record == record
    tell(session, device, Receipt(sid, session.server.survivors, bytes(32)))
    assert device.client.outcome == "included"


def test_a_sealed_share_that_was_touched_or_moved_ends_it() -> None:
    """Invariant 10: one key a direction, sender and receiver authenticated; failure: withdraw."""
    session = until("mask")
    device = session.devices[0]
    inbox = session.answer(device, Inbox)
    own = slot_of(session, device)
    other = session.devices[1]
    first = inbox.sealed[0]
    flipped = replace(first, sealed=first.sealed[:-1] + bytes([first.sealed[-1] ^ 1]))
    introduced = replace(first, introduction=b"\0")
    back = device.client.outgoing
    assert isinstance(back, Shares)
    theirs = session.answer(other, Inbox).sealed
    record = device.record
    for sealed, why in (
        ((flipped, *inbox.sealed[1:]), "for this receiver"),
        ((introduced, *inbox.sealed[1:]), "for this receiver"),
        ((inbox.sealed[1], first, *inbox.sealed[2:]), "for this receiver"),
        ((theirs[-1], *inbox.sealed[1:]), "for this receiver"),
        ((back.sealed[0], *inbox.sealed[1:]), "for this receiver"),
        (inbox.sealed[1:], "3 sealed shares, expected 4"),
    ):
        device.record = record
        device.client = device.read()
        tell(session, device, replace(inbox, sealed=sealed))
        refuses(device, why)
    for sharers, why in (
        (inbox.sharers - {own}, "not among the sharers"),
        (inbox.sharers | {5}, "outside of the roster's 5"),
        (frozenset({own, (own + 1) % 5, (own + 2) % 5}), "3 sharers near this client"),
    ):
        device.record = record
        device.client = device.read()
        tell(session, device, Inbox(sharers, inbox.sealed))
        refuses(device, why)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\xff" * 2 * SHARE_BYTES, "limb outside"),
        (bytes(2 * SHARE_BYTES - 1), "share of 39 bytes"),
        (bytes(2 * SHARE_BYTES + 1), "share of 41 bytes"),
    ],
    ids=["no share", "short", "long"],
)
def test_a_client_that_seals_rubbish_is_noticed(payload: bytes, why: str) -> None:
    """By its neighbours, before they mask anything."""
    session = Session(5)
    session.play("advertise", None, {})
    cheat, victim = session.devices[:2]
    for device in session.devices[1:]:
        session.hear(device, Roster)
        session.post(device)
    session.event(shares_of(session, cheat, payload))  # the server is in it: nobody is asked
    session.hear(victim, Inbox)
    refuses(victim, why)


@pytest.mark.parametrize("which", ["mask_key", "channel_key"])
def test_a_key_of_small_order_ends_it(which: str) -> None:
    """Invariant 9: the secret it leads to would be all zeros, for everybody to know."""
    session = Session(5)
    for device in session.devices:
        session.begin(device)
    cheat, victim = session.devices[:2]
    change: dict[str, Any] = {which: bytes(32)}
    weak = replace(advertised(cheat), **change)
    session.event(weak.signed(cheat.key, session.config.digest))
    for device in session.devices[1:]:
        session.event(advertised(device))
    for device in session.devices[1:]:
        session.hear(device, Roster)
    refuses(victim, "small order")
    assert victim.client.outgoing is None, "no share of a secret leaves it"


def shares_of(session: Session, cheat: Device, payload: bytes) -> Shares:
    """What `cheat` may send before it has heard the roster: `payload`, sealed for everybody."""
    cohort, channel = session.server._closed, ChannelKey(cheat.client._state.channel_secret)
    slot = cohort.slots[cheat.key.public]
    boxes = [
        channel.seal(member.channel_key, payload, sid=cohort.sid, own=slot, peer=peer)
        for peer, member in enumerate(cohort.members)
        if peer != slot
    ]
    return Shares(slot, bytes(32), tuple(SealedShares(box, b"") for box in boxes))


def advertised(device: Device) -> Advertise:
    message = device.client.outgoing
    assert isinstance(message, Advertise)
    return message


def test_a_receipt_for_another_sum_settles_nothing() -> None:
    """Invariant 23: the residual waits for the one true receipt."""
    session = until("reveal")
    device = session.devices[0]
    session.hear(device, Consents)
    survivors, sid = session.server.survivors, session.server.sid
    record = device.record
    for bad, why in (
        (Receipt(bytes(32), survivors, bytes(32)), "another roster"),
        (Receipt(sid, survivors - {slot_of(session, session.devices[1])}, bytes(32)), "other surv"),
    ):
        device.record = record
        device.client = device.read()
        tell(session, device, bad)
        assert (device.client.phase, device.client.outcome) == ("withdrawn", "pending")
        refuses(device, why)
        tell(session, device, Receipt(sid, survivors, bytes(32)))
        assert device.client.outcome == "included"


# Clients that cheat, before an honest server


def test_a_message_in_anothers_name_is_refused() -> None:
    """Invariant 9: by the device's own key, in the sender's own slot, of a member."""
    session = until("mask")
    one, other = session.devices[:2]
    session.hear(one, Inbox)
    one.mask()
    header = one.client.outgoing
    assert isinstance(header, MaskedInput)
    stranger = Device(identity(50), one.values, one.policy)
    for device, message in (
        (other, header),
        (stranger, header),
        (other, replace(header, sender=slot_of(session, other))),
    ):
        with pytest.raises((Forbidden, InvalidSignature)):
            session.post(device, message)
    with pytest.raises(Forbidden):
        session.answer(stranger, Inbox)
    fresh = Session(3)
    fresh.begin(fresh.devices[0])
    with pytest.raises(Forbidden, match="certificate of another"):
        fresh.post(fresh.devices[1], fresh.devices[0].client.outgoing)


def test_an_uncertified_client_or_a_key_of_somebody_elses_is_refused() -> None:
    """Invariant 9."""
    session = Session(3)
    one, other = session.devices[:2]
    session.begin(one)
    session.post(one)
    session.begin(other)
    theirs, own = advertised(one), advertised(other)
    sybil = replace(own.certificate, signature=bytes(64))
    for bad, why in (
        (replace(own, mask_key=theirs.mask_key), "another client has advertised"),
        (replace(own, channel_key=own.mask_key), "another client has advertised"),
        (replace(own, mask_key=bytes(31)), "a public key of 31 bytes"),
        (replace(own, mask_key=bytes(32)), "small order"),
        (replace(own, channel_key=respelled(theirs.channel_key)), "non-canonical"),
        (replace(own, certificate=sybil), "did not make this signature"),
    ):
        with pytest.raises((InvalidKey, InvalidSignature), match=why):
            session.post(other, bad.signed(other.key, session.config.digest))
    with pytest.raises(InvalidSignature):
        session.post(other, replace(own, nonce=bytes(32)))
    assert len(session.server.advertised) == 1


@pytest.mark.parametrize("change", ["truncated", "extended", "flipped"])
def test_a_body_other_than_its_header_is_refused(change: str) -> None:
    """Invariants 12 and 21: what is staged is held to the header before the header counts."""
    session = until("mask")
    device = session.devices[0]
    session.hear(device, Inbox)
    device.mask()
    header, body = device.client.outgoing, device.body
    assert isinstance(header, MaskedInput)
    bad = {
        "truncated": body[:-1],
        "extended": body + b"\0",
        "flipped": bytes([body[0] ^ 1]) + body[1:],
    }[change]
    header.content.check(Content.of(body))
    with pytest.raises(MalformedRequest):
        header.content.check(Content.of(bad))
    if change != "flipped":
        with pytest.raises(InvalidUpdate):
            session.config.packing.from_bytes(bad)
        lie = replace(header, length=len(bad)).signed(device.key, session.server.sid)
        with pytest.raises(MalformedRequest, match="bytes, expected"):
            session.post(device, lie)


def test_masks_with_others_than_those_announced_are_refused() -> None:
    """Invariant 13: the header says with whom, and it is the inbox's set."""
    session = Session(6, {"corrupt": 0})
    session.play("advertise", None, {})
    session.play("share", Roster, {5: "share"})
    device = session.devices[0]
    session.hear(device, Inbox)
    device.mask()
    header = device.client.outgoing
    assert isinstance(header, MaskedInput)
    near = set(session.server._closed.neighbours[header.sender])
    assert header.partners == session.server.sharers & near
    for partners in (header.partners - {min(header.partners)}, frozenset(near)):
        lie = replace(header, partners=partners).signed(device.key, session.server.sid)
        with pytest.raises(MalformedRequest, match="masked with other partners"):
            session.post(device, lie)


def test_shares_of_the_wrong_number_or_length_are_refused() -> None:
    session = until("share")
    device = session.devices[0]
    session.hear(device, Roster)
    good = device.client.outgoing
    assert isinstance(good, Shares)
    long = replace(good.sealed[0], sealed=good.sealed[0].sealed + b"\0")
    for sealed in (good.sealed[1:], (long, *good.sealed[1:])):
        bad = replace(good, sealed=sealed).signed(device.key, session.server.sid)
        with pytest.raises(MalformedRequest, match="sealed shares"):
            session.post(device, bad)


def test_an_answer_about_other_survivors_or_of_another_length_is_refused() -> None:
    session = until("consent", 6)
    device = session.devices[0]
    session.hear(device, Survivors)
    good = device.client.outgoing
    assert isinstance(good, Consent)
    bad: Any = replace(good, survivors=bytes(32)).signed(device.key, session.server.sid)
    with pytest.raises(MalformedRequest, match="other survivors"):
        session.post(device, bad)
    early: Any = Reveal(good.sender, survivors_digest(session.server.survivors), b"")
    with pytest.raises(Conflict, match="a reveal while the session is consenting"):
        session.post(device, early.signed(device.key, session.server.sid))
    for each in session.devices[1:]:
        session.hear(each, Survivors)
        session.post(each)
    assert session.server.phase == "revealing"
    assert not session.post(device)  # its consent is needed no more
    session.hear(device, Consents)
    reveal = device.client.outgoing
    assert isinstance(reveal, Reveal)
    for shares, why in (
        (reveal.shares[:-1], "239 bytes, expected 6 shares"),
        (b"\xff" * 240, "limb outside"),
    ):
        lie = replace(reveal, shares=shares).signed(device.key, session.server.sid)
        with pytest.raises((MalformedRequest, InvalidShare), match=why):
            session.post(device, lie)


def test_a_client_that_did_not_survive_helps_nobody() -> None:
    session = Session(8, {"corrupt": 0})
    drops = {7: "mask"}
    session.play("advertise", None, drops)
    session.play("share", Roster, drops)
    session.play("mask", Inbox, drops)
    session.play("consent", Survivors, drops)
    dead = session.devices[7]
    survivors = survivors_digest(session.server.survivors)
    answer: Any = Reveal(slot_of(session, dead), survivors, b"").signed(
        dead.key, session.server.sid
    )
    with pytest.raises(Forbidden, match="not among the survivors"):
        session.post(dead, answer)


def test_a_late_input_is_not_mixed_in() -> None:
    """Invariant 14."""
    session = Session(6, {"corrupt": 0})
    session.play("advertise", None, {})
    session.play("share", Roster, {})
    late = session.devices[0]
    session.hear(late, Inbox)
    late.mask()
    session.play("mask", Inbox, {0: "mask"})
    frozen = session.server
    assert frozen.phase == "consenting"
    with pytest.raises(RoundClosed, match="masked input after its phase"):
        session.post(late)
    header: Any = late.client.outgoing
    assert frozen.on(header, session.now) == (frozen, ())
    session.hear(late, Survivors)
    refuses(late, "not among the survivors")
    session.play("consent", Survivors, {0: "mask"})
    session.play("reveal", Consents, {0: "mask"})
    assert session.sums == session.expected
    session.hear(late, Receipt)
    assert late.client.outcome == "not-included"


def test_what_comes_after_its_deadline_is_refused_though_no_timer_ran() -> None:
    session = until("mask")
    device = session.devices[0]
    session.hear(device, Inbox)
    device.mask()
    session.now = session.server.deadline
    with pytest.raises(RoundClosed):
        session.post(device)
    fresh = Session(3)
    fresh.begin(fresh.devices[0])
    fresh.now = fresh.server.deadline
    with pytest.raises(RoundClosed, match="roster of this session is closed"):
        fresh.post(fresh.devices[0])
    with pytest.raises(Conflict, match="not closed yet"):
        fresh.post(fresh.devices[0], device.client.outgoing)


def test_a_client_that_came_too_late_to_share_is_told_so() -> None:
    session = Session(6, {"corrupt": 0})
    session.play("advertise", None, {})
    late = session.devices[0]
    session.hear(late, Roster)
    session.play("share", Roster, {0: "share"})
    with pytest.raises(RoundClosed):
        session.post(late)
    with pytest.raises(RoundClosed, match="did not arrive in time"):
        session.answer(late, Inbox)
    header = MaskedInput(slot_of(session, late), frozenset(), bytes(32), 0)
    with pytest.raises(RoundClosed, match="did not arrive in time"):
        session.post(late, header.signed(late.key, session.server.sid))
    late.keep(late.client.give_up("too late"))
    assert late.client.outcome == "not-included"
    refuses(late, "too late")
    last = late.record
    late.keep(late.client.give_up("again"))
    assert late.record == last


# Wrong shares


def flipped(message: Any, places: list[int]) -> Reveal:
    assert isinstance(message, Reveal)
    shares = bytearray(message.shares)
    for place in places:
        shares[SHARE_BYTES * place] ^= 1
    return replace(message, shares=bytes(shares))


def with_wrong_shares(n: int, cheats: int, places: list[int], lost: int = 1) -> Session:
    """`lost` drop out before they mask; `cheats` then give wrong shares of those in `places`."""
    session = Session(n, {"adversary": "semi-honest", "corrupt": 0})
    drops = {n - 1 - i: "mask" for i in range(lost)}
    session.play("advertise", None, drops)
    session.play("share", Roster, drops)
    session.play("mask", Inbox, drops)
    for number, device in enumerate(session.devices[: n - lost]):
        session.hear(device, Survivors)
        reveal = device.client.outgoing
        assert isinstance(reveal, Reveal)
        if number < cheats:
            reveal = flipped(reveal, places).signed(device.key, session.server.sid)
        session.post(device, reveal)
    return session


@pytest.mark.parametrize("places", [[0], list(range(12))], ids=["one", "all"])
def test_flipped_shares_are_dropped_and_their_senders_named(places: list[int]) -> None:
    """Invariant 11."""
    session = with_wrong_shares(12, 2, places)
    assert phase_of(session) == "unmasking"
    session.unmask()
    assert phase_of(session) == "finished"
    assert session.sums == session.expected
    cheats = {slot_of(session, device) for device in session.devices[:2]}
    if len(places) > 1:
        assert set(session.suspects) == cheats
    else:  # a wrong share that was not needed is not noticed
        assert set(session.suspects) <= cheats


def test_wrong_shares_are_found_among_more_choices_than_can_all_be_tried() -> None:
    session = with_wrong_shares(22, 3, list(range(22)), lost=2)
    while session.server.phase == "unmasking":
        session.unmask()
    assert session.sums == session.expected
    assert set(session.suspects) <= {slot_of(session, each) for each in session.devices[:3]}
    assert session.suspects


def test_with_too_many_flipped_shares_there_is_no_sum_and_no_wrong_one() -> None:
    """Invariant 11: all who can answer have, so the session ends."""
    session = with_wrong_shares(6, 4, list(range(6)))
    while session.server.phase == "unmasking":
        session.unmask()
    assert session.server.phase == "abandoned"
    assert session.server.reason in (
        "no 3 of 5 shares give the secret of slot 0",
        # All four flipped bits had the same value, so that these shares have the same error.
        "4 of 5 shares agree on a secret that contradicts the commitment of slot 0",
    )
    assert session.words is None
    assert session.server.blame == set()  # all owners, or the holders?


def test_no_choice_of_shares_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client that committed to another seed costs the server no more than that."""
    session = with_wrong_shares(6, 4, list(range(6)))
    tried: Counter[tuple[int, tuple[int, ...]]] = Counter()
    secret = unmasking._Recovery._secret

    def counted(self: Any, owner: int, holders: Sequence[int]) -> bytes | None:
        tried[owner, tuple(holders)] += 1
        return secret(self, owner, holders)

    monkeypatch.setattr(unmasking._Recovery, "_secret", counted)
    with pytest.raises(InvalidShare):
        session.server.recover()
    assert max(tried.values()) <= 2  # the first, with those of its pattern, and by itself


def test_wrong_shares_wait_for_the_answers_of_others() -> None:
    """Unmasking begins with the fewest that can do; if they fail, more may come and do."""
    session = Session(9, {"adversary": "semi-honest", "corrupt": 2_000})
    session.play("advertise", None, {})
    session.play("share", Roster, {})
    session.play("mask", Inbox, {})
    threshold = session.server._closed.topology.threshold
    answers = []
    for device in session.devices:
        session.hear(device, Survivors)
        answers.append(device.client.outgoing)
    bad = flipped(answers[0], [1]).signed(session.devices[0].key, session.server.sid)
    session.post(session.devices[0], bad)
    for device in session.devices[1:threshold]:
        session.post(device)
    assert phase_of(session) == "unmasking"
    session.unmask()
    assert phase_of(session) == "revealing"
    session.post(session.devices[threshold])
    assert phase_of(session) == "unmasking"
    waiting = session.server
    session.post(session.devices[threshold + 1])
    after, effects = session.server.on(UnmaskFailed("none"), session.now)
    assert after.phase == "unmasking"  # one more came meanwhile: it is tried at once
    assert len(effects) == 2
    assert waiting.on(UnmaskFailed("none"), waiting.deadline)[0].phase == "abandoned"
    session.unmask()
    assert session.sums == session.expected
    assert not session.post(session.devices[-1])  # the session is over: nothing counts


def test_the_secret_of_one_with_whom_no_survivor_masked_is_not_needed() -> None:
    """Nor could it be had: all that hold its shares are lost."""
    session = Session(140)
    keys = [identity(i) for i in range(140)]
    cohort = Cohort.of(session.config, [signed_advertise(session, key) for key in keys])
    everybody = frozenset(range(140))
    alone = {slot: everybody - {slot, *cohort.neighbours[slot]} for slot in (0, 77)}
    for slot, survivors in alone.items():
        assert cohort.needed(everybody, survivors) == sorted(everybody - {slot})


def test_a_client_that_commits_to_another_seed_is_not_unmasked() -> None:
    """Invariant 11: the sum would be wrong, so there is none."""
    session = Session(4, {"corrupt": 0, "adversary": "semi-honest"})
    session.play("advertise", None, {})
    for device in session.devices:
        session.hear(device, Roster)
    cheat = session.devices[0]
    shares = cheat.client.outgoing
    assert isinstance(shares, Shares)
    lie = replace(shares, commitment=bytes(32)).signed(cheat.key, session.server.sid)
    session.post(cheat, lie)
    for device in session.devices[1:]:
        session.post(device)
    session.play("mask", Inbox, {})
    session.play("reveal", Survivors, {})
    assert session.server.phase != "finished"
    assert session.words is None


@pytest.mark.parametrize("has_lost", [False, True])
def test_an_introduction_that_is_none_costs_the_sum_and_no_more(has_lost: bool) -> None:
    """A corrupt client can stop a session; it cannot make it wrong or open, nor have the one named
    that was lost: which of the two is at fault nobody knows."""
    session = Session(6, {"hybrid": True, "adversary": "semi-honest", "corrupt": 0})
    session.play("advertise", None, {})
    cohort = session.server._closed
    by_slot = sorted(session.devices, key=lambda device: cohort.slots[device.key.public])
    for device in by_slot:
        session.hear(device, Roster)
        shares = device.client.outgoing
        assert isinstance(shares, Shares)
        if device is by_slot[0]:
            channel = ChannelKey(device.client._state.channel_secret, hybrid=True)
            rubbish = bytes(len(shares.sealed[4].introduction))
            box = channel.seal(
                cohort.members[5].channel_key,
                bytes(2 * SHARE_BYTES),
                sid=cohort.sid,
                own=0,
                peer=5,
                associated=rubbish,
            )
            sealed = (*shares.sealed[:4], SealedShares(box, rubbish))
            shares = replace(shares, sealed=sealed).signed(device.key, cohort.sid)
        session.post(device, shares)
    lost = {session.devices.index(by_slot[5]): "mask"} if has_lost else {}
    session.play("mask", Inbox, lost)
    if not has_lost:
        refuses(by_slot[5], "for this receiver")
    session.play("reveal", Survivors, lost)
    assert session.server.phase == "abandoned"
    assert session.words is None
    assert (session.server.blame, session.server.failures) == (frozenset(), ((5, 0),))
    assert "1 masks are lost, of slots 5 and 0" in session.server.reason
    assert replayed(session, len(session.log))[0].failures == ((5, 0),)


# Wrong shares in large cohorts


@dataclass
class Dealt:
    """A cohort of `n` that all survived, and what each revealed: [owners, holders, limbs]."""

    n: int
    changes: dict[str, Any]

    def __post_init__(self) -> None:
        terms = config(self.n, **self.changes)
        self.cohort = Cohort.of(terms, [entry_of(i, terms) for i in range(self.n)])
        self.threshold = self.cohort.topology.threshold
        self.xs = np.arange(1, self.n + 1)
        rng = np.random.default_rng(self.n)
        self.seeds = [rng.bytes(32) for _ in range(self.n)]
        self.shares = np.stack([shamir.split(each, self.threshold, self.xs) for each in self.seeds])

    def recovered(self, holders: int = 0) -> unmasking.UnmaskJob:
        """With the shares of the first `holders`, or of all."""
        sid, everybody = self.cohort.sid, frozenset(range(self.n))
        own = [commitment(seed, sid=sid, slot=slot) for slot, seed in enumerate(self.seeds)]
        return unmasking.recovered(
            self.cohort,
            sharers=everybody,
            survivors=everybody,
            shares={slot: Shares(slot, each, ()) for slot, each in enumerate(own)},
            reveals={
                slot: Reveal(slot, bytes(32), self.shares[:, slot].astype("<u8").tobytes())
                for slot in range(holders or self.n)
            },
        )

    @property
    def masks(self) -> tuple[tuple[bytes, int], ...]:
        sid = self.cohort.sid
        seeds = enumerate(self.seeds)
        return tuple((self_mask(each, sid=sid, slot=slot), -1) for slot, each in seeds)

    def suspects(self, **terms: int) -> tuple[int, ...]:
        """Those that are named when there is no sum."""
        with pytest.raises(InvalidShare) as caught:
            self.recovered(**terms)
        return tuple(caught.value.members.get("suspects", ()))


def entry_of(number: int, terms: SessionConfig) -> Advertise:
    key = identity(number)
    return Advertise(certificate(key), bytes(32), bytes(32), bytes(32)).signed(key, terms.digest)


@pytest.mark.parametrize("n", [20, 50, 100])
def test_as_many_liars_as_the_session_allows_for_do_not_cost_the_sum(n: int) -> None:
    """Invariant 11: nor have they anybody else named."""
    dealt, liars = Dealt(n, {}), range(3, 3 + n // 10)
    dealt.shares[:, liars] ^= np.uint64(1)
    job = dealt.recovered()
    assert sorted(job.masks) == sorted(dealt.masks)
    assert job.suspects == tuple(liars)


def test_of_few_clients_more_may_lie_than_decoding_corrects() -> None:
    """Choices of shares are tried there: of twelve clients nine give a secret, and two lie."""
    dealt = Dealt(12, {"corrupt": 2_000})
    assert dealt.threshold == 9
    dealt.shares[:, :2] ^= np.uint64(1)
    job = dealt.recovered()
    assert sorted(job.masks) == sorted(dealt.masks)
    assert set(job.suspects) <= {0, 1}


def test_liars_do_not_choose_whom_to_exclude() -> None:
    """Nor does an owner that deals wrong shares to others."""
    dealt = Dealt(100, {})
    dealt.shares[60, 20:30] ^= np.uint64(1)
    dealt.shares[:10, 40] ^= np.uint64(1)
    job = dealt.recovered()
    assert sorted(job.masks) == sorted(dealt.masks)
    assert job.suspects == ()
    dealt.shares[10, 40] ^= np.uint64(1)  # by now more owners than can be corrupt
    assert dealt.recovered().suspects == (40,)


def test_an_owner_is_named_once_more_shares_are_wrong_than_liars_could_change() -> None:
    dealt = Dealt(100, {})  # of which 67 give a secret, and 10 may be corrupt
    dealt.shares[60, :17] ^= np.uint64(1)
    assert dealt.suspects() == (60,)
    assert dealt.suspects(holders=85) == ()  # 9 can be corrected, and 10 may be wrong
    dealt = Dealt(100, {"corrupt": 3_000})
    dealt.shares[60, :17] ^= np.uint64(1)
    assert dealt.suspects() == ()
    dealt.shares[60] = shamir.split(bytes(32), dealt.threshold, dealt.xs)
    assert dealt.suspects() == (60,)  # the 34 shares beyond the threshold are all but one liar's
    assert dealt.suspects(holders=96) == ()
    dealt.shares[70, :17] ^= np.uint64(1)
    assert dealt.suspects() == (60,)


def test_nobody_is_named_for_more_liars_than_the_session_allows_for() -> None:
    """Rather than all of the others, none of whose shares give a secret then."""
    dealt = Dealt(20, {})
    dealt.shares[:, :4] ^= np.uint64(1)
    assert dealt.suspects() == ()
    dealt = Dealt(20, {})
    dealt.shares[:3, :4] ^= np.uint64(1)
    assert dealt.suspects() == (0, 1, 2)  # as likely as four liars


@pytest.mark.parametrize(("n", "corrupt"), [(12, 2_000), (20, 3_000)], ids=["searched", "decoded"])
def test_liars_that_keep_the_secret_do_not_have_honest_holders_named(n: int, corrupt: int) -> None:
    """Any two holders know how to change their shares such that with those of t - 2 others they lie
    on another polynomial of the same secret, which the shares of the rest do not fit."""
    dealt = Dealt(n, {"corrupt": corrupt})
    num_liars, honest = corrupt * n // 10_000, dealt.threshold - 2
    liars = range(n - num_liars, n)
    for liar in liars:
        by = liar + 1
        for x in range(1, honest + 1):
            by = by * (liar + 1 - x) % shamir.PRIME
        dealt.shares[:, liar] = (dealt.shares[:, liar] + np.uint64(by)) % np.uint64(shamir.PRIME)
    job = dealt.recovered()
    assert sorted(job.masks) == sorted(dealt.masks)
    assert set(job.suspects) <= set(liars)


# Twice


def test_a_sum_is_unmasked_once() -> None:
    """Invariant 16: no second unmasking, and nothing left to do it with."""
    session = Session(4).run()
    over = session.server
    assert over.on(Unmasked("00" * 32), session.now) == (over, ())
    with pytest.raises(Conflict, match="nothing to reconstruct"):
        over.recover()
    assert not any((over.shares, over.masked, over.reveals))
    for state in session.states:
        if state.phase != "unmasking":
            with pytest.raises(Conflict, match="nothing to reconstruct"):
                state.recover()


def test_a_record_brought_back_masks_nothing_else() -> None:
    """Invariants 4 and 15: the same masks over two inputs would give their difference away.

    A copy of the record of a client that is ready to mask is brought back after it has masked.
    """
    session = until("mask")
    device = session.devices[0]
    session.hear(device, Inbox)
    copied = device.record
    device.mask()
    first = device.body
    device.record = copied
    again = device.read()
    assert again.phase == "ready"
    assert again.mask(device.values)[1] == first
    with pytest.raises(UpdateConflict, match="than the session was started with"):
        again.mask(values_of(session.config.vectors, 99))


def test_a_record_of_an_earlier_release_masks_nothing() -> None:
    """It does not say for which values its secrets are; one that has masked goes on."""
    session = until("mask")
    device = session.devices[0]
    session.hear(device, Inbox)
    for phase in ("ready", "masked"):
        if phase == "masked":
            device.mask()
        state = replace(device.client._state, version=1, content=b"")
        device.record = state.to_bytes()[:-4]
        assert device.read().phase == ("over" if phase == "ready" else "masked")


def test_clients_brought_back_from_a_copy_do_not_open_a_second_sum() -> None:
    """Invariant 16: a client brought back from a copy may answer for two sets of survivors, as a
    corrupt one may. With as many of them as the session bears, and just enough others for the one
    set, the other gets fewer than t consents."""
    session = until("consent", 12, corrupt=2_500)
    devices, sid = session.devices, session.server._closed.sid
    rolled, ones, others = devices[:3], [*devices[3:8], devices[11]], devices[8:11]
    assert len(rolled) == session.config.corrupt * session.n // 10_000
    everybody = frozenset(range(session.n))
    copies = [device.record for device in rolled]

    def answer(survivors: frozenset[int], group: list[Device]) -> None:
        for device in group:
            device.hear(Survivors(survivors).signed(SERVER, sid), session.now)
        consents = [each.client.outgoing for each in group]
        for device in group:
            slot = device.client._state.slot
            theirs = [e for e in consents if isinstance(e, Consent) and e.sender != slot]
            device.hear(Consents(tuple(theirs)).signed(SERVER, sid), session.now)

    answer(everybody, [*rolled, *ones])
    assert all(device.client.phase == "revealed" for device in [*rolled, *ones])
    for device, copy in zip(rolled, copies, strict=True):
        device.record = copy
        device.client = device.read()
        assert device.client.phase == "masked"
    answer(everybody - {devices[11].client._state.slot}, [*rolled, *others])
    for device in [*rolled, *others]:
        refuses(device, "neighbours consent, at least 9 must")


def test_other_values_are_not_masked_twice() -> None:
    """Invariant 15: one session, one input."""
    session = until("mask")
    device = session.devices[0]
    session.hear(device, Inbox)
    device.mask()
    body, values = device.body, dict(device.values)
    device.mask()
    assert device.body == body
    device.values = {**values, "update": -values["update"]}
    with pytest.raises(UpdateConflict, match="other values"):
        device.mask()
    session.post(device)
    header = device.client.outgoing
    assert isinstance(header, MaskedInput)
    other = replace(header, sha256=bytes(32)).signed(device.key, session.server.sid)
    with pytest.raises(UpdateConflict, match="another masked input"):
        session.post(device, other)


def test_no_seed_serves_two_sessions() -> None:
    """Invariant 4: the difference of two masked inputs is not that of the inputs."""
    vectors = (VectorSpec("update", 400, 1000),)
    packing = config(4, vectors=vectors).packing
    words, inputs = [], []
    for attempt in (1, 2):
        session = until("mask", 4, vectors=vectors, attempt=attempt, server_nonce=bytes(32))
        device = session.devices[0]
        session.hear(device, Inbox)
        device.mask()
        words.append(packing.from_bytes(device.body))
        inputs.append(packing.pack(device.values))
    difference = words[0] - words[1]
    assert np.count_nonzero(difference == inputs[0] - inputs[1]) == 0


@pytest.mark.parametrize("value", [1001, -1001, 2**62, -(2**63)])
def test_extreme_inputs_are_refused_before_they_are_masked(value: int) -> None:
    """Invariant 12: no client can wrap the ring; at the bound, the sum still fits."""
    session = until("mask")
    device = session.devices[0]
    session.hear(device, Inbox)
    record = device.record
    good = device.values
    extreme = good["update"].copy()
    extreme[3] = value
    for bad in (extreme, good["update"][:-1], good["update"].astype(float)):
        with pytest.raises(InvalidUpdate):
            device.client.mask({**good, "update": bad})
    with pytest.raises(InvalidUpdate):
        device.client.mask({"update": good["update"]})
    assert device.record == record


def test_the_largest_values_of_all_sum_exactly() -> None:
    """Invariant 12: the bound leaves room for every client of the largest cohort."""
    session = Session(4, {"corrupt": 0})
    for device in session.devices:
        device.values = {
            each.name: np.full(each.length, -each.bound) for each in session.config.vectors
        }
    session.run()
    assert session.sums["examples"] == [-4 * 65_536]
    assert session.sums == session.expected


def test_a_server_cannot_open_a_session_that_cannot_be_safe() -> None:
    for terms, error, why in (
        (config(140, corrupt=9_000), IncompatiblePlan, "134 of 140 clients must stay"),
        (config(1_100, dropout=3_000), IncompatiblePlan, "no sparse graph on 1100 clients"),
        (config(10, vectors=(VectorSpec("x", 1, 2**60),)), IncompatiblePlan, "sums of 10"),
        (config(10, server_key=bytes(32)), ConfigurationError, "another server's key"),
    ):
        with pytest.raises(error, match=why):
            MaskingServer.open(terms, SERVER, authority=AUTHORITY.public, now=0)


def test_degree_threshold_and_neighbours_are_the_clients_own_business() -> None:
    """Invariants 7 and 8: nobody states them; both ends find them from the roster."""
    session = until("mask", 6)
    client = session.devices[0].client
    assert client._state.topology == session.server._closed.topology
    for kind in (Offer, Roster, Inbox, SessionConfig):
        assert not {"threshold", "degree", "neighbours"} & set(kind.__annotations__)


# Who is at fault


def shared(n: int, tamper: Callable[[Session, Device, Shares], Shares], **changes: Any) -> Session:
    """A session whose first device said other shares than its own; up to the inboxes."""
    session = Session(n, changes)
    session.play("advertise", None, {})
    for device in session.devices:
        session.hear(device, Roster)
        said = device.client.outgoing
        assert isinstance(said, Shares)
        if device is session.devices[0]:
            said = tamper(session, device, said).signed(device.key, session.server.sid)
        session.post(device, said)
    assert session.server.phase == "masking"
    return session


def with_rubbish(session: Session, device: Device, shares: Shares) -> Shares:
    return replace(shares, sealed=tuple(replace(s, sealed=bytes(96)) for s in shares.sealed))


def with_another_commitment(session: Session, device: Device, shares: Shares) -> Shares:
    return replace(shares, commitment=bytes(32))


def with_shares_of_nothing(session: Session, device: Device, shares: Shares) -> Shares:
    """Each seals to two good shares, which are of no polynomial."""
    state, sid = device.client._state, session.server.sid
    channel = ChannelKey(state.channel_secret)
    rng = np.random.default_rng(1)
    sealed = [
        channel.seal(
            peer.channel_key,
            rng.integers(0, 2**60, 10, np.uint64).tobytes(),
            sid=sid,
            own=state.slot,
            peer=peer.slot,
        )
        for peer in state.peers
    ]
    return replace(shares, sealed=tuple(SealedShares(each, b"") for each in sealed))


def test_whom_nobody_can_open_is_named_before_anything_is_masked() -> None:
    session = shared(20, with_rubbish)
    cheat = slot_of(session, session.devices[0])
    for device in session.devices[1:]:
        if session.server.is_over:
            break
        session.hear(device, Inbox)
        refuses(device, "for this receiver")
        session.post(device)
    assert (session.server.phase, session.server.blame) == ("abandoned", frozenset({cheat}))
    assert f"point to slot {cheat}" in session.server.reason
    assert replayed(session, len(session.log))[0].blame == {cheat}


def test_a_complaint_is_of_a_client_in_the_inbox_by_one_that_has_not_masked() -> None:
    session = shared(8, with_another_commitment, corrupt=0)
    device, other = session.devices[1:3]
    own, another = slot_of(session, device), slot_of(session, other)
    for accused in (frozenset(), frozenset({own}), frozenset({99})):
        lie = Complaint(own, accused).signed(device.key, session.server.sid)
        with pytest.raises(MalformedRequest, match="a client that is not in the inbox"):
            session.post(device, lie)
    session.hear(device, Inbox)
    device.mask()
    session.post(device)
    complaint = Complaint(own, frozenset({another})).signed(device.key, session.server.sid)
    with pytest.raises(Conflict, match="has masked"):
        session.post(device, complaint)
    complaint = Complaint(another, frozenset({own})).signed(other.key, session.server.sid)
    session.post(other, complaint)
    session.hear(other, Inbox)
    other.mask()
    with pytest.raises(Conflict, match="has complained"):
        session.post(other)


@pytest.mark.parametrize("tamper", [with_another_commitment, with_shares_of_nothing])
@pytest.mark.parametrize("n", [5, 20])
def test_whose_shares_are_wrong_is_named_after_few_tries(
    tamper: Callable[[Session, Device, Shares], Shares], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many others answer, and however often: it is over once so many shares are wrong
    that no others can be at fault."""
    combined = 0
    combine = shamir.combine

    def counted(*args: Any) -> bytes:
        nonlocal combined
        combined += 1
        return combine(*args)

    monkeypatch.setattr(shamir, "combine", counted)
    session = shared(n, tamper)
    cheat = slot_of(session, session.devices[0])
    session.play("mask", Inbox, {})
    session.play("consent", Survivors, {})
    session.play("reveal", Consents, {})
    assert (session.server.phase, session.server.blame) == ("abandoned", frozenset({cheat}))
    assert combined <= (2 * n if tamper is with_another_commitment else unmasking._MAX_TRIES)


def test_pairs_that_fail_name_who_is_in_most() -> None:
    blamed = server_module.blamed
    assert blamed([]) == set()
    assert blamed([(1, 2)]) == blamed([(1, 2), (2, 1)]) == set()  # either may be
    assert blamed([(1, 9), (2, 9)]) == {9}
    assert blamed([(9, 1), (9, 2), (9, 3)]) == {9}
    assert blamed([(1, 9), (2, 9), (3, 4)]) == {9}
    assert blamed([(1, 2), (3, 4)]) == set()
    assert blamed([(1, 8), (2, 8), (1, 9), (2, 9)]) == set()  # two against two
