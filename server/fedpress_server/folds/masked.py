"""A masked session beside its round: begun from the queue, moved by events, summed and unmasked.

The session itself is `MaskingServer`, a pure machine; here is what stands between it and a round.
Its events are the round's: `Said` for a message, `UploadStaged` for a masked body, and what it
comes to (an end, a failure) is told to the round in the same step, so that one replay gives both.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import (
    IncompatiblePlan,
    InvalidUpdate,
    MalformedRequest,
    ServerError,
    UpdateConflict,
)
from fedpress_protocols.masking import server as masking
from fedpress_protocols.masking.agreement import agreed, chosen
from fedpress_protocols.masking.keys import HYBRID_SEAL_BYTES, INTRODUCTION_BYTES, SEAL_BYTES
from fedpress_protocols.masking.messages import (
    Advertise,
    ClientMessage,
    Complaint,
    Consent,
    Consents,
    Inbox,
    MaskedInput,
    Offer,
    Reveal,
    Roster,
    ServerMessage,
    Shares,
    Survivors,
    parse,
    survivors_digest,
)
from fedpress_protocols.masking.messages import Receipt as SumReceipt
from fedpress_protocols.masking.ring import Packing
from fedpress_protocols.masking.server import MaskingServer
from fedpress_protocols.masking.shamir import SHARE_BYTES
from fedpress_protocols.messages import MaskedSum, SessionStatus
from fedpress_protocols.plan import RoundPlan
from fedpress_server.folds.adding import FoldJob, StagedUpload, Summed
from fedpress_server.folds.terms import RoundTerms
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.signing import SigningKeys
from fedpress_server.rounds import SessionEnded, SessionFailed, Step
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import RoundKey
from fedpress_strategies import Strategy
from fedpress_strategies.strategy import Tally

Words = npt.NDArray[np.uint64]
Answer = Literal["offer", "advertise", "shares", "masked", "consent", "reveal"]

_SAID: dict[Step, type[ClientMessage]] = {
    "advertise": Advertise,
    "shares": Shares,
    "masked": MaskedInput,
    "consent": Consent,
    "reveal": Reveal,
    "complaint": Complaint,
}
_ANSWERS: dict[Answer, type[ServerMessage]] = {
    "offer": Offer,
    "advertise": Roster,
    "shares": Inbox,
    "masked": Survivors,
    "consent": Consents,
    "reveal": SumReceipt,
}
_STEP_OF: dict[str, Step] = {
    "advertising": "advertise",
    "sharing": "shares",
    "masking": "masked",
    "consenting": "consent",
    "revealing": "reveal",
}
_LASTS = 3600
"""Seconds that a session's offer is good for beyond its phases: devices' clocks are not exact."""
_HEAD = 4096
"""More than any message has besides its lists."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """What every session of this server has: the key that speaks for it, and who vouches for its
    devices."""

    keys: SigningKeys
    authority: Authority


def message_bound(step: Step, plan: RoundPlan) -> int:
    """Bytes of the longest message of this step that an honest client of the plan sends."""
    others, hybrid = plan.cohort.size, plan.masking is not None and plan.masking.hybrid
    seal = HYBRID_SEAL_BYTES + INTRODUCTION_BYTES if hybrid else SEAL_BYTES
    lists = {"shares": others * (2 * SHARE_BYTES + seal + 8), "reveal": others * SHARE_BYTES}
    return _HEAD + lists.get(step, others // 8)


def read_message(step: Step, body: bytes) -> ClientMessage:
    """What `body` says; raises MalformedRequest unless it is a message of this step."""
    message = parse(body)
    if not isinstance(message, _SAID[step]):
        raise MalformedRequest(f"a message of kind {message.NAME!r} for the step {step!r}")
    return message


@dataclass(frozen=True, slots=True)
class Message:
    """What a device said, and its Ed25519 key."""

    message: ClientMessage
    identity: bytes


@dataclass(frozen=True)
class Session:
    """A session as it is now. `began` clients were in the queue, at the time `began_at`."""

    machine: MaskingServer
    began: int
    began_at: float
    ended_at: float | None = None
    headers: Mapping[str, MaskedInput] = field(default_factory=dict)
    """By assignment: of bodies that are in or on their way."""
    answered: Mapping[str, int] = field(default_factory=dict)
    silent: Mapping[str, int] = field(default_factory=dict)
    """By step, how many had not answered at its deadline, of those that were asked."""
    num_bytes: int = 0
    """Of the messages said, bodies not among them."""
    clients: Mapping[str, str] = field(default_factory=dict)
    """By assignment, whose it is."""
    seats: Mapping[bytes, str] = field(default_factory=dict)
    """By identity key, the client that advertised it."""

    @classmethod
    def begun(
        cls,
        host: Host,
        terms: RoundTerms,
        clients: Mapping[str, str],
        opened_at: float,
        now: float,
    ) -> Session:
        """With the `clients` of these assignments, under the server's key of `opened_at`, when the
        attempt began; raises IncompatiblePlan.

        The assignments were drawn at random for this attempt alone, and so is the nonce that is
        made of them: it is on the disk with them, and in no other session.
        """
        queue = sorted(clients)
        key, population = host.keys.at(opened_at), host.authority.population
        config = agreed(terms.payload, population=population, server_key=key.public)
        nonce = hashlib.sha256("|".join(["fedpress session", *queue]).encode()).digest()
        lasts = sum(asdict(config.seconds).values()) + _LASTS
        config = chosen(config, nonce=nonce, expires=int(now) + lasts)
        machine = MaskingServer.open(config, key, authority=host.authority.public, now=now)
        return cls(machine, len(queue), now, clients=clients)

    @property
    def outcome(self) -> SessionEnded | SessionFailed | None:
        """What the round is to be told, if there is something."""
        if self.machine.phase == "unmasking":
            return SessionEnded()
        return SessionFailed(self.machine.reason) if self.machine.phase == "abandoned" else None

    def admits(self, assignment: str, message: ClientMessage, identity: bytes, now: float) -> bool:
        """Whether the message, of the device with this key, is for `said`; False for one that was
        here before. Raises as `MaskingServer.admit` does."""
        before = self.headers.get(assignment)
        if isinstance(message, MaskedInput) and before is not None:
            if before != message:
                raise UpdateConflict("this client announced another body before")
            return False
        return self.machine.admit(message, identity, now)

    def said(self, assignment: str, message: ClientMessage, now: float, waiting: int) -> Session:
        """With an admitted message; `waiting` clients of the queue have not left."""
        after = replace(self, num_bytes=self.num_bytes + len(message.to_bytes()))
        if isinstance(message, MaskedInput):
            return replace(after, headers={**self.headers, assignment: message})
        after = after._counting(type(message))
        if isinstance(message, Advertise):
            seats = {**self.seats, message.certificate.identity: self.clients[assignment]}
            after = replace(after, seats=seats)
        machine, _ = self.machine.on(message, now)
        if machine.phase == "advertising" and len(machine.advertised) >= waiting:
            # The queue is closed, so nobody else can come: nothing to wait for.
            machine, _ = replace(machine, deadline=now).on(masking.DeadlinePassed(), now)
        return after._moved(machine, now)

    def takes_body(self, assignment: str, now: float) -> bool:
        """Whether the body that this client announced can still be counted in."""
        header, machine = self.headers.get(assignment), self.machine
        if header is None or machine.phase != "masking" or now >= machine.deadline:
            return False
        return header.sender not in machine.masked

    def words(self, assignment: str, body: bytes, digest: str) -> Words:
        """The words of a masked body of this SHA-256 (hex), to be added up.

        Raises InvalidUpdate unless it is the body that the client announced and signed.
        """
        header = self.headers[assignment]
        if (header.sha256.hex(), header.length) != (digest, len(body)):
            raise InvalidUpdate(
                f"a body of SHA-256 {digest[:12]} where {header.sha256.hex()[:12]} was announced"
            )
        return self.machine.config.packing.from_bytes(body)

    def staged(self, assignment: str, now: float) -> Session:
        """With the body that `takes_body` spoke of on the disk."""
        machine, _ = self.machine.on(self.headers[assignment], now)
        return self._counting(MaskedInput)._moved(machine, now)

    def passed(self, now: float) -> Session:
        """With its phase's deadline over."""
        step = _STEP_OF[self.machine.phase]
        silent = self._asked(step) - self.answered.get(step, 0)
        if step == "masked":
            silent -= self.answered.get("complaint", 0)
        after = replace(self, silent={**self.silent, step: silent})
        return after._moved(self.machine.on(masking.DeadlinePassed(), now)[0], now)

    def unmask_failed(self, detail: str, suspects: tuple[int, ...], now: float) -> Session:
        """With shares found wrong: more may come, or it is over."""
        return self._moved(self.machine.on(masking.UnmaskFailed(detail, suspects), now)[0], now)

    def suspecting(self, suspects: Iterable[int]) -> Session:
        """With the slots named whose shares were wrong, though others gave the sum."""
        machine = self.machine
        return replace(
            self, machine=replace(machine, suspects=machine.suspects | frozenset(suspects))
        )

    def named(self, slots: Iterable[int]) -> tuple[str, ...]:
        """The clients in these slots, in their order."""
        cohort = self.machine.cohort
        if cohort is None:
            return ()
        return tuple(self.seats[cohort.members[slot].certificate.identity] for slot in slots)

    def answer(self, step: Answer, identity: bytes) -> bytes | None:
        """What the server says to this client after its `step`; None while it is not there.

        Raises Forbidden for one that the session does not know, RoundClosed for one it has lost.
        """
        if step == "offer":
            return self.machine.offer.to_bytes()
        found = self.machine.answer(_ANSWERS[step], identity)
        return None if found is None else found.to_bytes()

    @property
    def status(self) -> SessionStatus:
        seconds = None if self.ended_at is None else self.ended_at - self.began_at
        return SessionStatus(
            began=self.began,
            answered=dict(self.answered),
            silent=dict(self.silent),
            message_bytes=self.num_bytes,
            seconds=seconds,
            suspects=self.named(sorted(self.machine.blame)),
            failures=tuple((one, other) for one, other in map(self.named, self.machine.failures)),
        )

    def _asked(self, step: Step) -> int:
        """How many clients the step is for: those that answered the one before."""
        asked = {"advertise": self.began, "shares": len(self.machine.advertised)}
        asked |= {"masked": len(self.machine.sharers)}
        return asked.get(step, len(self.machine.survivors))

    def _counting(self, kind: type[ClientMessage]) -> Session:
        step = next(step for step, said in _SAID.items() if said is kind)
        return replace(self, answered={**self.answered, step: self.answered.get(step, 0) + 1})

    def _moved(self, machine: MaskingServer, now: float) -> Session:
        is_ended = machine.phase in ("unmasking", "abandoned")
        return replace(self, machine=machine, ended_at=now if is_ended else self.ended_at)


