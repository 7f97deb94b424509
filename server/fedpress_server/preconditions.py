"""What a start refuses before it opens anything: `server run` the first of it, `doctor` all."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from fedpress_protocols.errors import ConfigurationError
from fedpress_server.identity.membership import Authority
from fedpress_server.settings import Settings


def refusals(settings: Settings) -> Iterator[ConfigurationError]:
    """The settings that exclude each other, or name what is not there."""
    for check in (_shared, _watched, _authority):
        try:
            check(settings)
        except ConfigurationError as exc:
            yield exc


def check(settings: Settings) -> None:
    """Raises the first of the `refusals`."""
    for refusal in refusals(settings):
        raise refusal


def cannot_listen(exc: OSError, host: str, port: int, prefix: str = "") -> ConfigurationError:
    """Why nobody can listen there; `prefix`: admin_ for the operators' own listener."""
    of_host, of_port = (
        f"--{prefix.replace('_', '-')}{name}, FEDPRESS_{prefix.upper()}{name.upper()}"
        for name in ("host", "port")
    )
    if isinstance(exc, socket.gaierror):
        hint = f"choose an address of this machine, or 0.0.0.0 for every one ({of_host})"
    elif exc.errno in (errno.EADDRNOTAVAIL, None):  # asyncio tells no number of it
        hint = (
            f"no network interface of this machine has that address: choose one of its own, or "
            f"0.0.0.0 for every one ({of_host})"
        )
    elif exc.errno == errno.EACCES:
        hint = f"this user may not open ports below 1024: choose one above ({of_port})"
    else:
        hint = f"stop what listens there, or choose another port ({of_port})"
    listener = "the operators' listener" if prefix else "the server"
    return ConfigurationError(
        f"{listener} cannot listen on {host}:{port}: {exc.strerror or exc}", hint=hint
    )


def _shared(settings: Settings) -> None:
    """Several servers meet in a database and a store, and nowhere else."""
    if settings.role == "all":
        return
    if settings.resolved_database_url.startswith("sqlite"):
        raise ConfigurationError(
            f"role {settings.role!r} needs a database that several servers share, and SQLite is "
            "one server's own",
            hint="set FEDPRESS_DATABASE_URL to a postgresql:// URL, or leave the role at all",
        )
    if not settings.store_url:
        raise ConfigurationError(
            f"role {settings.role!r} needs a store that several servers share, and the data folder "
            "is one server's own",
            hint="set FEDPRESS_STORE_URL to s3://bucket/prefix, or leave the role at all",
        )


def _watched(settings: Settings) -> None:
    for folder in settings.watched[1:]:  # the data folder is made
        if not folder.is_dir():
            raise ConfigurationError(
                f"watched_folders names {folder}, which is no folder",
                hint="mount it here, or take it out of FEDPRESS_WATCHED_FOLDERS",
            )


def _authority(settings: Settings) -> None:
    if settings.masking_authority:
        Authority.apart(settings.population, settings.masking_authority)
