"""The device's side of a task: check in, train, upload, and account for all of it.

    check in → settle receipts → re-send what is unsent → evaluate → train → prepare → save → upload

Each arrow may be the last before a crash: what was saved is what there is, and the next check-in
goes on from there. An assignment that was prepared is never trained again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import SystemRandom
from statistics import median
from time import sleep as _sleep
from time import time as _time
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from fedpress_client import tracing
from fedpress_client.client_terms import TermsAtWork, check_honoured, personalised
from fedpress_client.device_key import change_key, is_changing, is_known_after, rotations
from fedpress_client.downloads import BASES, download_model
from fedpress_client.failures import Durations, FailurePolicy, Failures
from fedpress_client.ledger import KEEP_ALL, Discard, Ledger, ResidualRules
from fedpress_client.masking import FREE, RENEW_SECONDS, MaskedPart, MaskingRules, Member, joined
from fedpress_client.outgoing import Outgoing, abandon_unfinished
from fedpress_client.published import PublishedModel
from fedpress_client.server_trust import ServerTrust, pinned_anew
from fedpress_client.state import Identity, StateDirectory, TaskFiles
from fedpress_client.trainer import Evaluation, Trained, Trainer, Work
from fedpress_client.transport import (
    MAX_RETRY_AFTER,
    HttpTransport,
    Retries,
    Traffic,
    Transport,
)
from fedpress_compression import activity
from fedpress_compression.coding.fields import Known
from fedpress_compression.compressor import Knowledge
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    DecodingError,
    DeviceNotApproved,
    DigestMismatch,
    FedpressError,
    IncompatiblePlan,
    InvalidToken,
    InvalidUpdate,
    MalformedRequest,
    NotFound,
    PlanDeclined,
    StateWriteError,
    UnknownDevice,
)
from fedpress_protocols.faults import explained
from fedpress_protocols.masking.agreement import agreed
from fedpress_protocols.masking.payload import SECRET_BYTES, Payload
from fedpress_protocols.masking.transcript import SessionConfig
from fedpress_protocols.messages import (
    MAX_ATTRIBUTES,
    RECALL_CONTEXT,
    RECEIPT_CONTEXT,
    Assignment,
    Attribute,
    CheckInRequest,
    ClassCount,
    DeclineReason,
    EnrolRequest,
    EvaluationReport,
    Recall,
    Receipt,
    SignedRecall,
    SignedReceipt,
    TaskState,
    TaskSummary,
)
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan, TrainingTerms, agreed_version
from fedpress_protocols.policies import TELLING, UPLINK
from fedpress_protocols.signatures import DeviceKey, from_base64url, to_base64url
from fedpress_protocols.upload import REPORT_BYTES, max_body_bytes

_log = logging.getLogger(__name__)

_random = SystemRandom().random

MAX_MODEL_BYTES = 4 * 2**30
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REPORTED_PENDING = 1024
_SHORTEST_PAUSE = 0.05
_APPROVAL_PAUSE = 30.0
_UPLINKS = 5
_IMPATIENT = Retries(base=0.2, cap=2.0, patience=5.0)
"""Of `Client.model`, whose caller waits for the answer."""
_LONGEST_BACKOFF = 300.0

EventKind = Literal[
    "enrolled", "joined", "assigned", "evaluated", "trained", "uploaded", "refused", "declined",
    "settled", "waiting", "fine-tuned", "ended", "session", "restored", "unapproved", "approved",
    "rotated", "failed",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, for progress bars and logs; `details` is plain JSON."""

    kind: EventKind
    task: str = ""
    round: int = 0
    attempt: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Summary:
    """What `run` came to. Counts are of uploads, over the device's whole part in the task."""

    task: str
    state: TaskState
    """As last heard of; "running" if the client was stopped before the end."""
    included: int
    not_included: int
    pending: int
    model: str
    """Digest of the newest model heard of."""
    traffic: Traffic


