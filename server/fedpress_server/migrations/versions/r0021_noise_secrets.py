"""The secrets of tasks whose noise is the server's."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "noise_secrets",
        sa.Column("task", sa.String(64), sa.ForeignKey("tasks.task"), primary_key=True),
        sa.Column("secret", sa.LargeBinary(32), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("noise_secrets")
