"""Several servers on one database: versions of tasks, jobs under leases, who waits, nonces."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "tasks", sa.Column("version", sa.BigInteger(), nullable=False, server_default="0")
    )
    op.create_table(
        "jobs",
        sa.Column("task", sa.String(64), primary_key=True),
        sa.Column("round", sa.Integer(), primary_key=True),
        sa.Column("attempt", sa.Integer(), primary_key=True),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("batch", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("stop", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("lease_token", sa.String(32)),
        sa.Column("lease_expiry", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("output", sa.String(64)),
        sa.ForeignKeyConstraint(
            ["task", "round", "attempt"], ["rounds.task", "rounds.round", "rounds.attempt"]
        ),
    )
    op.create_index("jobs_by_lease_expiry", "jobs", ["state", "lease_expiry"])
    op.create_table(
        "waiting",
        sa.Column("task", sa.String(64), sa.ForeignKey("tasks.task"), primary_key=True),
        sa.Column("client_id", sa.String(64), sa.ForeignKey("clients.client_id"), primary_key=True),
        sa.Column("is_eligible", sa.Boolean(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("looks", sa.BigInteger(), nullable=False),
    )
    op.create_index("waiting_by_time", "waiting", ["seen_at"])
    op.create_table(
        "request_nonces",
        sa.Column("key_id", sa.String(64), primary_key=True),
        sa.Column("nonce", sa.String(64), primary_key=True),
        sa.Column("expires", sa.BigInteger(), nullable=False),
    )
    op.create_index("request_nonces_by_expiry", "request_nonces", ["expires"])


def downgrade() -> None:
    for name in ("request_nonces", "waiting", "jobs"):
        op.drop_table(name)
    op.drop_column("tasks", "version")
