"""The audit log: entries, each of which holds the hash of the one before it.

Whoever changes an entry, takes one out or puts one in has to make every later hash anew. Who has
noted a later hash elsewhere, as a `Head`, then finds out. docs/audit.md has the bytes for programs
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
"""What the first entry has in place of a hash before it."""
MAX_ENTRY_BYTES = 65536
"""The longest line of an exported log that is read."""
_MAX_SEQ = 2**53 - 1


class AuditEntry(Term):
    """What was done, by whom, to what; see docs/audit.md for actors and actions."""

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
        """What `hash` has to be. Raises MalformedRequest for details that no log has."""
        return digest_of(self.model_dump(exclude={"hash"}))

    def to_line(self) -> str:
        """As a line of an exported log, without its end."""
        return canonical_json(self.model_dump()).decode()

    @classmethod
    def from_line(cls, line: str) -> AuditEntry:
        """Raises ConfigurationError unless it is an entry in its one spelling."""
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
            raise ConfigurationError("an entry that is not spelled as RFC 8785 has it")
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
        """Of `SEQ:HASH`; raises ConfigurationError."""
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
    """Some entries in their order, and where the log ends now."""

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
    """The entries, each once it is found to follow from the one before.

    `after` is what the first one follows; None takes its own word for that. Every one of `heads`
    must be met. Raises BrokenChain.
    """
    noted = {head.seq: head for head in heads}
    last = after
    if last is not None and last.seq in noted:
        _meet(noted.pop(last.seq), last.hash)
    for entry in entries:
        _follow(entry, last)
        last = Head(seq=entry.seq, hash=entry.hash)
        if entry.seq in noted:
            _meet(noted.pop(entry.seq), entry.hash)
        yield entry
    for head in sorted(noted.values(), key=lambda each: each.seq):
        ends = "is empty" if last in (None, NOTHING) else f"ends at {last.seq if last else 0}"
        raise BrokenChain(
            f"entry {head.seq} is missing: the log {ends}, and had {head} once", seq=head.seq
        )


def end_of(entries: Iterable[AuditEntry]) -> Head:
    """Where they end; `NOTHING` if there are none."""
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


def _meet(head: Head, found: str) -> None:
    if found != head.hash:
        raise BrokenChain(
            f"entry {head.seq} has hash {found}, and had {head.hash} once", seq=head.seq
        )
