"""The servers that run: what each logs and has seen, and from which level it is to log."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "servers",
        sa.Column("server_id", sa.String(64), primary_key=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("log_level", sa.String(16), nullable=False),
        sa.Column("next_log_level", sa.String(16)),
        sa.Column("fleet", sa.JSON(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("servers")
