"""One assignment, from the plan to the upload:

    download → evaluate → train → compress → save → upload

Each arrow may be the last before a crash: what was saved is what there is, and the next check-in
goes on from there. An assignment that was saved is never trained again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from fedpress_client import tracing
from fedpress_client.client_terms import TermsAtWork, check_honoured
from fedpress_client.evaluation import Evaluator, finite
from fedpress_client.events import PrivacySpent, RoundAssigned, UpdateTrained
from fedpress_client.failures import Durations, Failures
from fedpress_client.joined_task import JoinedTask
from fedpress_client.ledger import Ledger
from fedpress_client.masked_rounds import MaskedRounds
from fedpress_client.models import TaskModels
from fedpress_client.outgoing import Outgoing
from fedpress_client.randomness import compression_rng, rounding_secret, training_seed
from fedpress_client.settings import Services
from fedpress_client.side_information import SideInformation
from fedpress_client.trainer import Trained, check_trained, unchanged
from fedpress_client.update_figures import Timing, figures_of
from fedpress_client.uploads import Uploads
from fedpress_compression.compressor import Knowledge
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices
from fedpress_protocols.errors import (
    ConfigurationError,
    InvalidUpdate,
    MalformedRequest,
    NotFound,
    PlanDeclined,
    StateWriteError,
)
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.masking.transcript import SessionConfig
from fedpress_protocols.messages import Assignment, DeclineReason
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan, agreed_version
from fedpress_protocols.upload import REPORT_BYTES, max_body_bytes

_log = logging.getLogger(__name__)

_UNSUITABLE = (ConfigurationError, MalformedRequest, NotFound)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything that a round's training and compression read."""

    assignment: Assignment
    model: Model
    terms: TermsAtWork
    support: Indices | None
    knowledge: Mapping[Knowledge, Vector]
    session: SessionConfig | None
    """In the masked lane, the session that the update is for."""


@dataclass(frozen=True, slots=True)
class _Output:
    """A trained and compressed update, not saved yet; no `body` where it went out of bounds."""

    trained: Trained
    update: Vector
    ledger: Ledger
    body: bytes | None
    timing: Timing


