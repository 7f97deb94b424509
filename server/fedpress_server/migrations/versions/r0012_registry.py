"""Versions of models with their lineage, aliases, which models' files were given up, held tasks.

What was committed before gets its versions here; which code and config made it is not known.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_OF_ROUND = ("task", "round", "attempt")


def upgrade() -> None:
    op.create_table(
        "model_versions",
        sa.Column("task", sa.String(64), sa.ForeignKey("tasks.task"), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("model", sa.String(64), sa.ForeignKey("models.digest"), nullable=False),
        sa.Column("parent", sa.String(64)),
        sa.Column("published", sa.JSON, nullable=False),
        sa.Column("updates", sa.JSON, nullable=False),
        sa.Column("num_updates", sa.Integer, nullable=False),
        sa.Column("config", sa.String(64), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_index("ix_model_versions_model", "model_versions", ["model"])
    op.create_table(
        "alias_moves",
        sa.Column("task", sa.String(64), sa.ForeignKey("tasks.task"), primary_key=True),
        sa.Column("alias", sa.String(64), primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("moved_at", sa.Double, nullable=False),
        sa.Column("undone_at", sa.Double),
    )
    op.create_table(
        "model_files",
        sa.Column("digest", sa.String(64), sa.ForeignKey("models.digest"), primary_key=True),
        sa.Column("brought_at", sa.Double),
        sa.Column("collected_at", sa.Double),
    )
    op.add_column("tasks", sa.Column("held_at", sa.Double(), nullable=True))
    _versions_so_far()


def downgrade() -> None:
    op.drop_column("tasks", "held_at")
    op.drop_table("model_files")
    op.drop_table("alias_moves")
    op.drop_index("ix_model_versions_model", "model_versions")
    op.drop_table("model_versions")


def _versions_so_far() -> None:
    connection = op.get_bind()
    versions = sa.table(
        "model_versions",
        *(sa.column(name) for name in ("task", "version", "attempt", "model", "parent")),
        *(sa.column(name, sa.JSON) for name in ("published", "updates")),
        *(sa.column(name) for name in ("num_updates", "config", "code", "created_at")),
    )
    tasks = sa.table("tasks", *map(sa.column, ("task", "config", "created_at")))
    rounds = sa.table(
        "rounds",
        *map(sa.column, (*_OF_ROUND, "base_model", "model", "closed_at", "opened_at")),
        sa.column("published", sa.JSON),
    )
    assignments = sa.table("assignments", *map(sa.column, ("assignment", "task", "receipt")))
    unknown = {"config": "0" * 64, "code": ""}
    for task, config, created_at in connection.execute(sa.select(tasks)).all():
        included: dict[str, list[str]] = {}
        receipts = sa.select(assignments.c.receipt).where(
            assignments.c.task == task, assignments.c.receipt.is_not(None)
        )
        for text in connection.execute(receipts).scalars():
            receipt = json.loads(text)["receipt"]
            if receipt["outcome"] == "included":
                included.setdefault(receipt["model"], []).append(receipt["upload"])
        rows = [
            {
                **unknown,
                "task": task,
                "version": 0,
                "attempt": 0,
                "model": json.loads(config)["model"],
                "parent": None,
                "published": {},
                "updates": [],
                "num_updates": 0,
                "created_at": created_at,
            }
        ]
        committed = sa.select(rounds).where(rounds.c.task == task, rounds.c.model.is_not(None))
        for row in connection.execute(committed).all():
            updates = sorted(included.get(row.model, []))
            rows.append(
                {
                    **unknown,
                    "task": task,
                    "version": row.round,
                    "attempt": row.attempt,
                    "model": row.model,
                    "parent": row.base_model,
                    "published": row.published or {},
                    "updates": updates,
                    "num_updates": len(updates),
                    "created_at": row.closed_at or row.opened_at,
                }
            )
        connection.execute(sa.insert(versions), rows)
