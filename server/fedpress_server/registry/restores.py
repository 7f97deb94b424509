"""SQL statements about backups and restores; each runs in its caller's transaction.

A running backup holds all files: from the insertion of its row on, no transaction removes files
that the snapshot refers to, since it checks for the row. A restore starts a new epoch. Everything
open in the backup is abandoned before the restored server answers any request, so an upload is in
its models if and only if its receipt says so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.messages import (
    RECALL_CONTEXT,
    IncludedUpload,
    Recall,
    Restore,
    SignedRecall,
)
from fedpress_protocols.restores import RestoreStatus, UndoneRound
from fedpress_protocols.signatures import DeviceKey, sign_document
from fedpress_server.storage.records import RoundKey, unfinished_rounds
from fedpress_server.storage.tables import assignments, backups, restores, undone

_COLUMNS = [restores.c[name] for name in Restore.model_fields]
_MARGIN = 60
"""Maximum seconds between a transaction's timestamp and its commit."""

# Backups


def begin_backup(connection: Connection, backup: str, now: float, holds_until: float) -> None:
    row = {"backup": backup, "began_at": now, "holds_until": holds_until, "finished_at": None}
    connection.execute(sa.insert(backups), row)


def hold_on(connection: Connection, backup: str, now: float, holds_until: float) -> bool:
    """Renew the hold on the files; False if it had expired and files may be missing."""
    is_held = (backups.c.backup == backup, backups.c.holds_until > now)
    changed = connection.execute(sa.update(backups).where(*is_held).values(holds_until=holds_until))
    return changed.rowcount == 1


def end_backup(connection: Connection, backup: str, now: float, *, is_whole: bool) -> bool:
    """Release the files; False if the hold had expired. An incomplete backup is deleted from the
    records, as are those before a complete one."""
    if not is_whole:
        connection.execute(sa.delete(backups).where(backups.c.backup == backup))
        return True
    is_held = (backups.c.backup == backup, backups.c.holds_until > now)
    update = sa.update(backups).where(*is_held).values(holds_until=now, finished_at=now)
    if connection.execute(update).rowcount != 1:
        return False
    is_old = (backups.c.backup != backup, backups.c.holds_until <= now)
    connection.execute(sa.delete(backups).where(*is_old))
    return True


def is_held(connection: Connection, now: float) -> bool:
    """Whether a running backup may need files that nothing else refers to."""
    query = sa.select(backups.c.backup).where(backups.c.holds_until > now).limit(1)
    return connection.execute(query).first() is not None


def goes_back_to(connection: Connection) -> int | None:
    """Unix seconds before which every commit is in the newest backup, or in the first one while it
    is running; None without a backup."""
    finished = sa.select(sa.func.max(backups.c.began_at)).where(backups.c.finished_at.is_not(None))
    began_at = connection.execute(finished).scalar_one()
    if began_at is None:
        began_at = connection.execute(sa.select(sa.func.min(backups.c.began_at))).scalar_one()
    return None if began_at is None else int(began_at) - _MARGIN


# Restores


def newest(connection: Connection) -> Restore | None:
    query = sa.select(*_COLUMNS).order_by(restores.c.number.desc()).limit(1)
    row = connection.execute(query).one_or_none()
    return None if row is None else Restore(**row._mapping)


def add(connection: Connection, epoch: str, backup_at: float, now: float) -> Restore:
    """Record a restore of these records; their open rounds are noted, to be abandoned."""
    before = newest(connection)
    restore = Restore(
        number=1 if before is None else before.number + 1,
        epoch=epoch,
        backup_at=int(backup_at),
        restored_at=int(now),
    )
    unfinished = sorted(unfinished_rounds(connection))
    row = {**restore.model_dump(), "open_rounds": [list(key) for key in unfinished]}
    connection.execute(sa.insert(restores), row)
    connection.execute(sa.delete(backups).where(backups.c.finished_at.is_(None)))
    return restore


def open_rounds(connection: Connection) -> list[RoundKey]:
    """The rounds that were open at the newest restore."""
    query = sa.select(restores.c.open_rounds).order_by(restores.c.number.desc()).limit(1)
    keys = connection.execute(query).scalar_one_or_none() or []
    return [(task, number, attempt) for task, number, attempt in keys]


def unknown(connection: Connection, names: Collection[str]) -> tuple[str, ...]:
    """The ids that are no assignment of any device, in order."""
    query = sa.select(assignments.c.assignment).where(assignments.c.assignment.in_(list(names)))
    recorded = set(connection.execute(query).scalars())
    return tuple(dict.fromkeys(name for name in names if name not in recorded))


def signed(
    key: DeviceKey, restore: Restore, client_id: str, task: str, names: Sequence[str], now: float
) -> SignedRecall:
    recall = Recall(
        client_id=client_id,
        task=task,
        restore=restore,
        unknown=tuple(names),
        issued_at=int(now),
    )
    document = sign_document(recall.model_dump(mode="json"), key, context=RECALL_CONTEXT)
    return SignedRecall(recall=recall, key_id=document["key_id"], signature=document["signature"])


def add_undone(
    connection: Connection,
    restore: Restore,
    client_id: str,
    task: str,
    fates: Sequence[IncludedUpload],
    now: float,
) -> None:
    """Record an inclusion that a device reports and these records lack; idempotent."""
    of_now = undone.c.number == restore.number
    names = [fate.assignment for fate in fates]
    query = sa.select(undone.c.assignment).where(of_now, undone.c.assignment.in_(names))
    recorded = set(connection.execute(query).scalars())
    rows = [
        {
            "number": restore.number,
            "task": task,
            "client_id": client_id,
            "reported_at": now,
            **fate.model_dump(),
        }
        for fate in {fate.assignment: fate for fate in fates}.values()
        if fate.assignment not in recorded
    ]
    if rows:
        connection.execute(sa.insert(undone), rows)


def listed(
    connection: Connection, before: int | None = None, limit: int = 1000
) -> list[RestoreStatus]:
    """The restores in the history of these records with numbers below `before`, newest first."""
    query = sa.select(*_COLUMNS).order_by(restores.c.number.desc()).limit(limit)
    if before is not None:
        query = query.where(restores.c.number < before)
    rows = connection.execute(query).all()
    row = undone.c
    of_round = (row.number, row.task, row.round, row.attempt, row.model)
    reported = (
        sa.select(
            *of_round,
            sa.func.count(sa.distinct(row.client_id)).label("devices"),
            sa.func.min(row.reported_at).label("reported_at"),
        )
        .where(row.number.in_([restore.number for restore in rows]))
        .group_by(*of_round)
        .order_by(row.task, row.round, row.attempt, row.model)
    )
    rounds_of: dict[int, list[UndoneRound]] = {}
    for number, *fields in connection.execute(reported):
        values = dict(zip(UndoneRound.model_fields, fields, strict=True))
        rounds_of.setdefault(number, []).append(UndoneRound(**values))
    return [
        RestoreStatus(**restore._mapping, undone=tuple(rounds_of.get(restore.number, ())))
        for restore in rows
    ]
