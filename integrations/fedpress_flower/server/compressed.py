"""A Flower strategy around any of Flower's, or of one of ours, whose clients upload compressed.

    strategy = FedpressStrategy(FedAvg(fraction_train=0.1), Plan(ErrorFeedback(TopK(0.01))))
    strategy.start(grid, initial_arrays, num_rounds=20)

`FedpressStrategy(fraction_train=0.1)` has the default of docs/auto.md: rates, strategy, downlink.

What the inner strategy sends gains the round's plan and, for a client whose last upload has had its
fate, the receipt; what comes back is decoded as it arrives. A strategy of Flower's is then given
whole models, as if nothing had been compressed. One of ours aggregates as our server does, in int64
fixed point, in memory that does not grow with the cohort.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
)
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from fedpress_compression.compressor import members
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_flower import envelope
from fedpress_flower.server.arrays import model_of, record_of, retyped
from fedpress_flower.server.automatic import Rates
from fedpress_flower.server.downlink import Downlink
from fedpress_flower.server.plan import (
    ANOTHER,
    NO_ANSWER,
    NOT_THE_MEAN,
    PROFILE,
    Plan,
    RoundReport,
    needs_plain_mean,
)
from fedpress_flower.server.uploads import Uploads, asked_in, parts_of
from fedpress_flower.server.wrapping import Wrapping, innermost, layers, with_figures
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.messages import DownlinkTerms, Receipt
from fedpress_protocols.plan import Profile
from fedpress_strategies.robust import common_support
from fedpress_strategies.strategy import Strategy

DOWNLOAD_BYTES = "fedpress-download-bytes"
_COORDINATEWISE = (FedMedian, FedTrimmedAvg, Bulyan)
_CLIPPED_BY_CLIENTS = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
)
_log = logging.getLogger(__name__)


def _holds_back(made: Any) -> bool:
    """Whether the compressor, or one within it, adds to an update what earlier ones left out."""
    return made.keeps_residual or any(map(_holds_back, members(made)))


class FedpressStrategy(Wrapping):
    """`inner` chooses clients and configures them; if it is one of ours, an instance of FedAvg made
    with `sampling` (fraction_train, min_train_nodes, weighted_by_key, ...) does.

    A client that fails, answers with NaN, other tensors or nothing, is in the round's report with
    the reason, and the round goes on without it. To a strategy of Flower's it is one that failed:
    those for differential privacy then skip the round, as their noise is for all who were asked.

    Without a compressor in the plan each round has the rate that `auto` chooses (docs/auto.md), and
    models go down coded unless `downlink` is False, where True
    stands for its default terms; without `inner` besides, the strategy is the
    default's, server momentum and the average of the rounds' models.

    With a `downlink` models go down coded, to train and to evaluate: what clients get lies on a
    grid, as near to the strategy's own parameters as the terms allow, and the rest waits for later
    rounds. `Result.arrays` is the model that clients have. Clients run `compression_mod` around
    both functions; one that does not is sent the arrays, after a failure at first.

    Every round adds fedpress-upload-bytes, fedpress-download-bytes, fedpress-nmse,
    fedpress-included and fedpress-dropped to Flower's metrics of training, and
    fedpress-download-bytes to those of evaluation; `reports` has all of it.
    """

    def __init__(
        self,
        inner: FlowerStrategy | Strategy | None = None,
        plan: Plan | None = None,
        *,
        downlink: DownlinkTerms | bool | None = None,
        **sampling: Any,
    ) -> None:
        plan = Plan() if plan is None else plan
        super().__init__(inner, plan, sampling)
        if plan.restricted:
            raise IncompatiblePlan(
                "training restricted to what is sent, which is for masked rounds",
                hint="leave `restricted` out of the plan, or use MaskedStrategy",
            )
        self._rates = None
        if plan.compressor is None:
            self._rates = Rates(plan.auto, of_default=self._hangs_on_rounds)
        if not isinstance(downlink, DownlinkTerms | bool | None):
            raise ConfigurationError(
                f"downlink is {downlink!r}, where DownlinkTerms(...), True or False is due"
            )
        self._check_clipping()
        if downlink is True or (downlink is None and self._rates is not None):
            downlink = DownlinkTerms()
        takes_the_mean = type(self.inner).aggregate_train is FedAvg.aggregate_train
        if needs_plain_mean(plan) and (not takes_the_mean or downlink):
            raise IncompatiblePlan(NOT_THE_MEAN, hint=ANOTHER)
        self._downlink = Downlink(downlink, plan.task) if downlink else None
        needed = getattr(innermost(self.inner), "train_loss_key", None)
        self._needed = frozenset() if needed is None else frozenset({str(needed)})
        self._open: Uploads | None = None

    def _check_clipping(self) -> None:
        """Raise IncompatiblePlan where clients clip before they add what they held back."""
        compressor = self.plan.compressor
        clipping = [s for s in layers(self.inner) if isinstance(s, _CLIPPED_BY_CLIENTS)]
        if not clipping or not (compressor is None or _holds_back(compressor)):
            return
        name = type(clipping[0]).__name__
        raise IncompatiblePlan(
            f"{name} counts on clients that send no more than they clipped, and error feedback, "
            "which the plan has, adds to a clipped update what earlier ones left out: the noise "
            "would be too small for it",
            hint=f"use {name.replace('ClientSide', 'ServerSide')}, a compressor without "
            "error_feedback, such as Plan(TopK(0.02)), or fedpress's Plan(privacy=...)",
        )

    def summary(self) -> None:
        _log.info("compressed by %s", self.plan.compressor or "auto")
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        published = arrays if self._downlink is None else self._downlink.published(arrays)
        own = arrays if self._downlink is None else self._downlink.own
        messages = self._asked(server_round, own, config, grid)
        self._open = None
        if not messages:
            return messages
        report = () if self._ours is None else self._ours.strategy.report
        profile, sketch = self._profile(server_round, own, len(messages), grid)
        if self._ours is not None and self._rates is not None:
            self._ours.momentum = self._rates.momentum
        here = Uploads.opened(
            self.plan,
            server_round,
            published,
            messages,
            self._models,
            profile,
            self._training,
            report=report,
            spending=self._spending,
            sketch=sketch,
        )
        here.needed = self._needed
        if self._downlink is not None:
            here.own = model_of(own).parameters
        if isinstance(innermost(self.inner), _COORDINATEWISE):
            common_support(here.plan, here.public)  # refuses coordinates that clients choose
        here.accumulator = None if self._ours is None else self._ours.begun(here, self._spending)
        beside, training = self._vectors_beside(here), self._training
        self._open = here
        for message in messages:
            node = message.metadata.dst_node_id
            record = here.record(node, training.receipts.get(node), self._weight)
            if asks := training.asks.get(node):
                record[envelope.RECEIPTS] = [self._answered(node, each) for each in asks]
            message.content = RecordDict(
                {**message.content, here.key: published, envelope.RECORD: record}
            )
        self._send(messages, here.key, beside, here.model.spec)
        return messages

    def _begin(self, num_rounds: int, cohort: int) -> None:
        super()._begin(num_rounds, cohort)
        if self._rates is not None:
            self._rates.begin(num_rounds)

    def _profile(
        self, server_round: int, arrays: ArrayRecord, size: int, grid: Grid
    ) -> tuple[Profile, int]:
        """The round's, and in a probe the cells of a sketch."""
        if self._rates is not None:
            spec, population = model_of(arrays).spec, len(list(grid.get_node_ids()))
            return self._rates.opened(server_round, spec, size, population)
        assert self.plan.compressor is not None  # noqa: S101 - else there are rates
        return Profile(name=PROFILE, compressor=self.plan.compressor), 0

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        published = arrays if self._downlink is None else self._downlink.published(arrays)
        messages = list(super().configure_evaluate(server_round, published, config, grid))
        self._downloads.clear()
        keys = {key for message in messages for key in message.content.array_records}
        if len(keys) == 1:
            self._send(messages, keys.pop(), {}, model_of(published).spec)
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        answers = list(replies)
        for reply in answers:
            if reply.has_content() and envelope.RECORD in reply.content:
                content = {n: each for n, each in reply.content.items() if n != envelope.RECORD}
                reply.content = RecordDict(content)
        metrics = super().aggregate_evaluate(server_round, answers)
        if self._rates is not None:
            self._rates.evaluated(server_round, metrics)
        if metrics is not None and self._downloads:
            metrics = MetricRecord({**metrics, DOWNLOAD_BYTES: self._downloads["all"]})
        return metrics

    def _send(
        self, messages: list[Message], key: str, beside: Mapping[str, Vector], spec: ModelSpec
    ) -> None:
        """Give the messages the models `beside`, code what goes down, and count it."""
        self._downloads.clear()
        if self._downlink is not None:
            self._downlink.send(messages, key, beside)
        else:
            records = {name: record_of(vector, spec) for name, vector in beside.items()}
            for message in messages:
                message.content = RecordDict({**message.content, **records})
        self._count(messages)

    def _again(self, reply: Message) -> Message | None:
        message = None if self._downlink is None else self._downlink.again(reply)
        if message is not None:
            self._count([message])
        return message

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        here, self._open = self._open, None
        if here is None:
            return self.inner.aggregate_train(server_round, list(replies))
        for reply in replies:
            here.take(reply, self._weight)
            start = self._training.start
            asks = () if reply.has_error() else asked_in(reply, start, server_round)
            self._training.asks[reply.metadata.src_node_id] = asks
        here.drop_the_odd()
        if capped := here.capped & here.taken.keys():
            _log.warning(
                "round %d: %d clients, the first of them node %d, have more examples than the "
                "plan's max_examples, and count as if they had %d: raise it to weight them by all",
                server_round,
                len(capped),
                min(capped),
                here.plan.fixed_point.max_examples,
            )
        if self._spending is not None:
            self._spending.count(here.may_have_sent, server_round)
        included = sorted(here.taken)
        if len(included) < self.plan.minimum:
            for node in included:
                here.drop(node, f"only {len(included)} of at least {self.plan.minimum} answered")
            included = []
        if here.accumulator is not None:
            arrays = here.accumulator.result() if included else None
            metrics = self._mean_metrics(here.metrics_of_all()) if included else None
        else:
            arrays, metrics = self.inner.aggregate_train(server_round, here.answers())
            arrays = None if arrays is None else retyped(arrays, here.arrays)
        if self._downlink is not None and arrays is not None:
            arrays = self._downlink.step(arrays)
        if arrays is not None:
            self.newest = arrays
        metrics = self._with_means_of_some(here, metrics)
        if self._rates is not None:
            self._rates.trained(server_round, metrics)
        report = self._closed(here, included, arrays)
        return arrays, with_figures(metrics, report)

    def _answered(self, node: int, assignment: str) -> str:
        """Return the receipt (JSON) of an assignment's upload for `node`."""
        parts = parts_of(assignment)
        assert parts is not None  # noqa: S101 - else `asked_in` passed it over
        _, number, before = parts
        receipt = self._training.receipts.get(before)
        if receipt is None or receipt.assignment != assignment:
            receipt = Receipt(
                assignment=assignment,
                client_id=str(before),
                task=self.plan.task,
                round=number,
                attempt=1,
                outcome="not-included",
                reason="missed-deadline",
                upload=None,
                model=None,
                issued_at=0,
            )
        return receipt.model_copy(update={"client_id": str(node)}).model_dump_json()

    def _with_means_of_some(
        self, here: Uploads, metrics: MetricRecord | None
    ) -> MetricRecord | None:
        """`metrics` with the means of those that some left out, over the clients that have them;
        without them if the metrics are averaged by a function of the user's own."""
        for node, names in here.left_out.items():
            _log.warning(
                "round %d: node %d measured %s that is NaN or infinite; that is left out of the "
                "round's mean, its update is kept",
                here.plan.round,
                node,
                ", ".join(names),
            )
        average = getattr(innermost(self.inner), "train_metrics_aggr_fn", None)
        if metrics is None or average is not aggregate_metricrecords:
            return metrics
        for records in here.metrics_of_some(self._weight).values():
            if records:
                metrics = MetricRecord({**metrics, **(self._mean_metrics(records) or {})})
        return metrics

    def _mean_metrics(self, reported: list[MetricRecord]) -> MetricRecord:
        records = [RecordDict({"metrics": metrics}) for metrics in reported]
        average = innermost(self.inner).train_metrics_aggr_fn
        mean: MetricRecord = average(records, self._weight)
        return mean

    def _closed(
        self, here: Uploads, included: list[int], arrays: ArrayRecord | None
    ) -> RoundReport:
        """Settle with everybody who answered, and tell how the round went."""
        after = here.model.digest if arrays is None else model_of(arrays).digest
        if arrays is None:
            for node in included:
                here.drop(node, "the strategy made no model of this round")
            included = []
        for node, (assignment, digest) in here.bodies.items():
            is_in = node in here.taken
            self._training.receipts[node] = Receipt(
                assignment=assignment,
                client_id=str(node),
                task=here.plan.task,
                round=here.plan.round,
                attempt=here.plan.attempt,
                outcome="included" if is_in else "not-included",
                reason="included" if is_in else "declined",
                upload=digest if is_in else None,
                model=after if is_in else None,
                issued_at=0,
            )
        for node in here.asked:
            if node not in here.taken and node not in here.dropped:
                here.drop(node, NO_ANSWER)
        errors = [here.taken[node].error for node in included]
        errors = [error for error in errors if math.isfinite(error)]
        course = None
        if self._rates is not None:
            num_flat = sum(here.taken[node].is_flat for node in included)
            flat = num_flat, len(included)
            course = self._rates.closed(here.comparison(), here.upload_bytes, flat)
            if course is not None and course.why:
                _log.info("round %d: %s", course.round, course.why)
        report = RoundReport(
            round=here.plan.round,
            asked=tuple(sorted(here.asked)),
            included=tuple(included),
            dropped=dict(sorted(here.dropped.items())),
            upload_bytes=here.upload_bytes,
            nmse=math.fsum(errors) / len(errors) if errors else math.nan,
            num_examples=sum(here.taken[node].examples for node in included),
            model=after,
            download_bytes=self._downloads["all"],
            coded_download_bytes=self._downloads["coded"],
            difference_download_bytes=self._downloads["difference"],
            left_out=here.left_out,
            profile=here.plan.profiles[0].name,
            course=course,
            privacy=None if self._spending is None else self._spending.status(here.plan),
        )
        self._tell(report)
        return report
