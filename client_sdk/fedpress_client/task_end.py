"""The end of a task: collect receipts, measure the last model, keep the device's own version."""

from __future__ import annotations

import logging

from fedpress_client.client_terms import personalised
from fedpress_client.evaluation import Evaluator
from fedpress_client.events import ModelFineTuned, TaskEnded
from fedpress_client.joined_task import JoinedTask
from fedpress_client.models import TaskModels
from fedpress_client.randomness import training_seed
from fedpress_client.receipts import Receipts
from fedpress_client.round_runner import checked_change
from fedpress_client.settings import Services
from fedpress_client.trainer import TrainingRequest, unchanged
from fedpress_protocols.errors import NotFound
from fedpress_protocols.messages import AVERAGE, TaskSummary
from fedpress_protocols.model import Model

_log = logging.getLogger(__name__)


class TaskEnd:
    """Finishes a device's part in a task that the server has ended."""

    def __init__(
        self, services: Services, models: TaskModels, receipts: Receipts, evaluator: Evaluator
    ) -> None:
        self._services, self._models = services, models
        self._receipts, self._evaluator = receipts, evaluator

    def finish(self, task: JoinedTask, summary: TaskSummary) -> float | None:
        """The seconds until receipts that are still missing may be there; None once all is done."""
        pause = self._receipts.collect(task)
        if pause:
            task.is_hurried = True
            return pause
        has_own = self._services.settings.fine_tuning is not None or bool(task.ledger.personal)
        is_asked = task.was_assigned and self._evaluator.can_evaluate
        if summary.state == "finished" and (is_asked or has_own):
            try:
                model = self._models.fetch(task, summary.model)
            except NotFound as exc:
                _log.info("the last model is gone: %s", exc.detail)
            else:
                if is_asked:
                    self._evaluator.evaluate(task, summary.model, model)
                    self._measure_average(task, summary)
                if has_own:
                    self._keep_own(task, summary, model)
        self._services.events.emit(TaskEnded(state=summary.state, model=summary.model))
        return None

    def _measure_average(self, task: JoinedTask, summary: TaskSummary) -> None:
        """Let the server know which of the two is better, so that it serves that."""
        average = summary.published.get(AVERAGE)
        if average is None or not self._evaluator.can_evaluate:
            return
        try:
            model = self._models.fetch(task, average)
        except NotFound as exc:
            _log.info("the average is gone: %s", exc.detail)
            return
        self._evaluator.evaluate(task, average, model)

    def _keep_own(self, task: JoinedTask, summary: TaskSummary, model: Model) -> None:
        """Keep the last model as this device uses it, once for each: a task may be continued."""
        if task.files.has_own_model(summary.model):
            return
        own, settings = personalised(model, task.ledger), self._services.settings
        if settings.fine_tuning is not None:
            round_ = summary.round + 1
            seed = training_seed(settings.seed, round_, 1)
            progress = self._services.progress
            progress.round = round_
            request = TrainingRequest(
                task.name, round_, 1, settings.fine_tuning, seed, progress=progress.of("train")
            )
            with unchanged(own, "train"):
                result = self._services.trainer.train(own, request)
            progress.finish("train")
            trained, _ = checked_change(result, own)
            own = own.with_parameters(trained.parameters)
            event = ModelFineTuned(num_examples=trained.num_examples, metrics=trained.metrics)
            self._services.events.emit(event)
        task.files.keep_own_model(summary.model, own.to_bytes())
