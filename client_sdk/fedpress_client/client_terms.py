"""Client terms of a strategy in one round, beyond plain training: where training begins, what is
added to its gradients, and which parts of its outcome are sent, reported and kept."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from fedpress_client.ledger import Ledger
from fedpress_client.progress import Report, unreported
from fedpress_client.trainer import Trained, Trainer, TrainingRequest
from fedpress_compression.tensors import Vector
from fedpress_compression.update import Indices
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan


class TermsAtWork:
    """A plan's client terms on the round's `model`, for the device whose account is `ledger`.

    `server` is the server's control variate, None for zeros; `profile` what the device uses of the
    plan's, which may correct the learning rate. `model` is where training begins: the
    round's, with the tensors that are personal as this device has them.
    """

    def __init__(
        self,
        plan: RoundPlan,
        model: Model,
        ledger: Ledger,
        server: Vector | None,
        profile: str | None = None,
    ) -> None:
        self._plan = plan
        self._training = plan.training if profile is None else plan.training_of(profile)
        self.shared = plan.shared(model.spec)
        self.model = personalised(model, ledger, besides={t.name for t in self.shared.trained})
        self._server = np.zeros(self.shared.size, np.float32) if server is None else server
        self._own = ledger.control if ledger.spec == self.shared.digest else None

    def work(
        self, seed: int, support: Indices | None, progress: Report = unreported
    ) -> TrainingRequest:
        """The request to the trainer, which may report by `progress`."""
        plan, terms = self._plan, self._plan.client_terms
        correction: Vector | None = None
        if terms.control is not None:
            difference = self._server if self._own is None else self._server - self._own
            nothing = np.zeros(self.model.spec.size, np.float32)
            correction = self.model.spec.with_part(nothing, self.shared, difference)
        return TrainingRequest(
            plan.task,
            plan.round,
            plan.attempt,
            self._training,
            seed,
            support,
            terms.proximal,
            correction,
            terms.full_batch,
            plan.trainer_report,
            progress,
        )

    def report(self, trained: Trained) -> dict[str, float]:
        """The numbers that the plan names; ConfigurationError if the trainer did not tell one."""
        names = self._plan.trainer_report
        missing = [name for name in names if name not in trained.report]
        if missing:
            raise ConfigurationError(f"the trainer did not report {', '.join(missing)}")
        return {name: float(trained.report[name]) for name in names}

    def update(self, change: Vector, trained: Trained) -> Vector:
        """The update to upload, of the `change` [model.spec.size] that training made."""
        terms = self._plan.client_terms
        update = self.model.spec.part(change, self.shared)
        if terms.normalise:
            update = update / np.float32(self.report(trained)["steps"])
        if terms.control is not None and terms.control.offset:
            update = update + np.float32(terms.control.offset) * self._server
        return update

    def personal(self, trained: Trained) -> dict[str, Vector]:
        """The tensors that stay here, by name; raises InvalidUpdate on NaN or infinity."""
        spec = self.model.spec
        if self.shared.size == spec.size:
            return {}
        own = spec.select({t.name for t in spec.trained} - {t.name for t in self.shared.trained})
        values = spec.part(np.asarray(trained.parameters, np.float32), own)
        if not np.isfinite(values).all():
            raise InvalidUpdate("a personal tensor holds NaN or infinity")
        return {name: array.copy() for name, array in own.unflatten(values).items()}


def personalised(model: Model, ledger: Ledger, besides: Collection[str] = ()) -> Model:
    """`model` with the device's own personal tensors, `besides` those of these names, where they
    have the shape."""
    tensors = model.spec.unflatten(model.parameters)
    personal = {
        name: values
        for name, values in ledger.personal.items()
        if name not in besides and name in tensors and tensors[name].shape == values.shape
    }
    if not personal:
        return model
    return model.with_parameters(model.spec.flatten({**tensors, **personal}))


def check_honoured(plan: RoundPlan, trainer: Trainer) -> None:
    """Raise IncompatiblePlan if the plan asks what the trainer does not say it knows."""
    restricted = ["restricted"] if plan.training.restricted else []
    required = plan.client_terms.of_trainer.union(plan.trainer_report, restricted)
    unknown = sorted(required.difference(getattr(trainer, "honours", ())))
    if unknown:
        raise IncompatiblePlan(
            f"the plan asks for {', '.join(unknown)}, and the trainer honours none of that",
            hint="see TrainingRequest; name in the trainer's attribute `honours` what it does",
        )
