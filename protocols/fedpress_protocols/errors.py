"""Errors that cross the wire, and the few that are only raised locally.

FedpressError
├── ConfigurationError          a setting or a task that cannot work
│   ├── IncompatiblePlan        the parts of a round plan cannot work together
│   │   └── PlanDeclined        a plan that this device's own rules refuse
│   └── MissingExtra            an optional dependency is not installed
├── MalformedRequest            a request that is not what the API describes
│   ├── LengthRequired          an upload that does not say how long it is
│   ├── RequestTimeout          a request whose body stopped arriving
│   ├── HeaderTooLarge          more header than the server reads
│   ├── BodyTooLarge            an upload longer than the plan allows
│   ├── DigestMismatch          a body that does not match its digest
│   └── WireVersionMismatch     the two ends speak no wire version in common
├── InvalidUpdate               an update that the plan does not allow
│   └── DecodingError           malformed bytes of a coded object
├── MaskingError                a party to secure aggregation violates the protocol
│   ├── InvalidShare            a share that was never issued, or inconsistent shares
│   ├── InvalidKey              a public key that cannot be used
│   └── InvalidSeal             a sealed message that was not sealed for this receiver
├── Unauthorized
│   ├── InvalidToken            an enrolment or admin token unknown, used up or expired
│   ├── UnknownDevice           a key that was never enrolled, or was revoked
│   ├── InvalidSignature        a request whose signature does not verify
│   ├── ReplayedRequest         a signed request seen before
│   └── ClockSkew               a request signed too long ago, or in the future
├── Forbidden                   a request for another device's resource
│   ├── RoleRequired            an operator whose role lacks the permission
│   ├── DeviceNotApproved       a device that waits for an operator's approval
│   └── DeviceRejected          a device that an operator has rejected
├── NotFound
│   ├── UnknownTask
│   ├── UnknownRound
│   ├── UnknownModel
│   ├── UnknownAssignment
│   └── UnknownPartial          an upload in parts that was dropped, has expired or never began
├── Conflict
│   ├── RoundClosed             the round takes no more updates
│   ├── UpdateConflict          other bytes under an assignment already used
│   ├── OffsetConflict          a part whose offset is not the end of the previous parts
│   └── AlreadyExists           a name or key that is taken
├── Unavailable                 try again after a while
│   ├── StorageFull
│   └── TooManyRequests         a rate limit of the server was reached
├── ServerError                 an internal error of the server
├── BrokenChain                 an audit log that was modified; raised locally, never sent
└── DeviceError                 on the device alone, never sent
    ├── StateLocked             another process holds the state directory
    ├── StateCorrupt            a state file that cannot be read
    ├── StateWriteError         a state file that cannot be written: a full disk, say
    └── TransportError          no answer from the server
"""

from __future__ import annotations

from fedpress_compression.errors import (
    PROBLEM_PREFIX,
    ConfigurationError,
    DecodingError,
    FedpressError,
    IncompatiblePlan,
    InvalidUpdate,
    MissingExtra,
    error_classes,
)

__all__ = [
    "PROBLEM_PREFIX",
    "AlreadyExists",
    "BodyTooLarge",
    "BrokenChain",
    "ClockSkew",
    "ConfigurationError",
    "Conflict",
    "DecodingError",
    "DeviceError",
    "DeviceNotApproved",
    "DeviceRejected",
    "DigestMismatch",
    "FedpressError",
    "Forbidden",
    "HeaderTooLarge",
    "IncompatiblePlan",
    "InvalidKey",
    "InvalidSeal",
    "InvalidShare",
    "InvalidSignature",
    "InvalidToken",
    "InvalidUpdate",
    "LengthRequired",
    "MalformedRequest",
    "MaskingError",
    "MissingExtra",
    "NotFound",
    "OffsetConflict",
    "PlanDeclined",
    "ReplayedRequest",
    "RequestTimeout",
    "RoleRequired",
    "RoundClosed",
    "ServerError",
    "StateCorrupt",
    "StateLocked",
    "StateWriteError",
    "StorageFull",
    "TooManyRequests",
    "TransportError",
    "Unauthorized",
    "Unavailable",
    "UnknownAssignment",
    "UnknownDevice",
    "UnknownModel",
    "UnknownPartial",
    "UnknownRound",
    "UnknownTask",
    "UpdateConflict",
    "WireVersionMismatch",
    "error_classes",
]


class PlanDeclined(IncompatiblePlan):
    """Raised with `rule`, the device's rule that the plan violates."""

    slug, title = "plan-declined", "The device's own rules refuse the plan"
    default_hint = "check the server's task, or change the device's rules"


class MalformedRequest(FedpressError):
    slug, status, title = "malformed-request", 400, "The request is malformed"


class LengthRequired(MalformedRequest):
    slug, status, title = "length-required", 411, "The request does not state its length"
    default_hint = "send a Content-Length header"


class RequestTimeout(MalformedRequest):
    slug, status, title = "request-timeout", 408, "The request was not completed in time"
    default_hint = "send it again"


class HeaderTooLarge(MalformedRequest):
    slug, status, title = "header-too-large", 431, "The request's header is too large"


