"""What policies made of each round, and how uploads came."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("course", sa.JSON(), nullable=True))
    op.add_column("uploads", sa.Column("began_at", sa.Double(), nullable=True))
    op.add_column("uploads", sa.Column("seconds", sa.Double(), nullable=True))
    op.create_index("ix_assignments_client_id_task", "assignments", ["client_id", "task"])


def downgrade() -> None:
    op.drop_index("ix_assignments_client_id_task", "assignments")
    op.drop_column("uploads", "seconds")
    op.drop_column("uploads", "began_at")
    op.drop_column("rounds", "course")
