"""Prometheus metrics; every app has its own registry.

Labels never name a device, and have at most as many values as there are tasks, routes or answers.
Counters count events of this process, so sum them over servers. Gauges of a task are reported by
every server that knows it: use the newest, `max by (task)`. `sources` sets these when scraped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from fedpress_protocols.messages import (
    DIVERGENCE_SIGNS,
    DivergenceSign,
    EvaluationReport,
    UploadFigures,
)
from fedpress_protocols.policies import Course
from fedpress_server.observing.series import Counters, Histograms
from fedpress_strategies.lora import AVERAGING_ERROR

_GIB = 2**30
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 86400)
_SKEWS = (0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_LINKS = tuple(each * 10.0**power for power in range(3, 9) for each in (1, 2, 5))
_SIZES = tuple(4.0**power * 64 for power in range(13))
_ERRORS = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 3.0, 10.0)
_RATIOS = (0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_NORMS = tuple(10.0 ** (power / 2) for power in range(-8, 9))
EVALUATED = ("loss", "accuracy")
"""The metrics with series of their own: a device chooses the names of all others."""
_STALENESS = (0, *(2**power for power in range(8)))
_MEASURED = 0.01
"""Minimum seconds of a body's transfer to measure its link."""


class Metrics:
    """All counters, gauges and histograms of a server."""

    def __init__(self, *, price: float = 0.0, currency: str = "EUR") -> None:
        """`price` of a sent GiB in `currency`."""
        self.registry = CollectorRegistry()
        self.since = time.time()
        """Unix seconds."""
        self.price, self.currency = price, currency
        self.sources: list[Callable[[], None]] = []
        """Callbacks before collection, in the event loop's thread."""

        self._make_requests()
        self._make_uploads()
        self._make_updates()
        self._make_links()
        self._make_egress()
        self._make_storage()
        self._make_evaluations()
        self._make_rounds()
        self._make_assignments()
        self._make_sessions()
        self._make_jobs()
        self._make_policies()
        self._make_process()

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(name, about, labels, registry=self.registry)

    def _seconds(self, name: str, about: str, *labels: str) -> Histogram:
        return Histogram(name, about, labels, registry=self.registry, buckets=_LONG)

    def _make_requests(self) -> None:
        self.requests = Histograms(
            "fedpress_http_request_duration_seconds",
            "Requests by route and status; long polls are long.",
            ("method", "route", "status"),
            _SECONDS,
            self.registry,
        )
        self.refused = self._counter(
            "fedpress_refused_requests", "Requests answered with a problem, by its type.", "type"
        )
        self.auth_failures = self._counter(
            "fedpress_auth_failures", "Unauthenticated requests, by reason.", "reason"
        )
        self.operator_refusals = self._counter(
            "fedpress_operator_refusals",
            "Refused requests to the operators' API, by the fault of the token.",
            "reason",
        )
        self.closed_connections = self._counter(
            "fedpress_closed_connections",
            "Connections closed because the peer was slow, silent or sent invalid data.",
            "reason",
        )
        self.waiting = self._gauge(
            "fedpress_waiting_check_ins", "Check-ins waiting in a long poll."
        )
        self.clock_skew = Histograms(
            "fedpress_client_clock_skew_seconds",
            "Difference of devices' clocks to the server's, transit time included.",
            ("side",),
            _SKEWS,
            self.registry,
        )

    def _make_uploads(self) -> None:
        self.uploads = Counters(
            "fedpress_uploads",
            "Uploads by the outcome of the request.",
            ("task", "result"),
            self.registry,
        )
        self.upload_size = Histograms(
            "fedpress_upload_bytes",
            "Body bytes of the uploads received.",
            ("task",),
            _SIZES,
            self.registry,
        )
        self.parts = Counters(
            "fedpress_upload_parts",
            "Parts of uploads by the outcome of the request.",
            ("task", "result"),
            self.registry,
        )
        self.staged_bytes = Counters(
            "fedpress_staged_bytes",
            "Body bytes of uploads that were staged.",
            ("task",),
            self.registry,
        )
        self.staged_float32_bytes = Counters(
            "fedpress_staged_float32_bytes",
            "Size of the same updates in float32.",
            ("task",),
            self.registry,
        )

    def _make_updates(self) -> None:
        self.update_nmse = Histograms(
            "fedpress_update_nmse",
            "What compression left unsent of an update and its residual: squared norms' ratio.",
            ("task",),
            _ERRORS,
            self.registry,
        )
        self.residual_ratio = Histograms(
            "fedpress_residual_ratio",
            "Norm of a device's residual relative to its update's.",
            ("task",),
            _RATIOS,
            self.registry,
        )
        self.update_norm = Histograms(
            "fedpress_update_norm",
            "L2 norm of an update before compression.",
            ("task",),
            _NORMS,
            self.registry,
        )
        self.device_seconds = Histograms(
            "fedpress_device_seconds",
            "Seconds that a device took for a round's step: train, compress.",
            ("task", "step"),
            _LONG,
            self.registry,
        )

    def _make_links(self) -> None:
        self.uplink = Histograms(
            "fedpress_uplink_bits_per_second",
            "Receive rate of bodies that took 10 ms or longer.",
            (),
            _LINKS,
            self.registry,
        )
        self.uplink_unmeasured = Counters(
            "fedpress_uplink_unmeasured",
            "Bodies received within 10 ms, too fast to measure their link.",
            (),
            self.registry,
        )
        self.bytes_in_flight = self._gauge(
            "fedpress_bytes_in_flight", "Upload bytes in memory now."
        )
        self.bytes_in_flight_limit = self._gauge(
            "fedpress_bytes_in_flight_limit", "Maximum upload bytes in memory."
        )

    def _make_egress(self) -> None:
        self.egress = Counters(
            "fedpress_egress_bytes",
            "Bytes sent, including headers: downloads, and all other answers.",
            ("kind",),
            self.registry,
        )
        self.registry.register(_Cost(self))
        self.download_bytes = self._counter("fedpress_download_bytes", "Model bytes sent.")
        self.downloaded = self._counter(
            "fedpress_download_form_bytes",
            "Model bytes sent, by form: plain, coded whole, or a coded difference.",
            "form",
        )

    def _make_storage(self) -> None:
        self.transaction_retries = self._counter(
            "fedpress_tx_retries",
            "Retried transactions, by reason: lock timeout, deadlock or lost connection.",
            "tx",
        )
        for tx in ("read", "write"):  # a series that begins with its first event has no rate of it
            self.transaction_retries.labels(tx)
        self.commit_batch = Histogram(
            "fedpress_commit_batch_size",
            "Writes per commit (group commit).",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self.connections = self._gauge(
            "fedpress_db_pool_connections", "Connections to the database, by use.", "state"
        )
        self.waiting_writes = self._gauge(
            "fedpress_db_waiting_writes", "Writes waiting for the next commit."
        )
        self.wal_bytes = self._gauge("fedpress_wal_bytes", "Length of SQLite's write-ahead log.")
        self.disk_free = self._gauge(
            "fedpress_disk_free_bytes",
            "Free disk space for this server, of its data folder and other watched folders.",
            "folder",
        )
        self.disk_size = self._gauge("fedpress_disk_size_bytes", "Size of that disk.", "folder")

    def _make_evaluations(self) -> None:
        self.evaluated_examples = Counters(
            "fedpress_evaluated_examples",
            "Examples by which devices evaluated models, by the metric they reported.",
            ("task", "metric"),
            self.registry,
        )
        self.evaluated_sum = Counters(
            "fedpress_evaluated_sum",
            "Sum of the metric over those examples: divided by their number, its mean.",
            ("task", "metric"),
            self.registry,
        )

    def _make_rounds(self) -> None:
        self.rounds = self._counter(
            "fedpress_rounds", "Attempts at rounds by outcome.", "task", "outcome"
        )
        self.round_seconds = self._seconds(
            "fedpress_round_duration_seconds",
            "Duration of attempts at rounds by phase; the whole is total.",
            "task",
            "phase",
        )
        self.round_number = self._gauge(
            "fedpress_round_number", "The current round of the task.", "task"
        )
        self.privacy_epsilon = self._gauge(
            "fedpress_privacy_epsilon",
            "Epsilon spent by the device that took part most often, before the open round; whom it "
            "covers is in the round's status.",
            "task",
        )
        self.model_version = self._gauge(
            "fedpress_model_version", "The newest version of the task's model.", "task"
        )
        self.round_state = self._gauge(
            "fedpress_round_state", "1 for the phase of a running task's round.", "task", "phase"
        )
        self.round_deadline = self._gauge(
            "fedpress_round_deadline_timestamp_seconds",
            "Deadline of the task's round (Unix time).",
            "task",
        )

    def _make_assignments(self) -> None:
        self.participants = self._gauge(
            "fedpress_round_participants",
            "Assignments of the task's round, by state.",
            "task",
            "state",
        )
        self.declined = self._counter(
            "fedpress_declined",
            "Declined assignments, by the stated reason.",
            "task",
            "reason",
        )
        self.tasks = self._gauge("fedpress_tasks", "Tasks by their state.", "state")
        self.staleness = Histogram(
            "fedpress_included_staleness",
            "Staleness of included uploads of asynchronous tasks, in model versions.",
            ("task",),
            buckets=_STALENESS,
            registry=self.registry,
        )

    def _make_sessions(self) -> None:
        self.dropped_out = self._counter(
            "fedpress_session_dropouts",
            "Clients of masked sessions that missed the deadline of a phase.",
            "task",
            "step",
        )
        self.session_failures = self._counter(
            "fedpress_session_failures",
            "Pairs of clients of masked sessions in which one could not open the other's shares.",
            "task",
        )
        self.session_suspects = self._counter(
            "fedpress_session_suspects",
            "Clients of masked sessions with wrong shares; a round's status has their ids.",
            "task",
        )
        self.session_seconds = self._seconds(
            "fedpress_session_duration_seconds",
            "Duration of masked sessions.",
            "task",
        )

    def _make_jobs(self) -> None:
        self.fold_seconds = self._seconds(
            "fedpress_fold_seconds",
            "Duration of aggregating staged uploads into the next model.",
            "task",
        )
        self.job_seconds = self._seconds(
            "fedpress_fold_job_seconds", "Duration of completed jobs, by kind.", "kind"
        )
        self.lease_expired = self._counter(
            "fedpress_lease_expired", "Jobs taken over from a worker whose lease ran out."
        )
        self.jobs_abandoned = self._counter(
            "fedpress_jobs_abandoned",
            "Jobs that failed too often and were abandoned with their rounds.",
        )

    def _make_policies(self) -> None:
        self.policy_warnings = self._counter(
            "fedpress_policy_warnings", "Warnings of a task's divergence guard.", "task"
        )
        self.divergence = self._gauge(
            "fedpress_divergence",
            "1 for a sign of divergence that a running task's newest rounds show, else 0.",
            "task",
            "sign",
        )
        self.policy_rung = self._gauge(
            "fedpress_policy_rung",
            "Least and most compressed profile of the task's round, from 0.",
            "task",
            "end",
        )
        self.progress = self._gauge(
            "fedpress_probe_progress",
            "Progress of compressed updates along those before compression in the last probe.",
            "task",
        )
        self.averaging_error = self._gauge(
            "fedpress_averaging_error",
            "Relative error of the last round's mean factors of LoRA against the mean product.",
            "task",
        )

    def _make_process(self) -> None:
        self.build = self._gauge("fedpress_build_info", "1 for this server.", "version", "role")
        ProcessCollector(registry=self.registry)

    def follow(self, task: str, course: Course) -> None:
        """Record the policies' decisions for a new round."""
        self.policy_warnings.labels(task).inc(len(course.warnings))
        self.policy_rung.labels(task, "gentlest").set(course.gentlest)
        self.policy_rung.labels(task, "hardest").set(course.hardest)

    def aggregated(self, task: str, figures: Mapping[str, float]) -> None:
        """Record a strategy's figures of a round."""
        if AVERAGING_ERROR in figures:
            self.averaging_error.labels(task).set(figures[AVERAGING_ERROR])

    def warned(self, warnings: Mapping[str, Mapping[DivergenceSign, str]]) -> None:
        """Set the signs of divergence by running task."""
        self.divergence.clear()
        for task, by_sign in warnings.items():
            for sign in DIVERGENCE_SIGNS:
                self.divergence.labels(task, sign).set(sign in by_sign)

    def arrived(self, num_bytes: int, seconds: float) -> None:
        """Record the transfer time of a body or of a part."""
        if seconds < _MEASURED:
            self.uplink_unmeasured.labels().inc()
        else:
            self.uplink.labels().observe(8 * num_bytes / seconds)

    def measured(self, task: str, figures: UploadFigures) -> None:
        """Record what a device measured of its update."""
        for name, histogram in (
            ("nmse", self.update_nmse),
            ("residual", self.residual_ratio),
            ("norm", self.update_norm),
        ):
            value = getattr(figures, name)
            if value is not None:
                histogram.labels(task).observe(value)
        for step in ("train", "compress"):
            if (seconds := getattr(figures, step)) is not None:
                self.device_seconds.labels(task, step).observe(seconds)

    def evaluated(self, task: str, report: EvaluationReport) -> None:
        """Record a device's evaluation."""
        for metric in EVALUATED:
            if metric in report.metrics:
                examples = report.num_examples
                self.evaluated_examples.labels(task, metric).inc(examples)
                self.evaluated_sum.labels(task, metric).inc(examples * report.metrics[metric])

    def staged(self, task: str, num_bytes: int, num_values: int) -> None:
        """Record a staged body and the number of values of its update."""
        self.staged_bytes.labels(task).value += num_bytes
        self.staged_float32_bytes.labels(task).value += 4 * num_values

    def skewed(self, seconds: float) -> None:
        """Record the offset of a device's clock to the server's."""
        self.clock_skew.labels("ahead" if seconds > 0 else "behind").observe(abs(seconds))

    def cost(self, num_bytes: float) -> float:
        """The cost of sending this number of bytes."""
        return num_bytes / _GIB * self.price

    def text(self) -> bytes:
        for source in self.sources:
            source()
        return generate_latest(self.registry)


class _Cost(Collector):
    """The cost of sent bytes as a metric."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "fedpress_egress_cost",
            "Cost of sent bytes at the configured price.",
            labels=("currency", "kind"),
        )
        metrics = self._metrics
        for (kind,), sent in metrics.egress:
            family.add_metric([metrics.currency, str(kind)], metrics.cost(sent.value))
        yield family
