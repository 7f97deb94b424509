"""The uplink that a device reports while it waits for a place, for the server that chooses."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("waiting", sa.Column("uplink", sa.Double()))


def downgrade() -> None:
    op.drop_column("waiting", "uplink")
