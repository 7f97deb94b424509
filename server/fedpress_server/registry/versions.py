"""The registry of models: versions that never change, and aliases that move between them.

A version is written in the transaction that commits its round. An alias is a stack of moves: a
promotion adds one, a rollback undoes the last, and nothing is removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from fedpress_protocols import __version__
from fedpress_protocols.errors import ConfigurationError, Conflict, NotFound, Unavailable
from fedpress_protocols.registry import (
    RESERVED,
    Alias,
    AliasMove,
    ModelLineage,
    ModelVersion,
    Promotion,
    Rollback,
)
from fedpress_server.identity import audit
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import TaskRecord
from fedpress_server.storage.tables import alias_moves, model_files, model_versions, models, tasks

MOST_ANCESTORS = 1000
"""Maximum listed ancestors of a version, the nearest."""
_MOST_NAMED = 1000
"""Versions that are looked at for the names of models."""
MOST_MOVES = 1000
"""Maximum listed moves of an alias, the newest."""

# Versions


def add_first_version(connection: Connection, record: TaskRecord, now: float) -> None:
    """Add version 0: the initial model of a task."""
    row = {
        "task": record.task,
        "version": 0,
        "attempt": 0,
        "model": record.model,
        "parent": None,
        "published": {},
        "updates": [],
        "num_updates": 0,
        "config": _digest(record.config),
        "code": __version__,
        "created_at": now,
    }
    connection.execute(sa.insert(model_versions), row)


def add_version(
    connection: Connection,
    record: TaskRecord,
    *,
    version: int,
    attempt: int,
    model: str,
    parent: str,
    published: Mapping[str, str],
    updates: Iterable[str],
    now: float,
) -> None:
    """Add the version that a round of `record`'s task made from the model `parent` and `updates`;
    `published` are the digests of further models by name."""
    included = sorted(updates)
    row = {
        "task": record.task,
        "version": version,
        "attempt": attempt,
        "model": model,
        "parent": parent,
        "published": dict(published),
        "updates": included,
        "num_updates": len(included),
        "config": _digest(record.config),
        "code": __version__,
        "created_at": now,
    }
    connection.execute(sa.insert(model_versions), row)


def versions(
    connection: Connection, task: str, before: int | None, limit: int
) -> list[ModelVersion]:
    """The task's versions below `before`, the newest first; raises NotFound without the task."""
    newest, best = _newest_and_best(connection, task)
    query = _described().where(model_versions.c.task == task)
    if before is not None:
        query = query.where(model_versions.c.version < before)
    rows = connection.execute(query.order_by(model_versions.c.version.desc()).limit(limit)).all()
    names = _aliases_by_version(connection, task)
    return [ModelVersion(**_fields(row, newest, best, names)) for row in rows]


def lineage(connection: Connection, task: str, which: str) -> ModelLineage:
    """The version `which`: a number, an alias, newest or best. Raises NotFound."""
    newest, best = _newest_and_best(connection, task)
    number = _number(connection, task, which, newest, best)
    query = _described(model_versions.c.updates).where(
        model_versions.c.task == task, model_versions.c.version == number
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"task {task!r} has no version {number}", task=task)
    fields = _fields(row, newest, best, _aliases_by_version(connection, task))
    return ModelLineage(
        **fields,
        updates=tuple(row.updates),
        ancestors=tuple(_ancestors(connection, task, number, row.parent)),
    )


def _described(*more: sa.Column[Any]) -> sa.Select[Any]:
    versions = model_versions.c
    plain = [column for column in versions if column.name != "updates"]
    joined = model_versions.join(models, models.c.digest == versions.model).outerjoin(
        model_files, model_files.c.digest == versions.model
    )
    return sa.select(*plain, *more, models.c.num_bytes, model_files.c.collected_at).select_from(
        joined
    )


def _fields(
    row: Row[Any], newest: str, best: str | None, names: dict[int, list[str]]
) -> dict[str, Any]:
    values = {
        name: row._mapping[name] for name in ModelVersion.model_fields if name in row._mapping
    }
    return values | {
        "aliases": tuple(names.get(row.version, [])),
        "is_newest": row.model == newest,
        "is_best": row.model == best,
    }


def _newest_and_best(connection: Connection, task: str) -> tuple[str, str | None]:
    query = sa.select(tasks.c.model, tasks.c.best).where(tasks.c.task == task)
    record = connection.execute(query).one_or_none()
    if record is None:
        raise NotFound(f"no task {task!r}", task=task)
    return record.model, record.best


