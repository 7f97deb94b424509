"""What operators and the server say to each other of devices and the tokens that bring them."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from fedpress_protocols.messages import WITHOUT_NUL, Identifier
from fedpress_protocols.plan import Term

DeviceState = Literal["waiting", "approved", "rejected", "revoked"]
DEVICE_STATES: tuple[DeviceState, ...] = get_args(DeviceState)
TokenState = Literal["good", "used-up", "expired", "revoked"]


class TokenRequest(Term):
    uses: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """How many devices may enrol with it."""
    expires_in: Annotated[float, Field(gt=0, le=10 * 366 * 86400)] = 86400.0
    """Seconds."""
    note: Annotated[str, Field(max_length=256, pattern=WITHOUT_NUL)] = ""
    approve_each: bool = False
    """Whether each device that it brings waits until an operator has approved it."""


class TokenStatus(Term):
    """An enrolment token without its secret."""

    token_id: Identifier
    state: TokenState
    uses: int
    used: int
    """Devices that have enrolled with it."""
    created_at: float
    """Unix seconds, as all times here."""
    expires_at: float
    note: str = ""
    approve_each: bool = False
    revoked_at: float | None = None


class TokenResponse(TokenStatus):
    """With its secret."""

    token: str
    """Shown once: the server keeps only its hash."""


class ClientStatus(Term):
    """A device that was ever enrolled."""

    client_id: Identifier
    state: DeviceState
    """waiting: every request is refused until an operator approves it; approved: it may take part,
    as most may without anybody's word; rejected, revoked: it is turned away."""
    key_id: str
    """Of its key; the device prints the same one."""
    name: str
    """What the device calls itself."""
    token_id: Identifier
    """Of the token that brought it."""
    enrolled_at: float
    decided_at: float | None = None
    """When an operator approved or rejected it; None if nobody had to."""
    rotated_at: float | None = None
    """Since when it has this key, if it had another before."""
    revoked_at: float | None = None


class KeyLeft(Term):
    """A key that its device has left for the next one; it never comes back."""

    key_id: str
    retired_at: float


class ClientDetails(ClientStatus):
    former_keys: tuple[KeyLeft, ...] = ()
    """In the order in which the device had them."""
