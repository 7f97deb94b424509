"""The client of a masked session, as a pure state machine: the server's messages in, its own out.

    step = MaskingClient.begin(offer, ...)            # or client.on(message, now)
    store(step.record)                                # durably, before anything is sent
    client = step.written()
    send(client.outgoing)                             # and the body with it, after `mask`

Every message is a function of a durable record, to the byte: a device that is killed at any point
and restarts from `MaskingClient.from_bytes` repeats its messages, never masks different content
with the same secrets and never answers for two survivor sets. A transition returns a `Step`, and
only its `written` leads to the next client, and so to its message.

No I/O and no clock; randomness comes from the operating system. A message without the server's
valid signature raises and changes nothing. A signed message that violates the protocol makes the
client withdraw: it sends nothing more and wipes its secrets.
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
"""The version of records without a digest of the content to be masked."""
_MAX_REASON = 512


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """Minimum requirements of the device for any session; an offer below them is declined.

    `authority` and `server_key` are pinned Ed25519 keys: of the enrolment authority, and of the
    server. The client computes degree and threshold from the offer's caps and the roster alone.
    """

    authority: bytes
    server_key: bytes
    population: str
    minimum: int = 3
    """Minimum number of survivors whose sum the client helps to unmask."""
    adversary: Adversary = "malicious"
    """With "semi-honest", sessions of either profile are accepted."""
    corrupt: float = 0.1
    """Minimum share of corrupt clients that a session must tolerate."""
    suites: tuple[Suite, ...] = SUITES
    hybrid: bool = False
    """Whether ML-KEM beside X25519 is required."""

    def check(self, config: SessionConfig) -> None:
        """Raise PlanDeclined for the first term that does not meet the requirements."""
        failures = {
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
        for rule, (failure, is_there) in failures.items():
            if is_there:
                raise PlanDeclined(
                    f"a session with {failure}, which this device's policy does not allow",
                    hint="check the server, or change the device's policy",
                    rule=rule,
                )


@dataclass(frozen=True, slots=True)
class RoundDigests:
    """The device's own digests of the round that it trained for, 32 bytes each.

    The digests enter every mask, so clients that got another model, support or plan from the server
    cannot be in one sum with this one. `content` is the SHA-256 of the values to be masked, packed
    as a body. The session's secrets are drawn for these values and stored with their digest, so no
    restored copy of a record can mask other values.
    """

    model: bytes
    support: bytes
    plan: bytes
    content: bytes

    def check(self, config: SessionConfig) -> None:
        """Raise IncompatiblePlan for a session about another round."""
        for name in ("model", "support", "plan"):
            if not same(getattr(self, name), getattr(config, name)):
                raise IncompatiblePlan(
                    f"a session on the {name} {getattr(config, name).hex()[:12]}, but this client "
                    f"trained on {getattr(self, name).hex()[:12]}"
                )


# The record


@dataclass(frozen=True, slots=True)
class _Peer(Record):
    """A neighbour, verified by its certificate and its own signature."""

    slot: U32
    identity: Bytes32
    mask_key: Annotated[bytes, blob()]
    channel_key: Annotated[bytes, blob()]


@dataclass(frozen=True, slots=True, repr=False)
class _HeldShares(Record):
    """The shares of one owner that this client holds; of its own secrets it holds only one."""

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
    """The whole state of a client; secrets are kept only while they are needed."""

    phase: Annotated[Phase, choice(*_PHASES)]
    config: SessionConfig
    sent: Annotated[bytes, blob()]
    """The message of this phase, or empty."""
    mask_secret: Annotated[bytes, blob(SECRET_BYTES)] = b""
    seed: Annotated[bytes, blob(SECRET_BYTES)] = b""
    channel_secret: Annotated[bytes, blob(SECRET_BYTES)] = b""
    sid: Annotated[bytes, blob(32)] = b""
    n: U32 = 0
    slot: U32 = 0
    peers: tuple[_Peer, ...] = ()
    held_shares: tuple[_HeldShares, ...] = ()
    sharers: Members = frozenset()
    masks: tuple[_Mask, ...] = ()
    survivors: Members = frozenset()
    has_masked: Flag = False
    """Whether a masked body may have left."""
    outcome: Annotated[Outcome, choice("pending", "included", "not-included")] = "pending"
    reason: Annotated[str, text(_MAX_REASON)] = ""
    heard: tuple[Bytes32, ...] = ()
    """Digests of the server's messages received so far."""
    version: U16 = _RECORD_VERSION
    content: Annotated[bytes, blob(32)] = b""
    """As in `RoundDigests`; empty in a record of the previous version."""

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
            held_shares=(),
            masks=(),
            content=b"",
        )