def _number(connection: Connection, task: str, which: str, newest: str, best: str | None) -> int:
    if which.isdecimal() and len(which) < 10:
        return int(which)
    if which in RESERVED:
        digest = newest if which == "newest" else best
        query = sa.select(sa.func.max(model_versions.c.version)).where(
            model_versions.c.task == task, model_versions.c.model == digest
        )
        number = None if digest is None else connection.execute(query).scalar_one()
        if number is None:
            raise NotFound(f"task {task!r} has no {which} version", task=task)
        return int(number)
    moves = _standing(connection, task, which)
    if not moves:
        raise NotFound(
            f"task {task!r} has no alias {which!r}",
            hint="use a version number, newest, best or an alias; fedpress model promote makes one",
            task=task,
        )
    return int(moves[-1].version)


def _ancestors(connection: Connection, task: str, number: int, parent: str | None) -> Iterable[str]:
    """The ancestors from the parent to the task's first model, or to one of another task, up to the
    listed maximum."""
    row, num_shown = model_versions.c, 0
    while parent is not None and num_shown < MOST_ANCESTORS:
        query = sa.select(row.version, row.model, row.parent).where(
            row.task == task, row.version < number
        )
        rows = connection.execute(query.order_by(row.version.desc()).limit(MOST_ANCESTORS)).all()
        for each in rows:
            if each.model == parent and num_shown < MOST_ANCESTORS:
                yield parent
                parent, num_shown = each.parent, num_shown + 1
        if not rows:
            yield parent
            return
        number = rows[-1].version


# Aliases


def aliases(connection: Connection, task: str) -> list[Alias]:
    """All aliases by name, with the newest moves of each."""
    _newest_and_best(connection, task)
    return [_alias(connection, task, name) for name in sorted(_points(connection, task))]


def promote(
    connection: Connection,
    task: str,
    name: str,
    request: Promotion,
    now: float,
    *,
    by: str = audit.SERVER,
) -> Alias:
    """Move an alias; idempotent.

    Raises NotFound for an unknown version, Conflict if the alias does not point to the expected
    version or the version's file was deleted, ConfigurationError for a reserved name.
    """
    _newest_and_best(connection, task)
    if name in RESERVED or name.isdecimal():
        raise ConfigurationError(
            f"{name!r} already selects a version", hint="choose a word such as production"
        )
    query = (
        sa.select(model_files.c.collected_at)
        .select_from(
            model_versions.outerjoin(model_files, model_files.c.digest == model_versions.c.model)
        )
        .where(model_versions.c.task == task, model_versions.c.version == request.version)
    )
    record = connection.execute(query).one_or_none()
    if record is None:
        raise NotFound(f"task {task!r} has no version {request.version}", task=task)
    if record.collected_at is not None:
        raise Conflict(
            f"the model of version {request.version} was deleted by the task's retention"
        )
    standing = _standing(connection, task, name)
    points_to = standing[-1].version if standing else "none"
    if request.expect not in ("any", points_to):
        raise Conflict(
            f"{name} points to {_said(points_to)}, not to {_said(request.expect)}",
            hint="check what was promoted since, and retry with the version you expect now",
            version=points_to,
        )
    if points_to != request.version:
        seq = sa.select(sa.func.coalesce(sa.func.max(alias_moves.c.seq), 0)).where(
            alias_moves.c.task == task, alias_moves.c.alias == name
        )
        row = {
            "task": task,
            "alias": name,
            "seq": connection.execute(seq).scalar_one() + 1,
            "version": request.version,
            "moved_at": now,
            "undone_at": None,
        }
        connection.execute(sa.insert(alias_moves), row)
        details = {"version": request.version, "before": points_to}
        audit.add(connection, now, by, "alias.promoted", f"{task}/{name}", **details)
    return _alias(connection, task, name)


def rollback(
    connection: Connection,
    task: str,
    name: str,
    request: Rollback,
    now: float,
    *,
    by: str = audit.SERVER,
) -> Alias:
    """Roll an alias back to its previous version. Raises NotFound, or Conflict if it does not point
    to the expected version, or has no previous one."""
    _newest_and_best(connection, task)
    standing = _standing(connection, task, name)
    if not standing:
        raise NotFound(f"task {task!r} has no alias {name!r}", task=task)
    if request.expect not in ("any", standing[-1].version):
        raise Conflict(
            f"{name} points to {_said(standing[-1].version)}, not to {_said(request.expect)}",
            version=standing[-1].version,
        )
    if len(standing) == 1:
        raise Conflict(
            f"{name} has only ever pointed to version {standing[-1].version}",
            hint="there is nothing to roll back to; promote another version",
        )
    connection.execute(
        sa.update(alias_moves)
        .where(
            alias_moves.c.task == task,
            alias_moves.c.alias == name,
            alias_moves.c.seq == standing[-1].seq,
        )
        .values(undone_at=now)
    )
    details = {"version": standing[-2].version, "before": standing[-1].version}
    audit.add(connection, now, by, "alias.rolled-back", f"{task}/{name}", **details)
    return _alias(connection, task, name)


