"""The masked lane of a task: the device's rules, its certificate, and the session under way."""

from __future__ import annotations

from fedpress_client.enrolment import Enrolment
from fedpress_client.events import SessionAdvanced
from fedpress_client.joined_task import JoinedTask
from fedpress_client.masking import MaskedPart
from fedpress_client.membership import RENEW_SECONDS, Member, joined
from fedpress_client.settings import Services
from fedpress_client.uploads import Uploads
from fedpress_protocols.errors import ConfigurationError, MalformedRequest
from fedpress_protocols.masking.agreement import agreed
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.masking.transcript import SessionConfig
from fedpress_protocols.plan import RoundPlan


class MaskedRounds:
    """Prepares the device for masked sessions, and goes on in them from check-in to check-in."""

    def __init__(self, services: Services, enrolment: Enrolment, uploads: Uploads) -> None:
        self._services, self._enrolment, self._uploads = services, enrolment, uploads
        self._rules, self._clock = services.settings.masking_rules, services.settings.clock

    def check_plan(self, task: JoinedTask, plan: RoundPlan) -> None:
        """Raises PlanDeclined for a plan that the device's rules do not admit."""
        ledger = task.ledger
        rounds = ledger.included + ledger.not_included + len(ledger.pending)
        self._rules.check(plan, rounds, is_pinned=task.files.is_masked())

    def agree(self, task: JoinedTask, payload: Payload) -> SessionConfig:
        """The session that a plan calls for, with this device ready to take part in it.

        Raises ConfigurationError where it cannot be.
        """
        self._rules.check_payload(payload)
        if task.masked_part is None or self._is_outdated(task.masked_part.member):
            task.masked_part = self.open_part(task, may_ask=True)
        if task.masked_part is None:
            raise ConfigurationError("this device has no certificate")
        policy = task.masked_part.member.policy
        config = agreed(payload, population=policy.population, server_key=policy.server_key)
        policy.check(config)
        return config

    def open_part(self, task: JoinedTask, *, may_ask: bool) -> MaskedPart | None:
        """The device's part in masked sessions; None if it has no certificate and may not ask."""
        member = self._member(may_ask=may_ask)
        if member is None:
            return None
        return MaskedPart(
            task.files,
            self._enrolment.key,
            member,
            self._services.transport,
            ledger=lambda: task.ledger,
            save=task.save,
            tell=lambda key, step, detail: self._services.events.emit(
                SessionAdvanced(step=step, detail=detail), task.ledger.pending.get(key)
            ),
            clock=self._clock,
            believes=task.trust.believes,
        )

    def resume(self, task: JoinedTask) -> float | None:
        """Go on in the masked session under way; None if there is none, or only its receipt is
        missing."""
        part = task.masked_part
        key = part.assignment if part is not None else None
        if part is None or key is None:
            return None
        if key not in task.ledger.pending:
            part.leave()
            return None
        if key in task.declined:
            return None
        upload = task.ledger.pending[key]
        self._services.progress.round = upload.round
        try:
            return part.advance(self._services.settings.wait)
        except (ConfigurationError, MalformedRequest) as exc:
            self._uploads.decline(task, key, upload, "session-failed", exc)
            return None

    def _member(self, *, may_ask: bool) -> Member | None:
        services, key = self._services, self._enrolment.key
        with services.directory.alone():
            identity = services.directory.identity()
            if identity is None:
                return None
            member = Member.of(identity, self._rules)
            if may_ask and (member is None or self._is_outdated(member)):
                answer = services.transport.certificate()
                identity = joined(identity, answer, self._rules, key=key.public, now=self._clock())
                services.directory.enrolled(identity)
                member = Member.of(identity, self._rules)
        return member

    def _is_outdated(self, member: Member) -> bool:
        if member.certificate.identity != self._enrolment.key.public:
            return True
        return member.certificate.expires < self._clock() + RENEW_SECONDS
