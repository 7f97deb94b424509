"""The tables, as the newest migration leaves them."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

_TIME = sa.Double
_ID = sa.String(64)
_DIGEST = sa.String(64)

enrolment_tokens = sa.Table(
    "enrolment_tokens",
    metadata,
    sa.Column("token_id", _ID, primary_key=True),
    sa.Column("token_hash", _DIGEST, nullable=False, unique=True),
    sa.Column("uses", sa.Integer, nullable=False),
    sa.Column("used", sa.Integer, nullable=False),
    sa.Column("created_at", _TIME, nullable=False),
    sa.Column("expires_at", _TIME, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("approve_each", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("revoked_at", _TIME),
)

clients = sa.Table(
    "clients",
    metadata,
    sa.Column("client_id", _ID, primary_key=True),
    sa.Column("key_id", _ID, nullable=False, unique=True),
    sa.Column("public_key", sa.LargeBinary(32), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("token_id", _ID, sa.ForeignKey("enrolment_tokens.token_id"), nullable=False),
    sa.Column("enrolled_at", _TIME, nullable=False),
    sa.Column("revoked_at", _TIME),
    sa.Column("approval", sa.String(16), nullable=False, server_default="approved"),
    sa.Column("decided_at", _TIME),
    sa.Column("rotated_at", _TIME),
    sa.Column("seen_at", _TIME),
    sa.Column("agent", sa.Text, nullable=False, server_default=""),
    sa.Column("clock_ahead", sa.Double),
    sa.Index("clients_by_enrolment", "enrolled_at", "client_id"),
)

former_keys = sa.Table(
    "former_keys",
    metadata,
    sa.Column("key_id", _ID, primary_key=True),
    sa.Column("client_id", _ID, sa.ForeignKey("clients.client_id"), nullable=False),
    sa.Column("public_key", sa.LargeBinary(32), nullable=False),
    sa.Column("next_key_id", _ID, nullable=False),
    sa.Column("retired_at", _TIME, nullable=False),
    sa.Column("rotation", sa.JSON, nullable=False),
    sa.Index("former_keys_by_client", "client_id"),
)

models = sa.Table(
    "models",
    metadata,
    sa.Column("digest", _DIGEST, primary_key=True),
    sa.Column("spec", _DIGEST, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", _TIME, nullable=False),
)

tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column("task", _ID, primary_key=True),
    sa.Column("config", sa.Text, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("model", _DIGEST, sa.ForeignKey("models.digest"), nullable=False),
    sa.Column("spec", _DIGEST, nullable=False),
    sa.Column("optimizer_state", _DIGEST),
    sa.Column("published", sa.JSON),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("rounds", sa.Integer, nullable=False),
    sa.Column("max_body_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", _TIME, nullable=False),
    sa.Column("ended_at", _TIME),
    sa.Column("best", _DIGEST),
    sa.Column("reason", sa.Text),
    sa.Column("version", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("held_at", _TIME),
)

STOPPED = sa.text("state = 'committed' AND reason <> ''")
"""Of rounds: a task was stopped before its time after them."""

rounds = sa.Table(
    "rounds",
    metadata,
    sa.Column("task", _ID, sa.ForeignKey("tasks.task"), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("plan", sa.Text, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("base_model", _DIGEST, sa.ForeignKey("models.digest"), nullable=False),
    sa.Column("model", _DIGEST, sa.ForeignKey("models.digest")),
    sa.Column("published", sa.JSON),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("minimum", sa.Integer, nullable=False),
    sa.Column("assigned", sa.Integer, nullable=False),
    sa.Column("received", sa.Integer, nullable=False),
    sa.Column("included", sa.Integer, nullable=False),
    sa.Column("num_examples", sa.BigInteger, nullable=False),
    sa.Column("upload_bytes", sa.BigInteger, nullable=False),
    sa.Column("wire_upload_bytes", sa.BigInteger, nullable=False),
    sa.Column("download_bytes", sa.BigInteger, nullable=False),
    sa.Column("coded_download_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("difference_download_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("opened_at", _TIME, nullable=False),
    sa.Column("deadline", _TIME, nullable=False),
    sa.Column("closed_at", _TIME),
    sa.Column("session", sa.JSON),
    sa.Column("course", sa.JSON(none_as_null=True)),
    sa.Column("num_figures", sa.Integer, nullable=False, server_default="0"),
    sa.Column("nmse_sum", sa.Double, nullable=False, server_default="0"),
    sa.Column("residual_sum", sa.Double, nullable=False, server_default="0"),
    sa.Column("norm_sum", sa.Double, nullable=False, server_default="0"),
    sa.Column("train_sum", sa.Double, nullable=False, server_default="0"),
    sa.Column("compress_sum", sa.Double, nullable=False, server_default="0"),
    sa.Column("num_flat", sa.Integer, nullable=False, server_default="0"),
    sa.Column("update_norm", sa.Double),
    sa.Column("strategy_figures", sa.JSON),
    sa.Index("rounds_by_base", "task", "base_model", "round", "attempt"),
    sa.Index("rounds_by_model", "task", "model", "round", "attempt"),
    sa.Index("rounds_stopped", "task", "round", sqlite_where=STOPPED, postgresql_where=STOPPED),
)

OPEN = sa.text("receipt IS NULL")
"""Of assignments: their rounds' plans are in use."""
_OF_ROUND = (["task", "round", "attempt"], ["rounds.task", "rounds.round", "rounds.attempt"])

