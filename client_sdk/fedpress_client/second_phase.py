"""The second phase of a two-phase round: compress the pending update again, by a basis."""

from __future__ import annotations

from fedpress_client.joined_task import JoinedTask
from fedpress_client.models import TaskModels
from fedpress_client.randomness import compression_rng
from fedpress_client.round_runner import out_of_bounds
from fedpress_client.settings import ClientSettings
from fedpress_client.side_information import SideInformation
from fedpress_client.uploads import Uploads
from fedpress_protocols.errors import (
    ConfigurationError,
    IncompatiblePlan,
    MalformedRequest,
    NotFound,
)
from fedpress_protocols.messages import Assignment


class SecondPhase:
    """Answers the basis of a round whose first phase this device took part in."""

    def __init__(
        self,
        settings: ClientSettings,
        models: TaskModels,
        knowledge: SideInformation,
        uploads: Uploads,
    ) -> None:
        self._settings, self._models = settings, models
        self._knowledge, self._uploads = knowledge, uploads

    def run(self, task: JoinedTask, assignment: Assignment, digest: str) -> bool:
        """Compress by the basis `digest` and upload; False if there was nothing to do, or nothing
        came of it."""
        key, plan = assignment.assignment, assignment.plan
        upload = task.ledger.pending.get(key)
        is_done = upload is not None and not upload.is_first
        if is_done or key in task.declined or key in task.ledger.settled:
            return False
        try:
            if upload is None:
                raise IncompatiblePlan("the update of the first trip is not here any more")
            model = self._models.fetch(task, plan.model)
            knowledge = self._knowledge.gather(task, assignment, model, plan.needs)
            basis = self._knowledge.basis(task, assignment, digest, plan.shared(model.spec))
            ledger, body = task.ledger.second(
                assignment,
                model.spec,
                compression_rng(self._settings.seed, assignment),
                basis,
                previous=knowledge.get("previous"),
                drift=knowledge.get("drift"),
                activity=knowledge.get("activity"),
                own=knowledge.get("own"),
            )
        except (ConfigurationError, MalformedRequest, NotFound) as exc:
            self._uploads.decline(task, key, "incompatible-plan", exc)
            return False
        task.save(ledger)
        if body is None:
            self._uploads.decline(task, key, "invalid-update", out_of_bounds(assignment))
            return False
        task.sent.discard(key)
        self._uploads.send(task, key)
        return True
