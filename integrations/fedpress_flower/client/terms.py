"""The terms of a training message, and the report of its reply."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict

from fedpress_compression.compressor import Knowledge
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_flower import envelope
from fedpress_flower.client.account import PARTITION
from fedpress_protocols.errors import FedpressError, IncompatiblePlan, InvalidUpdate
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.plan import RoundPlan, parsed

EARLIER: tuple[Knowledge, ...] = ("previous", "drift")
"""Side information that an earlier model gives."""


@dataclass(frozen=True)
class Terms:
    """The terms of a message, and the model [spec.size] that it carries."""

    assignment: Assignment
    since: int
    """The first of the starts that its own one goes on from."""
    receipts: tuple[Receipt, ...]
    arrays: str
    weight: str
    spec: ModelSpec
    model: Vector
    knowledge: dict[Knowledge, Vector]
    """Side information of the compressor from earlier models."""

    @classmethod
    def of(cls, message: Message) -> Terms:
        """Raises IncompatiblePlan or ConfigurationError if message and plan do not fit."""
        record = message.content[envelope.RECORD]
        plan = _plan(str(record[envelope.PLAN]))
        if plan.profiles[0].learning_rate_factor != 1:
            raise IncompatiblePlan(
                "the profile corrects the learning rate, which a Flower app sets for itself",
                hint="leave learning_rate_factor out, and say the rate in the run's configuration",
            )
        assignment = Assignment(
            assignment=str(record[envelope.ASSIGNMENT]),
            client_id=str(record[envelope.CLIENT]),
            plan=plan,
            profile=plan.profiles[0].name,
        )
        name = str(record[envelope.ARRAYS])
        records = message.content.array_records
        arrays = {key: array.numpy() for key, array in records[name].items()}
        spec = envelope.spec_of(arrays)
        model = spec.flatten(arrays)
        knowledge: dict[Knowledge, Vector] = {}
        for kind in EARLIER:
            named = envelope.model_record(kind)
            if named in records:
                earlier = {key: array.numpy() for key, array in records[named].items()}
                knowledge[kind] = model - spec.flatten(earlier)
        receipts: list[Any] = [record.get(envelope.RECEIPT)]
        receipts += list(record.get(envelope.RECEIPTS, []))
        since = record.get(envelope.SINCE, envelope.start_of(assignment.assignment))
        return cls(
            assignment,
            int(since),
            tuple(parsed(Receipt, str(each)) for each in receipts if each is not None),
            name,
            str(record[envelope.WEIGHT]),
            spec,
            model,
            knowledge,
        )


@lru_cache(maxsize=4)
def _plan(text: str) -> RoundPlan:
    """Clients in one process share a round's plan, and parsing it costs more than the rest."""
    return RoundPlan.from_json(text)


def own_seed(context: Context, seed: int) -> int:
    """The seed of this client in a run of `seed`."""
    return envelope.client_seed(seed, int(context.node_config.get(PARTITION, context.node_id)))


def without_ours(content: RecordDict) -> RecordDict:
    """Return a copy of the message for the app, without fedpress's own records."""
    return RecordDict(
        {n: each for n, each in content.items() if n.partition(".")[0] != envelope.RECORD}
    )


def model_in(reply: Message, terms: Terms) -> tuple[str, ArrayRecord]:
    """The name and record of the reply's model: as it was sent, or the only one."""
    records = reply.content.array_records
    if terms.arrays in records:
        return terms.arrays, records[terms.arrays]
    if len(records) != 1:
        raise InvalidUpdate(
            f"the reply holds {len(records)} array records, none of them named {terms.arrays!r}",
            hint="reply with the trained model under the name that it came by",
        )
    return next(iter(records.items()))


def update_of(arrays: ArrayRecord, terms: Terms) -> Vector:
    """New values less old [spec.size]; raises InvalidUpdate for other tensors."""
    tensors = {name: array.numpy() for name, array in arrays.items()}
    try:
        spec = envelope.spec_of(tensors)
        trained = terms.spec.flatten(tensors)
    except FedpressError as exc:
        raise InvalidUpdate(f"the reply's model: {exc.detail}") from exc
    here, there = ({t.name: t for t in each.tensors} for each in (terms.spec, spec))
    names = {tensor.name for tensor in spec.trained} ^ {t.name for t in terms.spec.trained}
    if retyped := sorted(names & here.keys() & there.keys()):
        name = retyped[0]
        raise InvalidUpdate(
            f"the reply's tensor {name!r} is {there[name].dtype}, and {here[name].dtype} was sent",
            hint="reply with every array in the type that it came in",
        )
    if names:
        raise InvalidUpdate(f"the reply's model has other tensors: {', '.join(sorted(names))}")
    with np.errstate(over="ignore", invalid="ignore"):  # prepare refuses what comes of it
        return trained - terms.model


def examples_of(reply: Message, terms: Terms) -> int:
    """The number of examples. It is the weight where a strategy of fedpress aggregates or, under
    masks, where they have a `max_weight`; one of Flower's reads the reply itself."""
    value = metrics_of(reply).get(terms.weight)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidUpdate(
            f"the reply's {terms.weight!r} is {value!r} where a positive number is due",
            hint=f"put {terms.weight!r} into the reply's metric record",
        )
    masking = terms.assignment.plan.masking
    if masking is not None and masking.max_weight is not None and value != round(value):
        raise InvalidUpdate(
            f"the reply's {terms.weight!r} is {value:g}, and masked sums weight by whole numbers",
            hint="report whole ones, such as 90 and 10 for 0.9 and 0.1",
        )
    return max(1, round(value))


def report_of(reply: Message, terms: Terms) -> dict[str, float]:
    metrics = metrics_of(reply)
    report = {}
    for name in terms.assignment.plan.trainer_report:
        value = metrics.get(name)
        if not isinstance(value, int | float):
            raise InvalidUpdate(
                f"the strategy needs {name!r}, and the reply's metric record has none",
                hint=f"put {name!r} into it",
            )
        report[name] = float(value)
    return report


def metrics_of(reply: Message) -> dict[str, Any]:
    return {k: v for record in reply.content.metric_records.values() for k, v in record.items()}
