"""The commands that take every setting as an option: run a server, migrate its database."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from fedpress_protocols.errors import ConfigurationError
from fedpress_server.settings import Settings, secret_settings

SECTIONS: Mapping[str, Sequence[str]] = {
    "Listeners": (
        "host",
        "port",
        "admin_host",
        "admin_port",
        "allowed_hosts",
        "trusted_proxies",
        "tls_certificate",
        "tls_key",
        "tls_client_ca",
    ),
    "Data and keys": (
        "data_dir",
        "database_url",
        "database_url_file",
        "store_url",
        "store_endpoint",
        "store_region",
        "store_access_key_id",
        "store_secret_access_key_file",
        "store_timeout",
        "store_cache_bytes",
        "download_location",
        "watched_folders",
        "server_key_file",
        "authority_key_file",
    ),
    "Access": (
        "admin_token_file",
        "metrics_token_file",
        "open_metrics",
        "approve_each_device",
        "approval_poll_seconds",
        "enrolments_per_second",
        "enrolment_failures_per_minute",
        "clock_skew",
        "population",
        "masking_authority",
    ),
    "Limits of connections and uploads": (
        "poll_seconds",
        "check_ins_per_second",
        "max_connections",
        "max_connections_per_address",
        "max_body_bytes",
        "max_bytes_in_flight",
        "max_part_bytes",
        "max_partial_bytes",
        "partial_seconds",
        "header_timeout",
        "body_timeout",
        "upload_seconds",
    ),
    "Processes": (
        "role",
        "worker_threads",
        "fold_memory_bytes",
        "tick_seconds",
        "lease_seconds",
        "follow_seconds",
        "retention_grace",
        "retention_seconds",
        "drain_seconds",
        "shutdown_seconds",
    ),
    "Logs, metrics, traces": (
        "log_level",
        "log_format",
        "egress_price",
        "egress_currency",
        "otlp_endpoint",
        "trace_share",
        "failpoint",
    ),
}
"""The settings by the section of `--help` that lists them; a test asks for each of them once."""

_OTHER = "Other settings"
_TYPES = {int: "INTEGER", float: "FLOAT", bool: "true|false", Path: "PATH"}
_LOW, _HIGH = (("ge", "<="), ("gt", "<")), (("le", "<="), ("lt", "<"))
_SECRETS = tuple(name for name in secret_settings() if name != "database_url")
_NO_SECRET = (
    "An option goes before its variable, a variable before the TOML file. No secret is an option, "
    "as other users of the machine could read it: "
    + ", ".join(f"FEDPRESS_{name.upper()}" for name in _SECRETS)
    + " come from the environment or from a file."
)


class SettingOption(click.Option):
    """The option of one setting. Its help shows the type, the bounds and the default; the value is
    parsed by Settings, which names every wrong setting at once."""

    def __init__(self, name: str, field: FieldInfo) -> None:
        kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
        kind = field.annotation if get_origin(field.annotation) is None else kinds[0]
        metavar = _TYPES.get(kind, "TEXT") if isinstance(kind, type) else "TEXT"
        if get_origin(field.annotation) is Literal:
            metavar = f"[{'|'.join(kinds)}]"
        super().__init__(
            ["--" + name.replace("_", "-"), name], metavar=metavar, help=field.description
        )
        self._field = field

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra: dict[str, Any] = {"envvars": (f"FEDPRESS_{str(self.name).upper()}",)}
        if self._field.default not in (None, ""):
            extra["default"] = str(self._field.default)
        limits = {
            name: getattr(each, name)
            for each in self._field.metadata
            for name in ("ge", "gt", "le", "lt")
            if getattr(each, name, None) is not None
        }
        if limits:
            low = "".join(f"{limits[name]}{sign}" for name, sign in _LOW if name in limits)
            high = "".join(f"{sign}{limits[name]}" for name, sign in _HIGH if name in limits)
            extra["range"] = f"{low}x{high}"
        return extra


class SettingsCommand(click.Command):
    """A command whose options are the server's settings, listed by section; `work` gets them."""

    def __init__(self, name: str, help: str, work: Callable[[Settings], None]) -> None:
        def load(config: Path | None, **options: str | None) -> None:
            work(Settings.load(config, **options))

        config = click.Option(
            ["--config"],
            type=click.Path(path_type=Path),
            envvar="FEDPRESS_CONFIG",
            show_envvar=True,
            help="TOML file of settings, by the options' names with underscores.",
        )
        super().__init__(
            name,
            callback=load,
            params=[config, *_options().values()],
            help=help,
            epilog=_NO_SECRET,
            context_settings={"help_option_names": ["-h", "--help"]},
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options, listed = _options(), {name for names in SECTIONS.values() for name in names}
        others = [name for name in options if name not in listed]
        own = [each for each in self.get_params(ctx) if not isinstance(each, SettingOption)]
        _section(ctx, formatter, "Options", own)
        for title, names in {**SECTIONS, _OTHER: others}.items():
            _section(ctx, formatter, title, [options[name] for name in names])


def _section(
    ctx: click.Context,
    formatter: click.HelpFormatter,
    title: str,
    params: Sequence[click.Parameter],
) -> None:
    rows = [row for each in params if (row := each.get_help_record(ctx)) is not None]
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


@cache
def _options() -> dict[str, SettingOption]:
    """By setting; secrets have none, as every process may read another's command line."""
    return {
        name: SettingOption(name, field)
        for name, field in Settings.model_fields.items()
        if name not in _SECRETS
    }


def _run(settings: Settings) -> None:
    from fedpress_server.serve import serve
    from fedpress_server.storage.database import damage_refused

    with damage_refused():
        serve(settings)


def _migrate(settings: Settings) -> None:
    from fedpress_server.storage.database import migrate as migrated

    before, after = migrated(settings.resolved_database_url)
    click.echo(f"the database is at schema {after}" + (f", was at {before}" if before else ""))
    for file in asyncio.run(_first_keys(settings)):
        click.echo(f"made {file}: keep a copy apart, nothing else signs for this database")


async def _first_keys(settings: Settings) -> list[Path]:
    from fedpress_server.identity.server_keys import first_keys
    from fedpress_server.storage.database import Database

    database = Database(settings.resolved_database_url, migrates=False)
    try:
        return await first_keys(settings, database)
    finally:
        await asyncio.to_thread(database.close)


run = SettingsCommand("run", "Run the aggregation server.", _run)
migrate = SettingsCommand(
    "migrate",
    "Update the database's schema to this release, and create the key files that the settings name "
    "if the database has none yet. Servers whose database user may not change the schema need it.",
    _migrate,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m fedpress_server`: wrong settings end with 2 and a sentence on stderr."""
    program = "python -m fedpress_server"
    try:
        run.main(arguments, prog_name=program)
    except ConfigurationError as exc:
        click.echo(f"{program}: {exc}", err=True)
        sys.exit(2)
