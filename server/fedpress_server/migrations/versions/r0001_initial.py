"""The first schema: clients, tasks, rounds, uploads."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "enrolment_tokens",
        sa.Column("token_id", sa.String(length=64), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("uses", sa.Integer(), nullable=False),
        sa.Column("used", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("token_id"),
        sa.UniqueConstraint("token_hash"),
    )
    op.create_table(
        "models",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.String(length=64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "clients",
        sa.Column("client_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("public_key", sa.LargeBinary(length=32), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("token_id", sa.String(length=64), nullable=False),
        sa.Column("enrolled_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["token_id"],
            ["enrolment_tokens.token_id"],
        ),
        sa.PrimaryKeyConstraint("client_id"),
        sa.UniqueConstraint("key_id"),
    )
    op.create_table(
        "tasks",
        sa.Column("task", sa.String(length=64), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("model", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.String(length=64), nullable=False),
        sa.Column("optimizer_state", sa.String(length=64), nullable=True),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("max_body_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["model"],
            ["models.digest"],
        ),
        sa.PrimaryKeyConstraint("task"),
    )
    op.create_table(
        "evaluations",
        sa.Column("task", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=64), nullable=False),
        sa.Column("client_id", sa.String(length=64), nullable=False),
        sa.Column("num_examples", sa.BigInteger(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["client_id"],
            ["clients.client_id"],
        ),
        sa.ForeignKeyConstraint(
            ["model"],
            ["models.digest"],
        ),
        sa.ForeignKeyConstraint(
            ["task"],
            ["tasks.task"],
        ),
        sa.PrimaryKeyConstraint("task", "model", "client_id"),
    )
    op.create_table(
        "rounds",
        sa.Column("task", sa.String(length=64), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("base_model", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=64), nullable=True),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("minimum", sa.Integer(), nullable=False),
        sa.Column("assigned", sa.Integer(), nullable=False),
        sa.Column("received", sa.Integer(), nullable=False),
        sa.Column("included", sa.Integer(), nullable=False),
        sa.Column("num_examples", sa.BigInteger(), nullable=False),
        sa.Column("upload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("wire_upload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("download_bytes", sa.BigInteger(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["base_model"],
            ["models.digest"],
        ),
        sa.ForeignKeyConstraint(
            ["model"],
            ["models.digest"],
        ),
        sa.ForeignKeyConstraint(
            ["task"],
            ["tasks.task"],
        ),
        sa.PrimaryKeyConstraint("task", "round", "attempt"),
    )
    op.create_table(
        "assignments",
        sa.Column("assignment", sa.String(length=64), nullable=False),
        sa.Column("task", sa.String(length=64), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(length=64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("profile", sa.String(length=64), nullable=False),
        sa.Column("assigned_at", sa.Double(), nullable=False),
        sa.Column("receipt", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["client_id"],
            ["clients.client_id"],
        ),
        sa.ForeignKeyConstraint(
            ["task", "round", "attempt"],
            ["rounds.task", "rounds.round", "rounds.attempt"],
        ),
        sa.PrimaryKeyConstraint("assignment"),
        sa.UniqueConstraint("task", "round", "attempt", "client_id"),
        sa.UniqueConstraint("task", "round", "attempt", "position"),
    )
    op.create_table(
        "round_events",
        sa.Column("task", sa.String(length=64), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("event", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["task", "round", "attempt"],
            ["rounds.task", "rounds.round", "rounds.attempt"],
        ),
        sa.PrimaryKeyConstraint("task", "round", "attempt", "seq"),
    )
    op.create_table(
        "uploads",
        sa.Column("assignment", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_examples", sa.BigInteger(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["assignment"],
            ["assignments.assignment"],
        ),
        sa.PrimaryKeyConstraint("assignment"),
    )


def downgrade() -> None:
    op.drop_table("uploads")
    op.drop_table("round_events")
    op.drop_table("assignments")
    op.drop_table("rounds")
    op.drop_table("evaluations")
    op.drop_table("tasks")
    op.drop_table("clients")
    op.drop_table("models")
    op.drop_table("enrolment_tokens")
