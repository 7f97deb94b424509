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
    """Raised with `rule`, the device's rule that the plan violates.

    Change the task, or the rule on the device, if it is stricter than meant.
    """

    slug, title = "plan-declined", "The device's own rules refuse the plan"
    default_hint = "check the server's task, or change the device's rules"


class MalformedRequest(FedpressError):
    """The request is not what the API describes: an unknown field, a wrong type, a missing header.

    Compare the request with the description of its route; the detail names each field.
    """

    slug, status, title = "malformed-request", 400, "The request is malformed"


class LengthRequired(MalformedRequest):
    """An upload came in chunks, without a Content-Length.

    A proxy in between may have removed the header: let it pass bodies as they are.
    """

    slug, status, title = "length-required", 411, "The request does not state its length"
    default_hint = "send a Content-Length header"


class RequestTimeout(MalformedRequest):
    """The body stopped arriving before its end.

    The SDK sends it again. If it happens often, the line is slower than `FEDPRESS_BODY_TIMEOUT`
    allows, or a proxy holds bodies back.
    """

    slug, status, title = "request-timeout", 408, "The request was not completed in time"
    default_hint = "send it again"


class HeaderTooLarge(MalformedRequest):
    """The header of the request is longer than the server reads.

    Look for what added to it on the way: cookies, tokens of a gateway.
    """

    slug, status, title = "header-too-large", 431, "The request's header is too large"


class BodyTooLarge(MalformedRequest):
    """The body is longer than the plan allows, or than the server's `FEDPRESS_MAX_BODY_BYTES`.

    Raise the limit for larger models, in the proxy, too. A device whose body is longer than its own
    plan allows has another version of the compressor.
    """

    slug, status, title = "body-too-large", 413, "The body is larger than allowed"


class DigestMismatch(MalformedRequest):
    """The body that arrived is not the body that was signed.

    The SDK sends it again. If it stays, something in between rewrites bodies, such as a proxy that
    compresses.
    """

    slug, title = "digest-mismatch", "The body does not match its Content-Digest"
    default_hint = "the bytes were changed in transit: send them again"


class WireVersionMismatch(MalformedRequest):
    """The device and the server speak no common version of the wire.

    Upgrade the older one; the server first where both are due.
    """

    slug, title = "wire-version", "No wire version in common"
    default_hint = "upgrade the older of the two ends"


class MaskingError(FedpressError):
    """A message of a masked session does not follow the protocol.

    The session goes on without its sender, or ends without a sum, and the round is tried again.
    Repeated for one device, look at its version and its state directory.
    """

    slug, status, title = "masking", 422, "The masking protocol was violated"


class InvalidShare(MaskingError):
    """A share of a secret was never issued, or the shares of one secret contradict each other.

    Other shares are tried. `fedpress round show` names who was at fault, where that can be told.
    """

    slug, title = "invalid-share", "A share does not belong to a secret"


class InvalidKey(MaskingError):
    """A public key is not a point that may be used, or stands twice in a roster.

    The device leaves the session and sends no part of its update. Ask who runs the server.
    """

    slug, title = "invalid-key", "A public key cannot be used"


class InvalidSeal(MaskingError):
    """A sealed message was damaged, or was sealed for somebody else.

    The device complains in the session, and goes on where enough shares remain.
    """

    slug, title = "invalid-seal", "A sealed message cannot be opened"


class Unauthorized(FedpressError):
    """The request brings no credentials that the server knows.

    Set `FEDPRESS_ADMIN_TOKEN` for an operator, or enrol the device.
    """

    slug, status, title = "unauthorized", 401, "The request is not authenticated"


class InvalidToken(Unauthorized):
    """The token of an enrolment or of an operator is unknown, used up, revoked or expired.

    Have a new one made: `fedpress devices token create`, `fedpress server operator create`.
    """

    slug, title = "invalid-token", "The token is unknown, used up or expired"
    default_hint = "ask the operator for a new token"


class UnknownDevice(Unauthorized):
    """The key that signed the request is not enrolled, was revoked, or was replaced by another.

    Enrol the device with a token. If it was enrolled and its key was replaced without its owner's
    doing, somebody has copied the key: revoke the client first.
    """

    slug, title = "unknown-device", "The device key is not enrolled"
    default_hint = "enrol the device first"


class InvalidSignature(Unauthorized):
    """The signature does not belong to the request as it arrived.

    Let proxies pass host, path and query unchanged. Behind another host name, set the device's URL
    to the one that the server sees.
    """

    slug, title = "invalid-signature", "The signature does not match the request"


class ReplayedRequest(Unauthorized):
    """A request with this nonce came before.

    The SDK never repeats a nonce. Two devices with one copied state directory do, and so does a
    recorder on the line.
    """

    slug, title = "replayed-request", "The signed request was seen before"
    default_hint = "sign every request with a fresh nonce"


class ClockSkew(Unauthorized):
    """Raised with `server_time` (Unix seconds), by which a device corrects its clock.

    The SDK does so by itself. Set the clock of whichever end is wrong, and have NTP keep it.
    """

    slug, title = "clock-skew", "The request was signed at another time"
    default_hint = "sign again with server_time as the clock"


class Forbidden(FedpressError):
    """The request is for something that belongs to another device.

    Check the assignment's id, and that each device has a state directory of its own.
    """

    slug, status, title = "forbidden", 403, "Not yours"


class RoleRequired(Forbidden):
    """Raised with the operator's `role` and the `roles` that are allowed.

    Use another operator's token, or have an admin create one of that role.
    """

    slug, title = "role-required", "The operator's role does not allow it"


