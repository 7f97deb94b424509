"""An index of the assignments without a receipt, whose plans a collection of models keeps."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    is_open = sa.text("receipt IS NULL")
    op.create_index(
        "assignments_open",
        "assignments",
        ["task"],
        sqlite_where=is_open,
        postgresql_where=is_open,
    )


def downgrade() -> None:
    op.drop_index("assignments_open", "assignments")
