"""The records of a ledger: uploads without a receipt, included ones, and discards."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from fedpress_compression.compressor import Compressor, from_config
from fedpress_compression.plain_states import State
from fedpress_compression.tensors import Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan

Reason = Literal[
    "not-sent", "not-included", "spec-changed", "decayed", "capped", "invalid", "not-saved",
    "rolled-back", "other-model",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResidualRules:
    """Optional limits on what waits in the residual; by default there are none.

    The residual is multiplied by `decay` for every round this device sat out, then scaled down
    to at most `max_ratio` times the new update's norm. What either takes away is reported. These
    are the device's own; where the plan's error feedback sets limits too, the stricter count.
    """

    decay: float = 1.0
    max_ratio: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigurationError(f"decay must lie in [0, 1], not {self.decay}")
        if self.max_ratio is not None and not self.max_ratio >= 0:
            raise ConfigurationError(f"max_ratio must be 0 or more, not {self.max_ratio}")


KEEP_ALL = ResidualRules()


@dataclass(frozen=True, slots=True, eq=False)
class Discard:
    """Something computed that will not reach the model, and why.

    not-sent      compression without error feedback lost it, or took it beyond the plan's bound;
                  under control variates it is not lost, see docs/strategies.md
    not-included  an upload without error feedback came to nothing
    spec-changed  it was waiting for a model of other tensors
    other-model   it was waiting for a model that is trained no further
    decayed       ResidualRules.decay
    capped        ResidualRules.max_ratio
    invalid       NaN, infinity or beyond float32: nothing of the update could be kept
    not-saved     the account with it could not be written: a full disk
    rolled-back   a restore of the server undid it, and it was not kept: `lost_norm` is all of it
                  that is known, and `update` is zeros

    A crash between deciding and telling has it told again, under the same `number`.
    """

    number: int
    reason: Reason
    assignment: str | None
    update: Update
    lost_norm: float | None = None

    @property
    def norm(self) -> float:
        """Euclidean."""
        return self.update.norm if self.lost_norm is None else self.lost_norm

    @property
    def vector(self) -> Vector:
        """Dense [size of its model]."""
        return self.update.dense()


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """An upload that has no receipt yet: its bytes, and `update`, what they decode to."""

    body: bytes
    update: Update
    num_examples: int
    round: int
    attempt: int
    model: str
    spec: str
    profile: str
    feedback: bool
    """Whether it returns to the residual if it is not included."""
    compressor: str
    """Its configuration, JSON; "" for one that an older release has made."""
    state_name: str
    """Of the state that the receipt moves."""
    mark: State
    """Of the upload, for `Compressor.commit`."""
    number: int
    """Pendings are numbered as they are made."""
    control: float = 0.0
    """Times what it decodes to, it moves the client's control variate once it is included."""
    is_base: bool = False
    """Whether it is what later uploads are differences to, once it is included."""
    report: tuple[float, ...] = ()
    """The numbers that the plan names."""
    lane: str = "clear"
    session: str | None = None
    """Of the masked lane: the id of the one session that `body` is masked for; None before."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the body."""
        return hashlib.sha256(self.body).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Included:
    """An upload that was included, for as long as a restore of the server may undo that."""

    update: Update | None
    """The update of the upload; None if there was no room for it."""
    norm: float
    """Euclidean, of the update."""
    round: int
    attempt: int
    model: str | None
    """The digest of the model that includes it."""
    issued_at: int
    """Of its receipt, Unix seconds of the server."""
    epoch: str | None
    """Of the server's last restore before."""
    spec: str
    feedback: bool
    number: int
    control: float
    compressor: str = ""
    state_name: str = ""
    """As of the upload."""

    @property
    def num_values(self) -> int:
        return 0 if self.update is None else sum(p.values.size for p in self.update.pieces)


def compressor_of(upload: Pending | Included) -> Compressor[Any]:
    """The compressor of `upload`, for what its receipt does to the state.

    Where an older release has not written it down, or its plug-in is gone, one of the same kind
    takes its place: then a state is what the newest included upload left.
    """
    try:
        if upload.compressor:
            return from_config(json.loads(upload.compressor))
    except IncompatiblePlan:
        pass
    none = {"id": "none"}
    return from_config({"id": "error_feedback", "inner": none} if upload.feedback else none)
