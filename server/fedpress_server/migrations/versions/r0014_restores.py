"""Backups under way, restores, and the uploads that a restore undid."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "backups",
        sa.Column("backup", sa.String(64), primary_key=True),
        sa.Column("began_at", sa.Double(), nullable=False),
        sa.Column("holds_until", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double()),
    )
    op.create_table(
        "restores",
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.String(64), nullable=False),
        sa.Column("backup_at", sa.BigInteger(), nullable=False),
        sa.Column("restored_at", sa.BigInteger(), nullable=False),
        sa.Column("open_rounds", sa.JSON(), nullable=False),
    )
    op.create_table(
        "undone",
        sa.Column("number", sa.Integer(), sa.ForeignKey("restores.number"), primary_key=True),
        sa.Column("assignment", sa.String(64), primary_key=True),
        sa.Column("task", sa.String(64), nullable=False),
        sa.Column("client_id", sa.String(64), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(64)),
        sa.Column("reported_at", sa.Double(), nullable=False),
    )


def downgrade() -> None:
    for name in ("undone", "restores", "backups"):
        op.drop_table(name)
