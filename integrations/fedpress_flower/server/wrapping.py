"""The base of fedpress's strategies: an inner one, seeded cohorts, reports, averages served."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedpress_compression.tensors import Vector
from fedpress_flower import envelope
from fedpress_flower.server.aggregation import StatefulStrategy
from fedpress_flower.server.arrays import model_of, moved, num_bytes, record_of
from fedpress_flower.server.automatic import default_strategy
from fedpress_flower.server.grid import Arriving, seeded
from fedpress_flower.server.plan import Plan, RoundReport, is_compressor
from fedpress_flower.server.rounds import Round
from fedpress_flower.server.spending import Spending
from fedpress_flower.server.training import Training
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_strategies.fedavg import FEDAVG
from fedpress_strategies.strategy import Strategy

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
_STEPS = (
    "configure_train",
    "aggregate_train",
    "configure_evaluate",
    "aggregate_evaluate",
    "summary",
)
"""The methods that Flower's `Strategy.start` calls."""
SHORT = 3
"""Rounds that `start` has if it is not told otherwise."""
_log = logging.getLogger(__name__)


class Wrapping(FlowerStrategy):
    """`inner` chooses clients and configures them; if it is one of ours, an instance of FedAvg made
    with `sampling` does. None stands for ours: the default's where the plan names no compressor,
    which depends on the number of rounds, and else fedavg.

    If the strategy publishes an average (`ema`), that is what `evaluate_fn` is given and what
    `Result.arrays` is; clients go on from `newest`.
    """

    is_masked = False

    def __init__(
        self, inner: FlowerStrategy | Strategy | None, plan: Plan, sampling: Mapping[str, Any]
    ) -> None:
        if not isinstance(plan, Plan):
            raise ConfigurationError(
                f"the plan is a {type(plan).__name__}, not a Plan",
                hint=f"give {type(self).__name__}(inner, Plan(compressor))",
            )
        if not (inner is None or isinstance(inner, FlowerStrategy | Strategy)):
            raise ConfigurationError(
                f"{type(self).__name__} is to wrap {_described(inner)}, where a strategy of "
                "flwr.serverapp.strategy or of fedpress.strategies is due",
                hint=_in_the_place_of(inner, type(self).__name__),
            )
        self.plan = plan
        self.reports: list[RoundReport] = []
        self.newest: ArrayRecord | None = None
        """The model after the newest round; None before the first."""
        self._ours: StatefulStrategy | None = None
        self._hangs_on_rounds = inner is None and plan.compressor is None
        if inner is None:
            inner = FEDAVG
            if self._hangs_on_rounds:
                inner = self._default(SHORT)
        if isinstance(inner, Strategy):
            self._ours = StatefulStrategy(inner, plan)
            self.inner: FlowerStrategy = FedAvg(**sampling)
        elif sampling:
            raise ConfigurationError(
                f"{', '.join(sampling)}: these are for strategies of fedpress; give them to "
                f"{type(inner).__name__}"
            )
        else:
            self.inner = inner
        self._weight = str(getattr(innermost(self.inner), "weighted_by_key", "num-examples"))
        self._models: tuple[Vector, Vector] | None = None  # the first, and the one before
        self._check_privacy()
        self._training = Training(self.is_masked)
        self._downloads = Counter[str]()
        self._spending = None if plan.privacy is None else Spending(plan.privacy)
        self._on_round: Callable[[RoundReport], None] | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = SHORT,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Flower's `Strategy.start`. A grid with a method `round_closed` is told every report.

        Another start on the same grid goes on where its `initial_arrays` are the model that the
        last one has returned, or `newest`: clients keep what they hold back. From any other model
        they begin anew.
        """
        self._on_round = getattr(grid, "round_closed", None)
        share = float(getattr(innermost(self.inner), "fraction_train", 1.0))
        model = model_of(initial_arrays).digest
        self._training = Training.begun(grid, self.plan.task, model, is_masked=self.is_masked)
        self._begin(num_rounds, math.ceil(share * len(list(grid.get_node_ids()))))
        start = super().start
        if type(self.inner).start is not FlowerStrategy.start:
            start = self._as_inner().start
        try:
            result = start(
                grid=Arriving(grid, self._again),
                initial_arrays=initial_arrays,
                num_rounds=num_rounds,
                timeout=timeout,
                train_config=train_config,
                evaluate_config=evaluate_config,
                evaluate_fn=None if evaluate_fn is None else self._of_served(evaluate_fn),
            )
        finally:
            ends = [initial_arrays if self.newest is None else self.newest, self.average]
            self._training.models = frozenset(
                model_of(arrays).digest for arrays in ends if arrays is not None
            )
        average = self.average
        if average is not None:
            result.arrays = average
        return result

    def _as_inner(self) -> FlowerStrategy:
        """The inner strategy, its attributes shared, as its own `start` is to find it: with the
        steps of this one."""
        kind = type(self.inner)
        steps = {name: staticmethod(getattr(self, name)) for name in _STEPS}
        wrapped: FlowerStrategy = object.__new__(type(kind.__name__, (kind,), steps))
        wrapped.__dict__ = self.inner.__dict__
        return wrapped

    def _begin(self, num_rounds: int, cohort: int) -> None:
        """Prepare for a run of so many rounds of some `cohort` clients."""
        self.newest = None
        if not self._training.goes_on:
            self._models = None
            if self._ours is not None:
                self._ours = StatefulStrategy(self._ours.strategy, self.plan)
        if self._hangs_on_rounds:
            self._ours = StatefulStrategy(self._default(num_rounds, cohort or None), self.plan)

    def _default(self, rounds: int, cohort: int | None = None) -> Strategy:
        is_restricted = self.plan.restricted and self.plan.privacy is None
        return default_strategy(
            rounds, cohort, is_masked=self.is_masked, is_restricted=is_restricted
        )

    def _of_served(self, evaluate: Evaluate) -> Evaluate:
        """`evaluate` of the average, once there is one."""

        def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            average = self.average
            return evaluate(server_round, arrays if average is None else average)

        return evaluated

    @property
    def average(self) -> ArrayRecord | None:
        """The average of the rounds' models; None if the strategy has none, or not yet."""
        vector = None if self._ours is None else self._ours.average
        if vector is None or self.newest is None:
            return None
        arrays = {name: array.numpy() for name, array in self.newest.items()}
        return moved(arrays, envelope.spec_of(arrays), vector)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self._spending is not None:
            return []  # what clients measure has no noise
        with seeded(self.plan.seed, server_round, "evaluate"):
            return list(self.inner.configure_evaluate(server_round, arrays, config, grid))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        ordered = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        measured = [reply for reply in ordered if self._has_measured(reply)]
        if ordered and not measured:
            return None
        return self.inner.aggregate_evaluate(server_round, measured)

    def _has_measured(self, reply: Message) -> bool:
        """False for a client that measured on no example, whose weight of 0 Flower cannot take."""
        if reply.has_error():
            return True
        return all(
            metrics.get(self._weight) != 0 for metrics in reply.content.metric_records.values()
        )

    def _asked(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the messages that the inner strategy would send to its clients."""
        with seeded(self.plan.seed, server_round, "train"):
            messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        if self._spending is None or not messages:
            return messages
        minimum, seed = self.plan.minimum, self.plan.seed
        nodes = grid.get_node_ids()
        return self._spending.chosen(messages, nodes, server_round, minimum=minimum, seed=seed)

    def _check_privacy(self) -> None:
        """Raise IncompatiblePlan for privacy terms that the strategies cannot keep."""
        terms = self.plan.privacy
        if terms is None:
            return
        if terms.needs_masks and not self.is_masked:
            raise IncompatiblePlan(
                "privacy terms of the distributed lane in uploads without masks, where the noise "
                "of one client alone would be all that hides its update",
                hint="use MaskedStrategy; or set privacy.lane to central, where the server is "
                "trusted, or to local",
            )
        if self.is_masked and not terms.needs_masks:
            raise IncompatiblePlan(
                f"privacy.lane is {terms.lane} under masks, where clients share the noise",
                hint="leave privacy.lane out, or use FedpressStrategy",
            )
        if terms.lane == "central" and self._ours is None:
            raise IncompatiblePlan(
                f"{type(self.inner).__name__} is given each client's model, and the noise of the "
                "central lane is for their sum",
                hint="choose a strategy of fedpress's that takes the mean, such as "
                'fedpress.strategies.from_config({"id": "fedavgm"})',
            )
        key = getattr(innermost(self.inner), "train_loss_key", None)
        if key is not None:
            raise IncompatiblePlan(
                f"{type(self.inner).__name__} goes by {key!r}, which clients measure on their data "
                "and would send without noise",
                hint="choose another strategy, such as FedAvg",
            )

    def _again(self, reply: Message) -> Message | None:
        """The message to send to a client in the place of the one that it could not read."""
        return None

    def _count(self, messages: Iterable[Message]) -> None:
        """Add the models in these messages to the downloads."""
        for message in messages:
            for record in message.content.array_records.values():
                size = num_bytes(record)
                self._downloads["all"] += size
                if (
                    envelope.MODEL in record
                    and record[envelope.MODEL].stype == envelope.MODEL_STYPE
                ):
                    self._downloads["coded"] += size
                    if envelope.BASE in cast(ConfigRecord, message.content[envelope.RECORD]):
                        self._downloads["difference"] += size

    def _models_beside(self, here: Round) -> dict[str, ArrayRecord]:
        """The records of `_vectors_beside`."""
        return {
            name: record_of(vector, here.model.spec)
            for name, vector in self._vectors_beside(here).items()
        }

    def _vectors_beside(self, here: Round) -> dict[str, Vector]:
        """The models [size] that clients need beside the round's; called once a round."""
        first = here.model.parameters if self._models is None else self._models[0]
        before = here.model.parameters if self._models is None else self._models[1]
        self._models = (first, here.model.parameters)
        return here.beside(first, before)

    def _tell(self, report: RoundReport) -> None:
        self.reports.append(report)
        if self._on_round is not None:
            self._on_round(report)
        for node, reason in report.dropped.items():
            _log.warning("round %d: node %d dropped: %s", report.round, node, reason)


def layers(strategy: Any) -> Iterator[Any]:
    """A strategy, and those that it is wrapped around, as the ones for differential privacy are."""
    yield strategy
    while isinstance(strategy := getattr(strategy, "strategy", None), FlowerStrategy):
        yield strategy


def innermost(strategy: Any) -> Any:
    *_, inner = layers(strategy)
    return inner


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, str) else f"a {type(value).__name__}"


