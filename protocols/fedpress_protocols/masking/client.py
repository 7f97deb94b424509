"""The client of a masked session, as a pure state machine: the server's messages in, its own out.

    step = MaskingClient.begin(offer, ...)            # or client.on(message, now)
    store(step.record)                                # durably, before anything is sent
    client = step.written()
    send(client.outgoing)                             # and the body with it, after `mask`

Nothing is sent that is not on record, and what is sent is a function of the record, to the byte: so
a device that is killed anywhere and begins again from `MaskingClient.from_bytes` says what it said,
never masks twice with other content and never answers for two survivor sets. A `Step` is all that a
transition gives, and it leads to a client, and so to its message, by way of `written` alone.

No I/O and no clock in here; the randomness is the operating system's. A message that the server did
not sign raises and changes nothing. One that it did sign and that breaks the protocol makes the
client withdraw: it says nothing more, and its secrets are gone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import (
    Conflict,
    FedpressError,
    IncompatiblePlan,
    InvalidKey,
    MalformedRequest,
    MaskingError,
    PlanDeclined,
    StateCorrupt,
    UpdateConflict,
)
from fedpress_protocols.masking import shamir
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.masking.graph import Adversary
from fedpress_protocols.masking.keys import (
    SECRET_BYTES,
    ChannelKey,
    MaskKey,
    check_public,
    commitment,
    new_secret,
    same,
    self_mask,
)
from fedpress_protocols.masking.keystream import MATERIAL_BYTES, SUITES, Suite, add_keystreams
from fedpress_protocols.masking.messages import (
    Abandoned,
    Advertise,
    ClientMessage,
    Complaint,
    Consent,
    Consents,
    Inbox,
    MaskedInput,
    Offer,
    Receipt,
    Reveal,
    Roster,
    SealedShares,
    ServerMessage,
    Shares,
    Survivors,
    parse,
    survivors_digest,
)
from fedpress_protocols.masking.shamir import SHARE_BYTES
from fedpress_protocols.masking.transcript import (
    U16,
    U32,
    Bytes32,
    Flag,
    Members,
    Record,
    SessionConfig,
    Topology,
    blob,
    choice,
    fixed,
    text,
)
from fedpress_protocols.signatures import DeviceKey

Phase = Literal[
    "advertised",
    "shared",
    "ready",
    "masked",
    "consented",
    "revealed",
    "withdrawn",
    "over",
    "complained",
]
Outcome = Literal["pending", "included", "not-included"]

_PHASES = get_args(Phase)
_RECORD_VERSION = 2
_UNBOUND = 1
"""The version of records that do not say what is to be masked."""
_MAX_REASON = 512


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """What the device insists on, whatever a server offers; an offer below it is refused.

    `authority` and `server_key` are pinned Ed25519 keys: of the enrolment authority, and of the
    server. Degree and threshold are found by the client from the offer's caps and the roster, and
    from nothing else that the server says.
    """

    authority: bytes
    server_key: bytes
    population: str
    minimum: int = 3
    """The least number of survivors whose sum the client will help to unmask."""
    adversary: Adversary = "malicious"
    """With "semi-honest", sessions of either profile are good enough."""
    corrupt: float = 0.1
    """The share of corrupt clients that a session must bear at least."""
    suites: tuple[Suite, ...] = SUITES
    hybrid: bool = False
    """Whether ML-KEM beside X25519 is a must."""

    def check(self, config: SessionConfig) -> None:
        """Raises PlanDeclined for the first term that is not good enough."""
        faults = {
            "server_key": ("another server's key", config.server_key != self.server_key),
            "population": (
                f"the population {config.population!r}",
                config.population != self.population,
            ),
            "minimum": (
                f"{config.minimum} survivors, fewer than {self.minimum}",
                config.minimum < self.minimum,
            ),
            "adversary": (
                "no protection from a malicious server",
                config.adversary != "malicious" and self.adversary == "malicious",
            ),
            "corrupt": (
                f"{config.corrupt / 1e4:g} corrupt clients, less than {self.corrupt:g}",
                config.corrupt < round(self.corrupt * 1e4),
            ),
            "suites": (f"the suite {config.suite!r}", config.suite not in self.suites),
            "hybrid": ("no post-quantum keys", self.hybrid and not config.hybrid),
        }
        for rule, (fault, is_there) in faults.items():
            if is_there:
                raise PlanDeclined(
                    f"a session with {fault}, which this device's policy does not admit",
                    hint="check the server, or change the device's policy",
                    rule=rule,
                )


@dataclass(frozen=True, slots=True)
class RoundDigests:
    """What the device knows by itself of the round it trained for: digests, 32 bytes each.

    A server that gave other clients another model, support or plan cannot have them in one sum
    with this one: the digests are in every mask. `content` is the SHA-256 of the values that are to
    be masked, packed as a body. The session's secrets are drawn for these values and stay on one
    record with their digest, so no copy of a record, brought back whenever, masks any others.
    """

    model: bytes
    support: bytes
    plan: bytes
    content: bytes

    def check(self, config: SessionConfig) -> None:
        """Raises IncompatiblePlan for a session about anything else."""
        for name in ("model", "support", "plan"):
            if not same(getattr(self, name), getattr(config, name)):
                raise IncompatiblePlan(
                    f"a session on the {name} {getattr(config, name).hex()[:12]} where this client "
                    f"trained on {getattr(self, name).hex()[:12]}"
                )


# What is on record


@dataclass(frozen=True, slots=True)
class _Peer(Record):
    """A neighbour, as its certificate and its own signature vouch for it."""

    slot: U32
    identity: Bytes32
    mask_key: Annotated[bytes, blob()]
    channel_key: Annotated[bytes, blob()]


@dataclass(frozen=True, slots=True, repr=False)
class _Held(Record):
    """The shares of one owner that this client holds. Of its own secrets it keeps one alone."""

    owner: U32
    mask_share: Annotated[bytes, blob(SHARE_BYTES)]
    seed_share: Annotated[bytes, fixed(SHARE_BYTES)]


@dataclass(frozen=True, slots=True, repr=False)
class _Mask(Record):
    material: Annotated[bytes, fixed(MATERIAL_BYTES)]
    is_added: Flag

    @property
    def signed(self) -> tuple[bytes, int]:
        return self.material, 1 if self.is_added else -1


@dataclass(frozen=True, slots=True, repr=False)
class _State(Record):
    """All that a client knows; secrets stay only as long as something is still to come of them."""

    phase: Annotated[Phase, choice(*_PHASES)]
    config: SessionConfig
    sent: Annotated[bytes, blob()]
    """The message of this phase, or nothing."""
    mask_secret: Annotated[bytes, blob(SECRET_BYTES)] = b""
    seed: Annotated[bytes, blob(SECRET_BYTES)] = b""
    channel_secret: Annotated[bytes, blob(SECRET_BYTES)] = b""
    sid: Annotated[bytes, blob(32)] = b""
    n: U32 = 0
    slot: U32 = 0
    peers: tuple[_Peer, ...] = ()
    held: tuple[_Held, ...] = ()
    sharers: Members = frozenset()
    masks: tuple[_Mask, ...] = ()
    survivors: Members = frozenset()
    has_masked: Flag = False
    """Whether a masked body may have left."""
    outcome: Annotated[Outcome, choice("pending", "included", "not-included")] = "pending"
    reason: Annotated[str, text(_MAX_REASON)] = ""
    heard: tuple[Bytes32, ...] = ()
    """Digests of the server's messages so far."""
    version: U16 = _RECORD_VERSION
    content: Annotated[bytes, blob(32)] = b""
    """Of `RoundDigests`; nothing in a record of the version before."""

    @property
    def topology(self) -> Topology:
        return Topology.of(self.config, self.n, self.sid)

    def without_secrets(self) -> _State:
        return replace(
            self,
            sent=b"",
            mask_secret=b"",
            seed=b"",
            channel_secret=b"",
            peers=(),
            held=(),
            masks=(),
            content=b"",
        )


