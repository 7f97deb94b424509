"""Diagnosis of common problems of a server, before it starts or while it runs, with fixes.

Nothing is changed: no table, no key and no folder is made; a probe is written and taken away where
the server would write.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx
import sqlalchemy as sa
from cryptography import x509
from sqlalchemy.engine import Connection

from fedpress_protocols.audit import checked, end_of
from fedpress_protocols.errors import (
    BrokenChain,
    ConfigurationError,
    FedpressError,
    NotFound,
    ServerError,
    TransportError,
)
from fedpress_server import open_files, preconditions
from fedpress_server.identity import audit
from fedpress_server.identity.rotation import Standing, key_files, standing
from fedpress_server.identity.server_keys import PURPOSES, key_file, known_key
from fedpress_server.preconditions import cannot_listen
from fedpress_server.settings import MIB, Settings, unknown_variables
from fedpress_server.storage.bucket import opened_payloads
from fedpress_server.storage.database import Database
from fedpress_server.storage.engines import RESTORE
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import Payloads, check_digest
from fedpress_server.storage.records import task_records
from fedpress_server.storage.tables import model_files, models
from fedpress_server.systems import check_system
from fedpress_server.tls import certificates_of

MIN_FREE_BYTES = 1024 * MIB
MIN_FREE_FILES = 10_000
_SAMPLED_MODELS = 20
_SAMPLED_BYTES = 1024 * MIB
"""Models that are read besides those that tasks are at, and bytes of all that are read."""
_EXPIRES_SOON = timedelta(days=14)
_FEW_FILES = 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: what was `found`, and the `fix`, empty if all is well."""

    check: str
    found: str
    fix: str = ""

    @property
    def is_fault(self) -> bool:
        return bool(self.fix)


def examined(
    load: Callable[[], Settings],
    *,
    url: str = "",
    ask: Callable[[str], httpx.Response],
    clock: Callable[[], float],
    min_free_bytes: int = MIN_FREE_BYTES,
) -> Iterator[Finding]:
    """Findings about the server that `load` tells of, and about the one that answers at `url`.

    `ask` sends a GET, and raises TransportError without an answer, ConfigurationError where TLS is
    why. `clock`: this machine's, Unix seconds.
    """
    try:
        check_system()
    except ConfigurationError as exc:
        yield Finding("system", exc.detail, exc.hint)
        if url:
            yield from _answer(url, ask, clock, 300.0)
        return
    for unknown in unknown_variables():
        yield Finding("settings", unknown, "correct its name, or unset it")
    try:
        settings = load()
    except ConfigurationError as exc:
        yield Finding(
            "settings", exc.detail, exc.hint or "correct the setting; fedpress server run -h"
        )
        settings = None
    else:
        yield Finding("settings", "can be read, and no secret is a placeholder")
    if settings is not None:
        yield from findings_of(settings, clock(), min_free_bytes=min_free_bytes)
        if not url:
            yield _port(settings.host, settings.port)
            if settings.admin_port is not None:
                yield _port(settings.admin_host, settings.admin_port, "admin_")
    if url:
        yield from _answer(url, ask, clock, settings.clock_skew if settings else 300.0)


def findings_of(
    settings: Settings, now: float, *, min_free_bytes: int = MIN_FREE_BYTES
) -> Iterator[Finding]:
    """Findings about a server with these settings, whether it runs or not.

    `now`: this machine's clock, Unix seconds. Blocks, and must not run inside an event loop.
    """
    for refusal in preconditions.refusals(settings):
        yield Finding("settings", refusal.detail, refusal.hint)
    missing = list(_extras(settings))
    yield from missing or [Finding("extras", "all that the settings need is installed")]
    yield _state(settings.data_dir)
    yield _disk(settings.data_dir, min_free_bytes)
    yield _files(settings)
    yield from _permissions(settings)
    yield from _keys(settings)
    if settings.tls_certificate is not None:
        yield _certificate(settings, settings.tls_certificate, now)
    if not missing:
        findings = [_database(settings)]
        if settings.store_url:
            findings.append(_store(settings))
        yield from findings
        if not any(each.is_fault for each in findings) and not _is_new(
            settings.resolved_database_url
        ):
            yield audit_log(settings)
            yield from _models(settings)


