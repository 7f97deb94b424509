"""Earlier names of commands, which work for one more release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

RENAMED: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("serve",): ("server", "run"),
    ("migrate",): ("server", "migrate"),
    ("doctor",): ("server", "doctor"),
    ("backup",): ("server", "backup"),
    ("verify",): ("server", "verify-backup"),
    ("restore",): ("server", "restore"),
    ("restores",): ("server", "restores"),
    ("server-key",): ("server", "key"),
    ("operator",): ("server", "operator"),
    ("audit",): ("server", "audit"),
    ("log-level",): ("server", "log-level"),
    ("token",): ("devices", "token"),
    ("fleet",): ("devices", "statistics"),
    ("client", "list"): ("devices", "list"),
    ("client", "show"): ("devices", "show"),
    ("client", "approve"): ("devices", "approve"),
    ("client", "reject"): ("devices", "reject"),
    ("client", "revoke"): ("devices", "revoke"),
    ("join",): ("client", "join"),
    ("relay",): ("client", "relay"),
    ("warmup",): ("client", "warmup"),
    ("device", "show"): ("client", "identity"),
    ("device", "rotate-key"): ("client", "rotate-key"),
    ("device",): ("client",),
    ("ca",): ("authority",),
}
"""Old words, new words."""


def current_words(arguments: Sequence[str]) -> tuple[list[str], str]:
    """The arguments with the words of a command's new name, and a note that names both; the note
    is empty if the command has the name that was given."""
    for length in (2, 1):
        old = tuple(arguments[:length])
        if old in RENAMED:
            new = RENAMED[old]
            note = (
                f"fedpress {' '.join(old)} is now fedpress {' '.join(new)}; "
                "the next release drops the old name"
            )
            return [*new, *arguments[length:]], note
    return list(arguments), ""
