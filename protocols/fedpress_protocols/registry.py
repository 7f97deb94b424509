"""What a server tells its operators of the models that its tasks have made: versions and aliases.

The model of a task's round n is its version n, and the one it began with is version 0. A version
never changes; an alias is a name that points to one and may be moved.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedpress_protocols.plan import Digest, Name, Term

RESERVED = ("newest", "best")
"""What a version may be called by besides its number and its aliases."""

Version = Annotated[int, Field(ge=0, lt=2**31)]


class ModelVersion(Term):
    """One version of a task's model, and what stands for it today."""

    task: Name
    version: Version
    model: Digest
    parent: Digest | None
    """The model that its updates were made on; None for version 0."""
    attempt: int
    """At its round, the one that was committed; 0 for version 0."""
    published: dict[str, Digest]
    """The models besides, by name."""
    num_updates: int
    num_bytes: int
    """Of the model's file."""
    config: Digest
    """SHA-256 of the task's configuration at that time."""
    code: str
    """The release of fedpress that made it; empty if that is not known."""
    created_at: float
    collected_at: float | None = None
    """When its file was given up, see `RetentionTerms`; the rest stays."""
    aliases: tuple[Name, ...] = ()
    is_newest: bool = False
    is_best: bool = False


class ModelLineage(ModelVersion):
    """A version with all it was made of."""

    updates: tuple[Digest, ...]
    """SHA-256 of every upload that is in it, sorted; in the masked lane, of the masked bodies."""
    ancestors: tuple[Digest, ...]
    """The models before it, from its parent to the first, as far as they are the task's; of more
    than a thousand the nearest."""


class AliasMove(Term):
    """That an alias was moved to a version; `undone_at` once it was rolled back."""

    version: Version
    model: Digest
    moved_at: float
    undone_at: float | None = None


class Alias(Term):
    """Where an alias points, and its newest moves, 1,000 at most, in their order."""

    task: Name
    alias: Name
    version: Version
    model: Digest
    history: tuple[AliasMove, ...]


class Promotion(Term):
    """Move an alias to `version`, if it points to `expect` now; "none": if there is no such alias
    yet, "any": wherever it points."""

    version: Version
    expect: Version | Literal["none", "any"] = "any"


class Rollback(Term):
    """Move an alias back to where it was before, if it points to `expect` now."""

    expect: Version | Literal["any"] = "any"


class CollectRequest(Term):
    """Give up the files of models that nothing needs; with `dry_run`, only say which."""

    dry_run: bool = False


class CollectedModel(Term):
    """A model whose file is given up, and which version of which tasks it was."""

    model: Digest
    num_bytes: int
    versions: dict[Name, Version]


class Collected(Term):
    """What was given up, or would be."""

    dry_run: bool
    models: tuple[CollectedModel, ...]
    num_bytes: int
