"""What tests of commands say of a command."""

from __future__ import annotations

from collections.abc import Callable

from click.testing import Result

Command = Callable[..., Result]


def said(done: Result) -> str:
    """What a command that succeeded has printed."""
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout
