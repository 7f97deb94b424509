"""Sweeping of orphaned files, left by a killed server, to which no record refers.

Files older than a limit are listed first, then the records are searched for references, and the
others are removed. So a file whose row is written in between stays, and no transaction waits for a
store. Writing a file again resets its age.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from sqlalchemy.engine import Connection

from fedpress_protocols.plan import RoundPlan
from fedpress_server.registry import restores
from fedpress_server.rounds import (
    CarriedOver,
    UploadStaged,
    from_record,
)
from fedpress_server.storage import leases, records
from fedpress_server.storage.database import Database
from fedpress_server.storage.files import (
    artefact_name,
    base_name,
    bases_folder,
    optimizer_name,
    upload_name,
    uploads_folder,
)
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import RoundKey, TaskRecord


async def sweep(
    database: Database, payloads: Payloads, now: float, older_than: float = 0.0
) -> bool:
    """Remove orphaned files, left by a killed server, for other servers, or for a backup that has
    ended. Except at startup, `older_than` (seconds) spares files whose row may follow. Returns
    False and removes nothing during a backup.
    """
    listed = await asyncio.to_thread(_settled, payloads, older_than)
    spent = await database.read(lambda connection: _orphaned(connection, listed, now))
    if spent is None:
        return False

    def remove() -> None:
        if not older_than:
            payloads.sweep_temporaries()
        for name in spent:
            payloads.drop_settled(name, older_than)

    await asyncio.to_thread(remove)
    return True


def _settled(payloads: Payloads, older_than: float) -> list[str]:
    """The candidates for sweeping: files, and the folders of attempts."""
    names = []
    for of_task in list(payloads.names("uploads")):
        folders = list(payloads.names(of_task))
        names += [name for each in folders for name in payloads.settled(each, older_than)]
        names += payloads.settled(of_task, older_than)
    for folder in ("models", "optimizers", "artefacts", *payloads.names("bases")):
        names += payloads.settled(folder, older_than)
    return names


def _orphaned(connection: Connection, listed: Iterable[str], now: float) -> list[str] | None:
    """The orphans among the names `listed`; None while a backup holds all files."""
    if restores.is_held(connection, now):
        return None
    needed = needed_by_rounds(connection)
    needed |= {name.rpartition("/")[0] for name in needed}
    needed |= {uploads_folder(key) for key in records.unfinished_rounds(connection)}
    needed |= needed_by_tasks(connection)
    for task in records.task_records(connection):
        bases = records.bases_of(connection, task.task)
        needed |= {base_name(task.task, *of_client) for of_client in bases.items()}
    return [
        name
        for name in listed
        if name not in needed
        and not (
            name.startswith("models/") and records.model(connection, _digest_in(name)) is not None
        )
    ]


def needed_by_rounds(connection: Connection) -> set[str]:
    """The files of bodies, bases and partial sums that open attempts need."""
    names: set[str] = set()
    for key in records.unfinished_rounds(connection):
        keys: dict[str, RoundKey] = {}
        for _, record in records.events(connection, key):
            event = from_record(record)
            if isinstance(event, UploadStaged):
                of = keys.get(event.assignment, key)
                names.add(upload_name(of, event.assignment, event.upload))
            elif isinstance(event, CarriedOver):
                for each in event.carried:
                    keys[each.assignment] = of = (key[0], each.round, each.attempt)
                    if each.upload is not None:
                        names.add(upload_name(of, each.assignment, each.upload))
    for key, output in leases.all_outputs(connection):
        names.add(f"{uploads_folder(key)}/{output}")
    return names


def needed_by_tasks(connection: Connection) -> set[str]:
    """The optimizer states, and the artefacts in open plans."""
    led_to: set[str] = set()
    for task in records.task_records(connection):
        plans = []
        if task.state == "running":
            texts = records.plans_in_use(connection, task.task)
            plans = [RoundPlan.from_json(text) for text in texts]
        led_to |= files_of(task, plans)
    return led_to


def sweep_bases(payloads: Payloads, task: str, bases: Mapping[str, str]) -> None:
    """Remove the decoded uploads of the task except `bases`."""
    needed = {base_name(task, client_id, digest) for client_id, digest in bases.items()}
    for name in list(payloads.settled(bases_folder(task))):
        if name not in needed:
            payloads.drop(name)


def files_of(record: TaskRecord, plans: Iterable[RoundPlan]) -> set[str]:
    """The files of a task besides models and uploads, with the plans of its uploads."""
    files = set()
    if record.optimizer_state is not None:
        files.add(optimizer_name(record.optimizer_state))
    for plan in plans:
        files |= {artefact_name(digest) for digest in plan.artefacts}
    return files


def _digest_in(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]
