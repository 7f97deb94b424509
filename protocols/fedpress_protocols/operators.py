"""Operators of a server: roles, and messages about their tokens."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from fedpress_protocols.messages import ONE_LINE, Identifier
from fedpress_protocols.plan import Term

Role = Literal["viewer", "operator", "registrar", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
Note = Annotated[str, Field(max_length=256, pattern=ONE_LINE)]


class OperatorRequest(Term):
    """Create a token for an operator."""

    role: Role
    """viewer reads; operator runs tasks and promotes models; registrar approves and revokes
    devices; admin does all of that and manages operators."""
    expires_in: Annotated[float, Field(gt=0, le=10 * 366 * 86400)] = 90 * 86400.0
    """Seconds."""
    note: Note = ""
    """The owner or the purpose of the token."""


class OperatorStatus(Term):
    """An operator token without its secret."""

    operator_id: Identifier
    """The name of the token's owner in the audit log."""
    role: Role
    note: str
    created_at: float
    """Unix seconds."""
    created_by: str
    expires_at: float
    revoked_at: float | None = None


class OperatorToken(OperatorStatus):
    """An operator token with its secret."""

    token: str
    """Shown once: the server keeps only its hash."""