def _unbound(record: bytes) -> _State | None:
    """The state in a record of the version before, which ends without `content`; None if it is
    none."""
    try:
        state = _State.from_bytes(record + bytes(4))
    except FedpressError:
        return None
    return replace(state, version=_RECORD_VERSION) if state.version == _UNBOUND else None


@dataclass(frozen=True, slots=True)
class Step:
    """A transition that is not yet on record."""

    _client: MaskingClient

    @property
    def record(self) -> bytes:
        """The whole state, secrets among it: to be written durably, readable by the device alone,
        in the place of the one before."""
        return self._client.to_bytes()

    def written(self) -> MaskingClient:
        """The client after the transition; to be called when `record` is on the disk."""
        return self._client


@dataclass(frozen=True)
class MaskingClient:
    """One client in one session; every method that changes anything gives a `Step`.

    | phase        | what the driver does                                                     |
    |--------------|--------------------------------------------------------------------------|
    | `advertised` | POST `outgoing` (Advertise), GET the Roster, `on`                        |
    | `shared`     | POST `outgoing` (Shares), GET the Inbox, `on`                            |
    | `ready`      | call `mask`                                                              |
    | `masked`     | PUT the body, POST `outgoing` (MaskedInput), GET the Survivors, `on`     |
    | `consented`  | POST `outgoing` (Consent), GET the Consents, `on`; malicious profile     |
    | `revealed`   | POST `outgoing` (Reveal), GET the Receipt, `on`                          |
    | `complained` | POST `outgoing` (Complaint), GET the Receipt, `on`; nothing was masked  |
    | `withdrawn`  | say nothing; GET the Receipt, `on`: the body may be in a sum             |
    | `over`       | read `outcome`; no secret is left, and the record may be dropped         |

    Whatever is awaited, `Abandoned` or the `Receipt` may come in its place.
    """

    _state: _State = field(repr=False)
    identity: DeviceKey = field(repr=False)
    policy: ClientPolicy

    @classmethod
    def begin(
        cls,
        offer: Offer,
        *,
        identity: DeviceKey,
        certificate: Certificate,
        policy: ClientPolicy,
        trained: RoundDigests,
        now: float,
    ) -> Step:
        """Take part in the session that `offer` opens, with fresh secrets.

        Raises InvalidSignature for an offer of another server or a certificate that is not good
        for this device, IncompatiblePlan for an offer that `policy` or what was `trained` does not
        admit, ConfigurationError for vectors that fit no words, Conflict for one that expired. To
        be called once for an offer, by a driver that keeps a list of the configurations it has
        answered; after that, `from_bytes`.
        """
        config = offer.config
        offer.verify(policy.server_key, config.digest)
        policy.check(config)
        trained.check(config)
        config.packing  # noqa: B018
        _check_time(config, now)
        if certificate.identity != identity.public:
            raise IncompatiblePlan("the certificate is of another key than this device's")
        certificate.check(policy.authority, population=policy.population, now=now)
        mask_secret, seed, channel_secret = (bytes(new_secret()) for _ in range(3))
        advertise = Advertise(
            certificate,
            MaskKey(mask_secret, hybrid=config.hybrid).public,
            ChannelKey(channel_secret, hybrid=config.hybrid).public,
            os.urandom(32),
        ).signed(identity, config.digest)
        state = _State(
            "advertised",
            config,
            advertise.to_bytes(),
            mask_secret,
            seed,
            channel_secret,
            content=trained.content,
        )
        return Step(cls(state, identity, policy))

    @classmethod
    def from_bytes(
        cls, record: bytes, *, identity: DeviceKey, policy: ClientPolicy
    ) -> MaskingClient:
        """The client whose `Step.record` was written; raises StateCorrupt.

        One that an earlier release wrote before it masked anything gives up: it does not say what
        it is for.
        """
        try:
            state = _State.from_bytes(record)
        except FedpressError as exc:
            unbound = _unbound(record)
            if unbound is None:
                raise StateCorrupt(f"not the record of a masked session: {exc.detail}") from exc
            client = cls(unbound, identity, policy)
            if unbound.phase in ("advertised", "shared", "ready"):
                return client.give_up("an earlier release began the session").written()
            return client
        if state.version != _RECORD_VERSION:
            raise StateCorrupt(
                f"a record of version {state.version} where {_RECORD_VERSION} is read",
                hint="end the session with the version that began it",
            )
        return cls(state, identity, policy)

    def to_bytes(self) -> bytes:
        """The record again."""
        return self._state.to_bytes()

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def config(self) -> SessionConfig:
        return self._state.config

    @property
    def sid(self) -> bytes:
        """The session's id, 32 bytes; empty before there is a roster."""
        return self._state.sid

    @property
    def survivors(self) -> frozenset[int]:
        """The slots that the server named as those in the sum; none before it did."""
        return self._state.survivors

    @property
    def outcome(self) -> Outcome:
        """What became of the masked input. While it is pending, the update is in no other session
        and not back in the residual; it never goes into another session as it is."""
        return self._state.outcome

    @property
    def reason(self) -> str:
        """Why the client withdrew, or why the session was abandoned; empty otherwise."""
        return self._state.reason

    @property
    def outgoing(self) -> ClientMessage | None:
        """What is to be sent in this phase, the same bytes each time; None if nothing is."""
        sent = self._state.sent
        return parse(sent) if sent else None  # type: ignore[return-value]

    def on(self, message: ServerMessage, now: float) -> Step:
        """The client after `message`. One that was heard before changes nothing.

        Raises InvalidSignature, and changes nothing, if the server did not sign it for this
        session.
        """
        if self.phase == "over":
            return Step(self)
        state = self._state
        message.verify(self.policy.server_key, self._context(message))
        mark = hashlib.sha256(message.to_bytes()).digest()
        if mark in state.heard:
            return Step(self)
        handler = _TRANSITIONS.get((state.phase, type(message))) or _TRANSITIONS.get(
            ("any", type(message))
        )
        try:
            if handler is None:
                raise Conflict(f"{message.NAME} is not due for a client that is {state.phase}")
            state = handler(self, message, now)
        except FedpressError as exc:
            if state.phase == "withdrawn":
                return Step(self)
            state = self._ended(exc.detail)
        return self._step(replace(state, heard=(*state.heard, mark)))

    def mask(self, vectors: Mapping[str, npt.NDArray[np.int64]]) -> tuple[Step, bytes]:
        """Pack and mask `vectors`, by the names, lengths and bounds of the configuration: the body
        to send, beside the header in `outgoing`.

        In `ready`, for the values that the session was begun with; in `masked` it makes the same
        body again. Raises UpdateConflict for other values, which nothing of this session masks;
        Conflict in any other phase, InvalidUpdate for values that the configuration does not admit.
        """
        state = self._state
        if state.phase not in ("ready", "masked"):
            raise Conflict(f"a client that is {state.phase} has nothing to mask")
        packing = state.config.packing
        words = packing.pack(vectors)
        content = hashlib.sha256(packing.to_bytes(words)).digest()
        if state.phase == "ready" and not same(content, state.content):
            raise UpdateConflict(
                "other values than the session was begun with",
                hint="was the state directory brought back from a copy?",
            )
        add_keystreams(words, [mask.signed for mask in state.masks], state.config.suite)
        body = packing.to_bytes(words)
        header = MaskedInput(
            state.slot,
            frozenset(peer.slot for peer in state.peers) & state.sharers,
            hashlib.sha256(body).digest(),
            len(body),
        ).signed(self.identity, state.sid)
        sent = header.to_bytes()
        if state.phase == "masked" and sent != state.sent:
            raise UpdateConflict("other values were masked in this session before")
        return self._step(replace(state, phase="masked", sent=sent, has_masked=True)), body

    def give_up(self, reason: str) -> Step:
        """The device ends its part; the outcome stays open if a body may have left."""
        return Step(self) if self.phase == "over" else self._step(self._ended(reason))

    # What each message leads to

    def _on_roster(self, roster: Roster, now: float) -> _State:
        state, config = self._state, self.config
        _check_time(config, now)
        rows = roster.listing.rows
        n = len(rows)
        if not config.least(n) <= n <= config.maximum:
            raise IncompatiblePlan(
                f"a roster of {n} where {config.least(n)} to {config.maximum} are due"
            )
        num_corrupt = config.corrupt * n // 10_000
        if (sure := config.honest(n) + num_corrupt) < self.policy.minimum:
            raise IncompatiblePlan(
                f"a roster of {n}, by whose graph a sum may be of {sure} clients, fewer than "
                f"{self.policy.minimum}",
                hint="enlarge the cohort, or lower this device's minimum",
            )
        order = [row.identity for row in rows]
        if any(one >= other for one, other in pairwise(order)):
            raise MalformedRequest("a roster out of order, or with one identity twice")
        own = Advertise.from_bytes(state.sent)
        if own.row not in rows:
            raise Conflict("a roster without what this client advertised")
        slot = rows.index(own.row)
        sid = config.session_id(roster.listing.root)
        topology = Topology.of(config, n, sid)
        peers = self._peers(roster, slot, topology, now)
        return self._deal(replace(state, sid=sid, n=n, slot=slot, peers=peers), topology)

    def _peers(
        self, roster: Roster, slot: int, topology: Topology, now: float
    ) -> tuple[_Peer, ...]:
        """The neighbours, each entry checked; raises for the first that is not as it should be."""
        slots = sorted({*topology.neighbours(slot), slot})
        due = [roster.listing.rows[each] for each in slots]
        if [entry.row for entry in roster.entries] != due:
            raise MalformedRequest("a roster whose entries are not the neighbours' and one's own")
        for entry in roster.entries:
            entry.certificate.check(
                self.policy.authority, population=self.policy.population, now=now
            )
            entry.verify(entry.certificate.identity, self.config.digest)
            check_public(entry.mask_key, hybrid=self.config.hybrid)  # `_deal` agrees by the other
        keys = [key for each in roster.entries for key in (each.mask_key, each.channel_key)]
        if len(set(keys)) != len(keys):
            raise InvalidKey("one key twice in a roster")
        return tuple(
            _Peer(each, entry.certificate.identity, entry.mask_key, entry.channel_key)
            for each, entry in zip(slots, roster.entries, strict=True)
            if each != slot
        )

    def _deal(self, state: _State, topology: Topology) -> _State:
        sid, slot, hybrid = state.sid, state.slot, state.config.hybrid
        holders = topology.holders(slot)
        points = range(1, len(holders) + 1)
        dealt = zip(
            shamir.split(state.mask_secret, topology.threshold, points),
            shamir.split(state.seed, topology.threshold, points),
            strict=True,
        )
        shares = dict(zip(holders, dealt, strict=True))
        mask_key = MaskKey(state.mask_secret, hybrid=hybrid)
        channel = ChannelKey(state.channel_secret, hybrid=hybrid)
        sealed = []
        for peer in state.peers:
            introduction = b""
            if slot < peer.slot:
                introduction = mask_key.introduce(peer.mask_key, sid=sid, own=slot, peer=peer.slot)
            both = b"".join(map(shamir.to_bytes, shares[peer.slot]))
            box = channel.seal(
                peer.channel_key, both, sid=sid, own=slot, peer=peer.slot, associated=introduction
            )
            sealed.append(SealedShares(box, introduction))
        own = shares.get(slot)
        message = Shares(slot, commitment(state.seed, sid=sid, slot=slot), tuple(sealed)).signed(
            self.identity, sid
        )
        return replace(
            state,
            phase="shared",
            sent=message.to_bytes(),
            held=() if own is None else (_Held(slot, b"", shamir.to_bytes(own[1])),),
        )

    def _on_inbox(self, inbox: Inbox, now: float) -> _State:
        state = self._state
        _check_time(state.config, now)
        topology, sharers = state.topology, inbox.sharers
        self._check_set("sharers", sharers, topology)
        peers = [peer for peer in state.peers if peer.slot in sharers]
        if len(inbox.sealed) != len(peers):
            raise MalformedRequest(
                f"{len(inbox.sealed)} sealed shares of {len(peers)} neighbours that shared"
            )
        sid, slot, hybrid = state.sid, state.slot, state.config.hybrid
        mask_key = MaskKey(state.mask_secret, hybrid=hybrid)
        channel = ChannelKey(state.channel_secret, hybrid=hybrid)
        held = list(state.held)
        masks = [_Mask(self_mask(state.seed, sid=sid, slot=slot), True)]
        failed: dict[int, str] = {}
        for peer, box in zip(peers, inbox.sealed, strict=True):
            try:
                both = channel.open(
                    peer.channel_key,
                    box.sealed,
                    sid=sid,
                    own=slot,
                    peer=peer.slot,
                    associated=box.introduction,
                )
                shares = both[:SHARE_BYTES], both[SHARE_BYTES:]
                for share in shares:
                    shamir.from_bytes(share)
                material = mask_key.pair_mask(
                    peer.mask_key,
                    sid=sid,
                    cfg_hash=state.config.digest,
                    own=slot,
                    peer=peer.slot,
                    introduction=box.introduction,
                )
            except MaskingError as exc:
                failed[peer.slot] = exc.detail
                continue
            held.append(_Held(peer.slot, *shares))
            masks.append(_Mask(material, slot < peer.slot))
        if failed:
            return self._complain(state, failed)
        return replace(
            state,
            phase="ready",
            sent=b"",
            mask_secret=b"",
            seed=b"",
            channel_secret=b"",
            sharers=sharers,
            held=tuple(sorted(held, key=lambda each: each.owner)),
            masks=tuple(masks),
        )

    def _complain(self, state: _State, failed: Mapping[int, str]) -> _State:
        """Out of the session, and say with whom it could not be; no secret is left."""
        complaint = Complaint(state.slot, frozenset(failed)).signed(self.identity, state.sid)
        return replace(
            state.without_secrets(),
            phase="complained",
            sent=complaint.to_bytes(),
            outcome="not-included",
            reason="; ".join(failed.values())[:_MAX_REASON],
        )

    def _on_survivors(self, survivors: Survivors, now: float) -> _State:
        state = self._state
        _check_time(state.config, now)
        members = survivors.members
        if not members <= state.sharers:
            raise Conflict("survivors that shared nothing")
        self._check_set("survivors", members, state.topology)
        state = replace(state, survivors=members, masks=())
        if state.config.adversary == "semi-honest":
            return self._reveal(state)
        consent = Consent(state.slot, survivors_digest(members)).signed(self.identity, state.sid)
        return replace(state, phase="consented", sent=consent.to_bytes())

    def _on_consents(self, consents: Consents, now: float) -> _State:
        state = self._state
        _check_time(state.config, now)
        topology, seen = state.topology, survivors_digest(state.survivors)
        identities = {peer.slot: peer.identity for peer in state.peers}
        consenting = {state.slot} & set(topology.holders(state.slot))
        for consent in consents.consents:
            if consent.sender not in identities or consent.sender not in state.survivors:
                raise Conflict(f"a consent of slot {consent.sender}, no survivor near this client")
            if not same(consent.survivors, seen):
                raise Conflict(f"the client in slot {consent.sender} saw other survivors")
            if len(consenting) < topology.threshold:  # more would prove nothing more
                consent.verify(identities[consent.sender], state.sid)
                consenting.add(consent.sender)
        if len(consenting) < topology.threshold:
            raise Conflict(
                f"{len(consenting)} of this client's neighbours consent where "
                f"{topology.threshold} must"
            )
        return self._reveal(state)

    def _reveal(self, state: _State) -> _State:
        shares = b"".join(
            held.seed_share if held.owner in state.survivors else held.mask_share
            for held in state.held
        )
        reveal = Reveal(state.slot, survivors_digest(state.survivors), shares)
        signed = reveal.signed(self.identity, state.sid)
        return replace(state, phase="revealed", sent=signed.to_bytes(), held=(), masks=(), peers=())

    def _on_receipt(self, receipt: Receipt, now: float) -> _State:
        state = self._state
        if state.sid and receipt.session != state.sid:
            raise Conflict("a receipt for another roster than the server gave before")
        if state.survivors and receipt.members != state.survivors:
            raise Conflict("a receipt for other survivors than the server named before")
        is_in = state.has_masked and state.slot in receipt.members
        outcome: Outcome = "included" if is_in else "not-included"
        return replace(state.without_secrets(), phase="over", outcome=outcome)

    def _on_abandoned(self, abandoned: Abandoned, now: float) -> _State:
        ended = self._ended(abandoned.reason)
        return replace(ended, phase="over", outcome="not-included")

    # Helpers

    def _check_set(self, what: str, members: frozenset[int], topology: Topology) -> None:
        state = self._state
        least = state.config.least(state.n)
        mine = len(members.intersection(topology.holders(state.slot)))
        if members and max(members) >= state.n:
            raise MalformedRequest(f"{what} beyond the roster's {state.n}")
        if state.slot not in members:
            raise Conflict(f"this client is not among the {what}")
        if len(members) < least:
            raise Conflict(f"{len(members)} {what} where {least} must be")
        if mine < topology.threshold:
            raise Conflict(f"{mine} {what} near this client where {topology.threshold} must be")

    def _context(self, message: ServerMessage) -> bytes:
        by_config = isinstance(message, Offer | Roster | Receipt | Abandoned)
        return self.config.digest if by_config else self._state.sid

    def _ended(self, reason: str) -> _State:
        """Withdrawn; over at once if no body can have left."""
        state = self._state.without_secrets()
        reason = reason.encode(errors="replace")[:_MAX_REASON].decode(errors="ignore")
        if state.has_masked:
            return replace(state, phase="withdrawn", reason=reason)
        return replace(state, phase="over", outcome="not-included", reason=reason)

    def _step(self, state: _State) -> Step:
        return Step(replace(self, _state=state))


def _check_time(config: SessionConfig, now: float) -> None:
    if now >= config.expires:
        raise Conflict(f"the session expired at {config.expires}")


_TRANSITIONS: Mapping[
    tuple[str, type[ServerMessage]], Callable[[MaskingClient, Any, float], _State]
] = {
    ("advertised", Roster): MaskingClient._on_roster,
    ("shared", Inbox): MaskingClient._on_inbox,
    ("masked", Survivors): MaskingClient._on_survivors,
    ("consented", Consents): MaskingClient._on_consents,
    ("any", Receipt): MaskingClient._on_receipt,
    ("any", Abandoned): MaskingClient._on_abandoned,
}
"""Every other message makes the client withdraw; one that has withdrawn, nothing any more."""
