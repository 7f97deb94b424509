"""The model registry's messages to operators: versions and aliases of a task's models.

The model of round n is version n, and the initial model is version 0. A version never changes; an
alias is a name that points to a version and may be moved.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedpress_protocols.plan import Digest, Name, Term

RESERVED = ("newest", "best")
"""Names that select a version besides its number and its aliases."""

Version = Annotated[int, Field(ge=0, lt=2**31)]


class ModelVersion(Term):
    """One version of a task's model, and the names that point to it now."""

    task: Name
    version: Version
    model: Digest
    parent: Digest | None
    """The model from which its updates were trained; None for version 0."""
    attempt: int
    """The committed attempt of its round; 0 for version 0."""
    published: dict[str, Digest]
    """Further published models by name."""
    num_updates: int
    num_bytes: int
    """Size of the model's file."""
    config: Digest
    """SHA-256 of the task's configuration at that time."""
    code: str
    """The fedpress release that made it; empty if unknown."""
    created_at: float
    collected_at: float | None = None
    """When its file was deleted, see `RetentionTerms`; the record stays."""
    aliases: tuple[Name, ...] = ()
    is_newest: bool = False
    is_best: bool = False


class ModelLineage(ModelVersion):
    """A version with its updates and ancestors."""

    updates: tuple[Digest, ...]
    """SHA-256 of every included upload, sorted; in the masked lane, of the masked bodies."""
    ancestors: tuple[Digest, ...]
    """The task's models before it, from its parent back to the first; at most the 1,000 nearest."""


class AliasMove(Term):
    """One move of an alias to a version; `undone_at` is set once it was rolled back."""

    version: Version
    model: Digest
    moved_at: float
    undone_at: float | None = None


class Alias(Term):
    """The target of an alias and its newest moves, at most 1,000, in order."""

    task: Name
    alias: Name
    version: Version
    model: Digest
    history: tuple[AliasMove, ...]


class Promotion(Term):
    """Move an alias to `version` if it points to `expect` now; "none": if the alias does not exist
    yet, "any": unconditionally."""

    version: Version
    expect: Version | Literal["none", "any"] = "any"


class Rollback(Term):
    """Move an alias back to its previous version, if it points to `expect` now."""

    expect: Version | Literal["any"] = "any"


class CollectRequest(Term):
    """Delete the files of models that nothing needs; with `dry_run`, only list them."""

    dry_run: bool = False


class CollectedModel(Term):
    """A model whose file is deleted, and its version in each task."""

    model: Digest
    num_bytes: int
    versions: dict[Name, Version]


class Collected(Term):
    """The deleted models, or with `dry_run` those that would be deleted."""

    dry_run: bool
    models: tuple[CollectedModel, ...]
    num_bytes: int
    num_events: int = 0
    """Events of old rounds that are deleted."""
