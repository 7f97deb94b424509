"""What was downloaded in each round coded, whole and as differences."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_COUNTS = ("coded_download_bytes", "difference_download_bytes")


def upgrade() -> None:
    for name in _COUNTS:
        op.add_column(
            "rounds", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
        )


def downgrade() -> None:
    for name in reversed(_COUNTS):
        op.drop_column("rounds", name)
