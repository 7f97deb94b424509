"""What Prometheus scrapes; every app has a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fedpress_protocols.policies.course import Course

_SIZES = tuple(4.0**power * 64 for power in range(13))
_STALENESS = (0, *(2**power for power in range(8)))


class Metrics:
    """Counters and histograms by what they count; labels never name a device."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Histogram(
            "fedpress_http_request_duration_seconds",
            "Requests by route and status; long polls are long.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.uploads = Counter(
            "fedpress_uploads",
            "Uploads by what became of the request.",
            ("task", "result"),
            registry=self.registry,
        )
        self.upload_size = Histogram(
            "fedpress_upload_bytes",
            "Body bytes of the uploads received.",
            ("task",),
            buckets=_SIZES,
            registry=self.registry,
        )
        self.parts = Counter(
            "fedpress_upload_parts",
            "Parts of uploads by what became of the request.",
            ("task", "result"),
            registry=self.registry,
        )
        self.download_bytes = Counter(
            "fedpress_download_bytes",
            "Model bytes sent.",
            registry=self.registry,
        )
        self.downloaded = Counter(
            "fedpress_download_form_bytes",
            "Model bytes sent, by form: plain, coded whole, or a coded difference.",
            ("form",),
            registry=self.registry,
        )
        self.transaction_retries = Counter(
            "fedpress_tx_retries",
            "Transactions that were run again: a lock, a deadlock or a connection was lost.",
            registry=self.registry,
        )
        self.commit_batch = Histogram(
            "fedpress_commit_batch_size",
            "Writes that went into one commit.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self.bytes_in_flight = Gauge(
            "fedpress_bytes_in_flight",
            "Upload bytes held in memory now.",
            registry=self.registry,
        )
        self.waiting = Gauge(
            "fedpress_waiting_check_ins",
            "Check-ins held until there is news.",
            registry=self.registry,
        )
        self.rounds = Counter(
            "fedpress_rounds",
            "Attempts at rounds by how they ended.",
            ("task", "outcome"),
            registry=self.registry,
        )
        self.round_number = Gauge(
            "fedpress_round_number",
            "The round that the task is at.",
            ("task",),
            registry=self.registry,
        )
        self.fold_seconds = Histogram(
            "fedpress_fold_seconds",
            "From the last upload to the next model.",
            ("task",),
            registry=self.registry,
        )
        self.lease_expired = Counter(
            "fedpress_lease_expired",
            "Jobs taken over from a worker whose lease ran out.",
            registry=self.registry,
        )
        self.jobs_abandoned = Counter(
            "fedpress_jobs_abandoned",
            "Jobs that failed too often, and their rounds with them.",
            registry=self.registry,
        )
        self.staleness = Histogram(
            "fedpress_included_staleness",
            "Of uploads in models of asynchronous tasks: how many models their own was behind.",
            ("task",),
            buckets=_STALENESS,
            registry=self.registry,
        )
        self.dropped_out = Counter(
            "fedpress_session_dropouts",
            "Clients of masked sessions that had not answered a step at its deadline.",
            ("task", "step"),
            registry=self.registry,
        )
        self.session_seconds = Histogram(
            "fedpress_session_duration_seconds",
            "Masked sessions from their beginning until the last step was over.",
            ("task",),
            registry=self.registry,
        )
        self.refused = Counter(
            "fedpress_refused_requests",
            "Requests answered with a problem, by its type.",
            ("type",),
            registry=self.registry,
        )
        self.closed_connections = Counter(
            "fedpress_closed_connections",
            "Connections closed because the other end was slow, silent or unintelligible.",
            ("reason",),
            registry=self.registry,
        )

        self.policy_warnings = Counter(
            "fedpress_policy_warnings",
            "Findings of a task's divergence guard.",
            ("task",),
            registry=self.registry,
        )
        self.policy_rung = Gauge(
            "fedpress_policy_rung",
            "The gentlest and the hardest profile of the task's round, from 0 on.",
            ("task", "end"),
            registry=self.registry,
        )
        self.progress = Gauge(
            "fedpress_probe_progress",
            "How far compressed updates went along the reference's direction in the last probe.",
            ("task",),
            registry=self.registry,
        )

    def follow(self, task: str, course: Course) -> None:
        """What policies made of a round that opens."""
        self.policy_warnings.labels(task).inc(len(course.warnings))
        self.policy_rung.labels(task, "gentlest").set(course.gentlest)
        self.policy_rung.labels(task, "hardest").set(course.hardest)

    def text(self) -> bytes:
        return generate_latest(self.registry)
