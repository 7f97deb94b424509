"""A round under way, whatever its lane: the plan, the model that went out, who was asked."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message
from pydantic import ValidationError

from fedpress_compression.compressor import Knowledge, Public
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_flower import envelope
from fedpress_flower.server.plan import Plan
from fedpress_flower.server.spending import Spending
from fedpress_flower.server.training import Training
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.messages import Receipt
from fedpress_protocols.model import Model
from fedpress_protocols.plan import (
    CohortRules,
    MaskingTerms,
    Profile,
    RoundPlan,
    TrainingTerms,
)
from fedpress_protocols.validation import format_validation_errors
from fedpress_strategies.private import fixed_point_of


@dataclass
class Round:
    """A round under way: its plan, the model that went out, and whom it has lost so far."""

    plan: RoundPlan
    model: Model
    arrays: Mapping[str, npt.NDArray[Any]]
    key: str
    asked: Mapping[int, Message]
    public: Public
    training: Training
    dropped: dict[int, str] = field(default_factory=dict)
    upload_bytes: int = 0

    def __post_init__(self) -> None:
        self._text = self.plan.to_json()

    @classmethod
    def opened(
        cls,
        terms: Plan,
        number: int,
        arrays: ArrayRecord,
        messages: list[Message],
        models: tuple[Vector, Vector] | None,
        profile: Profile,
        training: Training,
        *,
        report: tuple[str, ...] = (),
        masking: MaskingTerms | None = None,
        spending: Spending | None = None,
        sketch: int = 0,
    ) -> Self:
        """`models` are the first and the one before, `profile` is that of the uploads, `sketch` the
        plan's. Raises ConfigurationError for a model or messages that this cannot work with."""
        tensors = {name: array.numpy() for name, array in arrays.items()}
        model = envelope.model_of(tensors)
        names = list(messages[0].content.array_records)
        if len(names) != 1:
            raise ConfigurationError(
                f"messages with {len(names)} array records, where one is the model"
            )
        privacy, size = None, len(messages)
        if spending is not None:
            privacy, size = spending.terms, spending.size
            report = (*report, *spending.report)
        fixed_point = fixed_point_of(
            None if masking is not None else privacy, terms.max_abs, terms.max_examples, size
        )
        needs, here = profile.compressor.needs, model.digest
        if masking is not None:
            needs = needs | {"previous"}
        first, before = models if models is not None else (model.parameters, model.parameters)
        seed = f"fedpress public seed v1|{terms.seed}|{terms.task}|{number}|1"
        if terms.seed is None:
            seed = secrets.token_hex(32)
        try:
            plan = RoundPlan(
                task=terms.task,
                round=number,
                attempt=1,
                model=here,
                spec=model.spec.digest,
                profiles=(profile,),
                lane="clear" if masking is None else "masked",
                masking=masking,
                privacy=privacy,
                training=TrainingTerms(restricted=terms.restricted),
                report=report,
                cohort=CohortRules(size=size, minimum=min(terms.minimum, size)),
                deadline=0.0,
                fixed_point=fixed_point,
                previous_model=here if "previous" in needs else None,
                first_model=here if "drift" in needs else None,
                public_seed=hashlib.sha256(seed.encode()).hexdigest(),
                sketch=sketch,
            )
        except ValidationError as exc:
            raise IncompatiblePlan(format_validation_errors(exc)) from exc
        earlier: dict[Knowledge, Vector] = {"previous": before, "drift": first}
        public = plan.public(
            model.spec,
            {kind: model.parameters - earlier[kind] for kind in earlier if kind in needs},
        )
        asked = {message.metadata.dst_node_id: message for message in messages}
        return cls(plan, model, tensors, names[0], asked, public, training)

    @property
    def shared(self) -> ModelSpec:
        """The tensors that uploads are over."""
        return self.model.spec

    def beside(self, first: Vector, before: Vector) -> dict[str, Vector]:
        """The models [spec.size] that the compressor reads, by the names of their records."""
        return {
            envelope.model_record(what): vector
            for what, vector in (("previous", before), ("drift", first))
            if what in self.plan.needs
        }

    def assignment(self, node: int) -> str:
        return envelope.assignment(self.training.start, self.plan.round, node)

    def record(self, node: int, receipt: Receipt | None, weight: str) -> ConfigRecord:
        fields: dict[str, Any] = {
            envelope.PLAN: self._text,
            envelope.ASSIGNMENT: self.assignment(node),
            envelope.CLIENT: str(node),
            envelope.ARRAYS: self.key,
            envelope.WEIGHT: weight,
        }
        if self.training.goes_on:
            fields[envelope.SINCE] = self.training.since
        if receipt is not None:
            fields[envelope.RECEIPT] = receipt.model_dump_json()
        return ConfigRecord(fields)

    def drop(self, node: int, reason: str) -> None:
        self.dropped[node] = reason
