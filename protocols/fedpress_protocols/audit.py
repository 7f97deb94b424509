"""The audit log: entries, each of which holds the hash of the one before it.

Changing, removing or inserting an entry changes every later hash. Anyone who noted a later hash
elsewhere, as a `Head`, detects it. docs/audit.md has the bytes for programs
in other languages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import Field, ValidationError

from fedpress_protocols.errors import BrokenChain, ConfigurationError, MalformedRequest
from fedpress_protocols.plan import Digest, Term
from fedpress_protocols.signatures import canonical_json
from fedpress_protocols.validation import format_validation_errors

_DOMAIN = b"fedpress audit v1\x00"
BEFORE_THE_FIRST = "0" * 64
"""The `previous` of the first entry."""
MAX_ENTRY_BYTES = 65536
"""The longest line of an exported log that is read."""
_MAX_SEQ = 2**53 - 1


class AuditEntry(Term):
    """One action: who did it, to which object; see docs/audit.md for actors and actions."""

    seq: Annotated[int, Field(ge=1, le=_MAX_SEQ)]
    """1, 2, 3 and so on, without a gap."""
    at: Annotated[int, Field(ge=0, le=_MAX_SEQ)]
    """Unix milliseconds, by the clock of the server that wrote it."""
    actor: Annotated[str, Field(max_length=80)]
    action: Annotated[str, Field(max_length=64)]
    subject: str
    details: dict[str, Any]
    previous: Digest
    """The hash of the entry before it."""
    hash: Digest

    @property
    def digest(self) -> str:
        """The expected value of `hash`. Raises MalformedRequest for details that no log can
        hold."""
        return digest_of(self.model_dump(exclude={"hash"}))

    def to_line(self) -> str:
        """Format as a line of an exported log, without the line break."""
        return canonical_json(self.model_dump()).decode()

    @classmethod
    def from_line(cls, line: str) -> AuditEntry:
        """Parse a line of an exported log; raises ConfigurationError unless it is canonical
        JSON."""
        try:
            entry = cls.model_validate_json(line, strict=True)
            is_canonical = entry.to_line() == line
        except ValidationError as exc:
            raise ConfigurationError(
                f"not an entry of an audit log: {format_validation_errors(exc)}"
            ) from exc
        except MalformedRequest as exc:
            raise ConfigurationError(f"not an entry of an audit log: {exc.detail}") from exc
        if not is_canonical:
            raise ConfigurationError("an entry that is not canonical JSON (RFC 8785)")
        return entry


class Head(Term):
    """The newest entry at some time. Noted where the server cannot reach, it proves later that
    nothing up to it was changed."""

    seq: Annotated[int, Field(ge=0, le=_MAX_SEQ)]
    """0 of an empty log."""
    hash: Digest

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"

    @classmethod
    def parsed(cls, text: str) -> Head:
        """Parse `SEQ:HASH`; raises ConfigurationError."""
        seq, _, digest = text.partition(":")
        try:
            return cls(seq=int(seq) if seq.isdecimal() and len(seq) < 17 else -1, hash=digest)
        except ValidationError:
            raise ConfigurationError(
                f"{text[:80]!r} is not a head of an audit log",
                hint="give SEQ:HASH as fedpress server audit verify printed it",
            ) from None


NOTHING = Head(seq=0, hash=BEFORE_THE_FIRST)


class AuditPage(Term):
    """Some entries in order, and the current head of the log."""

    entries: tuple[AuditEntry, ...]
    head: Head


def digest_of(fields: dict[str, Any]) -> str:
    """SHA-256 over all fields of an entry but its hash, hex."""
    return hashlib.sha256(_DOMAIN + canonical_json(fields)).hexdigest()


def checked(
    entries: Iterable[AuditEntry],
    *,
    heads: Iterable[Head] = (),
    after: Head | None = NOTHING,
) -> Iterator[AuditEntry]:
    """Yield the entries after checking that each one links to the previous.

    `after` is the head that the first entry must link to; None accepts any. Every one of `heads`
    must be reached. Raises BrokenChain.
    """
    expected = {head.seq: head for head in heads}
    last = after
    if last is not None and last.seq in expected:
        _meet(expected.pop(last.seq), last.hash)
    for entry in entries:
        _follow(entry, last)
        last = Head(seq=entry.seq, hash=entry.hash)
        if entry.seq in expected:
            _meet(expected.pop(entry.seq), entry.hash)
        yield entry
    for head in sorted(expected.values(), key=lambda each: each.seq):
        ends = "is empty" if last in (None, NOTHING) else f"ends at {last.seq if last else 0}"
        raise BrokenChain(
            f"entry {head.seq} is missing: the log {ends}, and had {head} once", seq=head.seq
        )


def end_of(entries: Iterable[AuditEntry]) -> Head:
    """The head after the last of them; `NOTHING` if there are none."""
    last = NOTHING
    for entry in entries:
        last = Head(seq=entry.seq, hash=entry.hash)
    return last


def _follow(entry: AuditEntry, last: Head | None) -> None:
    if last is not None and entry.seq != last.seq + 1:
        raise BrokenChain(
            f"entry {last.seq + 1} is missing: entry {entry.seq} comes after {last.seq}",
            seq=last.seq + 1,
        )
    if last is not None and entry.previous != last.hash:
        raise BrokenChain(
            f"entry {entry.seq} follows {entry.previous}, and the one before it is {last.hash}",
            seq=entry.seq,
        )
    try:
        digest = entry.digest
    except MalformedRequest as exc:
        raise BrokenChain(f"entry {entry.seq}: {exc.detail}", seq=entry.seq) from exc
    if entry.hash != digest:
        raise BrokenChain(
            f"entry {entry.seq} has hash {entry.hash}, and what it says has {digest}",
            seq=entry.seq,
        )


def _meet(head: Head, actual_hash: str) -> None:
    if actual_hash != head.hash:
        raise BrokenChain(
            f"entry {head.seq} has hash {actual_hash}, and had {head.hash} once", seq=head.seq
        )
