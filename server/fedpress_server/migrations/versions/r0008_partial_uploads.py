"""Uploads by parts: how far each has come, and the parts that count."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "partial_uploads",
        sa.Column("partial", sa.String(length=64), nullable=False),
        sa.Column("assignment", sa.String(length=64), nullable=False),
        sa.Column("trip", sa.String(length=8), nullable=False),
        sa.Column("max_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("num_parts", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["assignment"], ["assignments.assignment"]),
        sa.PrimaryKeyConstraint("partial"),
        sa.UniqueConstraint("assignment", "trip"),
    )
    op.create_table(
        "partial_parts",
        sa.Column("partial", sa.String(length=64), nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["partial"], ["partial_uploads.partial"]),
        sa.PrimaryKeyConstraint("partial", "start"),
    )


def downgrade() -> None:
    op.drop_table("partial_parts")
    op.drop_table("partial_uploads")
