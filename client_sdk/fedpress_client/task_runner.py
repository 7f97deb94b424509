"""One check-in of a task, and all that follows from it:

masked session → conditions of the device → check in → settle receipts → send what is unsent
→ run the assignment
"""

from __future__ import annotations

from fedpress_client.bases import Bases, own_model
from fedpress_client.enrolment import Enrolment
from fedpress_client.evaluation import Evaluator
from fedpress_client.joined_task import JoinedTask, masked_tasks
from fedpress_client.masked_rounds import MaskedRounds
from fedpress_client.models import TaskModels
from fedpress_client.participation import Participation
from fedpress_client.receipts import SHORTEST_PAUSE, Receipts
from fedpress_client.round_runner import RoundRunner
from fedpress_client.settings import Services
from fedpress_client.side_information import SideInformation
from fedpress_client.task_end import TaskEnd
from fedpress_client.transport import News
from fedpress_client.uplink import UplinkMeter
from fedpress_client.uploads import Uploads
from fedpress_protocols.messages import Assignment, CheckInResponse

_LONGEST_BACKOFF = 300.0


class TaskRunner:
    """The parts of a client that take part in a task, and their order.

    With `may_switch` a device that requires masking leaves a task whose plans its rules refuse for
    the only other one that is masked.
    """

    def __init__(self, services: Services, enrolment: Enrolment, *, may_switch: bool) -> None:
        self._services, self._may_switch = services, may_switch
        settings, transport = services.settings, services.transport
        uplink = UplinkMeter(settings.attributes or {})
        bases = Bases(services.directory, lambda: own_model(services.trainer))
        models = TaskModels(transport, settings.max_model_bytes, bases)
        knowledge = SideInformation(models, transport)
        evaluator = Evaluator(services)
        self.receipts = Receipts(transport, services.events, uplink)
        self.uploads = Uploads(services, self.receipts, uplink)
        self.masked = MaskedRounds(services, enrolment, self.uploads)
        self._rounds = RoundRunner(
            services, models, knowledge, evaluator, self.masked, self.uploads
        )
        self._participation = Participation(settings.conditions, services.events)
        self._end = TaskEnd(services, models, self.receipts, evaluator)
        self.forget = models.forget
        self._was_recalled = False

    def step(self, task: JoinedTask) -> float | None:
        """See `Client.step`."""
        pause = self.masked.resume(task)
        if pause is not None:
            return pause
        pause = self._participation.postponed()
        if pause is not None:
            return pause
        unsent = task.unsent
        news = self._check_in(task, 0.0 if unsent else self._services.settings.wait)
        later, response = max(news.retry_after, SHORTEST_PAUSE), news.response
        if response is not None:
            if response.recall is not None:
                is_done = self.receipts.reconcile(task, response.recall)
                # A server that is restored again and again is asked no faster for it.
                is_first, self._was_recalled = not self._was_recalled, True
                return 0.0 if is_done and is_first else later
            self._was_recalled = False
            self.receipts.settle(task, response.receipts, response.backup_at)
        for key in unsent:
            if key in task.ledger.pending:
                self.uploads.send(task, key)
        if news.unfit is not None:
            key, reason = news.unfit
            self.uploads.decline(task, key, None, "incompatible-plan", reason)
        if response is None:
            return later
        if response.task.state not in ("running", "paused"):
            return self._end.finish(task, response.task)
        if response.assignment is None:
            return later
        return self._run(task, response.assignment, response, later)

    def _check_in(self, task: JoinedTask, wait: float) -> News:
        request = self.receipts.request(task, 0.0 if task.is_hurried else wait)
        task.is_hurried = False
        news = self._services.transport.check_in(task.name, request)
        if news.response is not None:
            task.summary = news.response.task
        return news

    def _run(
        self, task: JoinedTask, assignment: Assignment, response: CheckInResponse, later: float
    ) -> float:
        """Run the assignment of a check-in; the seconds until the next."""
        if not task.is_new(assignment.assignment):
            return later
        seconds_left = assignment.plan.deadline - response.server_time
        if self._rounds.is_too_late(task, assignment, seconds_left):
            return later
        if self._rounds.run(task, assignment, seconds_left):
            self.uploads.num_refused_plans = 0
            return 0.0
        if self.uploads.num_refused_plans:
            return self._after_refused_plan(task, later)
        return max(later, self._rounds.failure_pause)

    def _after_refused_plan(self, task: JoinedTask, later: float) -> float:
        """The seconds until the next check-in, more after each plan in a row that the device's
        rules refuse; names the task's successor where there is one."""
        requires_masking = self._services.settings.masking_rules.required
        if self._may_switch and requires_masking and not task.ledger.pending:
            masked = masked_tasks(self._services.transport.tasks())
            if len(masked) == 1 and masked[0] != task.name:
                task.successor = masked[0]
        return max(later, min(2.0 ** (self.uploads.num_refused_plans - 1), _LONGEST_BACKOFF))