def _extras(settings: Settings) -> Iterator[Finding]:
    libraries = {
        "postgres": ("psycopg", not settings.resolved_database_url.startswith("sqlite")),
        "s3": ("obstore", bool(settings.store_url)),
        "otel": ("opentelemetry", bool(settings.otlp_endpoint)),
    }
    for extra, (library, is_needed) in libraries.items():
        if is_needed and find_spec(library) is None:
            yield Finding(
                "extras",
                f"the settings need {library}, which is not installed",
                f"pip install 'fedpress[{extra}]'",
            )


def _state(folder: Path) -> Finding:
    existing = _nearest(folder)
    if not existing.is_dir():
        return Finding("state", f"{existing} is no folder", "name another as FEDPRESS_DATA_DIR")
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as exc:
        advice = {
            errno.ENOSPC: "see `disk`: the file system has no room or no inodes left",
            errno.EDQUOT: f"raise the disk quota of user {os.getuid()}",
            errno.EROFS: "mount the file system for writing: it may have been remounted "
            "read-only after an error, which the kernel's log tells",
            errno.EMFILE: "raise the limit of open files (ulimit -n, LimitNOFILE)",
        }.get(
            exc.errno or 0,
            f"chown {os.getuid()} {existing}, or name another folder as FEDPRESS_DATA_DIR",
        )
        return Finding(
            "state", f"user {os.getuid()} cannot write to {existing}: {exc.strerror}", advice
        )
    verdict = "can be written to" if folder.exists() else f"can be made in {existing}"
    return Finding("state", f"{folder} {verdict}")