def _in_the_place_of(value: object, wrapper: str) -> str:
    """What to write instead."""
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, Plan):
        return f"write {wrapper}(plan=Plan(...)), or {wrapper}(inner, Plan(...))"
    if is_compressor(value):
        return f"write {wrapper}(plan=Plan({kind.__name__}(...)))"
    if isinstance(value, str):
        return f'write {wrapper}(from_config({{"id": {value!r}}}), ...), of fedpress.strategies'
    if kind.__module__.startswith("flwr.server."):
        return (
            f"{kind.__name__} is of Flower's older API: take that of flwr.serverapp.strategy, if "
            "it has one, and Flower's Message API"
        )
    return f"write {wrapper}(FedAvg(...), plan), for example"


def with_figures(metrics: MetricRecord | None, report: RoundReport) -> MetricRecord:
    """`metrics` with those of the round's report."""
    figures: dict[str, int | float] = {
        "fedpress-upload-bytes": report.upload_bytes,
        "fedpress-included": len(report.included),
        "fedpress-dropped": len(report.dropped),
        "fedpress-download-bytes": report.download_bytes,
    }
    if math.isfinite(report.nmse):
        figures["fedpress-nmse"] = report.nmse
    if report.session_up_bytes or report.session_down_bytes:
        figures["fedpress-session-bytes"] = report.session_up_bytes + report.session_down_bytes
    if report.privacy is not None:
        figures["fedpress-epsilon"] = report.privacy.epsilon
    return MetricRecord({**(metrics or {}), **figures})