def _moves(
    connection: Connection, task: str, name: str, most: int, *conditions: sa.ColumnElement[bool]
) -> list[Row[Any]]:
    """The newest moves of an alias that match the conditions, in order, with their models."""
    same = sa.and_(
        model_versions.c.task == alias_moves.c.task,
        model_versions.c.version == alias_moves.c.version,
    )
    query = (
        sa.select(alias_moves, model_versions.c.model)
        .join(model_versions, same)
        .where(alias_moves.c.task == task, alias_moves.c.alias == name, *conditions)
        .order_by(alias_moves.c.seq.desc())
        .limit(most)
    )
    return list(connection.execute(query))[::-1]


def _standing(connection: Connection, task: str, name: str) -> list[Row[Any]]:
    """The last one or two moves that were not rolled back."""
    return _moves(connection, task, name, 2, alias_moves.c.undone_at.is_(None))


def _points(connection: Connection, task: str) -> dict[str, int]:
    """The version of each alias."""
    row = alias_moves.c
    last = (
        sa.select(row.alias, sa.func.max(row.seq).label("seq"))
        .where(row.task == task, row.undone_at.is_(None))
        .group_by(row.alias)
        .subquery()
    )
    same = sa.and_(row.task == task, row.alias == last.c.alias, row.seq == last.c.seq)
    query = sa.select(row.alias, row.version).select_from(alias_moves.join(last, same))
    return {name: version for name, version in connection.execute(query)}


def _aliases_by_version(connection: Connection, task: str) -> dict[int, list[str]]:
    aliases: dict[int, list[str]] = {}
    for name, version in sorted(_points(connection, task).items()):
        aliases.setdefault(version, []).append(name)
    return aliases


def _alias(connection: Connection, task: str, name: str) -> Alias:
    last = _standing(connection, task, name)[-1]
    return Alias(
        task=task,
        alias=name,
        version=last.version,
        model=last.model,
        history=tuple(
            AliasMove(
                version=move.version,
                model=move.model,
                moved_at=move.moved_at,
                undone_at=move.undone_at,
            )
            for move in _moves(connection, task, name, MOST_MOVES)
        ),
    )


def _said(version: object) -> str:
    return "nothing" if version == "none" else f"version {version}"


# Files


def is_collected(connection: Connection, digest: str) -> bool:
    query = sa.select(model_files.c.collected_at).where(model_files.c.digest == digest)
    return connection.execute(query).scalar_one_or_none() is not None


def newest_files(connection: Connection, limit: int) -> list[tuple[str, int, float, str]]:
    """Digest, bytes, Unix time and name of the newest models with a file, those of all tasks; the
    name says the newest version that a model is of, and is empty for one of no task."""
    query = (
        sa.select(models.c.digest, models.c.num_bytes, models.c.created_at)
        .outerjoin(model_files, model_files.c.digest == models.c.digest)
        .where(model_files.c.collected_at.is_(None))
        .order_by(models.c.created_at.desc(), models.c.digest)
        .limit(limit)
    )
    files = connection.execute(query).all()
    row, names = model_versions.c, dict[str, str]()
    versions = (
        sa.select(row.task, row.version, row.model, row.published)
        .where(row.model.in_([digest for digest, _, _ in files]))
        .order_by(row.created_at.desc())
        .limit(_MOST_NAMED)
    )
    for task, version, model, published in connection.execute(versions):
        names.setdefault(model, f"{task} {version}")
        for name, digest in published.items():
            names.setdefault(digest, f"{task} {version} {name}")
    return [(digest, size, at, names.get(digest, "")) for digest, size, at in files]


def keep_again(connection: Connection, payloads: Payloads, digests: Iterable[str]) -> None:
    """Mark models whose files were just written as kept again.

    Raises Unavailable for one whose file was removed in the meantime: write it again.
    """
    given_up = sa.and_(
        model_files.c.digest.in_(list(digests)), model_files.c.collected_at.is_not(None)
    )
    for digest in connection.execute(sa.select(model_files.c.digest).where(given_up)).scalars():
        try:
            payloads.size(model_name(digest))
        except NotFound as exc:
            raise Unavailable(
                f"the file of model {digest[:12]} was being removed; retry", retry_after=1
            ) from exc
    connection.execute(sa.update(model_files).where(given_up).values(collected_at=None))


def mark_uploaded(connection: Connection, digest: str, now: float) -> None:
    """Mark a model as uploaded by an operator, which is never deleted."""
    row = sa.update(model_files).where(model_files.c.digest == digest)
    if not connection.execute(row.values(brought_at=now)).rowcount:
        connection.execute(
            sa.insert(model_files), {"digest": digest, "brought_at": now, "collected_at": None}
        )


def _digest(config: str) -> str:
    return hashlib.sha256(config.encode()).hexdigest()
