"""A client's place in the masked sessions of a run: its files, whom it believes, what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedpress_client.ledger import Ledger
from fedpress_client.masking import MaskedPart
from fedpress_client.masking_rules import MaskingRules
from fedpress_client.membership import Member, joined
from fedpress_client.state import Identity
from fedpress_flower import envelope
from fedpress_flower.client.account import Account, begun
from fedpress_protocols.errors import ConfigurationError, Conflict, InvalidSignature
from fedpress_protocols.messages import Membership, Receipt
from fedpress_protocols.plan import RoundPlan, parsed
from fedpress_protocols.signatures import DeviceKey


class Seat:
    """A client in a run's sessions: its files, its key, and what it insists on."""

    def __init__(
        self,
        account: Account,
        task: str,
        client_id: str,
        key: DeviceKey,
        rules: MaskingRules,
        clock: Callable[[], float],
    ) -> None:
        self.account, self.key = account, key
        self._task, self._client_id, self._rules, self._clock = task, client_id, rules, clock
        self._ledger: Ledger | None = None

    def ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = self.account.load(self._task, self._client_id)
        return self._ledger

    def save(self, ledger: Ledger) -> None:
        self.account.save(ledger)
        self._ledger = ledger

    def believe(self, ours: ConfigRecord, server_key: str | None, now: float) -> None:
        """Take in who the server is and who vouches for the population; what was believed before
        stays. Raises ConfigurationError for anything else than what is pinned."""
        membership, named = (
            parsed(Membership, str(ours[envelope.MEMBERSHIP])),
            str(ours[envelope.SERVER_KEY]),
        )
        before = self.account.identity()
        identity = before or Identity(url="flower", client_id=self._client_id, server_key=named)
        if named != (server_key or identity.server_key):
            raise ConfigurationError(
                f"the server signs by {named}, pinned is {server_key or identity.server_key}",
                hint="give every MaskedStrategy of a run the same `key` and `authority`, or start "
                "the same strategy again",
            )
        after = joined(identity, membership, self._rules, key=self.key.public, now=now)
        if after != before:
            self.account.enrolled(after)

    def part(self, mailbox: Mailbox) -> MaskedPart:
        """Raises Conflict for a client that no server has spoken to."""
        identity = self.account.identity()
        member = None if identity is None else Member.of(identity, self._rules)
        if member is None:
            raise Conflict("this client has no part in any session")
        return MaskedPart(
            self.account,
            self.key,
            member,
            mailbox,
            ledger=self.ledger,
            save=self.save,
            tell=mailbox.tell,
            clock=self._clock,
        )


class Mailbox:
    """The server as a masked part knows it: it says one thing, and is told the last that there is
    to tell. What the part heard before, it says again: the same bytes."""

    def __init__(self, message: bytes, *, is_offer: bool = False) -> None:
        self._heard: bytes | None = message
        self._is_offer = is_offer
        self.said: bytes | None = None
        self.body: bytes | None = None

    def ready(self, assignment: str) -> None: ...

    def hear(self, assignment: str, step: Any, wait: float) -> bytes | float:
        if self._heard is None or self._is_offer != (step == "offer"):
            return 1.0
        message, self._heard = self._heard, None
        return message

    def say(self, assignment: str, step: Any, message: bytes) -> None:
        self.said, self.body = message, None

    def upload(self, assignment: str, body: bytes) -> None:
        self.body = body

    def tell(self, assignment: str, step: str, detail: str) -> None:
        """Of what ends a part's turn without a word of its own, Flower has to be told."""
        if step == "unsigned":
            raise InvalidSignature(detail)
        if step == "left":
            raise Conflict(detail)


def said_in(part: MaskedPart, mailbox: Mailbox, name: str, message: Message) -> Message:
    """Go on, and reply with what there is to say."""
    part.advance(0.0)
    if mailbox.said is None:
        raise Conflict("this client has nothing to say in this session")
    record = ConfigRecord({envelope.ASSIGNMENT: name, envelope.SAID: mailbox.said})
    content = RecordDict({envelope.RECORD: record})
    if mailbox.body is not None:
        array = Array("uint8", (len(mailbox.body),), envelope.MASKED_STYPE, mailbox.body)
        content[envelope.BODY_RECORD] = ArrayRecord({envelope.BODY: array})
    return Message(content, reply_to=message)


def settled(seat: Seat, part: MaskedPart, ours: ConfigRecord, name: str, plan: RoundPlan) -> Ledger:
    """The account once everything pending has its fate by the last word of its session, durably.

    Raises Conflict for a message that later ones overtook, and where a body may be in a sum that
    the server does not speak of, unless it belongs to another training and is never sent again.
    """
    since: Any = ours.get(envelope.SINCE, envelope.start_of(name))
    ledger = begun(seat.ledger(), name, plan.round, int(since))
    ended: Any = zip(ours.get(envelope.ENDED_FOR, []), ours.get(envelope.ENDED, []), strict=False)
    words: dict[str, bytes] = dict(ended)
    for before, pending in list(ledger.pending.items()):
        if before == name:
            continue
        outcome = "pending" if pending.session is not None else "not-included"
        if before == part.assignment:
            outcome = part.outcome(words.get(before))
        if outcome == "pending":
            raise Conflict(
                f"what this client sent for {before} may be in a sum, and the server does not say "
                "what became of it"
            )
        is_in = outcome == "included"
        receipt = Receipt(
            assignment=before,
            client_id=ledger.client_id,
            task=ledger.task,
            round=pending.round,
            attempt=pending.attempt,
            outcome="included" if is_in else "not-included",
            reason="included" if is_in else "dropped-out",
            upload=pending.digest if is_in else None,
            model=None,
            issued_at=0,
        )
        ledger = ledger.settle(receipt)
    if ledger is not seat.ledger():
        seat.save(ledger)
    if part.assignment not in (None, name):
        part.leave()
    return ledger
