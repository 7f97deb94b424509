"""Answers to an assignment: the body of its update, or a decline."""

from __future__ import annotations

import logging

from fedpress_client import tracing
from fedpress_client.events import AssignmentDeclined, InRound, UpdateUploaded, UploadRefused
from fedpress_client.joined_task import JoinedTask
from fedpress_client.ledger_records import Pending
from fedpress_client.privacy_budget import BUDGET_RULES
from fedpress_client.receipts import Receipts
from fedpress_client.settings import Services
from fedpress_client.uplink import UplinkMeter
from fedpress_protocols.errors import (
    Conflict,
    DigestMismatch,
    FedpressError,
    InvalidUpdate,
    MalformedRequest,
    NotFound,
    PlanDeclined,
)
from fedpress_protocols.messages import DeclineReason, UploadAck, UploadFigures

_log = logging.getLogger(__name__)


class Uploads:
    """Sends pending bodies from the account, and declines assignments."""

    def __init__(self, services: Services, receipts: Receipts, uplink: UplinkMeter) -> None:
        self._transport, self._events = services.transport, services.events
        self._progress = services.progress
        self._masking, self._clock = services.settings.masking_rules, services.settings.clock
        self._receipts, self._uplink = receipts, uplink
        self.num_refused_plans = 0
        """Plans in a row that the device's own rules refused."""

    @tracing.traced("upload")
    def send(self, task: JoinedTask, key: str) -> None:
        """Send the bytes of a pending upload; whatever the answer, its receipt decides."""
        upload = task.ledger.pending[key]
        self._progress.round = upload.round
        try:
            self._masking.check_lane(
                upload.lane,
                f"the update of round {upload.round}.{upload.attempt} of task {task.name!r}",
                is_pinned=task.files.is_masked(),
            )
            ack = self._timed(key, upload, task.figures.get(key))
            if (ack.assignment, ack.upload) != (key, upload.digest):
                raise DigestMismatch(
                    f"the server took {ack.upload[:12]} for {ack.assignment}, sent was "
                    f"{upload.digest[:12]} for {key}"
                )
            event = UpdateUploaded(assignment=key, body_bytes=len(upload.body))
            self._events.emit(event, upload)
        except PlanDeclined as exc:  # prepared before the device had these rules
            self.decline(task, key, upload, "masking-rules", exc)
        except Conflict as exc:
            _log.info("upload %s: %s", key, exc.detail)
            self._report_refusal(key, upload, exc)
        except NotFound as exc:
            _log.warning("upload %s: %s; it stays pending", key, exc.detail)
            self._report_refusal(key, upload, exc)
        except (InvalidUpdate, MalformedRequest) as exc:
            # The same bytes would fail again. Declined, the assignment gets its receipt soon.
            _log.error("upload %s: %s", key, exc)
            self._report_refusal(key, upload, exc)
            self.decline(task, key, upload, "upload-refused", exc)
        task.sent.add(key)
        task.figures.pop(key, None)

    def decline(
        self,
        task: JoinedTask,
        key: str,
        about: InRound | None,
        code: DeclineReason,
        reason: Exception | str,
        needed_seconds: float | None = None,
    ) -> None:
        """Give an assignment back: the server learns `code`, and `reason` stays on the device.
        `about` is its plan or update, None if the plan cannot be read."""
        detail = str(reason) or type(reason).__name__
        task.declined.add(key)
        rule = None
        if isinstance(reason, PlanDeclined):
            self.num_refused_plans += 1
            rule = reason.members["rule"]
            code = "privacy-budget" if rule in BUDGET_RULES else "masking-rules"
        _log.warning("assignment %s declined (%s): %s", key, code, detail)
        event = AssignmentDeclined(assignment=key, code=code, reason=detail, rule=rule)
        self._events.emit(event, about)
        try:
            signed = self._transport.decline(key, code, needed_seconds)
        except FedpressError as exc:  # it will miss its deadline instead
            _log.info("declining %s: %s", key, exc.detail)
        else:
            self._receipts.settle(task, () if signed is None else (signed,))

    def _timed(self, key: str, upload: Pending, figures: UploadFigures | None) -> UploadAck:
        """Send a body, and measure the uplink by it."""
        traffic = self._transport.traffic
        began_at, sent_before = self._clock(), traffic.body_up
        ack = self._transport.upload(key, upload.body, figures)
        self._uplink.add(traffic.body_up - sent_before, self._clock() - began_at)
        return ack

    def _report_refusal(self, key: str, upload: Pending, error: FedpressError) -> None:
        event = UploadRefused(assignment=key, body_bytes=len(upload.body), reason=error.detail)
        self._events.emit(event, upload)