def _disk(folder: Path, min_free_bytes: int) -> Finding:
    existing = _nearest(folder)
    free = shutil.disk_usage(existing).free
    free_space = f"{free // MIB:,} MiB are free where {folder} is"
    system = os.statvfs(existing)
    if system.f_files and system.f_favail < min(MIN_FREE_FILES, system.f_files // 10):
        return Finding(
            "disk",
            f"{system.f_favail:,} of {system.f_files:,} inodes are free where {folder} is: soon no "
            "file can be made, however many bytes are free",
            "remove files (`df -i` and `du --inodes` show where they are), or make a file system "
            "with more inodes and move the folder there",
        )
    if free >= min_free_bytes:
        return Finding("disk", free_space)
    return Finding(
        "disk",
        f"{free_space}, and {min_free_bytes // MIB:,} are wanted",
        "make room, use a larger disk, or let tasks keep fewer models (docs/registry.md)",
    )


def _permissions(settings: Settings) -> Iterator[Finding]:
    """The data folder and a SQLite file in it that others have open; the next start closes them."""
    files = {settings.data_dir: (0o027, "0700")}
    if settings.resolved_database_url.startswith("sqlite"):
        files[_file_of(settings.resolved_database_url)] = (0o077, "0600")
    for file, (forbidden, good) in files.items():
        if file.exists() and (mode := stat.S_IMODE(file.stat().st_mode)) & forbidden:
            yield Finding(
                "permissions",
                f"others on this machine have {file} open: its mode is {mode:04o}",
                f"chmod {good} {file}; the next start does, if it is this user's",
            )


def _files(settings: Settings) -> Finding:
    """Whether enough files may be open for the connections that are to be served; the server raises
    its soft limit itself."""
    _, hard = open_files.possible()
    if settings.max_connections is None:
        required, of = _FEW_FILES, "a few hundred connections"
    else:
        required, of = open_files.needed(settings), f"max_connections of {settings.max_connections}"
    if hard < required:
        return Finding(
            "files",
            f"at most {hard} files may be open, and {of} need {required}",
            f"raise the hard limit (ulimit -Hn, LimitNOFILE=, ulimits: nofile) to {required}",
        )
    in_all, of_address = open_files.connections(settings, hard)
    return Finding(
        "files", f"{hard} may be open: {in_all} connections, {of_address} of one address"
    )


def _keys(settings: Settings) -> Iterator[Finding]:
    """Private keys that others than their owner can read; a TLS key may be its group's."""
    files = {key_file(purpose, settings): 0o077 for purpose in PURPOSES}
    place = key_file("server", settings)
    files |= dict.fromkeys(key_files(place), 0o077)
    if settings.tls_key:
        files[settings.tls_key] = 0o007
    configured = {settings.server_key_file, settings.authority_key_file}
    faults = []
    for file, forbidden in files.items():
        if not file.exists():
            if file in configured:
                fix = "fedpress server migrate makes the first; later, copy it from another server"
                faults.append(Finding("keys", f"{file} is not there", fix))
            continue
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & forbidden:
            problem = f"{file} can be read by others: its mode is {mode:04o}"
            fix = f"chmod 0600 {file}; if others use this machine, they may have the key"
            faults.append(Finding("keys", problem, fix))
        elif not os.access(file, os.R_OK):
            problem = f"user {os.getuid()} cannot read {file}"
            faults.append(Finding("keys", problem, f"chown {os.getuid()} {file}"))
    yield from faults or [Finding("keys", "no private key can be read by others")]


def _certificate(settings: Settings, certificate: Path, now: float) -> Finding:
    fix = "get a new certificate for the key, and name both files in the settings"
    try:
        certificates_of(settings)
        first = x509.load_pem_x509_certificate(certificate.read_bytes())
    except ConfigurationError as exc:
        return Finding("certificate", exc.detail, exc.hint or fix)
    except ValueError as exc:
        return Finding("certificate", f"{certificate} cannot be used: {exc}", fix)
    moment = datetime.fromtimestamp(now, UTC)
    until = first.not_valid_after_utc
    if moment < first.not_valid_before_utc:
        problem = f"{certificate} is valid from {first.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on"
        return Finding("certificate", problem, fix)
    if moment > until - _EXPIRES_SOON:
        verb = "expired" if moment > until else "expires"
        return Finding("certificate", f"{certificate} {verb} on {until:%Y-%m-%d %H:%M} UTC", fix)
    return Finding("certificate", f"{certificate} is valid until {until:%Y-%m-%d}")


def _is_new(url: str) -> bool:
    """Whether it is a SQLite database that the first start is to make."""
    return url.startswith("sqlite") and not _file_of(url).exists()


def _file_of(url: str) -> Path:
    return Path(url.partition(":///")[2].partition("?")[0])


def _database(settings: Settings) -> Finding:
    url = settings.resolved_database_url
    file = _file_of(url)
    if _is_new(url):
        return Finding("database", f"{file} is not there yet: the first start makes it")
    try:
        state = asyncio.run(_opened(url, key_file("server", settings)))
    except FedpressError as exc:
        return Finding("database", exc.detail, exc.hint or "look at FEDPRESS_DATABASE_URL")
    if state.damage:
        return Finding("database", f"{file} is damaged: {state.damage}", RESTORE)
    standing_ = state.standing
    if standing_ is not None and standing_.current not in standing_.here:
        return Finding(
            "keys",
            f"the database is signed for with server key {standing_.current}, which is not here",
            "copy its file from a server that has it; fedpress server key show tells which",
        )
    if standing_ is not None and standing_.next not in (None, *standing_.here):
        return Finding(
            "keys",
            f"the next server key {standing_.next} is not here, and will sign once it is "
            "switched to",
            "copy the file that ends in .next from where fedpress server key rotate made it",
        )
    return Finding("database", "answers, and its schema is this release's")


class _Opened(NamedTuple):
    standing: Standing | None
    """The state of the server's signing key; None before there is one."""
    damage: str
    """The first faults that SQLite reports in its file; empty if there are none."""


async def _opened(url: str, place: Path) -> _Opened:
    database = Database(url, migrates=False)
    try:
        damage = await database.read(_damage)
        recorded = await database.read(lambda c: known_key(c, "server"))
        return _Opened(None if recorded is None else await standing(database, place), damage)
    finally:
        await asyncio.to_thread(database.close)


def _damage(connection: Connection) -> str:
    if connection.dialect.name != "sqlite":
        return ""
    rows = connection.exec_driver_sql("PRAGMA integrity_check(3)").scalars().all()
    return "" if rows == ["ok"] else "; ".join(" ".join(str(row).split()) for row in rows)


def audit_log(settings: Settings) -> Finding:
    """Whether the chain of the whole log is unbroken. Must not run inside an event loop."""
    url = settings.resolved_database_url
    try:
        head = asyncio.run(_read(url, lambda c: end_of(checked(audit.entries(c)))))
    except BrokenChain as exc:
        return Finding("audit", f"the audit log was changed: {exc.detail}", exc.hint)
    return Finding("audit", f"the audit log is whole; it ends at {head}")


def _store(settings: Settings) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        try:
            opened_payloads(settings.model_copy(update={"data_dir": Path(folder)}))
        except FedpressError as exc:
            return Finding("store", exc.detail, exc.hint or "look at FEDPRESS_STORE_URL")
    return Finding("store", f"{settings.store_url} takes writes")


def _models(settings: Settings) -> Iterator[Finding]:
    """Models that are not in the store, or are there with other bytes: those that tasks are at,
    without which no server starts, and a sample of the others."""
    url = settings.resolved_database_url
    at = {record.model: record.task for record in asyncio.run(_read(url, task_records))}
    others = [digest for digest in asyncio.run(_read(url, _kept_models)) if digest not in at]
    sample = random.sample(others, min(_SAMPLED_MODELS, len(others)))
    faults, num_read, budget = [], 0, _SAMPLED_BYTES
    where = settings.store_url or settings.data_dir
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) if settings.store_url else settings.data_dir
        payloads = opened_payloads(settings.model_copy(update={"data_dir": place}))
        for digest in (*at, *sample):
            whose = f"task {at[digest]} is at model {digest}" if digest in at else f"model {digest}"
            try:
                size = payloads.size(model_name(digest))
                if size <= budget:
                    budget -= size
                    num_read += 1
                    _check_bytes(payloads, model_name(digest))
            except NotFound:
                problem = f"{whose}, which is not in {where}"
            except ServerError:
                problem = f"{whose}, and its file in {where} holds other bytes than those"
            else:
                continue
            faults.append(
                Finding(
                    "models",
                    problem,
                    f"bring the file {model_name(digest)} back, or restore a backup; a disk "
                    "or a store that has lost one file may have lost others",
                )
            )
    well = f"{num_read} of {len(at) + len(others)} models were read, and are whole"
    yield from faults or [Finding("models", well)]


def _check_bytes(payloads: Payloads, name: str) -> None:
    check_digest(name, payloads.get(name))


def _kept_models(connection: Connection) -> list[str]:
    """The digests of models whose files are kept."""
    collected = sa.select(model_files.c.digest).where(model_files.c.collected_at.is_not(None))
    query = sa.select(models.c.digest).where(models.c.digest.not_in(collected))
    return list(connection.execute(query).scalars())


async def _read(url: str, work: Callable[[Connection], T]) -> T:
    database = Database(url, migrates=False)
    try:
        return await database.read(work)
    finally:
        await asyncio.to_thread(database.close)


def _port(host: str, port: int, prefix: str = "") -> Finding:
    """Whether the server could listen there, if it is not what listens already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            refusal = cannot_listen(exc, host, port, prefix)
            hint = refusal.hint
            if exc.errno == errno.EADDRINUSE:
                hint = f"if the server itself runs there, give --url; else {hint}"
            return Finding("port", refusal.detail, hint)
    return Finding("port", f"{host}:{port} is free")


def _answer(
    url: str,
    ask: Callable[[str], httpx.Response],
    clock: Callable[[], float],
    clock_skew: float,
) -> Iterator[Finding]:
    """Check `url` as a device would see it."""
    before = clock()
    try:
        ready = ask(f"{url.rstrip('/')}/readyz")
    except ConfigurationError as exc:
        yield Finding("certificate", exc.detail, exc.hint)
        return
    except TransportError as exc:
        port = urlsplit(url).port or urlsplit(url).scheme
        way = f"FEDPRESS_HOST, and port {port} in firewall and proxy"
        yield Finding("port", exc.detail, f"{exc.hint}; otherwise look at {way}")
        return
    after = clock()
    yield Finding("port", f"{url} answers")
    if ready.status_code != 200:
        detail = ready.json().get("detail") if "json" in ready.headers["content-type"] else ""
        yield Finding(
            "readiness",
            f"{url}/readyz answers {ready.status_code}{': ' if detail else ''}{detail or ''}",
            "look at the server's log: its database or its store fails",
        )
    else:
        yield Finding("readiness", "the server can work")
    with suppress(KeyError, ValueError):
        date = parsedate_to_datetime(ready.headers["date"]).timestamp()
        yield _clock(before, date, after, clock_skew)


def _clock(before: float, date: float, after: float, clock_skew: float) -> Finding:
    """`date`: the server's time between `before` and `after`, in whole seconds, which it looks up
    once a second: its clock shows up to two more."""
    off = (before + after) / 2 - (date + 1)
    unsure = 1 + (after - before) / 2
    if abs(off) > clock_skew + unsure:
        return Finding(
            "clock",
            f"this machine's clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the "
            f"server's, and {clock_skew:.0f} s are allowed",
            "set both by NTP (timedatectl set-ntp true): signatures out of time are refused",
        )
    apart = abs(off) if abs(off) > unsure else 0.0
    return Finding("clock", f"the two clocks are {apart:.0f} s apart")


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return place
