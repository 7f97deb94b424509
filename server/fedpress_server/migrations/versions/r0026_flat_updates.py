"""The number of an attempt's updates that were flat, as their devices said."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("num_flat", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("rounds", "num_flat")
