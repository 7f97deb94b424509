"""Devices that wait for approval, keys that others came after, tokens that are given back."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_NO = sa.false()


def upgrade() -> None:
    op.add_column(
        "enrolment_tokens",
        sa.Column("approve_each", sa.Boolean(), nullable=False, server_default=_NO),
    )
    op.add_column("enrolment_tokens", sa.Column("revoked_at", sa.Double()))
    op.add_column(
        "clients",
        sa.Column("approval", sa.String(16), nullable=False, server_default="approved"),
    )
    op.add_column("clients", sa.Column("decided_at", sa.Double()))
    op.add_column("clients", sa.Column("rotated_at", sa.Double()))
    op.create_index("clients_by_enrolment", "clients", ["enrolled_at", "client_id"])
    op.create_table(
        "former_keys",
        sa.Column("key_id", sa.String(64), primary_key=True),
        sa.Column("client_id", sa.String(64), sa.ForeignKey("clients.client_id"), nullable=False),
        sa.Column("public_key", sa.LargeBinary(32), nullable=False),
        sa.Column("next_key_id", sa.String(64), nullable=False),
        sa.Column("retired_at", sa.Double(), nullable=False),
        sa.Column("rotation", sa.JSON(), nullable=False),
    )
    op.create_index("former_keys_by_client", "former_keys", ["client_id"])


def downgrade() -> None:
    op.drop_table("former_keys")
    op.drop_index("clients_by_enrolment", "clients")
    for name in ("rotated_at", "decided_at", "approval"):
        op.drop_column("clients", name)
    for name in ("revoked_at", "approve_each"):
        op.drop_column("enrolment_tokens", name)