class RoundRunner:
    """Runs assignments; whatever goes wrong in one is declined, as far as the policy allows."""

    def __init__(
        self,
        services: Services,
        models: TaskModels,
        knowledge: SideInformation,
        evaluator: Evaluator,
        masked: MaskedRounds,
        uploads: Uploads,
    ) -> None:
        self._services, self._settings = services, services.settings
        self._progress = services.progress
        self._models, self._knowledge, self._evaluator = models, knowledge, evaluator
        self._masked, self._uploads = masked, uploads
        self._failures = Failures(services.settings.failure_policy)
        self._has_warned = False
        """Of examples that do not count."""

    @property
    def failure_pause(self) -> float:
        """Seconds to wait after the trainings that failed in a row."""
        return self._failures.pause

    def run(self, task: JoinedTask, assignment: Assignment, seconds_left: float) -> bool:
        """Run an assignment of which `seconds_left` are left; False if nothing came of it."""
        clock, traffic = self._settings.clock, self._services.transport.traffic
        began_at, plan, away_before = clock(), assignment.plan, traffic.seconds_away
        with Outgoing(task.files, self._services.transport, assignment.assignment) as outgoing:
            is_saved = self._prepare(task, assignment, outgoing)
        if not is_saved:
            return False
        # After the deadline a body would travel in vain: the next check-in brings the receipt, or
        # else has it sent.
        is_late = clock() - began_at > seconds_left
        if not is_late and plan.lane == "clear":
            self._uploads.send(task, assignment.assignment)
        seconds = clock() - began_at
        if seconds > seconds_left:
            _log.warning("an assignment of %.0f s took this device %.0f s", seconds_left, seconds)
        seconds -= traffic.seconds_away - away_before  # an outage tells nothing of the next one
        Durations.read(task.files).after(plan, seconds).keep(task.files)
        return True

    def is_too_late(self, task: JoinedTask, assignment: Assignment, seconds_left: float) -> bool:
        """Decline a round that earlier ones took longer than."""
        if not self._settings.failure_policy.skips_late:
            return False
        durations = Durations.read(task.files)
        duration = durations.too_long(assignment.plan, seconds_left)
        if duration is None:
            return False
        remaining = max(seconds_left, 0.0)
        reason = f"this device needs {duration:.0f} s, and {remaining:.0f} s are left"
        key, plan = assignment.assignment, assignment.plan
        self._uploads.decline(task, key, plan, "too-slow", reason, duration)
        durations.after_skipping().keep(task.files)
        return True

    @tracing.traced("prepare")
    def _prepare(self, task: JoinedTask, assignment: Assignment, outgoing: Outgoing) -> bool:
        """Have the account hold a trained update; False if it does not. A large body may begin to
        leave by `outgoing` meanwhile."""
        key, plan = assignment.assignment, assignment.plan
        self._progress.round = plan.round
        self._services.events.emit(RoundAssigned(profile=assignment.profile), plan)
        try:
            inputs = self._download(task, assignment)
        except _UNSUITABLE as exc:
            self._uploads.decline(task, key, plan, "incompatible-plan", exc)
            return False
        self._evaluator.evaluate(task, plan.model, inputs.model, plan)
        if self._services.stopping.is_set:
            return False
        output = self._train(task, inputs, outgoing)
        if output is None or not self._save(task, inputs, output, outgoing):
            return False
        if output.body is None:
            outgoing.abandon()
            self._uploads.decline(task, key, plan, "invalid-update", out_of_bounds(assignment))
            return False
        outgoing.finish()
        self._failures.clear()
        figures = figures_of(task.ledger, key, output.update, output.timing)
        if plan.lane == "clear" and plan.privacy is None:
            task.figures[key] = figures
        event = UpdateTrained(
            num_examples=self._counted(plan, output.trained.num_examples),
            body_bytes=len(output.body),
            metrics=output.trained.metrics,
            figures=figures.model_dump(exclude_none=True),
        )
        self._services.events.emit(event, plan)
        return not self._services.stopping.is_set

    def _counted(self, plan: RoundPlan, num_examples: int) -> int:
        """How many of an update's examples count; under privacy terms all updates do alike."""
        most = plan.fixed_point.max_examples
        if num_examples <= most or plan.privacy is not None:
            return num_examples
        if not self._has_warned:
            self._has_warned = True
            text = "an update of %d examples counts as one of %d, the most that task %r counts: "
            hint = "whoever makes the task can raise its max_examples"
            _log.warning(text + hint, num_examples, most, plan.task)
        return most

    def _download(self, task: JoinedTask, assignment: Assignment) -> _Inputs:
        """Check the plan and fetch all that it names; raises one of _UNSUITABLE."""
        plan = assignment.plan
        task.check_assignment(assignment)
        agreed_version((plan.wire_version,))
        self._masked.check_plan(task, plan)
        self._services.budget.check(plan)
        check_honoured(plan, self._services.trainer)
        compressor = plan.compressor(assignment.profile)
        self._models.keep_only(task, plan)
        model = self._models.fetch(task, plan.model)
        plan.public(model.spec)
        needs = plan.needs if plan.lane == "masked" else compressor.needs
        knowledge = self._knowledge.gather(task, assignment, model, needs)
        public = plan.public(model.spec, knowledge)
        session: SessionConfig | None = None
        if plan.lane == "masked":  # before hours of training, and not after
            session = self._masked.agree(task, Payload(plan, public))
        support = plan.support(assignment.profile, model.spec, public)
        server_control = self._models.server_control(task, plan, public.spec)
        task.files.used(plan.model)
        terms = TermsAtWork(plan, model, task.ledger, server_control, assignment.profile)
        return _Inputs(assignment, model, terms, support, knowledge, session)

    def _train(self, task: JoinedTask, inputs: _Inputs, outgoing: Outgoing) -> _Output | None:
        """Train and compress; None, and the assignment declined, where that fails."""
        assignment, terms = inputs.assignment, inputs.terms
        plan, key = assignment.plan, assignment.assignment
        seed = training_seed(self._settings.seed, plan.round, plan.attempt, assignment.turn)
        update = np.empty(0, np.float32)
        began_at = time.perf_counter()
        try:
            with tracing.span("train"):
                request = terms.work(seed, inputs.support, self._progress.of("train"))
                with unchanged(terms.model, "train"):
                    result = self._services.trainer.train(terms.model, request)
            trained_at = time.perf_counter()
            self._progress.finish("train")
            trained, change = checked_change(result, terms.model)
            outgoing.expect(_max_bytes(assignment, inputs.model.spec))
            update = terms.update(change, trained)
            self._progress.report("compress", 0, 1)
            ledger, body = self._compress(task, inputs, trained, update, outgoing)
            self._progress.finish("compress")
        except InvalidUpdate as exc:
            outgoing.abandon()
            task.save(task.ledger.refuse(key, update))
            self._fail(task, inputs.assignment, "invalid-update", exc)
            return None
        except Exception as exc:
            outgoing.abandon()
            if update.size:
                task.save(task.ledger.refuse(key, update, "not-sent"))
            self._fail(task, inputs.assignment, "training-failed", exc)
            return None
        timing = Timing(trained_at - began_at, time.perf_counter() - trained_at)
        return _Output(trained, update, ledger, body, timing)

    def _compress(
        self,
        task: JoinedTask,
        inputs: _Inputs,
        trained: Trained,
        update: Vector,
        outgoing: Outgoing,
    ) -> tuple[Ledger, bytes | None]:
        """The account with `update` compressed and pending, and its body; see `Ledger.prepare`."""
        seed, knowledge, terms = self._settings.seed, inputs.knowledge, inputs.terms
        return task.ledger.prepare(
            inputs.assignment,
            update,
            trained.num_examples,
            inputs.model.spec,
            compression_rng(seed, inputs.assignment),
            self._settings.rules,
            knowledge=knowledge,
            report=terms.report(trained),
            personal=terms.personal(trained),
            secret=rounding_secret(seed, inputs.assignment),
            sections=outgoing.add,
        )

    def _save(self, task: JoinedTask, inputs: _Inputs, output: _Output, outgoing: Outgoing) -> bool:
        """Make the account durable; False, and the assignment declined, where that fails."""
        key, plan = inputs.assignment.assignment, inputs.assignment.plan
        part, session = task.masked_part, inputs.session
        try:
            if output.body is not None:
                self._debit(plan)
            if output.body is not None and session is not None and part is not None:
                part.enter(key, session)
            task.save(output.ledger)
        except StateWriteError as exc:
            outgoing.abandon()
            task.ledger = task.ledger.refuse(key, output.update, "not-saved")
            task.report_discards()
            self._fail(task, inputs.assignment, "storage-failed", exc)
            return False
        except PlanDeclined as exc:  # another task of this device has spent what was left
            outgoing.abandon()
            task.save(task.ledger.refuse(key, output.update, "not-sent"))
            self._uploads.decline(task, key, plan, "privacy-budget", exc)
            return False
        return True

    def _debit(self, plan: RoundPlan) -> None:
        """Spend the privacy that a body costs, durably, before the account has it to send."""
        debit = self._services.budget.debit(plan)
        if debit is not None:
            self._services.events.emit(PrivacySpent(**asdict(debit)), plan)

    def _fail(
        self, task: JoinedTask, assignment: Assignment, code: DeclineReason, error: Exception
    ) -> None:
        """Decline what failed; raises `error` itself if it is one failure too many, or of a kind
        that the next round would repeat: a trainer that does not fit the task."""
        is_misfit = code == "training-failed" and isinstance(error, ConfigurationError)
        if code == "training-failed" and not is_misfit:
            _log.error("training failed", exc_info=error)
        self._uploads.decline(task, assignment.assignment, assignment.plan, code, error)
        if is_misfit:
            raise error
        self._failures.add(error)


def checked_change(result: object, model: Model) -> tuple[Trained, Vector]:
    """The checked result of training `model`, with its finite metrics alone, and the change
    [spec.size]; raises as `check_trained`."""
    trained = check_trained(result, model)
    trained = replace(trained, metrics=finite(trained.metrics))
    with np.errstate(over="ignore", invalid="ignore"):  # prepare refuses what comes of it
        return trained, trained.parameters - model.parameters


def out_of_bounds(assignment: Assignment) -> InvalidUpdate:
    """The error of an update that compression scaled beyond the plan's bound."""
    return InvalidUpdate(
        f"compressed, the update goes beyond the plan's {assignment.plan.fixed_point.max_abs:g}",
        hint="raise the task's max_abs, or choose a compressor that scales less",
    )


def _max_bytes(assignment: Assignment, spec: ModelSpec) -> int:
    """The largest body that may come of an assignment's update, where it may leave before it is
    whole: not in the masked lane, nor before its privacy is debited."""
    plan = assignment.plan
    if plan.lane == "masked" or plan.privacy is not None:
        return 0
    layout = plan.layouts(spec)[plan.profile_index(assignment.profile)]
    return max_body_bytes(layout) + REPORT_BYTES * len(plan.report)
