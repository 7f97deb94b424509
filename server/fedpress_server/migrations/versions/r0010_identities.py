"""Which release made the schema, and which keys this server signs with."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "schema_releases",
        sa.Column("revision", sa.String(length=32), nullable=False),
        sa.Column("release", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("revision"),
    )
    op.create_table(
        "server_keys",
        sa.Column("purpose", sa.String(length=16), nullable=False),
        sa.Column("public_key", sa.LargeBinary(length=32), nullable=False),
        sa.PrimaryKeyConstraint("purpose"),
    )


def downgrade() -> None:
    op.drop_table("server_keys")
    op.drop_table("schema_releases")
