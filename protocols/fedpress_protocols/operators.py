"""Who operates a server: roles, and what is told of their tokens."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from fedpress_protocols.messages import WITHOUT_NUL, Identifier
from fedpress_protocols.plan import Term

Role = Literal["viewer", "operator", "registrar", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
Note = Annotated[str, Field(max_length=256, pattern=WITHOUT_NUL)]


class OperatorRequest(Term):
    """A token for somebody who is to operate the server."""

    role: Role
    """viewer reads; operator runs tasks and moves models; registrar lets devices in and out;
    admin does all of it, and makes operators."""
    expires_in: Annotated[float, Field(gt=0, le=10 * 366 * 86400)] = 90 * 86400.0
    """Seconds."""
    note: Note = ""
    """Whose it is, or what for."""


class OperatorStatus(Term):
    """A token without its secret."""

    operator_id: Identifier
    """By this the audit log names who has the token."""
    role: Role
    note: str
    created_at: float
    """Unix seconds."""
    created_by: str
    expires_at: float
    revoked_at: float | None = None


class OperatorToken(OperatorStatus):
    """With its secret."""

    token: str
    """Shown once: the server keeps only its hash."""
