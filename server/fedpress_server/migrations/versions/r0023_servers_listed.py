"""What a list of servers shows: host, version, start, holder of leases, lag."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_TEXTS = ("host", "version", "holder")
_NUMBERS = ("started_at", "lag")


def upgrade() -> None:
    for name in _TEXTS:
        op.add_column("servers", sa.Column(name, sa.Text(), nullable=False, server_default=""))
    for name in _NUMBERS:
        op.add_column("servers", sa.Column(name, sa.Double(), nullable=False, server_default="0"))


def downgrade() -> None:
    for name in (*_NUMBERS, *_TEXTS):
        op.drop_column("servers", name)