def _unbound(record: bytes) -> _State | None:
    """The state in a record of the previous version, which lacks `content`; None for other
    bytes."""
    try:
        state = _State.from_bytes(record + bytes(4))
    except FedpressError:
        return None
    return replace(state, version=_RECORD_VERSION) if state.version == _UNBOUND else None


@dataclass(frozen=True, slots=True)
class Step:
    """A transition that has not been recorded yet."""

    _client: MaskingClient

    @property
    def record(self) -> bytes:
        """The whole state including secrets: the caller replaces the previous record durably,
        readable by the device only."""
        return self._client.to_bytes()

    def written(self) -> MaskingClient:
        """Return the client after the transition; call it once `record` is on the disk."""
        return self._client


@dataclass(frozen=True)
class MaskingClient:
    """One client in one session; every method that changes the state returns a `Step`.

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

        Raises InvalidSignature for an offer of another server or a certificate that is not valid
        for this device, PlanDeclined or IncompatiblePlan for an offer that violates `policy` or
        differs from `trained`, ConfigurationError for vectors that do not fit into words, Conflict
        for an expired offer. Call it once per offer: the driver keeps a list of the configurations
        it has answered, and uses `from_bytes` afterwards.
        """
        config = offer.config
        offer.verify(policy.server_key, config.digest)
        policy.check(config)
        trained.check(config)
        config.packing  # noqa: B018
        _check_time(config, now)
        if certificate.identity != identity.public:
            raise IncompatiblePlan("the certificate is for another key than this device's")
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
        """Restore the client from `Step.record`; raises StateCorrupt.

        A client recorded by an earlier release before it masked anything withdraws: its record
        lacks the digest of the content.
        """
        try:
            state = _State.from_bytes(record)
        except FedpressError as exc:
            unbound = _unbound(record)
            if unbound is None:
                raise StateCorrupt(f"not the record of a masked session: {exc.detail}") from exc
            client = cls(unbound, identity, policy)
            if unbound.phase in ("advertised", "shared", "ready"):
                return client.give_up("an earlier release started the session").written()
            return client
        if state.version != _RECORD_VERSION:
            raise StateCorrupt(
                f"a record of version {state.version}, expected {_RECORD_VERSION}",
                hint="finish the session with the release that started it",
            )
        return cls(state, identity, policy)

    def to_bytes(self) -> bytes:
        """The record of the current state."""
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
        """The slots that the server announced as survivors; empty before that."""
        return self._state.survivors

    @property
    def outcome(self) -> Outcome:
        """The outcome of the masked input. While it is pending, the update must not be returned to
        the residual; it is never used unchanged in another session."""
        return self._state.outcome

    @property
    def reason(self) -> str:
        """The reason why the client withdrew or the session was abandoned; empty otherwise."""
        return self._state.reason

    @property
    def outgoing(self) -> ClientMessage | None:
        """The message to send in this phase, always the same bytes; None if there is none."""
        message = self._state.sent
        return parse(message) if message else None  # type: ignore[return-value]

    def on(self, message: ServerMessage, now: float) -> Step:
        """Process `message` from the server. A repeated message changes nothing.

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
                raise Conflict(f"unexpected {message.NAME} for a client in phase {state.phase}")
            state = handler(self, message, now)
        except FedpressError as exc:
            if state.phase == "withdrawn":
                return Step(self)
            state = self._ended(exc.detail)
        return self._step(replace(state, heard=(*state.heard, mark)))

    def mask(
        self, vectors: Mapping[str, npt.NDArray[np.int64]], *, is_checked: bool = False
    ) -> tuple[Step, bytes]:
        """Pack and mask `vectors`, by the names, lengths and bounds of the configuration: the body
        to send, beside the header in `outgoing`.

        In `ready`, for the values that the session was started with; in `masked` it repeats the
        same body. Raises UpdateConflict for other values, which this session never masks; Conflict
        in any other phase, InvalidUpdate for values outside the configuration's bounds, or with
        `is_checked` for values that no sum has room for: a payload whose bound is a share of the
        sum's has checked its own values.
        """
        state = self._state
        if state.phase not in ("ready", "masked"):
            raise Conflict(f"a client in phase {state.phase} has nothing to mask")
        packing = state.config.packing
        words = packing.pack(vectors, as_sum=is_checked)
        content = hashlib.sha256(packing.to_bytes(words)).digest()
        if state.phase == "ready" and not same(content, state.content):
            raise UpdateConflict(
                "other values than the session was started with",
                hint="was the state directory restored from a copy?",
            )
        add_keystreams(words, [mask.signed for mask in state.masks], state.config.suite)
        body = packing.to_bytes(words)
        header = MaskedInput(
            state.slot,
            frozenset(peer.slot for peer in state.peers) & state.sharers,
            hashlib.sha256(body).digest(),
            len(body),
        ).signed(self.identity, state.sid)
        message = header.to_bytes()
        if state.phase == "masked" and message != state.sent:
            raise UpdateConflict("other values were masked in this session before")
        return self._step(replace(state, phase="masked", sent=message, has_masked=True)), body

    def give_up(self, reason: str) -> Step:
        """Withdraw; the outcome stays pending if a body may have been sent."""
        return Step(self) if self.phase == "over" else self._step(self._ended(reason))

    # Transitions by message

    def _on_roster(self, roster: Roster, now: float) -> _State:
        state, config = self._state, self.config
        _check_time(config, now)
        rows = roster.listing.rows
        n = len(rows)
        if not config.least(n) <= n <= config.maximum:
            raise IncompatiblePlan(
                f"a roster of {n}, expected {config.least(n)} to {config.maximum}"
            )
        num_corrupt = config.corrupt * n // 10_000
        if (sure := config.honest(n) + num_corrupt) < self.policy.minimum:
            raise IncompatiblePlan(
                f"a roster of {n}, whose graph allows a sum of {sure} clients, fewer than "
                f"{self.policy.minimum}",
                hint="enlarge the cohort, or lower this device's minimum",
            )
        order = [row.identity for row in rows]
        if any(one >= other for one, other in pairwise(order)):
            raise MalformedRequest("a roster that is not sorted by identity, or repeats one")
        own = Advertise.from_bytes(state.sent)
        if own.row not in rows:
            raise Conflict("a roster without this client's Advertise")
        slot = rows.index(own.row)
        sid = config.session_id(roster.listing.root)
        topology = Topology.of(config, n, sid)
        peers = self._peers(roster, slot, topology, now)
        return self._deal(replace(state, sid=sid, n=n, slot=slot, peers=peers), topology)

    def _peers(
        self, roster: Roster, slot: int, topology: Topology, now: float
    ) -> tuple[_Peer, ...]:
        """Verify the entries of the neighbours; raises for the first invalid one."""
        slots = sorted({*topology.neighbours(slot), slot})
        rows = [roster.listing.rows[each] for each in slots]
        if [entry.row for entry in roster.entries] != rows:
            raise MalformedRequest(
                "a roster whose entries are not those of the neighbours and this client"
            )
        for entry in roster.entries:
            entry.certificate.check(
                self.policy.authority, population=self.policy.population, now=now
            )
            entry.verify(entry.certificate.identity, self.config.digest)
            check_public(entry.mask_key, hybrid=self.config.hybrid)  # `_deal` agrees by the other
        keys = [key for each in roster.entries for key in (each.mask_key, each.channel_key)]
        if len(set(keys)) != len(keys):
            raise InvalidKey("a roster with a repeated key")
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
            held_shares=() if own is None else (_HeldShares(slot, b"", shamir.to_bytes(own[1])),),
        )

    def _on_inbox(self, inbox: Inbox, now: float) -> _State:
        state = self._state
        _check_time(state.config, now)
        topology, sharers = state.topology, inbox.sharers
        self._check_set("sharers", sharers, topology)
        peers = [peer for peer in state.peers if peer.slot in sharers]
        if len(inbox.sealed) != len(peers):
            raise MalformedRequest(f"{len(inbox.sealed)} sealed shares, expected {len(peers)}")
        sid, slot, hybrid = state.sid, state.slot, state.config.hybrid
        mask_key = MaskKey(state.mask_secret, hybrid=hybrid)
        channel = ChannelKey(state.channel_secret, hybrid=hybrid)
        held_shares = list(state.held_shares)
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
            held_shares.append(_HeldShares(peer.slot, *shares))
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
            held_shares=tuple(sorted(held_shares, key=lambda each: each.owner)),
            masks=tuple(masks),
        )

    def _complain(self, state: _State, failed: Mapping[int, str]) -> _State:
        """Leave the session with a Complaint that names the senders; wipes all secrets."""
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
            raise Conflict("survivors that sent no shares")
        self._check_set("survivors", members, state.topology)
        state = replace(state, survivors=members, masks=())
        if state.config.adversary == "semi-honest":
            return self._reveal(state)
        consent = Consent(state.slot, survivors_digest(members)).signed(self.identity, state.sid)
        return replace(state, phase="consented", sent=consent.to_bytes())

    def _on_consents(self, consents: Consents, now: float) -> _State:
        state = self._state
        _check_time(state.config, now)
        topology, digest = state.topology, survivors_digest(state.survivors)
        identities = {peer.slot: peer.identity for peer in state.peers}
        consenting = {state.slot} & set(topology.holders(state.slot))
        for consent in consents.consents:
            if consent.sender not in identities or consent.sender not in state.survivors:
                raise Conflict(
                    f"a consent of slot {consent.sender}, which is no surviving neighbour"
                )
            if not same(consent.survivors, digest):
                raise Conflict(f"slot {consent.sender} consented to another set of survivors")
            if len(consenting) < topology.threshold:  # enough: skip the others' signatures
                consent.verify(identities[consent.sender], state.sid)
                consenting.add(consent.sender)
        if len(consenting) < topology.threshold:
            raise Conflict(
                f"{len(consenting)} of this client's neighbours consent, "
                f"at least {topology.threshold} must"
            )
        return self._reveal(state)

    def _reveal(self, state: _State) -> _State:
        shares = b"".join(
            share.seed_share if share.owner in state.survivors else share.mask_share
            for share in state.held_shares
        )
        reveal = Reveal(state.slot, survivors_digest(state.survivors), shares)
        signed = reveal.signed(self.identity, state.sid)
        return replace(
            state, phase="revealed", sent=signed.to_bytes(), held_shares=(), masks=(), peers=()
        )

    def _on_receipt(self, receipt: Receipt, now: float) -> _State:
        state = self._state
        if state.sid and receipt.session != state.sid:
            raise Conflict("a receipt for another roster than the server announced")
        if state.survivors and receipt.members != state.survivors:
            raise Conflict("a receipt for other survivors than the server announced")
        is_in = state.has_masked and state.slot in receipt.members
        outcome: Outcome = "included" if is_in else "not-included"
        return replace(state.without_secrets(), phase="over", outcome=outcome)

    def _on_abandoned(self, abandoned: Abandoned, now: float) -> _State:
        state = self._ended(abandoned.reason)
        return replace(state, phase="over", outcome="not-included")

    # Helpers

    def _check_set(self, role: str, members: frozenset[int], topology: Topology) -> None:
        state = self._state
        least = state.config.least(state.n)
        neighbouring = len(members.intersection(topology.holders(state.slot)))
        if members and max(members) >= state.n:
            raise MalformedRequest(f"{role} outside of the roster's {state.n} slots")
        if state.slot not in members:
            raise Conflict(f"this client is not among the {role}")
        if len(members) < least:
            raise Conflict(f"{len(members)} {role}, at least {least} are required")
        if neighbouring < topology.threshold:
            raise Conflict(
                f"{neighbouring} {role} near this client, at least {topology.threshold} required"
            )

    def _context(self, message: ServerMessage) -> bytes:
        by_config = isinstance(message, Offer | Roster | Receipt | Abandoned)
        return self.config.digest if by_config else self._state.sid

    def _ended(self, reason: str) -> _State:
        """Withdraw; the outcome is final at once if no body can have been sent."""
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
"""Any other message makes the client withdraw; after that, all messages are ignored."""
