"""What Prometheus scrapes; every app has a registry of its own.

Labels never name a device, and none takes more values than there are tasks, routes or answers.
What is counted was done by this process, so that sums over servers are right. What is true of a
task every server says, each as it knows: there the newest, `max by (task)`, is right. Gauges of the
latter kind are set as they are asked for, by `sources`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

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

from fedpress_protocols.policies import Course
from fedpress_server.observing.series import Counters, Histograms

_GIB = 2**30
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 86400)
_SKEWS = (0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_LINKS = tuple(each * 10.0**power for power in range(3, 9) for each in (1, 2, 5))
_SIZES = tuple(4.0**power * 64 for power in range(13))
_STALENESS = (0, *(2**power for power in range(8)))
_MEASURED = 0.01
"""Seconds that a body must have taken to tell anything of its link."""


class Metrics:
    """Counters and histograms by what they count."""

    def __init__(self, *, price: float = 0.0, currency: str = "EUR") -> None:
        """`price` of a GiB that is sent, in `currency`."""
        self.registry = registry = CollectorRegistry()
        self.since = time.time()
        """Unix seconds."""
        self.price, self.currency = price, currency
        self.sources: list[Callable[[], None]] = []
        """Called before the figures are collected, in the event loop's thread."""

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, registry=registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(name, about, labels, registry=registry)

        def seconds(name: str, about: str, *labels: str) -> Histogram:
            return Histogram(name, about, labels, registry=registry, buckets=_LONG)

        # Requests

        self.requests = Histograms(
            "fedpress_http_request_duration_seconds",
            "Requests by route and status; long polls are long.",
            ("method", "route", "status"),
            _SECONDS,
            registry,
        )
        self.refused = counter(
            "fedpress_refused_requests", "Requests answered with a problem, by its type.", "type"
        )
        self.auth_failures = counter(
            "fedpress_auth_failures", "Requests of strangers, by what they lacked.", "reason"
        )
        self.operator_refusals = counter(
            "fedpress_operator_refusals",
            "Requests to the operators' API that were refused, by what was wrong with the token.",
            "reason",
        )
        self.closed_connections = counter(
            "fedpress_closed_connections",
            "Connections closed because the other end was slow, silent or unintelligible.",
            "reason",
        )
        self.waiting = gauge("fedpress_waiting_check_ins", "Check-ins held until there is news.")
        self.clock_skew = Histograms(
            "fedpress_client_clock_skew_seconds",
            "How far devices' clocks are from the server's, their requests' way included.",
            ("side",),
            _SKEWS,
            registry,
        )

        # Uploads

        self.uploads = Counters(
            "fedpress_uploads",
            "Uploads by what became of the request.",
            ("task", "result"),
            registry,
        )
        self.upload_size = Histograms(
            "fedpress_upload_bytes",
            "Body bytes of the uploads received.",
            ("task",),
            _SIZES,
            registry,
        )
        self.parts = Counters(
            "fedpress_upload_parts",
            "Parts of uploads by what became of the request.",
            ("task", "result"),
            registry,
        )
        self.staged_bytes = Counters(
            "fedpress_staged_bytes", "Body bytes of uploads that were staged.", ("task",), registry
        )
        self.staged_float32_bytes = Counters(
            "fedpress_staged_float32_bytes",
            "What the same updates would have come to in float32.",
            ("task",),
            registry,
        )
        self.uplink = Histograms(
            "fedpress_uplink_bits_per_second",
            "Speed at which bodies came, of those that took 10 ms or longer.",
            (),
            _LINKS,
            registry,
        )
        self.uplink_unmeasured = Counters(
            "fedpress_uplink_unmeasured",
            "Bodies that came within 10 ms, which tells nothing of their link.",
            (),
            registry,
        )
        self.bytes_in_flight = gauge("fedpress_bytes_in_flight", "Upload bytes held in memory now.")
        self.bytes_in_flight_limit = gauge(
            "fedpress_bytes_in_flight_limit", "Upload bytes that may be held in memory."
        )

        # What is sent

        self.egress = Counters(
            "fedpress_egress_bytes",
            "Bytes sent, headers among them: downloads, and all other answers.",
            ("kind",),
            registry,
        )
        registry.register(_Cost(self))
        self.download_bytes = counter("fedpress_download_bytes", "Model bytes sent.")
        self.downloaded = counter(
            "fedpress_download_form_bytes",
            "Model bytes sent, by form: plain, coded whole, or a coded difference.",
            "form",
        )

        # The database and the disk

        self.transaction_retries = counter(
            "fedpress_tx_retries",
            "Transactions that were run again: a lock, a deadlock or a connection was lost.",
            "tx",
        )
        self.commit_batch = Histogram(
            "fedpress_commit_batch_size",
            "Writes that went into one commit.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=registry,
        )
        self.connections = gauge(
            "fedpress_db_pool_connections", "Connections to the database, by use.", "state"
        )
        self.waiting_writes = gauge(
            "fedpress_db_waiting_writes", "Writes that wait for the next commit."
        )
        self.wal_bytes = gauge("fedpress_wal_bytes", "Length of SQLite's write-ahead log.")
        self.disk_free = gauge(
            "fedpress_disk_free_bytes",
            "Room for this server on the disks of its data folder and of others that it watches.",
            "folder",
        )
        self.disk_size = gauge("fedpress_disk_size_bytes", "Size of that disk.", "folder")

        # Rounds

        self.rounds = counter(
            "fedpress_rounds", "Attempts at rounds by how they ended.", "task", "outcome"
        )
        self.round_seconds = seconds(
            "fedpress_round_duration_seconds",
            "Attempts at rounds, by the phase that took so long; all of them together are total.",
            "task",
            "phase",
        )
        self.round_number = gauge("fedpress_round_number", "The round that the task is at.", "task")
        self.model_version = gauge(
            "fedpress_model_version", "The newest version of the task's model.", "task"
        )
        self.round_state = gauge(
            "fedpress_round_state", "1 for the phase of a running task's round.", "task", "phase"
        )
        self.round_deadline = gauge(
            "fedpress_round_deadline_timestamp_seconds",
            "When the time of the task's round is up (Unix time).",
            "task",
        )
        self.participants = gauge(
            "fedpress_round_participants",
            "Assignments of the task's round, by what became of them.",
            "task",
            "state",
        )
        self.declined = counter(
            "fedpress_declined",
            "Assignments that devices gave back, by the reason that they state.",
            "task",
            "reason",
        )
        self.tasks = gauge("fedpress_tasks", "Tasks by their state.", "state")
        self.staleness = Histogram(
            "fedpress_included_staleness",
            "Of uploads in models of asynchronous tasks: how many models their own was behind.",
            ("task",),
            buckets=_STALENESS,
            registry=registry,
        )
        self.dropped_out = counter(
            "fedpress_session_dropouts",
            "Clients of masked sessions that had not answered a step at its deadline.",
            "task",
            "step",
        )
        self.session_failures = counter(
            "fedpress_session_failures",
            "Pairs of clients of masked sessions of which one could not open the other's shares.",
            "task",
        )
        self.session_suspects = counter(
            "fedpress_session_suspects",
            "Clients that masked sessions named for wrong shares; a round's status has names.",
            "task",
        )
        self.session_seconds = seconds(
            "fedpress_session_duration_seconds",
            "Masked sessions from their beginning until the last step was over.",
            "task",
        )

        # Jobs

        self.fold_seconds = seconds(
            "fedpress_fold_seconds", "Folds of staged uploads into the next model.", "task"
        )
        self.job_seconds = seconds(
            "fedpress_fold_job_seconds", "Jobs under a lease that were done, by kind.", "kind"
        )
        self.lease_expired = counter(
            "fedpress_lease_expired", "Jobs taken over from a worker whose lease ran out."
        )
        self.jobs_abandoned = counter(
            "fedpress_jobs_abandoned", "Jobs that failed too often, and their rounds with them."
        )

        # Policies

        self.policy_warnings = counter(
            "fedpress_policy_warnings", "Findings of a task's divergence guard.", "task"
        )
        self.policy_rung = gauge(
            "fedpress_policy_rung",
            "The gentlest and the hardest profile of the task's round, from 0 on.",
            "task",
            "end",
        )
        self.progress = gauge(
            "fedpress_probe_progress",
            "How far compressed updates went along the reference's direction in the last probe.",
            "task",
        )

        # The process

        self.build = gauge("fedpress_build_info", "1 for this server.", "version", "role")
        ProcessCollector(registry=registry)

    def follow(self, task: str, course: Course) -> None:
        """What policies made of a round that opens."""
        self.policy_warnings.labels(task).inc(len(course.warnings))
        self.policy_rung.labels(task, "gentlest").set(course.gentlest)
        self.policy_rung.labels(task, "hardest").set(course.hardest)

    def arrived(self, num_bytes: int, seconds: float) -> None:
        """A body, or a part of one, was on its way for so long."""
        if seconds < _MEASURED:
            self.uplink_unmeasured.labels().inc()
        else:
            self.uplink.labels().observe(8 * num_bytes / seconds)

    def staged(self, task: str, num_bytes: int, num_values: int) -> None:
        """A body stands for an update of so many values."""
        self.staged_bytes.labels(task).value += num_bytes
        self.staged_float32_bytes.labels(task).value += 4 * num_values

    def skewed(self, seconds: float) -> None:
        """A device's clock is so far ahead of the server's, or behind it."""
        self.clock_skew.labels("ahead" if seconds > 0 else "behind").observe(abs(seconds))

    def cost(self, num_bytes: float) -> float:
        """Of sending so much."""
        return num_bytes / _GIB * self.price

    def text(self) -> bytes:
        for source in self.sources:
            source()
        return generate_latest(self.registry)


class _Cost(Collector):
    """What was sent, in money."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "fedpress_egress_cost",
            "What was sent at the price of the settings.",
            labels=("currency", "kind"),
        )
        metrics = self._metrics
        for (kind,), sent in metrics.egress:
            family.add_metric([metrics.currency, str(kind)], metrics.cost(sent.value))
        yield family
