"""Receipts: verify what the server signed, settle the account by it, follow a restored server."""

from __future__ import annotations

import logging

from fedpress_client.events import EventLog, ReceiptReceived, ServerRestored
from fedpress_client.joined_task import JoinedTask
from fedpress_client.ledger import Ledger
from fedpress_client.transport import Transport
from fedpress_client.uplink import UplinkMeter
from fedpress_protocols.errors import NotFound
from fedpress_protocols.messages import (
    RECALL_CONTEXT,
    RECEIPT_CONTEXT,
    CheckInRequest,
    IncludedUpload,
    Recall,
    Receipt,
    SignedRecall,
    SignedReceipt,
)

_log = logging.getLogger(__name__)

_REPORTED_PENDING = 1024
SHORTEST_PAUSE = 0.05


class Receipts:
    """Settles pending uploads; the account is durable when a method returns."""

    def __init__(self, transport: Transport, events: EventLog, uplink: UplinkMeter) -> None:
        self._transport, self._events, self._uplink = transport, events, uplink

    def request(
        self, task: JoinedTask, wait: float = 0.0, fates: tuple[IncludedUpload, ...] = ()
    ) -> CheckInRequest:
        """The check-in that asks for the receipts of all that is pending."""
        return CheckInRequest(
            pending=tuple(task.ledger.pending)[:_REPORTED_PENDING],
            wait=wait,
            attributes=self._uplink.attributes,
            epoch=task.ledger.epoch,
            fates=fates,
        )

    def settle(
        self, task: JoinedTask, receipts: tuple[SignedReceipt, ...], backup_at: int | None = None
    ) -> None:
        """Settle the account by `receipts`; `backup_at` is where the server may go back to."""
        ledger = task.ledger if backup_at is None else task.ledger.goes_back_to(backup_at)
        ledger = self._settled(task, ledger, receipts)
        if ledger is not task.ledger:
            task.save(ledger)

    def collect(self, task: JoinedTask) -> float:
        """Ask for each receipt that is due; the seconds until the missing ones may be there."""
        pause = 0.0
        for key in tuple(task.ledger.pending):
            try:
                answer = self._transport.receipt(key)
            except NotFound as exc:
                _log.warning("no receipt for %s: %s; it stays pending", key, exc.detail)
                continue
            if isinstance(answer, SignedReceipt):
                self.settle(task, (answer,))
            else:
                pause = max(pause, answer, SHORTEST_PAUSE)
        return pause

    def reconcile(self, task: JoinedTask, signed: SignedRecall) -> bool:
        """Follow a restore of the server: ask for the fate of all that is pending, or that it may
        have undone. False if it does not know all of it yet.

        The epoch is noted last, so that whatever comes in between it is asked again.
        """
        restore = _verified_recall(task, signed).restore
        if restore.epoch != task.ledger.epoch:
            _log.warning("the server was restored from a backup (restore %d)", restore.number)
        fates = task.ledger.fates
        request = self.request(task, fates=fates)
        response = self._transport.check_in(task.name, request).response
        if response is None or response.recall is None:
            return False
        recall = _verified_recall(task, response.recall)
        ledger = self._settled(task, task.ledger, response.receipts)
        num_before = len(ledger.pending) + ledger.included
        ledger = ledger.recalled(recall)
        settled = {each.receipt.assignment for each in response.receipts} | {*recall.unknown}
        is_done = all(fate.assignment in settled for fate in fates)
        if is_done:
            ledger = ledger.in_epoch(recall.restore.epoch)
        task.sent.clear()  # what is pending still, the backup may not have
        task.save(ledger)
        undone = num_before - len(ledger.pending) - ledger.included
        self._events.emit(ServerRestored(restore=recall.restore.number, undone=undone))
        return is_done

    def _settled(
        self, task: JoinedTask, ledger: Ledger, receipts: tuple[SignedReceipt, ...]
    ) -> Ledger:
        for signed in receipts:
            receipt = _verified(task, signed)
            if task.masked_part is not None:
                task.masked_part.check(receipt)
            after = ledger.settle(receipt)
            if after is not ledger:
                event = ReceiptReceived(outcome=receipt.outcome, reason=receipt.reason)
                self._events.emit(event, receipt)
            ledger = after
        return ledger


def _verified(task: JoinedTask, signed: SignedReceipt) -> Receipt:
    """The receipt; raises InvalidSignature unless a key that `ServerTrust` believes signed it."""
    document = signed.receipt.model_dump(mode="json")
    document |= {"key_id": signed.key_id, "signature": signed.signature}
    task.trust.verify(document, RECEIPT_CONTEXT)
    return signed.receipt


def _verified_recall(task: JoinedTask, signed: SignedRecall) -> Recall:
    document = signed.recall.model_dump(mode="json")
    document |= {"key_id": signed.key_id, "signature": signed.signature}
    task.trust.verify(document, RECALL_CONTEXT)
    return signed.recall