# The sum


class Sums:
    """Masked bodies, added up as they come: one array of words for each attempt under way.

    It is a saving of time and no more. What is on the disk counts: whatever was not added here, as
    after a restart, is added when the sum is asked for. Safe in many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[RoundKey, tuple[Words, set[str]]] = {}

    def add(self, key: RoundKey, upload: str, words: Words) -> None:
        """Take in the body of the file `upload`, which is staged."""
        with self._lock:
            total, added = self._sums.setdefault(key, (np.zeros_like(words), set()))
            if upload not in added:
                total += words
                added.add(upload)

    def total(
        self,
        key: RoundKey,
        uploads: Iterable[StagedUpload],
        payloads: Payloads,
        packing: Packing,
    ) -> Words:
        """The sum over exactly `uploads`; raises ServerError for a file that was changed, or if the
        attempt ended meanwhile."""
        due = {upload.name: upload for upload in uploads}
        with self._lock:
            _, added = self._sums.get(key, (None, set()))
            if not added <= due.keys():
                del self._sums[key]
                added = set()
        for name in sorted(due.keys() - added):
            body = payloads.get(name)
            if hashlib.sha256(body).hexdigest() != due[name].digest:
                raise ServerError(f"{name} was changed on the disk")
            self.add(key, name, packing.from_bytes(body))
        with self._lock:
            total, added = self._sums.get(key, (None, set()))
            if total is None or added != due.keys():
                raise ServerError("the attempt ended while its bodies were added up")
            return total.copy()

    def drop(self, key: RoundKey) -> None:
        with self._lock:
            self._sums.pop(key, None)


def unmasked(
    job: FoldJob, session: Session, sums: Sums, payloads: Payloads
) -> tuple[Summed, MaskedSum, tuple[int, ...]]:
    """What the cohort's updates come to, the name of the sum, and whose shares were wrong.

    Raises InvalidShare if too many were, InvalidUpdate if the sum is not one that honest clients
    make.
    """
    plan, config = job.terms.plan, session.machine.config
    key = (plan.task, plan.round, plan.attempt)
    undo = session.machine.recover()
    words = undo.unmask([sums.total(key, job.uploads, payloads, config.packing)])
    payload = job.terms.payload
    found = payload.decompress(config.packing.unpack(words), len(job.uploads))
    over_symbols = job.strategy.symbol_aggregator is not None
    delta = found.numbers if over_symbols else found.mean.dense().astype(np.float64)
    summed = Summed(delta, found.num_examples, Tally(found.num_clients, found.report))
    return (
        summed,
        MaskedSum(
            session=session.machine.sid.hex(),
            survivors=survivors_digest(session.machine.survivors).hex(),
            aggregate=masking.aggregate_digest(config, words),
        ),
        undo.suspects,
    )


def left_out(
    sessions: Sequence[SessionStatus], turn: int, members: frozenset[str], minimum: int
) -> frozenset[str]:
    """Who takes no part after these `sessions`, the last ones of a task: those that one of them
    named, or all of them together do; and of two that fail with each other and nobody else, one and
    the other by `turn`. Nobody, where too few of the `members`, if there are any, would be left."""
    failures = [pair for each in sessions for pair in each.failures]
    named = set(masking.blamed(failures)).union(*(each.suspects for each in sessions))
    apart = {tuple(sorted(pair)) for pair in failures if named.isdisjoint(pair)}
    named |= {pair[turn % 2] for pair in apart}
    if members and len(members - named) < minimum:
        return frozenset()
    return frozenset(named)


def check_masked_strategy(terms: RoundTerms, strategy: Strategy) -> None:
    """Raises IncompatiblePlan unless the strategy needs no more than the sum of the updates."""
    plan = terms.plan
    if strategy.planned_aggregator is not None or not getattr(
        strategy.aggregator(terms.shared.size, plan.sum_bounds()), "linear", False
    ):
        raise IncompatiblePlan(
            "the strategy looks at updates one by one, and masking leaves nothing but their sum",
            hint="choose a strategy that takes the mean of the updates, or the clear lane",
        )
