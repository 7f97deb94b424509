"""What a step reads of a task's history without reading all of it: what each client has done, and
which models were measured anew."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_LARGEST = 1e15

_GIVEN = """
INSERT INTO participants (task, client_id, given, delivered)
SELECT a.task, a.client_id, COUNT(*), COUNT(u.assignment)
FROM assignments a LEFT JOIN uploads u ON u.assignment = a.assignment
WHERE a.task = :task GROUP BY a.task, a.client_id
"""
_OTHERS = """
INSERT INTO participants (task, client_id, given, delivered)
SELECT DISTINCT e.task, e.client_id, 0, 0 FROM evaluations e WHERE e.task = :task
AND NOT EXISTS (SELECT 1 FROM participants p WHERE p.task = e.task AND p.client_id = e.client_id)
"""
_EXAMPLES = """
SELECT a.client_id, u.num_examples, u.received_at, NULL FROM assignments a
JOIN uploads u ON u.assignment = a.assignment
WHERE a.task = :task AND u.num_examples > 0 ORDER BY u.received_at
"""
_LOSSES = """
SELECT a.client_id, u.loss, u.received_at, NULL FROM assignments a
JOIN uploads u ON u.assignment = a.assignment
WHERE a.task = :task AND u.loss IS NOT NULL ORDER BY u.received_at
"""
_MEASURED = """
SELECT e.client_id, m.value, e.reported_at, e.model FROM evaluations e
JOIN measures m ON m.task = e.task AND m.model = e.model AND m.client_id = e.client_id
WHERE e.task = :task AND m.metric = 'loss' AND m.value BETWEEN :least AND :most
ORDER BY e.reported_at
"""
_NEWEST = (
    (
        _EXAMPLES,
        "UPDATE participants SET num_examples = :value, examples_at = :at "
        "WHERE task = :task AND client_id = :client_id",
    ),
    (
        _LOSSES,
        "UPDATE participants SET loss = :value, loss_at = :at "
        "WHERE task = :task AND client_id = :client_id",
    ),
    (
        _MEASURED,
        "UPDATE participants SET measured_loss = :value, measured_at = :at, "
        "measured_model = :model WHERE task = :task AND client_id = :client_id",
    ),
)


def upgrade() -> None:
    op.create_table(
        "participants",
        sa.Column("task", sa.String(64), sa.ForeignKey("tasks.task"), primary_key=True),
        sa.Column("client_id", sa.String(64), sa.ForeignKey("clients.client_id"), primary_key=True),
        sa.Column("given", sa.Integer(), nullable=False),
        sa.Column("delivered", sa.Integer(), nullable=False),
        sa.Column("num_examples", sa.BigInteger()),
        sa.Column("examples_at", sa.Double()),
        sa.Column("loss", sa.Double()),
        sa.Column("loss_at", sa.Double()),
        sa.Column("measured_loss", sa.Double()),
        sa.Column("measured_at", sa.Double()),
        sa.Column("measured_model", sa.String(64)),
    )
    op.create_table(
        "measured_models",
        sa.Column("task", sa.String(64), sa.ForeignKey("tasks.task"), primary_key=True),
        sa.Column("model", sa.String(64), sa.ForeignKey("models.digest"), primary_key=True),
        sa.Column("change", sa.BigInteger(), nullable=False),
    )
    op.create_index("measured_models_by_change", "measured_models", ["task", "change"])
    op.create_index("rounds_by_base", "rounds", ["task", "base_model", "round", "attempt"])
    op.create_index("rounds_by_model", "rounds", ["task", "model", "round", "attempt"])
    stopped = sa.text("state = 'committed' AND reason <> ''")
    op.create_index(
        "rounds_stopped",
        "rounds",
        ["task", "round"],
        sqlite_where=stopped,
        postgresql_where=stopped,
    )
    connection = op.get_bind()
    connection.execute(
        sa.text(
            "INSERT INTO measured_models (task, model, change) "
            "SELECT DISTINCT task, model, 1 FROM evaluations"
        )
    )
    for task, config in connection.execute(sa.text("SELECT task, config FROM tasks")).all():
        if json.loads(config).get("selection", {}).get("policy", "first") != "first":
            _tell_participants(connection, task)


def _tell_participants(connection: sa.Connection, task: str) -> None:
    connection.execute(sa.text(_GIVEN), {"task": task})
    connection.execute(sa.text(_OTHERS), {"task": task})
    for query, update in _NEWEST:
        bounds = {"least": -_LARGEST, "most": _LARGEST} if query is _MEASURED else {}
        rows = [
            {"task": task, "client_id": client_id, "value": value, "at": at, "model": model}
            for client_id, value, at, model in connection.execute(
                sa.text(query), {"task": task, **bounds}
            )
        ]
        newest = {row["client_id"]: row for row in rows}
        if newest:
            connection.execute(sa.text(update), list(newest.values()))


def downgrade() -> None:
    for name in ("rounds_stopped", "rounds_by_model", "rounds_by_base"):
        op.drop_index(name, "rounds")
    for name in ("measured_models", "participants"):
        op.drop_table(name)
