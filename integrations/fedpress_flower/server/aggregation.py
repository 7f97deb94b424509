"""A strategy of ours in Flower's rounds: uploads to int64 sums, the sum to the next model."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
from flwr.app import ArrayRecord

from fedpress_compression.decode_add import decode_add
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.running_statistics import with_statistics, with_variances
from fedpress_compression.tensors import Vector
from fedpress_compression.update import Update
from fedpress_flower.server.arrays import moved
from fedpress_flower.server.plan import ANOTHER, NOT_THE_MEAN, Plan, needs_plain_mean
from fedpress_flower.server.rounds import Round
from fedpress_flower.server.spending import Spending
from fedpress_flower.server.uploads import Taken, Uploads
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.messages import AVERAGE
from fedpress_protocols.plan import MaskingTerms
from fedpress_protocols.upload import WITHIN_CLIP, Upload
from fedpress_strategies.private import check_private_strategy, has_own_noise
from fedpress_strategies.staleness import DiscountedMean
from fedpress_strategies.strategy import (
    AggregationSpace,
    Delta,
    OptimizerState,
    Strategy,
    Tally,
    UniformMean,
    WeightedMean,
    published,
)

_SMALLEST = FixedPoint(0, 1.0, 1)


class StatefulStrategy:
    """A strategy of ours, with its optimizer's state from round to round."""

    def __init__(self, strategy: Strategy, plan: Plan) -> None:
        terms = strategy.client_terms
        asked = sorted({*terms.of_trainer, *(("normalise",) if terms.normalise else ())})
        if asked or terms.personal:
            raise IncompatiblePlan(
                f"the strategy asks of its clients {', '.join(asked) or 'personal layers'}, which "
                "no Flower app knows of",
                hint="use Flower's own (FedProx), or run fedpress's server",
            )
        if strategy.symbol_aggregator is not None:
            raise IncompatiblePlan("a strategy that sums symbols runs on fedpress's server alone")
        if isinstance(strategy.aggregator(1, _SMALLEST), DiscountedMean):
            raise IncompatiblePlan(
                "the strategy counts uploads by how old their models are, and in Flower's rounds "
                "all are new",
                hint="choose fedavg or fedavgm, or give fedpress's server an asynchronous task",
            )
        if needs_plain_mean(plan) and not (
            strategy.aggregator is WeightedMean and getattr(strategy.optimizer, "is_plain", False)
        ):
            raise IncompatiblePlan(NOT_THE_MEAN, hint=ANOTHER)
        self.strategy = strategy
        self.state: OptimizerState | None = None
        self.master: Vector | None = None
        """The parameters in float32; the model's arrays may hold less."""
        self.momentum: float | None = None
        """The most of the open round's step, where a policy decides on it."""

    @property
    def average(self) -> Vector | None:
        """The average [size] that the strategy publishes; None if it does not, or not yet."""
        if self.state is None:
            return None
        return published(self.strategy.optimizer, self.state).get(AVERAGE)

    def begun(self, here: Uploads, spending: Spending | None = None) -> StreamedAggregation:
        """Raises IncompatiblePlan where the strategy needs more than a noised sum, and that is all
        there is."""
        check_private_strategy(here, self.strategy)
        if here.own is not None:
            self.master = here.own
        return StreamedAggregation(self, here, spending)

    def check_masked(self, masking: MaskingTerms) -> None:
        """Raises IncompatiblePlan unless the strategy needs no more than a sum of the updates."""
        if self.strategy.planned_aggregator is not None or not self.strategy.linear:
            raise IncompatiblePlan(
                "the strategy looks at updates one by one, and masking leaves nothing but their "
                "sum",
                hint="choose a strategy that takes the mean of the updates, such as fedavgm",
            )
        if masking.max_weight and self.strategy.aggregator is UniformMean:
            raise IncompatiblePlan(
                "the strategy counts all clients the same, and max_weight counts them by their "
                "examples; leave max_weight out"
            )

    def applied(self, here: Round, delta: Delta, tally: Tally) -> ArrayRecord:
        """The next model, by the round's update [size]."""
        spec = here.model.spec
        before = here.model.parameters
        if self.master is not None:
            before = with_statistics(spec, self.master, before)
        optimizer = self.strategy.optimizer
        state = optimizer.init(before) if self.state is None else self.state
        tally = replace(tally, spec=spec, momentum=self.momentum)
        after, self.state = optimizer.apply(before, delta, state, tally)
        after = with_variances(spec, before, after)
        self.master = after if any(t.dtype != "float32" for t in spec.trained) else None
        return moved(here.arrays, spec, after)


class StreamedAggregation:
    """One round's aggregation. A plain mean adds uploads as they arrive; an aggregator that may
    depend on their order gets them in the order of nodes, and their bodies wait until then."""

    def __init__(
        self, stateful: StatefulStrategy, here: Uploads, spending: Spending | None = None
    ) -> None:
        self._spending = spending if has_own_noise(here.plan) else None
        self._stateful, self._here, strategy = stateful, here, stateful.strategy
        bounds = here.plan.sum_bounds()
        if strategy.planned_aggregator is not None:
            self._sums = strategy.planned_aggregator(here.plan, here.public, AggregationSpace())
        else:
            self._sums = strategy.aggregator(here.model.spec.size, bounds)
        self._is_mean = type(self._sums) in (WeightedMean, UniformMean)
        self._waiting: dict[int, bytes] = {}

    def add(self, update: Update, upload: Taken) -> None:
        """Raises InvalidUpdate, and then nothing was added."""
        self._sums.add(update, upload.examples, upload.report)

    def add_body(self, node: int, body: bytes, upload: Taken) -> None:
        """Add the update of `body`, or keep `body`; raises InvalidUpdate, and then neither was
        done. Sets the weight and the report of `upload`."""
        here = self._here
        if not self._is_mean:
            here.updated(here.read(body, upload))
            self._waiting[node] = body
            return
        if self._spending is not None:  # its norm is to be within the clip
            self.add(here.updated(here.read(body, upload)), upload)
            return
        mean, own, plan = cast(WeightedMean, self._sums), here.format, here.plan
        examples, report, symbols = Upload.find(
            body, own.layouts, 0, own.contexts, plan.report, plan.sketch
        )
        here.weigh(upload, examples, report)
        with np.errstate(over="ignore", invalid="ignore"):  # as in `updated`
            decode_add(symbols, own.compressor, here.public, mean.sums, mean.weight_of(examples))

    def result(self) -> ArrayRecord:
        """The next model."""
        here = self._here
        for node in sorted(self._waiting):
            taken = here.taken[node]
            self.add(here.updated(here.read(self._waiting[node], taken)), taken)
        uploads = [here.taken[node] for node in sorted(here.taken)]
        total = sum(upload.examples for upload in uploads)
        means = {
            name: sum(upload.examples * upload.report[name] for upload in uploads) / max(total, 1)
            for name in here.plan.report
        }
        delta: Delta
        if self._spending is None:
            delta = self._sums.result()
        else:
            digests = [here.bodies[node][1] for node in sorted(here.taken)]
            delta = self._spending.mean(here, cast(WeightedMean, self._sums), digests)
            if WITHIN_CLIP in means:
                del means[WITHIN_CLIP]  # of which no more than a noised count is used
                within = [upload.report[WITHIN_CLIP] for upload in uploads]
                self._spending.adapt(here.plan, within, digests)
        return self._stateful.applied(here, delta, Tally(len(uploads), means))
