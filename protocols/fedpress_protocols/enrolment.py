"""Messages between operators and the server about devices and enrolment tokens."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from fedpress_protocols.messages import ONE_LINE, Identifier
from fedpress_protocols.plan import Term

DeviceState = Literal["waiting", "approved", "rejected", "revoked"]
DEVICE_STATES: tuple[DeviceState, ...] = get_args(DeviceState)
TokenState = Literal["good", "used-up", "expired", "revoked"]


class TokenRequest(Term):
    uses: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Number of devices that may enrol with the token."""
    expires_in: Annotated[float, Field(gt=0, le=10 * 366 * 86400)] = 86400.0
    """Seconds."""
    note: Annotated[str, Field(max_length=256, pattern=ONE_LINE)] = ""
    approve_each: bool = False
    """Whether each device that enrols with the token waits for an operator's approval."""


class TokenStatus(Term):
    """An enrolment token without its secret."""

    token_id: Identifier
    state: TokenState
    uses: int
    used: int
    """Devices that have enrolled with it."""
    created_at: float
    """Unix seconds, like all times here."""
    expires_at: float
    note: str = ""
    approve_each: bool = False
    revoked_at: float | None = None


class TokenResponse(TokenStatus):
    """An enrolment token with its secret."""

    token: str
    """Shown once: the server keeps only its hash."""


class ClientStatus(Term):
    """A device that is or was enrolled."""

    client_id: Identifier
    state: DeviceState
    """waiting: every request is refused until an operator approves the device; approved: it may
    take part, the default without approval; rejected, revoked: every request is refused."""
    key_id: str
    """The id of its key, as the device prints it."""
    name: str
    """The name that the device gave."""
    token_id: Identifier
    """The token with which it enrolled."""
    enrolled_at: float
    decided_at: float | None = None
    """When an operator approved or rejected it; None if no decision was needed."""
    rotated_at: float | None = None
    """When it rotated to this key; None if it never did."""
    revoked_at: float | None = None
    seen_at: float | None = None
    """When it was last seen, to the hour; None before its first request."""
    agent: str = ""
    """Its software at that time, as its User-Agent says."""
    clock_ahead: float | None = None
    """Seconds by which its clock was ahead of the server's at that time."""


class KeyLeft(Term):
    """A key that its device has replaced; it is never valid again."""

    key_id: str
    retired_at: float


class ClientDetails(ClientStatus):
    former_keys: tuple[KeyLeft, ...] = ()
    """The former keys, oldest first."""
