"""Evaluation: have the trainer measure a model, and report it where the device's rules admit."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from pydantic import ValidationError

from fedpress_client.client_terms import personalised
from fedpress_client.events import EvaluationFailed, InRound, ModelEvaluated
from fedpress_client.failures import Failures
from fedpress_client.joined_task import JoinedTask
from fedpress_client.settings import Services
from fedpress_client.trainer import Evaluation, check_evaluation, unchanged
from fedpress_protocols.errors import ConfigurationError, Conflict, MalformedRequest, NotFound
from fedpress_protocols.messages import Attribute, ClassCount, EvaluationReport
from fedpress_protocols.model import Model
from fedpress_protocols.validation import format_validation_errors

_log = logging.getLogger(__name__)


class Evaluator:
    """Measures each model once; a trainer that returned None is not asked again."""

    def __init__(self, services: Services) -> None:
        self._services, self._trainer = services, services.trainer
        self._failures = Failures(services.settings.failure_policy)
        self._newest: str | None = None
        self.can_evaluate = True

    def evaluate(
        self, task: JoinedTask, digest: str, model: Model, about: InRound | None = None
    ) -> None:
        """Measure `model` unless it was the newest measured; a failure is counted, not raised,
        until the failure policy allows no more. Raises ConfigurationError for a trainer that
        changed the model: training begins at it."""
        if not self.can_evaluate or self._newest == digest:
            return
        self._newest = digest
        own = personalised(model, task.ledger)
        with unchanged(own, "evaluate"):
            report = self._measured(digest, own, about)
        if report is None:
            return
        event = ModelEvaluated(
            model=digest, num_examples=report.num_examples, metrics=report.metrics
        )
        self._services.events.emit(event, about)
        self._send(task, report)

    def _measured(self, digest: str, own: Model, about: InRound | None) -> EvaluationReport | None:
        """The trainer's report; None if it measured nothing or failed."""
        try:
            evaluation = check_evaluation(self._trainer.evaluate(own))
            if evaluation is None:
                self.can_evaluate = False
                return None
            attributes = self._services.settings.attributes or {}
            report = _report(digest, evaluation, attributes)
        except Exception as exc:
            trace = None if isinstance(exc, ConfigurationError) else exc
            _log.error("model %s is not evaluated: %s", digest[:12], exc, exc_info=trace)
            self._services.events.emit(EvaluationFailed(reason=str(exc) or repr(exc)), about)
            self._failures.add(exc)
            return None
        self._failures.clear()
        return report

    def _send(self, task: JoinedTask, report: EvaluationReport) -> None:
        if self._services.budget.is_private(task.name):  # what it measures has no noise
            return
        rules = self._services.settings.masking_rules
        is_masked = rules.required or task.lane == "masked" or task.files.is_masked()
        if is_masked and not rules.reports_evaluations:
            return
        try:
            self._services.transport.report(task.name, report)
        except (Conflict, NotFound, MalformedRequest) as exc:
            _log.warning("evaluation of %s not taken: %s", report.model[:12], exc.detail)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The finite metrics; JSON has no word for the others."""
    finite_values = {name: value for name, value in metrics.items() if math.isfinite(value)}
    if len(finite_values) < len(metrics):
        _log.warning(
            "not finite, left out: %s", ", ".join(sorted(set(metrics) - set(finite_values)))
        )
    return finite_values


def _report(
    digest: str, evaluation: Evaluation, attributes: Mapping[str, Attribute]
) -> EvaluationReport:
    try:
        return EvaluationReport(
            model=digest,
            num_examples=evaluation.num_examples,
            metrics=finite(evaluation.metrics),
            classes={
                label: ClassCount(num_examples=examples, correct=correct)
                for label, (examples, correct) in evaluation.classes.items()
            },
            attributes=dict(attributes),
        )
    except ValidationError as exc:
        raise ConfigurationError(
            f"the trainer's evaluation cannot be sent: {format_validation_errors(exc)}"
        ) from exc
