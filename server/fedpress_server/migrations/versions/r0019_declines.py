"""Why devices gave assignments back, and the time that those which are too slow need."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "declines",
        sa.Column(
            "assignment",
            sa.String(64),
            sa.ForeignKey("assignments.assignment"),
            primary_key=True,
        ),
        sa.Column("task", sa.String(64), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(32), nullable=False),
        sa.Column("needed_seconds", sa.Double()),
    )
    op.create_index("declines_by_round", "declines", ["task", "round", "attempt"])


def downgrade() -> None:
    op.drop_table("declines")