class DeviceNotApproved(Forbidden):
    """Raised with `retry_after` (seconds) and `key_id`, which operator and device compare.

    Approve it with `fedpress devices approve CLIENT --key KEY_ID`; the SDK keeps asking.
    """

    slug, title = "device-not-approved", "The device waits for an operator's approval"
    default_hint = "have an operator compare the key id and approve the device; then retry"


class DeviceRejected(Forbidden):
    """An operator has rejected the device.

    Ask the operator. `fedpress devices approve` may admit it later.
    """

    slug, title = "device-rejected", "An operator has rejected the device"
    default_hint = "ask the operator; a retry changes nothing"


class NotFound(FedpressError):
    """The address names nothing that is there.

    Check it for a typing error, and that the server is of the version that has the route.
    """

    slug, status, title = "not-found", 404, "There is no such thing"


class UnknownTask(NotFound):
    """No task has this name.

    `fedpress task list` shows the names.
    """

    slug, title = "unknown-task", "There is no such task"


class UnknownRound(NotFound):
    """The task has no round of this number, or its history was removed by retention.

    `fedpress round list TASK` shows the rounds.
    """

    slug, title = "unknown-round", "There is no such round"


class UnknownModel(NotFound):
    """No model has this digest, or it was collected since nothing refers to it.

    A device checks in again and gets the newest. `fedpress model list TASK` shows the versions.
    """

    slug, title = "unknown-model", "There is no such model"


class UnknownAssignment(NotFound):
    """The assignment is of another server, or of a database that was restored to an earlier time.

    The device returns the update to its residual and checks in again by itself.
    """

    slug, title = "unknown-assignment", "There is no such assignment"


class UnknownPartial(NotFound):
    """An upload in parts was dropped, has expired, or never began.

    The SDK begins it again. If it expires often, raise `FEDPRESS_PARTIAL_SECONDS`.
    """

    slug, title = "unknown-partial", "There is no such upload by parts"
    default_hint = "begin it again: what was not completed has not been counted"


class Conflict(FedpressError):
    """The request does not fit what is there now.

    Read the state anew and decide again: the detail says what was found.
    """

    slug, status, title = "conflict", 409, "The request conflicts with what is there"


class RoundClosed(Conflict):
    """The round had its quorum or its deadline before the update came.

    The SDK keeps the update in its residual and checks in again: nothing is lost. If it happens to
    many, raise `round_seconds`.
    """

    slug, title = "round-closed", "The round takes no more updates"
    default_hint = (
        "fetch the assignment's receipt, return the update to the residual and check in again"
    )


class UpdateConflict(Conflict):
    """The assignment already has an upload with other bytes.

    The SDK never does this. Look for two devices with one copied state directory.
    """

    slug, title = "update-conflict", "Other bytes came under this assignment before"
    default_hint = "send the first bytes again, or check in for a new assignment"


class OffsetConflict(Conflict):
    """Carries `offset`, the bytes that the server holds.

    The SDK goes on from there by itself.
    """

    slug, title = "offset-conflict", "The part does not begin where the parts before it end"
    default_hint = "go on from offset"


class AlreadyExists(Conflict):
    """A task, a token or a key of this name is there already.

    Choose another name. For a task that should go on, `fedpress task continue`.
    """

    slug, title = "already-exists", "The name is taken"


class Unavailable(FedpressError):
    """Carries `retry_after` (seconds).

    The server starts, stops, or waits for its database. The SDK waits and tries again; look at
    `/readyz` if it lasts.
    """

    slug, status, title = "unavailable", 503, "The server cannot take this now"
    default_hint = "try again in a few seconds; if it lasts, look at /readyz of the server"


class StorageFull(Unavailable):
    """The disk of the server, of its database or of its store has no room.

    Devices keep their uploads and try again. Make room: docs/operations/disk-full.md.
    """

    slug, status, title = "storage-full", 507, "The server's storage is full"


class TooManyRequests(Unavailable):
    """A rate limit was reached, of enrolments, check-ins or connections.

    The SDK waits as long as `retry_after` says. Raise the limit if the load is meant.
    """

    slug, status, title = "too-many-requests", 429, "Too many requests of this kind"


class ServerError(FedpressError):
    """The server failed in a way that it did not expect.

    Find the request's id in the server's log, and report the traceback there.
    """

    slug, status, title = "server-error", 500, "The server failed"


class BrokenChain(FedpressError):
    """Carries `seq`, the entry at which the chain breaks.

    Compare the log with a copy that was exported before: docs/audit.md.
    """

    slug, title = "broken-chain", "The audit log was changed"
    default_hint = "docs/audit.md says what each kind of break may come from"


class DeviceError(FedpressError):
    """The device failed; nothing was sent.

    Base of the errors below.
    """

    slug, title = "device", "The device failed"


class StateLocked(DeviceError):
    """Another process works in the same state directory.

    Stop it, or give each process a directory of its own. Copies of a directory are two devices with
    one key: never run them.
    """

    slug, title = "state-locked", "Another process holds the state directory"
    default_hint = "stop it, or give this one a state directory of its own"


class StateCorrupt(DeviceError):
    """A file of the state directory was damaged or written by a newer version.

    Restore the version that wrote it. If the disk is at fault, enrol the device anew with an empty
    directory: what was pending in the old one is lost.
    """

    slug, title = "state-corrupt", "A state file cannot be read"


class StateWriteError(DeviceError):
    """A file of the state directory could not be written: a full or read-only disk.

    Make room and start the device again: it goes on from the last file that was written whole.
    """

    slug, title = "state-write", "A state file cannot be written"


class TransportError(DeviceError):
    """The server gave no answer: no route, no TLS, or a connection that was cut.

    The SDK retries by itself. If it stays, try `curl -v URL/livez` from the device and look at the
    proxy.
    """

    slug, title = "transport", "The server gave no answer"
