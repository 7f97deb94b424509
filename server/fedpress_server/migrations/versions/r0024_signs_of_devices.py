"""When devices were last seen, with what software and clock; the norm of a round's update."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("clients", sa.Column("seen_at", sa.Double()))
    op.add_column("clients", sa.Column("agent", sa.Text(), nullable=False, server_default=""))
    op.add_column("clients", sa.Column("clock_ahead", sa.Double()))
    op.add_column("rounds", sa.Column("update_norm", sa.Double()))


def downgrade() -> None:
    op.drop_column("rounds", "update_norm")
    for name in ("clock_ahead", "agent", "seen_at"):
        op.drop_column("clients", name)
