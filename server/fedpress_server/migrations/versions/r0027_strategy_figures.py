"""The strategy's own figures of an attempt, such as how much of its update was clipped."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("strategy_figures", sa.JSON()))


def downgrade() -> None:
    op.drop_column("rounds", "strategy_figures")
