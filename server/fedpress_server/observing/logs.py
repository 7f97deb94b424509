"""Structured logs: one line per event, as JSON or text, with the context of the request or round.

Libraries log through the same handler from level warning on, independent of the server's level: at
debug, sqlalchemy would log every row.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, TextIO

from fedpress_server.observing.requests import current

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
OURS = (
    "fedpress",
    "fedpress_server",
    "fedpress_strategies",
    "fedpress_protocols",
    "fedpress_compression",
    "uvicorn",
)
"""Loggers with the server's level."""

_MOST_TEXT = 4096
_MOST_TRACEBACK = 32768
_GIVEN = frozenset(
    (*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message")
)
"""Attributes that every log record has; the others are fields of the event."""
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SHAPES = (
    r"\bfp[a-z]_[A-Za-z0-9_-]{20,}",  # tokens that this server makes
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
)
_about: ContextVar[Mapping[str, object]] = ContextVar("fedpress_about", default={})  # noqa: B039


@contextmanager
def about(task: str, round: int, attempt: int, **more: object) -> Iterator[None]:
    """Set the attempt as the context of log lines in this block and in tasks started from it."""
    token = _about.set({"task": task, "round": round, "attempt": attempt, **more})
    try:
        yield
    finally:
        _about.reset(token)


class Pseudonyms:
    """Pseudonyms of devices in logs: the same on all servers with the same `secret`, the signing
    key for receipts, and not reversible without it."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, b"fedpress names in logs", "sha256")
        self.of: Callable[[str], str] = lru_cache(maxsize=4096)(self._of)

    def _of(self, client_id: str) -> str:
        return hmac.digest(self._key, client_id.encode(), "sha256").hex()[:16]


class Redaction:
    """Redaction as a second line of defence: text that looks like a secret is logged as [secret].
    Tests that no secret is logged search for that word too."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        spelt = {form for each in secrets for form in (each, json.dumps(each)[1:-1]) if each}
        shapes = [*map(re.escape, sorted(spelt, key=len, reverse=True)), *_SHAPES]
        self._shape = re.compile("|".join(shapes), re.DOTALL)

    def __call__(self, line: str) -> str:
        return self._shape.sub("[secret]", line)


class Lines(logging.Formatter, ABC):
    """Base formatter: turns a log record into an event, for `JsonLines` and `TextLines`."""

    def __init__(self, role: str, hide: Redaction) -> None:
        super().__init__()
        self.pseudonyms: Pseudonyms | None = None
        """None until the server's key is loaded; until then no device is named."""
        self.tracing: Callable[[], Mapping[str, object]] = dict
        """The trace and span ids of the event."""
        self._role = role
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(self.spelt(record, self._fields(record)))

    @abstractmethod
    def spelt(self, record: logging.LogRecord, fields: Mapping[str, object]) -> str: ...

    def _fields(self, record: logging.LogRecord) -> dict[str, object]:
        request = current.get()
        fields: dict[str, object] = dict(request.facts()) if request is not None else {}
        fields.update(_about.get())
        fields |= {name: value for name, value in vars(record).items() if name not in _GIVEN}
        client = fields.pop("client", None)
        if client is not None and self.pseudonyms is not None:
            fields["client"] = self.pseudonyms.of(str(client))
        fields.update(self.tracing())
        return fields


class JsonLines(Lines):
    """A JSON object on a line, ASCII alone: time, level, logger, event, and the fields."""

    def spelt(self, record: logging.LogRecord, fields: Mapping[str, object]) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "at": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage()[:_MOST_TEXT],
            "role": self._role,
            **fields,
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = _told(record.exc_info[1])
        return json.dumps(line, default=str, allow_nan=True)


class TextLines(Lines):
    """Text lines for people, followed by the traceback of an exception. Untrusted text cannot start
    a new line."""

    def spelt(self, record: logging.LogRecord, fields: Mapping[str, object]) -> str:
        message = _visible(record.getMessage()[:_MOST_TEXT])
        parts = [self.formatTime(record), record.levelname, f"{record.name}: {message}"]
        shown = " ".join(f"{name}={_visible(str(value))}" for name, value in fields.items())
        if shown:
            parts.append(f"[{shown}]")
        line = " ".join(parts)
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + _told(record.exc_info[1])["traceback"].rstrip()
        return line


def install(
    level: Level,
    form: Literal["text", "json"] = "text",
    *,
    role: str = "all",
    secrets: Iterable[str] = (),
    stream: TextIO | None = None,
) -> Lines:
    """Configure logging of this process from `level` on; returns the formatter. JSON goes to
    stdout, text to stderr, unless `stream` is given."""
    lines = (JsonLines if form == "json" else TextLines)(role, Redaction(secrets))
    handler = logging.StreamHandler(stream or (sys.stdout if form == "json" else sys.stderr))
    handler.setFormatter(lines)
    logging.raiseExceptions = False  # a closed pipe must not cause tracebacks
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    set_level(level)
    return lines


def set_level(level: Level) -> None:
    """Set the log level. Raises ValueError for a level outside of LEVELS."""
    if level not in LEVELS:
        raise ValueError(f"log level must be one of {', '.join(LEVELS)}, not {level!r}")
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())


def level_now() -> Level:
    found = logging.getLogger("fedpress_server").getEffectiveLevel()
    return next((each for each in LEVELS if logging.getLevelName(each.upper()) >= found), "error")


def toggle(configured: Level) -> Level:
    """Switch to debug, or back to the `configured` level; returns the new level."""
    to: Level = configured if level_now() == "debug" else "debug"
    set_level(to)
    return to


def _told(exc: BaseException) -> dict[str, str]:
    text = "".join(traceback.format_exception(exc))
    if len(text) > _MOST_TRACEBACK:
        text = text[: _MOST_TRACEBACK // 2] + "\n...\n" + text[-_MOST_TRACEBACK // 2 :]
    return {"type": type(exc).__name__, "message": str(exc)[:_MOST_TEXT], "traceback": text}


def _visible(text: str) -> str:
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)
