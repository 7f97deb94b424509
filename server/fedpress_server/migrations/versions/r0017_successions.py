"""Which keys the server has signed with, and how each of them named the next."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "server_key_successions",
        sa.Column("public_key", sa.LargeBinary(32), primary_key=True),
        sa.Column("successor", sa.LargeBinary(32), nullable=False, unique=True),
        sa.Column("statement", sa.Text(), nullable=False),
        sa.Column("active_at", sa.Double()),
    )


def downgrade() -> None:
    op.drop_table("server_key_successions")
