"""Exit codes of commands, and the error message or problem on stderr.

docs/operations/command-line.md has the same table, and a test holds the two together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from fedpress_protocols.errors import (
    ConfigurationError,
    FedpressError,
    Forbidden,
    TransportError,
    Unauthorized,
    Unavailable,
    error_classes,
)

DONE = 0
FAILED = 1
"""The command failed: it was refused, or a check found a fault."""
WRONG_USE = 2
"""Invalid options, settings or task configuration; retrying cannot help."""
NO_ANSWER = 3
"""No server answered, or it was overloaded; retrying may help."""
NOT_ALLOWED = 4
"""The server does not accept the token or key, or its role may not do this."""
INTERRUPTED = 130

_DOCUMENTED = ("fedpress_compression.errors", "fedpress_protocols.errors")
"""The modules whose error classes have a section each in docs/reference/errors.md."""

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
    """The FedpressError that `exc` is or corresponds to; None for an unexpected exception."""
    if isinstance(exc, FedpressError):
        return exc
    if isinstance(exc, OSError):  # wrong paths, a full disk
        return FedpressError(f"{exc.filename or 'input or output'}: {exc.strerror or exc}")
    from pydantic import ValidationError

    from fedpress_protocols.validation import format_validation_errors

    if isinstance(exc, ValidationError):  # an option whose value its field refuses
        return ConfigurationError(format_validation_errors(exc))
    return None


def documented_errors() -> Iterator[type[FedpressError]]:
    """The classes that `fedpress explain` and docs/reference/errors.md explain, parents first."""
    for cls in error_classes():
        if cls is not FedpressError and cls.__module__ in _DOCUMENTED:
            yield cls


def explanation(error: FedpressError) -> str:
    """The name under which `fedpress explain` explains errors of this class; empty if it does not.

    A class from outside fedpress has its parent's name. The base class has none: its messages
    are the operating system's, such as that a file does not exist.
    """
    documented = set(documented_errors())
    return next((cls.slug for cls in type(error).__mro__ if cls in documented), "")


def message(error: FedpressError, as_json: bool) -> str:
    """For stderr: a sentence and the command that explains it, or in a line the problem of
    RFC 9457, whose `type` ends with the same name."""
    if as_json:
        return json.dumps(error.to_problem())
    name = explanation(error)
    return f"fedpress: {error}" + (f"\n  see `fedpress explain {name}`" if name else "")