class BodyTooLarge(MalformedRequest):
    slug, status, title = "body-too-large", 413, "The body is larger than allowed"


class DigestMismatch(MalformedRequest):
    slug, title = "digest-mismatch", "The body does not match its Content-Digest"
    default_hint = "the bytes were changed in transit: send them again"


class WireVersionMismatch(MalformedRequest):
    slug, title = "wire-version", "No wire version in common"
    default_hint = "upgrade the older of the two ends"


class MaskingError(FedpressError):
    slug, status, title = "masking", 422, "The masking protocol was violated"


class InvalidShare(MaskingError):
    slug, title = "invalid-share", "A share does not belong to a secret"


class InvalidKey(MaskingError):
    slug, title = "invalid-key", "A public key cannot be used"


class InvalidSeal(MaskingError):
    slug, title = "invalid-seal", "A sealed message cannot be opened"


class Unauthorized(FedpressError):
    slug, status, title = "unauthorized", 401, "The request is not authenticated"


class InvalidToken(Unauthorized):
    slug, title = "invalid-token", "The token is unknown, used up or expired"
    default_hint = "ask the operator for a new token"


class UnknownDevice(Unauthorized):
    slug, title = "unknown-device", "The device key is not enrolled"
    default_hint = "enrol the device first"


class InvalidSignature(Unauthorized):
    slug, title = "invalid-signature", "The signature does not match the request"


class ReplayedRequest(Unauthorized):
    slug, title = "replayed-request", "The signed request was seen before"
    default_hint = "sign every request with a fresh nonce"


class ClockSkew(Unauthorized):
    """Raised with `server_time` (Unix seconds), by which a device corrects its clock."""

    slug, title = "clock-skew", "The request was signed at another time"
    default_hint = "sign again with server_time as the clock"


class Forbidden(FedpressError):
    slug, status, title = "forbidden", 403, "Not yours"


class RoleRequired(Forbidden):
    """Raised with the operator's `role` and the `roles` that are allowed."""

    slug, title = "role-required", "The operator's role does not allow it"


class DeviceNotApproved(Forbidden):
    """Raised with `retry_after` (seconds) and `key_id`, which operator and device compare."""

    slug, title = "device-not-approved", "The device waits for an operator's approval"
    default_hint = "have an operator compare the key id and approve the device; then retry"


class DeviceRejected(Forbidden):
    slug, title = "device-rejected", "An operator has rejected the device"
    default_hint = "ask the operator; a retry changes nothing"


class NotFound(FedpressError):
    slug, status, title = "not-found", 404, "There is no such thing"


class UnknownTask(NotFound):
    slug, title = "unknown-task", "There is no such task"


class UnknownRound(NotFound):
    slug, title = "unknown-round", "There is no such round"


class UnknownModel(NotFound):
    slug, title = "unknown-model", "There is no such model"


class UnknownAssignment(NotFound):
    slug, title = "unknown-assignment", "There is no such assignment"


class UnknownPartial(NotFound):
    slug, title = "unknown-partial", "There is no such upload by parts"
    default_hint = "begin it again: what was not completed has not been counted"


class Conflict(FedpressError):
    slug, status, title = "conflict", 409, "The request conflicts with what is there"


class RoundClosed(Conflict):
    slug, title = "round-closed", "The round takes no more updates"
    default_hint = (
        "fetch the assignment's receipt, return the update to the residual and check in again"
    )


class UpdateConflict(Conflict):
    slug, title = "update-conflict", "Other bytes came under this assignment before"
    default_hint = "send the first bytes again, or check in for a new assignment"


class OffsetConflict(Conflict):
    """Carries `offset`, the bytes that the server holds."""

    slug, title = "offset-conflict", "The part does not begin where the parts before it end"
    default_hint = "go on from offset"


class AlreadyExists(Conflict):
    slug, title = "already-exists", "The name is taken"


class Unavailable(FedpressError):
    """Carries `retry_after` (seconds)."""

    slug, status, title = "unavailable", 503, "The server cannot take this now"
    default_hint = "try again after retry_after seconds"


class StorageFull(Unavailable):
    slug, status, title = "storage-full", 507, "The server's storage is full"


class TooManyRequests(Unavailable):
    slug, status, title = "too-many-requests", 429, "Too many requests of this kind"


class ServerError(FedpressError):
    slug, status, title = "server-error", 500, "The server failed"


class BrokenChain(FedpressError):
    """Carries `seq`, the entry at which the chain breaks."""

    slug, title = "broken-chain", "The audit log was changed"
    default_hint = "docs/audit.md says what each kind of break may come from"


class DeviceError(FedpressError):
    slug, title = "device", "The device failed"


class StateLocked(DeviceError):
    slug, title = "state-locked", "Another process holds the state directory"
    default_hint = "stop it, or give this one a state directory of its own"


class StateCorrupt(DeviceError):
    slug, title = "state-corrupt", "A state file cannot be read"


class StateWriteError(DeviceError):
    slug, title = "state-write", "A state file cannot be written"


class TransportError(DeviceError):
    slug, title = "transport", "The server gave no answer"
