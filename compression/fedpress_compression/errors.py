"""The base of all errors, and the errors of compression and coding.

FedpressError
├── ConfigurationError          a setting or a task that cannot work
│   ├── IncompatiblePlan        the parts of a round plan cannot work together
│   └── MissingExtra            an optional dependency is not installed
└── InvalidUpdate               an update that the plan does not allow
    └── DecodingError           malformed bytes of a coded object

`fedpress_protocols.errors` has the complete tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

PROBLEM_PREFIX = "urn:fedpress:problem:"
_MOST_CHARACTERS = 8192
"""Of a detail or a hint that the other end sent."""


def printable(text: str) -> str:
    """The text with escapes in place of characters that move a terminal's cursor or reorder a line,
    for texts that others choose."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class FedpressError(Exception):
    """Base of all fedpress errors: an RFC 9457 problem on the wire, the same class at both ends.

    `detail` says what was found and what was expected, `hint` what to do. `members` are
    the problem's extension members, plain JSON (`server_time`, `retry_after`, `round`, ...).
    """

    slug: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "fedpress error"
    default_hint: ClassVar[str] = ""

    def __init__(self, detail: str = "", *, hint: str = "", **members: Any) -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.hint = hint or self.default_hint
        self.members = members

    def __str__(self) -> str:
        return f"{self.detail} ({self.hint})" if self.hint else self.detail

    def to_problem(self) -> dict[str, Any]:
        """The RFC 9457 problem object."""
        problem: dict[str, Any] = {
            "type": PROBLEM_PREFIX + self.slug,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.hint:
            problem["hint"] = self.hint
        return problem | self.members

    @staticmethod
    def from_problem(problem: Mapping[str, Any], status: int = 500) -> FedpressError:
        """The error of `problem`; an unknown type gives the class with the nearest status. Control
        characters in its texts are escaped, since the other end chooses what is shown here."""
        slug = str(problem.get("type", "")).removeprefix(PROBLEM_PREFIX)
        cls = _by_slug().get(slug) or _nearest(int(problem.get("status", status)))
        members = {
            str(key): value
            for key, value in problem.items()
            if key not in {"type", "title", "status", "detail", "hint", "instance"}
        }
        detail, hint = (
            printable(str(problem.get(name, ""))[:_MOST_CHARACTERS]) for name in ("detail", "hint")
        )
        error = cls(detail, hint=hint)
        error.members = members
        return error


class ConfigurationError(FedpressError):
    """A setting, a file or a task cannot work as it stands.

    Read the detail: it names the setting, its value and what is allowed. Correct it and start
    again; a retry without a change fails again.
    """

    slug, status, title = "configuration", 422, "The configuration cannot work"


class IncompatiblePlan(ConfigurationError):
    """The parts of a task exclude each other, such as masks and a compressor that does not commute.

    Change one of the parts that the detail names; the hint says what works in its place.
    """

    slug, title = "incompatible-plan", "The parts of the plan cannot work together"


class MissingExtra(ConfigurationError):
    """The code needs a package that the base install leaves out.

    Run the `pip install` that the message shows.
    """

    slug, title = "missing-extra", "An optional dependency is not installed"


class InvalidUpdate(FedpressError):
    """The values of an update are not what the plan allows: not finite, or out of bounds.

    On the device, look at the training: a learning rate that is too high gives infinities. The
    device keeps the update in its residual where that is finite.
    """

    slug, status, title = "invalid-update", 422, "The plan does not allow the update"


class DecodingError(InvalidUpdate):
    """The bytes of an update, a model or a message are damaged or follow another plan.

    Compare the versions of both ends. If they agree, the bytes were changed on the way or on the
    disk: send or fetch them again.
    """

    slug, title = "malformed-update", "The update's bytes do not follow the plan"


def error_classes() -> Iterator[type[FedpressError]]:
    """All error classes, parents first."""

    def below(cls: type[FedpressError]) -> Iterator[type[FedpressError]]:
        yield cls
        for child in cls.__subclasses__():
            yield from below(child)

    return below(FedpressError)


def _by_slug() -> dict[str, type[FedpressError]]:
    return {cls.slug: cls for cls in error_classes() if "slug" in vars(cls)}


def _nearest(status: int) -> type[FedpressError]:
    for cls in error_classes():
        if cls is not FedpressError and "status" in vars(cls) and cls.status == status:
            return cls
    slug = "malformed-request" if 400 <= status < 500 else "server-error"
    return _by_slug().get(slug, FedpressError)
