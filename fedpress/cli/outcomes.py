"""How a command ends: its exit code, and the sentence or the problem on stderr.

docs/operations/command-line.md has the same table, and a test holds the two together.
"""

from __future__ import annotations

import json

from fedpress_protocols.errors import (
    ConfigurationError,
    FedpressError,
    Forbidden,
    TransportError,
    Unauthorized,
    Unavailable,
)

DONE = 0
FAILED = 1
"""What was asked for did not come about: it was refused, or a check has found something."""
WRONG_USE = 2
"""An option, a setting or a task's file that cannot work: the same again will fail again."""
NO_ANSWER = 3
"""No server answered, or it said to come back later: the same again may work."""
NOT_ALLOWED = 4
"""The server knows no such token or key, or it may not do this."""
INTERRUPTED = 130

_BY_CLASS: tuple[tuple[type[FedpressError], int], ...] = (
    (ConfigurationError, WRONG_USE),
    (TransportError, NO_ANSWER),
    (Unavailable, NO_ANSWER),
    (Unauthorized, NOT_ALLOWED),
    (Forbidden, NOT_ALLOWED),
)


def exit_code(error: FedpressError) -> int:
    return next((code for kind, code in _BY_CLASS if isinstance(error, kind)), FAILED)


def as_family(exc: Exception) -> FedpressError | None:
    """The error of the family that `exc` is or stands for; None for what nobody foresaw."""
    if isinstance(exc, FedpressError):
        return exc
    if isinstance(exc, OSError):  # a path that is not what it was taken for, a disk that is full
        return FedpressError(f"{exc.filename or 'input or output'}: {exc.strerror or exc}")
    from pydantic import ValidationError

    from fedpress_protocols.faults import explained

    if isinstance(exc, ValidationError):  # of an option that is no value of the field it stands for
        return ConfigurationError(explained(exc))
    return None


def said(error: FedpressError, as_json: bool) -> str:
    """For stderr: one sentence, or in a line the problem of RFC 9457."""
    return json.dumps(error.to_problem()) if as_json else f"fedpress: {error}"