bases = sa.Table(
    "bases",
    metadata,
    sa.Column("task", _ID, sa.ForeignKey("tasks.task"), primary_key=True),
    sa.Column("client_id", _ID, sa.ForeignKey("clients.client_id"), primary_key=True),
    sa.Column("digest", _DIGEST, nullable=False),
)

round_events = sa.Table(
    "round_events",
    metadata,
    sa.Column("task", _ID, primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", _TIME, nullable=False),
    sa.Column("event", sa.JSON, nullable=False),
    sa.ForeignKeyConstraint(*_OF_ROUND),
)

assignments = sa.Table(
    "assignments",
    metadata,
    sa.Column("assignment", _ID, primary_key=True),
    sa.Column("task", _ID, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("client_id", _ID, sa.ForeignKey("clients.client_id"), nullable=False),
    sa.Column("position", sa.Integer, nullable=False),
    sa.Column("profile", _ID, nullable=False),
    sa.Column("assigned_at", _TIME, nullable=False),
    sa.Column("receipt", sa.Text),
    sa.Column("turn", sa.Integer, nullable=False, server_default="0"),
    sa.ForeignKeyConstraint(*_OF_ROUND),
    sa.Index("ix_assignments_client_id_task", "client_id", "task"),
    sa.Index("assignments_open", "task", sqlite_where=OPEN, postgresql_where=OPEN),
    sa.UniqueConstraint("task", "round", "attempt", "client_id", "turn"),
    sa.UniqueConstraint("task", "round", "attempt", "position"),
)

uploads = sa.Table(
    "uploads",
    metadata,
    sa.Column("assignment", _ID, sa.ForeignKey("assignments.assignment"), primary_key=True),
    sa.Column("digest", _DIGEST, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("num_examples", sa.BigInteger, nullable=False),
    sa.Column("received_at", _TIME, nullable=False),
    sa.Column("loss", sa.Double),
    sa.Column("began_at", _TIME),
    sa.Column("seconds", sa.Double),
)

declines = sa.Table(
    "declines",
    metadata,
    sa.Column("assignment", _ID, sa.ForeignKey("assignments.assignment"), primary_key=True),
    sa.Column("task", _ID, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("reason", sa.String(32), nullable=False),
    sa.Column("needed_seconds", sa.Double),
    sa.Index("declines_by_round", "task", "round", "attempt"),
)

partial_uploads = sa.Table(
    "partial_uploads",
    metadata,
    sa.Column("partial", _ID, primary_key=True),
    sa.Column("assignment", _ID, sa.ForeignKey("assignments.assignment"), nullable=False),
    sa.Column("trip", sa.String(8), nullable=False),
    sa.Column("max_bytes", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("digest", _DIGEST, nullable=False),
    sa.Column("num_parts", sa.Integer, nullable=False),
    sa.Column("expires_at", _TIME, nullable=False),
    sa.UniqueConstraint("assignment", "trip"),
)

partial_parts = sa.Table(
    "partial_parts",
    metadata,
    sa.Column("partial", _ID, sa.ForeignKey("partial_uploads.partial"), primary_key=True),
    sa.Column("start", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("digest", _DIGEST, nullable=False),
)

session_messages = sa.Table(
    "session_messages",
    metadata,
    sa.Column("assignment", _ID, sa.ForeignKey("assignments.assignment"), primary_key=True),
    sa.Column("step", sa.String(16), primary_key=True),
    sa.Column("digest", _DIGEST, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

evaluations = sa.Table(
    "evaluations",
    metadata,
    sa.Column("task", _ID, sa.ForeignKey("tasks.task"), primary_key=True),
    sa.Column("model", _DIGEST, sa.ForeignKey("models.digest"), primary_key=True),
    sa.Column("client_id", _ID, sa.ForeignKey("clients.client_id"), primary_key=True),
    sa.Column("num_examples", sa.BigInteger, nullable=False),
    sa.Column("reported_at", _TIME, nullable=False),
    sa.Column("group_name", _ID),
)

_REPORT = ["task", "model", "client_id"]
_OF_REPORT = (_REPORT, [f"evaluations.{name}" for name in _REPORT])

measures = sa.Table(
    "measures",
    metadata,
    sa.Column("task", _ID, primary_key=True),
    sa.Column("model", _DIGEST, primary_key=True),
    sa.Column("client_id", _ID, primary_key=True),
    sa.Column("metric", _ID, primary_key=True),
    sa.Column("value", sa.Double, nullable=False),
    sa.ForeignKeyConstraint(*_OF_REPORT),
)

class_counts = sa.Table(
    "class_counts",
    metadata,
    sa.Column("task", _ID, primary_key=True),
    sa.Column("model", _DIGEST, primary_key=True),
    sa.Column("client_id", _ID, primary_key=True),
    sa.Column("label", _ID, primary_key=True),
    sa.Column("num_examples", sa.BigInteger, nullable=False),
    sa.Column("correct", sa.BigInteger, nullable=False),
    sa.ForeignKeyConstraint(*_OF_REPORT),
)

measured_models = sa.Table(
    "measured_models",
    metadata,
    sa.Column("task", _ID, sa.ForeignKey("tasks.task"), primary_key=True),
    sa.Column("model", _DIGEST, sa.ForeignKey("models.digest"), primary_key=True),
    sa.Column("change", sa.BigInteger, nullable=False),
    sa.Index("measured_models_by_change", "task", "change"),
)

participants = sa.Table(
    "participants",
    metadata,
    sa.Column("task", _ID, sa.ForeignKey("tasks.task"), primary_key=True),
    sa.Column("client_id", _ID, sa.ForeignKey("clients.client_id"), primary_key=True),
    sa.Column("given", sa.Integer, nullable=False),
    sa.Column("delivered", sa.Integer, nullable=False),
    sa.Column("num_examples", sa.BigInteger),
    sa.Column("examples_at", _TIME),
    sa.Column("loss", sa.Double),
    sa.Column("loss_at", _TIME),
    sa.Column("measured_loss", sa.Double),
    sa.Column("measured_at", _TIME),
    sa.Column("measured_model", _DIGEST),
)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("task", _ID, primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("batch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("start", sa.Integer, nullable=False),
    sa.Column("stop", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("lease_token", sa.String(32)),
    sa.Column("lease_expiry", _TIME, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("output", _DIGEST),
    sa.ForeignKeyConstraint(*_OF_ROUND),
    sa.Index("jobs_by_lease_expiry", "state", "lease_expiry"),
)

waiting = sa.Table(
    "waiting",
    metadata,
    sa.Column("task", _ID, sa.ForeignKey("tasks.task"), primary_key=True),
    sa.Column("client_id", _ID, sa.ForeignKey("clients.client_id"), primary_key=True),
    sa.Column("is_eligible", sa.Boolean, nullable=False),
    sa.Column("seen_at", _TIME, nullable=False),
    sa.Column("looks", sa.BigInteger, nullable=False),
    sa.Column("uplink", sa.Double),
    sa.Index("waiting_by_time", "seen_at"),
)

request_nonces = sa.Table(
    "request_nonces",
    metadata,
    sa.Column("key_id", _ID, primary_key=True),
    sa.Column("nonce", sa.String(64), primary_key=True),
    sa.Column("expires", sa.BigInteger, nullable=False),
    sa.Index("request_nonces_by_expiry", "expires"),
)

schema_releases = sa.Table(
    "schema_releases",
    metadata,
    sa.Column("revision", sa.String(32), primary_key=True),
    sa.Column("release", sa.String(64), nullable=False),
)

server_keys = sa.Table(
    "server_keys",
    metadata,
    sa.Column("purpose", sa.String(16), primary_key=True),
    sa.Column("public_key", sa.LargeBinary(32), nullable=False),
)

noise_secrets = sa.Table(
    "noise_secrets",
    metadata,
    sa.Column("task", sa.ForeignKey("tasks.task"), primary_key=True),
    sa.Column("secret", sa.LargeBinary(32), nullable=False),
)
"""The secret that the noise of a task's sums is derived from."""

server_key_successions = sa.Table(
    "server_key_successions",
    metadata,
    sa.Column("public_key", sa.LargeBinary(32), primary_key=True),
    sa.Column("successor", sa.LargeBinary(32), nullable=False, unique=True),
    sa.Column("statement", sa.Text, nullable=False),
    sa.Column("active_at", sa.Double),
)

model_versions = sa.Table(
    "model_versions",
    metadata,
    sa.Column("task", _ID, sa.ForeignKey("tasks.task"), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("model", _DIGEST, sa.ForeignKey("models.digest"), nullable=False, index=True),
    sa.Column("parent", _DIGEST),
    sa.Column("published", sa.JSON, nullable=False),
    sa.Column("updates", sa.JSON, nullable=False),
    sa.Column("num_updates", sa.Integer, nullable=False),
    sa.Column("config", _DIGEST, nullable=False),
    sa.Column("code", _ID, nullable=False),
    sa.Column("created_at", _TIME, nullable=False),
)

alias_moves = sa.Table(
    "alias_moves",
    metadata,
    sa.Column("task", _ID, sa.ForeignKey("tasks.task"), primary_key=True),
    sa.Column("alias", _ID, primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("moved_at", _TIME, nullable=False),
    sa.Column("undone_at", _TIME),
)

model_files = sa.Table(
    "model_files",
    metadata,
    sa.Column("digest", _DIGEST, sa.ForeignKey("models.digest"), primary_key=True),
    sa.Column("brought_at", _TIME),
    sa.Column("collected_at", _TIME),
)

backups = sa.Table(
    "backups",
    metadata,
    sa.Column("backup", _ID, primary_key=True),
    sa.Column("began_at", _TIME, nullable=False),
    sa.Column("holds_until", _TIME, nullable=False),
    sa.Column("finished_at", _TIME),
)

restores = sa.Table(
    "restores",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("epoch", _ID, nullable=False),
    sa.Column("backup_at", sa.BigInteger, nullable=False),
    sa.Column("restored_at", sa.BigInteger, nullable=False),
    sa.Column("open_rounds", sa.JSON, nullable=False),
)

undone = sa.Table(
    "undone",
    metadata,
    sa.Column("number", sa.Integer, sa.ForeignKey("restores.number"), primary_key=True),
    sa.Column("assignment", _ID, primary_key=True),
    sa.Column("task", _ID, nullable=False),
    sa.Column("client_id", _ID, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("model", _DIGEST),
    sa.Column("reported_at", _TIME, nullable=False),
)

operators = sa.Table(
    "operators",
    metadata,
    sa.Column("operator_id", _ID, primary_key=True),
    sa.Column("token_hash", _DIGEST, nullable=False, unique=True),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("created_at", _TIME, nullable=False),
    sa.Column("created_by", sa.String(80), nullable=False),
    sa.Column("expires_at", _TIME, nullable=False),
    sa.Column("revoked_at", _TIME),
)

audit_log = sa.Table(
    "audit_log",
    metadata,
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("actor", sa.String(80), nullable=False),
    sa.Column("action", sa.String(64), nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("details", sa.Text, nullable=False),
    sa.Column("previous", _DIGEST, nullable=False),
    sa.Column("hash", _DIGEST, nullable=False),
)

servers = sa.Table(
    "servers",
    metadata,
    sa.Column("server_id", _ID, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("seen_at", _TIME, nullable=False),
    sa.Column("log_level", sa.String(16), nullable=False),
    sa.Column("next_log_level", sa.String(16)),
    sa.Column("fleet", sa.JSON, nullable=False),
    sa.Column("host", sa.Text, nullable=False, server_default=""),
    sa.Column("version", sa.Text, nullable=False, server_default=""),
    sa.Column("holder", sa.Text, nullable=False, server_default=""),
    sa.Column("started_at", _TIME, nullable=False, server_default="0"),
    sa.Column("lag", sa.Double, nullable=False, server_default="0"),
)
