"""Sums of the figures that devices measure of their updates, by attempt."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_SUMS = ("nmse_sum", "residual_sum", "norm_sum", "train_sum", "compress_sum")


def upgrade() -> None:
    op.add_column(
        "rounds", sa.Column("num_figures", sa.Integer(), nullable=False, server_default="0")
    )
    for name in _SUMS:
        op.add_column("rounds", sa.Column(name, sa.Double(), nullable=False, server_default="0"))


def downgrade() -> None:
    for name in (*_SUMS, "num_figures"):
        op.drop_column("rounds", name)