class Client:
    """Takes part in one task, with everything durable in `state_dir`.

    `task` None stands for the single one that is running. `token` is needed once, to enrol. `seed`
    makes training and compression repeat exactly; without it they draw on the system's randomness.
    `server_key` (base64url) names the server's key by a way that is not the server's own; a device
    that has pinned another, which no chain leads to from this one, believes this one from then on.
    `verify`, `client_certificate`, `client_key`, `proxy` and `timeout` are HttpTransport's;
    `transport` takes its place. `rules` limit the residual. `masking` is what the device insists
    on, whatever a plan says; with any, masking is required unless they say otherwise. A plan that
    they do not admit is declined, and the client goes on asking, less and less often; where no
    `task` was named it goes to the one masked task that runs. `attributes`, numbers and short texts
    by name, are what a task's rules of eligibility and groups of metrics may read of it. With
    `fine_tuning` the task's last model is trained on as these terms say, for this device alone: see
    `own_model`. `failures` says how often training may fail in a row, and whether deadlines that
    cannot be met are declined. `on_event` and `on_discard` are called from the thread that runs.
    One thread runs a client; any may `stop` it, or ask for the `model`.
    """

    def __init__(
        self,
        url: str,
        trainer: Trainer,
        *,
        state_dir: str | Path,
        task: str | None = None,
        token: str | None = None,
        name: str = "",
        seed: int | None = None,
        verify: str | None = None,
        client_certificate: str | Path | None = None,
        client_key: str | Path | None = None,
        proxy: str | None = None,
        timeout: float = 30.0,
        wait: float = 20.0,
        max_model_bytes: int = MAX_MODEL_BYTES,
        rules: ResidualRules = KEEP_ALL,
        masking: MaskingRules | None = None,
        fine_tuning: TrainingTerms | None = None,
        attributes: Mapping[str, Attribute] | None = None,
        failures: FailurePolicy | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_discard: Callable[[Discard], None] | None = None,
        server_key: str | None = None,
        transport: Transport | None = None,
        sleep: Callable[[float], None] | None = None,
        clock: Callable[[], float] = _time,
        random: Callable[[], float] = _random,
    ) -> None:
        if task is not None and not _NAME.fullmatch(task):
            raise ConfigurationError(f"{task!r} cannot be the name of a task")
        if seed is not None and seed < 0:
            raise ConfigurationError(f"seed must be 0 or more, not {seed}")
        if not 0 <= wait <= 30:
            raise ConfigurationError(f"wait must lie in [0, 30] seconds, not {wait}")
        if server_key is not None:
            _checked_key(server_key)
        self._server_key = server_key
        self._url, self._trainer, self._task = url, trainer, task
        self._token, self._name, self._seed = token, name, seed
        self._wait, self._rules, self._max_model_bytes = wait, rules, max_model_bytes
        self._fine_tuning = fine_tuning
        self._attributes = _checked_attributes(attributes or {})
        self._policy = failures or FailurePolicy()
        self._failures, self._failed_evaluations = Failures(self._policy), Failures(self._policy)
        self._uplinks: list[float] = []
        """In Mbit/s, of the newest uploads that tell of the link."""
        self._masking, self._clock = masking or FREE, clock
        self._is_free_to_choose = task is None
        self._num_refusals = 0
        """Plans in a row that its rules did not admit."""
        self._on_event = on_event
        self._on_discard = on_discard or _warn_of_discard
        self._random = random
        self._stopping = threading.Event()
        self._wait_out = sleep or self._stopping.wait
        self._directory = StateDirectory.open(state_dir)
        self._key = self._directory.key()

        def opened(retries: Retries | None, sleep: Callable[[float], None]) -> HttpTransport:
            return HttpTransport(
                url,
                self._key,
                verify=verify,
                client_certificate=client_certificate,
                client_key=client_key,
                proxy=proxy,
                timeout=timeout,
                retries=retries,
                sleep=sleep,
                clock=clock,
                random=random,
            )

        @contextmanager
        def beside() -> Iterator[Transport]:
            """A connection for another thread than the one that runs."""
            if transport is not None:
                yield transport
                return
            with closing(opened(_IMPATIENT, _sleep)) as own:
                yield own

        self._transport = transport or opened(None, self._pause)
        self._beside = beside
        self._published = PublishedModel(self._directory, beside, clock, max_model_bytes)
        self._peeked: Ledger | None = None
        self._open: _Open | None = None
        self._heard: TaskSummary | None = None
        self._account = Ledger(task or "", "")
        self._model: tuple[str, Model] | None = None
        self._evaluated: str | None = None
        self._can_evaluate = True
        self._is_unapproved = False

    # Running

    def run(self) -> Summary:
        """Take part until the task has ended or `stop` is called.

        Errors that waiting does not mend are raised; the state is consistent after any of them,
        KeyboardInterrupt among them, and a later run goes on from there.
        """
        try:
            while not self._stopping.is_set():
                pause = self.step()
                if pause is None:
                    break
                if pause:
                    self._tell("waiting", seconds=pause)
                    self._pause(pause * (1 + 0.1 * self._random()))
        except _Stopped:
            _log.info("stopped")
        finally:
            self.close()
        return self.summary()

    def stop(self) -> None:
        """Have `run` return soon: at the next pause, or once the step under way is done."""
        self._stopping.set()

    def close(self) -> None:
        """Let go of the lock and the connection; another Client may go on from here."""
        self._drop()
        self._transport.close()

    def summary(self) -> Summary:
        """How far it has come, as far as this client has seen."""
        ledger, heard = self._account, self._heard
        return Summary(
            task=ledger.task,
            state=heard.state if heard is not None else "running",
            included=ledger.included,
            not_included=ledger.not_included,
            pending=len(ledger.pending),
            model=heard.model if heard is not None else "",
            traffic=replace(self._transport.traffic),
        )

    @property
    def key_id(self) -> str:
        """Of the device's key: what an operator sees of it too, and compares."""
        return self._key.key_id

    def rotate_key(self) -> str:
        """Have the server know this device by a new key; its id. The one before is refused from
        then on, wherever a copy of it is; the device stays who it is, with all that it has.

        Not while another thread runs the client. Raises as `device_key.change_key` does; whatever
        it raises, the next run goes on, and ends the change that was begun.
        """
        self._drop()
        if self._directory.identity() is None:
            self._enrolled()
        self._take_key(change_key(self._directory, self._transport))
        return self.key_id

    def own_model(self) -> Model | None:
        """The task's last model as this device uses it: with its personal tensors, and trained on
        if `fine_tuning` was given. None before the task has ended, or if it is everybody's."""
        data = self._joined().files.own_model()
        return None if data is None else Model.from_bytes(data)

    def model(self, *, max_age: float = 30.0) -> Model:
        """The newest published model of the task, with this device's personal tensors if it has
        some: for inference, from any thread, before, while and after another one runs the client.

        The server is asked if its last answer is `max_age` seconds old or older (0: each time), and
        a model that is not here yet is fetched, by its difference where the task has a downlink.
        The SHA-256 of what comes is checked against the name that the server gives it; the server
        signs no models. The last model is kept in the state directory: where the server is away it
        goes on being used, also after a restart. Do not change it in place.

        Enrols the device if need be, and does not join the task. A `transport` given to the client
        must be safe for two threads. Raises TransportError if there is no model here and no answer
        within some seconds, UnknownTask, InvalidToken, UnknownDevice or DeviceNotApproved.
        """
        if not max_age >= 0:
            raise ConfigurationError(f"max_age must be 0 seconds or more, not {max_age}")
        task = self._task
        if self._directory.identity() is None or task is None:
            with self._beside() as transport:
                self._identified(transport)
                task = task or self._only_task(transport)
        try:
            model = self._published.get(task, max_age)
        except UnknownDevice:
            key = self._directory.key()
            if key.key_id == self._key.key_id:
                raise
            self._key = key  # another process of this device has changed it
            model = self._published.get(task, max_age)
        account = self._account
        if not account.client_id:
            self._peeked = account = self._peeked or self._directory.peek(task) or account
        return personalised(model, account)

    @property
    def ledger(self) -> Ledger:
        """The account as saved; joins the task if need be."""
        return self._joined().ledger

    def step(self) -> float | None:
        """One check-in and all that follows from it.

        Returns the seconds until the next is worth while, None once the task has ended and every
        upload has its receipt. Whatever it raises, the state on disk is consistent.
        """
        try:
            pause = self._step(self._joined())
        except _Stopped:
            raise
        except DeviceNotApproved as exc:
            self._drop()
            return self._await_approval(exc)
        except UnknownDevice as exc:
            self._drop()
            self._become_known(exc)
            return _SHORTEST_PAUSE
        except BaseException:
            self._drop()  # memory may be ahead of the disk or behind; the disk is right
            raise
        if self._is_unapproved:
            self._is_unapproved = False
            self._tell("approved")
        return pause

    def _await_approval(self, refusal: DeviceNotApproved) -> float:
        """The seconds until it is worth while to ask again; that it waits is told once."""
        if not self._is_unapproved:
            self._is_unapproved = True
            _log.warning("waiting for an operator to approve this device, key %s", self.key_id)
            self._tell("unapproved", key_id=self.key_id)
        after = refusal.members.get("retry_after")
        if not isinstance(after, int | float) or not math.isfinite(after) or after <= 0:
            return _APPROVAL_PAUSE
        return min(float(after), MAX_RETRY_AFTER)

    def _step(self, here: _Open) -> float | None:
        pause = self._take_part(here)
        if pause is not None:
            return pause
        unsent = [
            key
            for key, held in here.ledger.pending.items()
            if key not in here.sent and held.lane == "clear"
        ]
        request = CheckInRequest(
            pending=tuple(here.ledger.pending)[:_REPORTED_PENDING],
            wait=0.0 if unsent or here.hurry else self._wait,
            attributes=self._said,
            epoch=here.ledger.epoch,
        )
        here.hurry = False
        news = self._transport.check_in(here.task, request)
        if news.response is not None:
            self._heard = news.response.task
            if news.response.recall is not None:
                is_done = self._reconcile(here, news.response.recall)
                return 0.0 if is_done else max(news.retry_after, _SHORTEST_PAUSE)
            self._settle(here, news.response.receipts, news.response.backup_at)
        for key in unsent:
            if key in here.ledger.pending:
                self._upload(here, key)
        if news.unfit is not None:
            self._decline(here, news.unfit[0], "incompatible-plan", news.unfit[1])
        later = max(news.retry_after, _SHORTEST_PAUSE)
        if news.response is None:
            return later
        if news.response.task.state not in ("running", "paused"):
            return self._ending(here, news.response.task)
        assignment = news.response.assignment
        if assignment is not None and assignment.basis is not None:
            return 0.0 if self._second(here, assignment, assignment.basis) else later
        if assignment is None or not self._is_new(here, assignment):
            return later
        left = assignment.plan.deadline - news.response.server_time
        if self._is_too_late(here, assignment, left):
            return later
        if self._work(here, assignment, left):
            self._num_refusals = 0
            return 0.0
        if self._num_refusals:
            return self._after_refusal(here, later)
        return max(later, self._failures.pause)

    def _after_refusal(self, here: _Open, later: float) -> float:
        """Return the seconds to wait before the next check-in, after a plan that the rules refuse.

        Where nobody named the task and exactly one other task is masked, switch to that one.
        """
        if self._is_free_to_choose and self._masking.required and not here.ledger.pending:
            fitting = _masked(self._transport.tasks())
            if len(fitting) == 1 and fitting[0] != here.task:
                self._drop()
                self._task = fitting[0]
        return max(later, min(2.0 ** (self._num_refusals - 1), _LONGEST_BACKOFF))

    # One assignment

    def _is_new(self, here: _Open, assignment: Assignment) -> bool:
        key, ledger = assignment.assignment, here.ledger
        return key not in ledger.pending and key not in ledger.settled and key not in here.declined

    def _is_too_late(self, here: _Open, assignment: Assignment, left: float) -> bool:
        """Decline what cannot be done in the `left` seconds, by what earlier assignments took."""
        if not self._policy.skips_late:
            return False
        durations = Durations.read(here.files)
        needed = durations.too_long(assignment.plan, left)
        if needed is None:
            return False
        why = f"this device needs {needed:.0f} s, and {max(left, 0.0):.0f} s are left"
        self._decline(here, assignment.assignment, "too-slow", why, needed)
        durations.after_skipping().keep(here.files)
        return True

    def _work(self, here: _Open, assignment: Assignment, left: float) -> bool:
        """Train and upload, for which `left` seconds are left; False if nothing came of it."""
        began_at = self._clock()
        with Outgoing(here.files, self._transport, assignment.assignment) as outgoing:
            is_due = self._prepare(here, assignment, outgoing)
        if not is_due:
            return False
        # After the deadline a body would travel in vain: the next check-in brings the receipt, or
        # else has it sent.
        is_late = self._clock() - began_at > left
        if not is_late and assignment.plan.lane == "clear":
            self._upload(here, assignment.assignment)
        seconds = self._clock() - began_at
        if seconds > left:
            _log.warning("an assignment of %.0f s took this device %.0f s", left, seconds)
        Durations.read(here.files).after(assignment.plan, seconds).keep(here.files)
        return True

    @tracing.traced("prepare")
    def _prepare(self, here: _Open, assignment: Assignment, outgoing: Outgoing) -> bool:
        """Train, and have the account hold what comes of it; False if nothing does. A large body
        may begin to leave by `outgoing` meanwhile."""
        key, plan = assignment.assignment, assignment.plan
        self._tell("assigned", assignment, profile=assignment.profile)
        try:
            if assignment.client_id != here.ledger.client_id or plan.task != here.task:
                raise IncompatiblePlan(
                    f"for client {assignment.client_id} in task {plan.task}, this is client "
                    f"{here.ledger.client_id} in task {here.task}"
                )
            agreed_version((plan.wire_version,))
            self._check_rules(here, plan)
            check_honoured(plan, self._trainer)
            compressor = plan.compressor(assignment.profile)
            named = (plan.model, *plan.sources.values(), *plan.artefacts)
            here.files.drop_models(besides={*named, *self._bases(here, plan.model)})
            model = self._fetch(here, plan.model)
            plan.public(model.spec)
            needs = plan.needs if plan.lane == "masked" else compressor.needs
            known = self._known(here, assignment, model, needs)
            public = plan.public(model.spec, **known)
            due: SessionConfig | None = None
            if plan.lane == "masked":  # before hours of training, and not after
                due = self._agreed(here, Payload(plan, public))
            support = plan.support(assignment.profile, model.spec, public)
            server = self._read_control(here, plan, public.spec)
            here.files.used(plan.model)
            terms = TermsAtWork(plan, model, here.ledger, server, assignment.profile)
        except (ConfigurationError, MalformedRequest, NotFound) as exc:
            self._decline(here, key, "incompatible-plan", exc)
            return False
        self._evaluate(here, plan.model, model, assignment)
        if self._stopping.is_set():
            return False
        seed = self._work_seed(plan.round, plan.attempt, assignment.turn)
        work = terms.work(seed, support)
        update = np.empty(0, np.float32)
        try:
            with tracing.span("train"):
                trained = self._trainer.train(terms.model, work)
            change, metrics = _checked(trained, terms.model)
            outgoing.expect(_most_bytes(assignment, model.spec))
            update = terms.update(change, trained)
            ledger, body = here.ledger.prepare(
                assignment,
                update,
                trained.num_examples,
                model.spec,
                self._compression_rng(assignment),
                self._rules,
                previous=known.get("previous"),
                drift=known.get("drift"),
                activity=known.get("activity"),
                own=known.get("own"),
                report=terms.report(trained),
                personal=terms.personal(trained),
                secret=self._rounding_secret(assignment),
                sections=outgoing.add,
            )
        except InvalidUpdate as exc:
            outgoing.abandon()
            self._save(here, here.ledger.refuse(key, update))
            return self._failed(here, key, "invalid-update", exc)
        except Exception as exc:
            outgoing.abandon()
            return self._failed(here, key, "training-failed", exc)
        try:
            if body is not None and due is not None and here.part is not None:
                here.part.enter(key, due)
            self._save(here, ledger)
        except StateWriteError as exc:
            outgoing.abandon()
            here.ledger = here.ledger.refuse(key, update, "not-saved")
            self._report_discards(here)
            return self._failed(here, key, "storage-failed", exc)
        if body is None:
            outgoing.abandon()
            beyond = InvalidUpdate(
                f"compressed, the update goes beyond the plan's {plan.fixed_point.max_abs:g}",
                hint="raise the task's max_abs, or choose a compressor that scales less",
            )
            self._decline(here, key, "invalid-update", beyond)
            return False
        outgoing.finish()
        self._failures.clear()
        self._tell(
            "trained",
            assignment,
            num_examples=trained.num_examples,
            body_bytes=len(body),
            metrics=metrics,
        )
        return not self._stopping.is_set()

    def _failed(self, here: _Open, key: str, code: DeclineReason, error: Exception) -> bool:
        """Decline what failed; False, or `error` itself if it is one failure too many."""
        if code == "training-failed":
            _log.error("training failed", exc_info=error)
        self._decline(here, key, code, error)
        self._failures.add(error)
        return False

    def _second(self, here: _Open, assignment: Assignment, digest: str) -> bool:
        """Make the second of two trips; False if there was nothing to do, or nothing came of it."""
        key, plan = assignment.assignment, assignment.plan
        held = here.ledger.pending.get(key)
        is_done = held is not None and not held.is_first
        if is_done or key in here.declined or key in here.ledger.settled:
            return False
        try:
            if held is None:
                raise IncompatiblePlan("the update of the first trip is not here any more")
            model = self._fetch(here, plan.model)
            known = self._known(here, assignment, model, plan.needs)
            basis = self._basis(here, assignment, digest, plan.shared(model.spec))
            ledger, body = here.ledger.second(
                assignment,
                model.spec,
                self._compression_rng(assignment),
                basis,
                previous=known.get("previous"),
                drift=known.get("drift"),
                activity=known.get("activity"),
                own=known.get("own"),
            )
        except (ConfigurationError, MalformedRequest, NotFound) as exc:
            self._decline(here, key, "incompatible-plan", exc)
            return False
        self._save(here, ledger)
        if body is None:
            beyond = InvalidUpdate(
                f"compressed, the update goes beyond the plan's {plan.fixed_point.max_abs:g}"
            )
            self._decline(here, key, "invalid-update", beyond)
            return False
        here.sent.discard(key)
        self._upload(here, key)
        return True

    def _basis(self, here: _Open, assignment: Assignment, digest: str, spec: ModelSpec) -> Vector:
        """What the round's first trips came to; raises IncompatiblePlan if it is no basis."""
        made = assignment.plan.first_trip
        size = 0 if made is None else made.basis_size(spec)
        data = self._transport.basis(assignment.assignment, digest, 4 * size, here.task)
        if hashlib.sha256(data).hexdigest() != digest:
            raise DigestMismatch(f"{digest[:12]} came with other bytes")
        if len(data) != 4 * size:
            raise IncompatiblePlan(f"a basis of {len(data)} bytes where {4 * size} are due")
        basis = np.frombuffer(data, "<f4").astype(np.float32)
        if not np.abs(basis).max(initial=0.0) < 1.001:
            raise IncompatiblePlan("the columns of the basis are not of length 1")
        return basis

    # Masked sessions

    def _check_rules(self, here: _Open, plan: RoundPlan) -> None:
        """Raises PlanDeclined for a plan that the device's rules do not admit."""
        ledger = here.ledger
        rounds = ledger.included + ledger.not_included + len(ledger.pending)
        self._masking.check(plan, rounds, is_pinned=here.files.is_masked())

    def _agreed(self, here: _Open, payload: Payload) -> SessionConfig:
        """The session that a plan calls for, and this device made ready to take part in it.

        Raises ConfigurationError where it cannot be.
        """
        self._masking.check_payload(payload)
        if here.part is None or self._is_old(here.part.member):
            here.part = self._part(here, may_ask=True)
        if here.part is None:
            raise ConfigurationError("this device has no certificate")
        policy = here.part.member.policy
        due = agreed(payload, population=policy.population, server_key=policy.server_key)
        policy.check(due)
        return due

    def _part(self, here: _Open, *, may_ask: bool) -> MaskedPart | None:
        """The device's part in masked sessions; None if it has no certificate and may not ask."""
        with self._directory.alone():
            identity = self._directory.identity()
            if identity is None:
                return None
            member = Member.of(identity, self._masking)
            if may_ask and (member is None or self._is_old(member)):
                told = self._transport.certificate()
                identity = joined(
                    identity, told, self._masking, key=self._key.public, now=self._clock()
                )
                self._directory.enrolled(identity)
                member = Member.of(identity, self._masking)
        if member is None:
            return None
        return MaskedPart(
            here.files,
            self._key,
            member,
            self._transport,
            ledger=lambda: here.ledger,
            save=lambda ledger: self._save(here, ledger),
            tell=lambda key, step, detail: self._tell(
                "session", here.ledger.pending.get(key), step=step, detail=detail
            ),
            clock=self._clock,
            believes=here.trust.believes,
        )

    def _is_old(self, member: Member) -> bool:
        if member.certificate.identity != self._key.public:
            return True
        return member.certificate.expires < self._clock() + RENEW_SECONDS

    def _take_part(self, here: _Open) -> float | None:
        """Go on in the masked session under way; None if there is none, or it is for its receipt
        to say the rest."""
        part = here.part
        key = part.assignment if part is not None else None
        if part is None or key is None:
            return None
        if key not in here.ledger.pending:
            part.leave()
            return None
        if key in here.declined:
            return None
        try:
            return part.advance(self._wait)
        except (ConfigurationError, MalformedRequest) as exc:
            self._decline(here, key, "session-failed", exc)
            return None

    @tracing.traced("upload")
    def _upload(self, here: _Open, key: str) -> None:
        """Send the bytes of a pending upload; whatever the answer, its receipt decides."""
        held = here.ledger.pending[key]
        about = {"assignment": key, "body_bytes": len(held.body)}
        try:
            self._masking.check_lane(
                held.lane,
                f"the update of round {held.round}.{held.attempt} of task {here.task!r}",
                is_pinned=here.files.is_masked(),
            )
            send = self._transport.first if held.is_first else self._transport.upload
            began_at, sent = self._clock(), self._transport.traffic.body_up
            ack = send(key, held.body)
            sent = self._transport.traffic.body_up - sent
            self._timed(sent, self._clock() - began_at)
            if (ack.assignment, ack.upload) != (key, held.digest):
                raise DigestMismatch(
                    f"the server took {ack.upload[:12]} for {ack.assignment}, sent was "
                    f"{held.digest[:12]} for {key}"
                )
            self._tell("uploaded", held, **about)
        except PlanDeclined as exc:  # prepared before the device had these rules
            self._decline(here, key, "masking-rules", exc)
        except Conflict as exc:
            _log.info("upload %s: %s", key, exc.detail)
            self._tell("refused", held, **about, reason=exc.detail)
        except NotFound as exc:
            _log.warning("upload %s: %s; it stays pending", key, exc.detail)
            self._tell("refused", held, **about, reason=exc.detail)
        except (InvalidUpdate, MalformedRequest) as exc:
            # The same bytes would fail again. Declined, the assignment gets its receipt soon.
            _log.error("upload %s: %s", key, exc)
            self._tell("refused", held, **about, reason=exc.detail)
            self._decline(here, key, "upload-refused", exc)
        here.sent.add(key)

    def _timed(self, num_bytes: int, seconds: float) -> None:
        """So many bytes of a body took so long, answer and repeats included."""
        if num_bytes >= TELLING and seconds > 0:
            recent = [*self._uplinks, 8e-6 * num_bytes / seconds]
            self._uplinks = recent[-_UPLINKS:]

    @property
    def _said(self) -> dict[str, Attribute]:
        """The device's attributes, with what its uplink was found to be: the median of its newest
        uploads, which takes the place of what was declared."""
        if not self._uplinks or len({*self._attributes, UPLINK}) > MAX_ATTRIBUTES:
            return self._attributes
        return {**self._attributes, UPLINK: round(median(self._uplinks), 6)}

    def _decline(
        self,
        here: _Open,
        key: str,
        code: DeclineReason,
        why: Exception | str,
        needed_seconds: float | None = None,
    ) -> None:
        """Give an assignment back: the server learns `code`, and `why` stays on the device."""
        reason = str(why) or type(why).__name__
        _log.warning("assignment %s declined (%s): %s", key, code, reason)
        here.declined.add(key)
        rule: dict[str, Any] = {}
        if isinstance(why, PlanDeclined):
            self._num_refusals += 1
            rule, code = {"rule": why.members["rule"]}, "masking-rules"
        self._tell("declined", assignment=key, code=code, reason=reason, **rule)
        try:
            signed = self._transport.decline(key, code, needed_seconds)
        except FedpressError as exc:  # it will miss its deadline instead
            _log.info("declining %s: %s", key, exc.detail)
        else:
            self._settle(here, () if signed is None else (signed,))

    # Receipts

    def _reconcile(self, here: _Open, signed: SignedRecall) -> bool:
        """Take account of a restore of the server: ask for the fate of all that is pending, or that
        it may have undone. False if it does not know all of it yet.

        The epoch is noted last, so that whatever comes in between it is asked again.
        """
        restore = self._verified_recall(here, signed).restore
        if restore.epoch != here.ledger.epoch:
            _log.warning("the server was restored from a backup (restore %d)", restore.number)
        fates = here.ledger.fates
        request = CheckInRequest(
            pending=tuple(here.ledger.pending)[:_REPORTED_PENDING],
            attributes=self._said,
            epoch=here.ledger.epoch,
            fates=fates,
        )
        response = self._transport.check_in(here.task, request).response
        if response is None or response.recall is None:
            return False
        recall = self._verified_recall(here, response.recall)
        ledger = self._settled(here, here.ledger, response.receipts)
        before = len(ledger.pending) + ledger.included
        ledger = ledger.recalled(recall)
        answered = {each.receipt.assignment for each in response.receipts} | {*recall.unknown}
        is_done = all(fate.assignment in answered for fate in fates)
        if is_done:
            ledger = ledger.in_epoch(recall.restore.epoch)
        here.sent.clear()  # what is pending still, the backup may not have
        self._save(here, ledger)
        self._tell(
            "restored",
            restore=recall.restore.number,
            undone=before - len(ledger.pending) - ledger.included,
        )
        return is_done

    def _verified_recall(self, here: _Open, signed: SignedRecall) -> Recall:
        document = signed.recall.model_dump(mode="json")
        document |= {"key_id": signed.key_id, "signature": signed.signature}
        here.trust.verify(document, RECALL_CONTEXT)
        return signed.recall

    def _settle(
        self, here: _Open, receipts: tuple[SignedReceipt, ...], backup_at: int | None = None
    ) -> None:
        ledger = here.ledger if backup_at is None else here.ledger.goes_back_to(backup_at)
        ledger = self._settled(here, ledger, receipts)
        if ledger is not here.ledger:
            self._save(here, ledger)

    def _settled(self, here: _Open, ledger: Ledger, receipts: tuple[SignedReceipt, ...]) -> Ledger:
        for signed in receipts:
            receipt = self._verified(here, signed)
            if here.part is not None:
                here.part.check(receipt)
            after = ledger.settle(receipt)
            if after is not ledger:
                self._tell("settled", receipt, **receipt.model_dump(include={"outcome", "reason"}))
            ledger = after
        return ledger

    def _verified(self, here: _Open, signed: SignedReceipt) -> Receipt:
        """The receipt, once it is sure that the server signed it, with a key that `ServerTrust`
        believes."""
        document = signed.receipt.model_dump(mode="json")
        document |= {"key_id": signed.key_id, "signature": signed.signature}
        here.trust.verify(document, RECEIPT_CONTEXT)
        return signed.receipt

    def _ending(self, here: _Open, summary: TaskSummary) -> float | None:
        """Collect what receipts there are to come, and measure the last model."""
        pause = 0.0
        for key in tuple(here.ledger.pending):
            try:
                found = self._transport.receipt(key)
            except NotFound as exc:
                _log.warning("no receipt for %s: %s; it stays pending", key, exc.detail)
                continue
            if isinstance(found, SignedReceipt):
                self._settle(here, (found,))
            else:
                pause = max(pause, found, _SHORTEST_PAUSE)
        if pause:
            here.hurry = True
            return pause
        has_own = self._fine_tuning is not None or bool(here.ledger.personal)
        if summary.state == "finished" and (self._can_evaluate or has_own):
            try:
                model = self._fetch(here, summary.model)
            except NotFound as exc:
                _log.info("the last model is gone: %s", exc.detail)
            else:
                self._evaluate(here, summary.model, model, None)
                if has_own:
                    self._make_own(here, summary, model)
        self._tell("ended", state=summary.state, model=summary.model)
        return None

    def _make_own(self, here: _Open, summary: TaskSummary, model: Model) -> None:
        """Keep the last model as this device uses it, once."""
        if here.files.own_model() is not None:
            return
        own, after = personalised(model, here.ledger), summary.round + 1
        if self._fine_tuning is not None:
            work = Work(here.task, after, 1, self._fine_tuning, self._work_seed(after, 1))
            trained = self._trainer.train(own, work)
            _, metrics = _checked(trained, own)
            own = own.with_parameters(np.asarray(trained.parameters, np.float32))
            self._tell("fine-tuned", num_examples=trained.num_examples, metrics=metrics)
        here.files.keep_own_model(own.to_bytes())

    # Models

    @tracing.traced("fetch")
    def _fetch(self, here: _Open, digest: str) -> Model:
        """A model, which stays in memory until another is fetched."""
        if self._model is None or self._model[0] != digest:
            self._model = None  # two at a time would be one too many for a small device
            self._model = (digest, self._read(here, digest))
        return self._model[1]

    def _read(self, here: _Open, digest: str) -> Model:
        """A model from the device's own files, or else from the server."""
        data = here.files.model(digest)
        if data is None:
            held = None
            if self._heard is not None and self._heard.downlink:
                found = ((base, here.files.model(base)) for base in here.files.newest())
                held = ((base, data) for base, data in found if data is not None)
            limit = self._max_model_bytes
            data = download_model(self._transport, digest, here.task, limit, held)
            self._keep(here, digest, data)
        return Model.from_bytes(data)

    def _bases(self, here: _Open, digest: str) -> list[str]:
        """What is held that the model `digest` may be had from, if it is not held itself."""
        held = here.files.newest()
        if self._heard is None or not self._heard.downlink or digest in held:
            return []
        return held[:BASES]

    def _read_map(self, here: _Open, digest: str, spec: ModelSpec) -> Vector:
        """A map of activity, as a model is read; raises IncompatiblePlan if it is none."""
        data = here.files.model(digest)
        if data is None:
            data = self._transport.artefact(digest, activity.max_bytes(spec), here.task)
            self._keep(here, digest, data)
        try:
            return activity.from_bytes(data, spec)
        except DecodingError as exc:
            raise IncompatiblePlan(f"{digest[:12]} is no map of activity: {exc.detail}") from exc

    def _read_control(self, here: _Open, plan: RoundPlan, spec: ModelSpec) -> Vector | None:
        """The server's control variate [spec.size], as a model is read."""
        control = plan.client_terms.control
        if control is None or control.server is None:
            return None
        data = here.files.model(control.server)
        if data is None:
            data = self._transport.artefact(control.server, 4 * spec.size, here.task)
            self._keep(here, control.server, data)
        if len(data) != 4 * spec.size:
            raise IncompatiblePlan(
                f"a control variate of {len(data)} bytes where {4 * spec.size} are due"
            )
        return np.frombuffer(data, "<f4").astype(np.float32)

    def _keep(self, here: _Open, digest: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != digest:
            raise DigestMismatch(f"{digest[:12]} came with other bytes")
        here.files.keep_model(digest, data)

    def _known(
        self, here: _Open, assignment: Assignment, model: Model, needs: frozenset[Knowledge]
    ) -> dict[Knowledge, Vector]:
        """What a compressor reads of how `model` came about, and of what this device sent; see
        Public."""
        plan = assignment.plan
        shared = plan.shared(model.spec)
        known: dict[Knowledge, Vector] = {}
        for what, digest in plan.sources.items():
            if what not in needs:
                continue
            if digest is None or digest == plan.model:  # the first round
                known[what] = np.zeros(shared.size, np.float32)
            elif what == "activity":
                known[what] = self._read_map(here, digest, shared)
            else:
                known[what] = model.spec.part(self._since(here, digest, model, what), shared)
        if "own" in needs:
            known["own"] = self._own(here, assignment, shared)
        return known

    def _since(self, here: _Open, digest: str, model: Model, what: Known) -> Vector:
        """How far `model` is from an earlier one."""
        other = self._read(here, digest)
        if other.spec.digest != model.spec.digest:
            raise IncompatiblePlan(f"the model that {what} is taken from has other tensors")
        return model.parameters - other.parameters

    def _own(self, here: _Open, assignment: Assignment, spec: ModelSpec) -> Vector:
        """What this device's last included upload stood for, as the assignment names it: from the
        account, or from the server if the account has been lost."""
        digest, kept, due = assignment.own, here.ledger.own, 4 * spec.size
        if digest is None:
            return np.zeros(spec.size, np.float32)
        data = b"" if kept is None else kept[1].astype("<f4").tobytes()
        if hashlib.sha256(data).hexdigest() != digest:
            data = self._transport.own(assignment.assignment, digest, due, here.task)
        if hashlib.sha256(data).hexdigest() != digest:
            raise DigestMismatch(f"{digest[:12]} came with other bytes")
        if len(data) != due:
            raise IncompatiblePlan(f"an upload before is of {len(data)} bytes, not {due}")
        return np.frombuffer(data, "<f4").astype(np.float32)

    def _evaluate(
        self, here: _Open, digest: str, model: Model, assignment: Assignment | None
    ) -> None:
        if not self._can_evaluate or self._evaluated == digest:
            return
        self._evaluated = digest
        try:
            evaluation = self._trainer.evaluate(personalised(model, here.ledger))
            if evaluation is None:
                self._can_evaluate = False
                return
            metrics = _finite(evaluation.metrics)
            report = _report(digest, evaluation, metrics, self._attributes)
        except Exception as exc:
            _log.error("model %s is not evaluated", digest[:12], exc_info=exc)
            self._tell("failed", assignment, what="evaluation", reason=str(exc) or repr(exc))
            self._failed_evaluations.add(exc)
            return
        self._failed_evaluations.clear()
        self._tell(
            "evaluated",
            assignment,
            model=digest,
            num_examples=evaluation.num_examples,
            metrics=metrics,
        )
        is_masked = self._heard is not None and self._heard.lane == "masked"
        stays = self._masking.required or is_masked or here.files.is_masked()
        if stays and not self._masking.reports_evaluations:
            return
        try:
            self._transport.report(here.task, report)
        except (Conflict, NotFound, MalformedRequest) as exc:
            _log.warning("evaluation of %s not taken: %s", digest[:12], exc.detail)

    # State

    def _joined(self) -> _Open:
        if self._open is None:
            identity = self._enrolled()
            task = self._task or self._only_task(self._transport)
            files = self._directory.task(task)
            try:
                ledger = files.load(identity.client_id)
            except BaseException:
                files.close()
                raise
            trust = ServerTrust(self._directory, identity, self._transport, self._clock)
            here = _Open(task, files, ledger, trust)
            self._open, self._account = here, ledger
            self._task = task  # what it was, should the state be dropped and read again
            abandon_unfinished(files, self._transport, frozenset(ledger.pending))
            if files.session() is not None:
                here.part = self._part(here, may_ask=False)
            self._report_discards(self._open)
            self._tell("joined", pending=len(ledger.pending))
        return self._open

    def _enrolled(self) -> Identity:
        identity = self._directory.identity()
        if identity is not None and self._server_key is not None:
            identity = pinned_anew(self._directory, identity, self._server_key, self._transport)
        if identity is not None:
            self._end_key_change()
            return identity
        identity = self._identified(self._transport)
        if self._server_key is not None:
            identity = pinned_anew(self._directory, identity, self._server_key, self._transport)
        self._tell("enrolled", client_id=identity.client_id, key_id=self.key_id)
        return identity

    def _identified(self, transport: Transport) -> Identity:
        """This device's identity, which it enrols for by `transport` if it has none."""
        with self._directory.alone():
            identity = self._directory.identity()
            if identity is not None:
                return identity
            if self._token is None:
                raise InvalidToken(
                    "this device is not enrolled and has no token",
                    hint="ask the operator for an enrolment token",
                )
            answer = transport.enrol(
                self._token,
                EnrolRequest(public_key=to_base64url(self._key.public), name=self._name),
            )
            identity = Identity(
                url=self._url, client_id=answer.client_id, server_key=answer.server_key
            )
            self._directory.enrolled(identity)
        return identity

    def _take_key(self, key: DeviceKey) -> None:
        self._key = key
        self._transport.use_key(key)
        self._tell("rotated", key_id=key.key_id)

    def _end_key_change(self) -> None:
        """Bring in the key whose change was begun; where it cannot be now, the old one goes on."""
        if is_changing(self._directory):
            try:
                self._take_key(change_key(self._directory, self._transport))
            except FedpressError as exc:
                _log.warning("the change of this device's key is not at its end: %s", exc)

    def _follows_key(self) -> bool:
        """Whether another process of this device has brought in a key, which this one takes."""
        key = self._directory.key()
        if key.key_id == self._key.key_id:
            return False
        self._take_key(key)
        return True

    def _become_known(self, refusal: UnknownDevice) -> None:
        """For a key that the server does not know: another process may have changed it, or the
        server came back from a backup of before the change, or of before the enrolment. Raises as
        `_enrol_again` does."""
        before = self.key_id
        if self._follows_key():
            return
        self._end_key_change()
        if self.key_id == before and not is_known_after(self._directory, self._transport):
            self._enrol_again(refusal)

    def _enrol_again(self, refusal: UnknownDevice) -> None:
        """For a server that came back from a backup of before this device was enrolled: the same
        key has the same name. Raises UnknownDevice without a token, or if it has not."""
        identity = self._enrolled()
        if self._token is None:
            raise UnknownDevice(
                f"the server does not know this device any more: {refusal.detail}",
                hint="ask the operator for an enrolment token, and give it to the client",
            ) from refusal
        request = EnrolRequest(
            public_key=to_base64url(self._key.public),
            name=self._name,
            rotations=rotations(self._directory),
        )
        answer = self._transport.enrol(self._token, request)
        trust = ServerTrust(self._directory, identity, self._transport, self._clock)
        is_its = trust.believes(from_base64url(answer.server_key, 32))
        if answer.client_id != identity.client_id or not is_its:
            raise UnknownDevice(
                f"the server knows this device as {answer.client_id}, and it has been "
                f"{identity.client_id}",
                hint="is it the server that it enrolled with?",
            )
        self._tell("enrolled", client_id=identity.client_id)

    def _only_task(self, transport: Transport) -> str:
        tasks = transport.tasks()
        running = [task.task for task in tasks if task.state in ("running", "paused")]
        masked = _masked(tasks) if self._masking.required else []
        if len(masked) == 1:
            return masked[0]
        if len(running) != 1:
            listed = ", ".join(f"{task.task} ({task.state})" for task in tasks) or "none"
            raise ConfigurationError(
                f"{len(running) or 'no'} tasks are running; the server has: {listed}",
                hint="name the task to join",
            )
        return running[0]

    def _save(self, here: _Open, ledger: Ledger) -> None:
        here.files.save(ledger)
        here.ledger = ledger
        self._report_discards(here)

    def _report_discards(self, here: _Open) -> None:
        """Tell of discards once they are durable; the file forgets them at its next writing."""
        for discard in here.ledger.discards:
            self._on_discard(discard)
        here.ledger = self._account = here.ledger.told()

    def _drop(self) -> None:
        if self._open is not None:
            self._open.files.close()
            self._open = None

    # Chance, time, news

    def _compression_rng(self, assignment: Assignment) -> np.random.Generator:
        if self._seed is None:
            return np.random.default_rng()
        plan, turn = assignment.plan, (0, assignment.turn) if assignment.turn else ()
        return np.random.default_rng([self._seed, plan.round, plan.attempt, *turn])

    def _rounding_secret(self, assignment: Assignment) -> bytes | None:
        """None: the ledger takes one of the system's, as it should for anybody but a test."""
        if self._seed is None:
            return None
        plan = assignment.plan
        return np.random.default_rng([self._seed, plan.round, plan.attempt, 2]).bytes(SECRET_BYTES)

    def _work_seed(self, round_: int, attempt: int, turn: int = 0) -> int:
        if self._seed is None:
            return secrets.randbits(63)
        again = (turn,) if turn else ()
        sequence = np.random.SeedSequence([self._seed, round_, attempt, 1, *again])
        return int(sequence.generate_state(1, np.uint64)[0]) >> 1

    def _pause(self, seconds: float) -> None:
        self._wait_out(seconds)
        if self._stopping.is_set():
            raise _Stopped

    def _tell(self, kind: EventKind, about: Any = None, **details: Any) -> None:
        about = about.plan if isinstance(about, Assignment) else about
        round_, attempt = (about.round, about.attempt) if about is not None else (0, 0)
        task = self._open.task if self._open is not None else self._task or ""
        _log.info("%s round %d.%d %s", kind, round_, attempt, details)
        if self._on_event is not None:
            self._on_event(Event(kind, task, round_, attempt, details))


@dataclass(slots=True)
class _Open:
    """A task joined: its files, the account as saved, and what this process knows besides."""

    task: str
    files: TaskFiles
    ledger: Ledger
    trust: ServerTrust
    sent: set[str] = field(default_factory=set)
    """Pending uploads that the server has answered."""
    declined: set[str] = field(default_factory=set)
    part: MaskedPart | None = None
    """In masked sessions, once it has taken part in one."""
    hurry: bool = False
    """Whether the next check-in is not to be held."""


class _Stopped(Exception):
    """`stop` was called during a pause."""


def _masked(tasks: Sequence[TaskSummary]) -> list[str]:
    """The tasks of the masked lane that go on."""
    going = ("running", "paused")
    return [each.task for each in tasks if each.state in going and each.lane == "masked"]


def _most_bytes(assignment: Assignment, spec: ModelSpec) -> int:
    """The largest body that may come of an assignment's update, where it may leave before it is
    whole: not in the masked lane, nor in the first of two trips."""
    plan = assignment.plan
    if plan.lane == "masked" or plan.first_trip is not None:
        return 0
    layout = plan.layouts(spec)[plan.profile_index(assignment.profile)]
    return max_body_bytes(layout) + REPORT_BYTES * len(plan.report)


def _checked(trained: Trained, model: Model) -> tuple[Vector, dict[str, float]]:
    parameters = np.asarray(trained.parameters, np.float32)
    if parameters.shape != model.parameters.shape:
        raise ConfigurationError(
            f"the trainer returned parameters of shape {parameters.shape} where "
            f"{model.parameters.shape} is due",
            hint="return model.spec.flatten(tensors)",
        )
    if trained.num_examples < 1:
        raise ConfigurationError(f"the trainer learnt from {trained.num_examples} examples")
    with np.errstate(over="ignore", invalid="ignore"):  # prepare refuses what comes of it
        return parameters - model.parameters, _finite(trained.metrics)


def _report(
    digest: str,
    evaluation: Evaluation,
    metrics: dict[str, float],
    attributes: dict[str, Attribute],
) -> EvaluationReport:
    try:
        return EvaluationReport(
            model=digest,
            num_examples=evaluation.num_examples,
            metrics=metrics,
            classes={
                label: ClassCount(num_examples=examples, correct=correct)
                for label, (examples, correct) in evaluation.classes.items()
            },
            attributes=attributes,
        )
    except ValidationError as exc:
        raise ConfigurationError(
            f"the trainer's evaluation cannot be sent: {explained(exc)}"
        ) from exc


def _checked_attributes(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    uplink = attributes.get(UPLINK, 1.0)
    if isinstance(uplink, str) or not uplink > 0:
        raise ConfigurationError(
            f"the attribute {UPLINK} is {uplink!r} where a number of Mbit/s is due",
            hint="leave it out where it is not known: it is found from uploads",
        )
    try:
        return CheckInRequest(attributes=dict(attributes)).attributes
    except ValidationError as exc:
        raise ConfigurationError(explained(exc)) from exc


def _checked_key(server_key: str) -> None:
    try:
        from_base64url(server_key, 32)
    except MalformedRequest as exc:
        raise ConfigurationError(
            f"server_key: {exc.detail}", hint="give what fedpress server key show prints"
        ) from exc


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Plain floats; JSON has no word for the others."""
    found = {name: float(value) for name, value in metrics.items()}
    kept = {name: value for name, value in found.items() if math.isfinite(value)}
    if len(kept) < len(found):
        _log.warning("not finite, left out: %s", ", ".join(sorted(set(found) - set(kept))))
    return kept


def _warn_of_discard(discard: Discard) -> None:
    _log.warning("an update of norm %.3g is lost to the model: %s", discard.norm, discard.reason)
