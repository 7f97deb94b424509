"""The session inside a masked round: `MaskingServer`, a pure machine, and what its round counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import InvalidUpdate, UpdateConflict
from fedpress_protocols.masking import server as masking
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
)
from fedpress_protocols.masking.messages import Receipt as SumReceipt
from fedpress_protocols.masking.server import MaskingServer
from fedpress_protocols.messages import SessionStatus
from fedpress_server.rounds.events import SessionEnded, SessionFailed
from fedpress_server.rounds.parts import Step

Words = npt.NDArray[np.uint64]
Answer = Literal["offer", "advertise", "shares", "masked", "consent", "reveal"]

MESSAGES: dict[Step, type[ClientMessage]] = {
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
    def begun(cls, machine: MaskingServer, clients: Mapping[str, str], now: float) -> Session:
        """With the `clients` of these assignments."""
        return cls(machine, len(clients), now, clients=clients)

    @property
    def outcome(self) -> SessionEnded | SessionFailed | None:
        """The end that the session has come to, for its round."""
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
        """Return the server's message to this client after its `step`; None until it is ready.

        Raises Forbidden for a client that the session does not know, RoundClosed for one it lost.
        """
        if step == "offer":
            return self.machine.offer.to_bytes()
        message = self.machine.answer(_ANSWERS[step], identity)
        return None if message is None else message.to_bytes()

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
        """Number of clients that the step is for: those that answered the one before."""
        expected = {"advertise": self.began, "shares": len(self.machine.advertised)}
        expected |= {"masked": len(self.machine.sharers)}
        return expected.get(step, len(self.machine.survivors))

    def _counting(self, kind: type[ClientMessage]) -> Session:
        step = next(step for step, message_type in MESSAGES.items() if message_type is kind)
        return replace(self, answered={**self.answered, step: self.answered.get(step, 0) + 1})

    def _moved(self, machine: MaskingServer, now: float) -> Session:
        is_ended = machine.phase in ("unmasking", "abandoned")
        return replace(self, machine=machine, ended_at=now if is_ended else self.ended_at)
