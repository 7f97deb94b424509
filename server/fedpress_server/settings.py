"""Everything an operator can set, once: flags over FEDPRESS_* variables over a TOML file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.local_files import check_private
from fedpress_protocols.validation import format_validation_errors
from fedpress_server import failpoints

MIB = 2**20
_PLACEHOLDER = re.compile(
    r"chang.{0,2}me|replace.?(me|this|with)|place.?holder|your.?(own.?)?(secret|token|password|key)"
    r"|^<.*>$|^\[.*\]$|^(?P<one>.)(?P=one)*$|^(password|secret|postgres|fedpress|admin|todo|none|null)$",
    re.IGNORECASE,
)
_HOST = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*|\[[0-9a-f:.]+\]", re.ASCII)
_HTTP = re.compile(r"https?://[^/@\s]+(/[^@\s]*)?$")
Seconds = Annotated[float, Field(gt=0)]
_OF_COMMANDS = ("CONFIG", "URL", "CA", "TOKEN", "TOKEN_FILE", "CA_PASSPHRASE", "CA_PASSPHRASE_FILE")
_OF_KERNELS = ("KERNELS", "PREBUILT_KERNELS", "THREADS")
_OF_COMPOSE = (
    *("PUBLISH", "PUBLISH_OPERATORS", "PUBLISH_GRAFANA", "PUBLISH_PROMETHEUS", "SECRETS", "TLS"),
    *("MEMORY", "WORKER_MEMORY", "WORKER_CPUS", "METRICS_KEPT"),
)
_OF_TESTS = ("SLOW", "SOAK", "BENCH_POSTGRESQL")
OTHER_VARIABLES = frozenset(
    f"FEDPRESS_{name}" for name in (*_OF_COMMANDS, *_OF_KERNELS, *_OF_COMPOSE, *_OF_TESTS)
)
"""The variables that are no settings of a server; a test compares them with those in use."""
_SERVICE_LINK = re.compile(r"(^|_)(SERVICE_(HOST|PORT)|PORT_\d+)(_|$)")
"""In variables that Kubernetes makes for a service whose name begins with fedpress, beside those
with values such as tcp://10.0.0.1:8080."""


class Settings(BaseSettings):
    """The server's settings; every field is a flag, a variable and a key of the TOML file."""

    model_config = SettingsConfigDict(
        env_prefix="FEDPRESS_",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
    )

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every one.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    data_dir: Path = Field(
        Path("fedpress-data"), description="Folder of the database, the models and the server key."
    )
    database_url: str = Field(
        "",
        repr=False,
        description="SQLAlchemy URL, sqlite:////folder/file.db or postgresql://...; empty is the "
        "SQLite file fedpress.db in the data folder. With a password give it by variable or file.",
    )
    database_url_file: Path | None = Field(
        None, description="File that holds the database's URL, in place of the URL itself."
    )
    store_url: str = Field(
        "",
        description="s3://bucket/prefix for models and uploads; empty keeps them in the data "
        "folder. Servers that share a database share their store.",
    )
    store_endpoint: str = Field(
        "", description="http(s) address of an S3 store other than Amazon's."
    )
    store_region: str = Field("", description="Region of the S3 store.")
    store_access_key_id: str = Field(
        "",
        description="Name of the store's key; if not set, found as S3 clients do, from AWS_* on.",
    )
    store_secret_access_key: SecretStr | None = Field(None, description="The store's secret key.")
    store_secret_access_key_file: Path | None = Field(
        None, description="File that holds the store's secret key, in place of the key itself."
    )
    store_timeout: Seconds = Field(
        30.0, description="Seconds that the store may take for one file, including retries."
    )
    store_cache_bytes: int = Field(
        4096 * MIB,
        ge=0,
        description="Bytes of the store's files that are cached in the data folder.",
    )
    download_location: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="Internal location of the proxy before this server, such as /_store: it sends "
        "what devices fetch, from the store, as X-Accel-Redirect tells it; empty: the server does.",
    )
    watched_folders: str = Field(
        "",
        description="Folders, separated by commas, whose disks /metrics reports besides the data "
        "folder's: the database's and the store's, if they are on this machine.",
    )
    server_key_file: Path | None = Field(
        None,
        description="PEM file of the key that signs receipts, the same for all servers of one "
        "database; if not set, server-key.pem in the data folder, created at the first start.",
    )
    authority_key_file: Path | None = Field(
        None,
        description="PEM file of the key that certifies devices of the masked lane, if the server "
        "does that; if not set, authority-key.pem in the data folder.",
    )
    role: Literal["all", "api", "worker", "scheduler"] = Field(
        "all",
        description="Role of this server: api answers devices and operators, worker aggregates, "
        "scheduler enforces deadlines and selects clients; all does everything.",
    )
    admin_token: SecretStr | None = Field(
        None,
        description="Bearer token of the admin API, at least 16 characters; not set: it is closed.",
    )
    admin_token_file: Path | None = Field(
        None, description="File that holds the admin token, in place of the token itself."
    )
    metrics_token: SecretStr | None = Field(
        None,
        description="Bearer token that opens /metrics and nothing else, at least 16 characters; an "
        "operator's token opens it, too.",
    )
    metrics_token_file: Path | None = Field(
        None, description="File that holds the metrics token, in place of the token itself."
    )
    open_metrics: bool = Field(
        False, description="Whether /metrics answers anybody who reaches it, without a token."
    )
    allowed_hosts: str = Field(
        "",
        description="Host names that requests may be sent to, separated by commas, *.example.org "
        "for all subdomains; empty: any. /livez, /readyz and /metrics answer to any.",
    )
    admin_host: str = Field(
        "127.0.0.1", description="Address of the operators' own listener, if it has a port."
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of a listener for operators alone: the admin API, what operators read "
        "and /metrics are answered there and no longer on the port; 0 takes a free one.",
    )
    tls_certificate: Path | None = Field(None, description="PEM certificate chain; turns on TLS.")
    tls_key: Path | None = Field(None, description="PEM private key of the certificate.")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM certificates of authorities: devices are answered only with a certificate "
        "that one of them has signed. The operators' own listener asks for none.",
    )
    max_body_bytes: int = Field(
        1024 * MIB, ge=1024, description="Largest body of any request; a plan's bound is tighter."
    )
    max_bytes_in_flight: int = Field(
        256 * MIB,
        ge=1024,
        description="Limit of upload bytes in memory at a time, as they arrive; beyond it the "
        "slowest upload is refused and must be retried.",
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        description="Limit of open connections; more are answered 503. If not set, 16384, or half "
        "of the files that the process may open, if that is less.",
    )
    max_connections_per_address: int | None = Field(
        None,
        ge=1,
        description="Limit of connections from one address, or one IPv6 network of 64 bits; if "
        "not set, half of max_connections.",
    )
    trusted_proxies: str = Field(
        "",
        description="Addresses or networks of proxies, separated by commas. They carry connections "
        "of many devices, so only max_connections limits them.",
    )
    poll_seconds: Seconds = Field(
        5.0, description="Seconds after which a device without work is asked to poll again."
    )
    check_ins_per_second: Annotated[float, Field(gt=0)] = Field(
        200.0, description="Check-ins per second over which devices without work are spread."
    )
    approve_each_device: bool = Field(
        False,
        description="Whether an operator has to approve every device that enrols, whatever its "
        "token says.",
    )
    approval_poll_seconds: Seconds = Field(
        30.0,
        description="Seconds after which a device that waits for approval is asked to poll again.",
    )
    enrolments_per_second: Annotated[float, Field(gt=0)] = Field(
        100.0,
        description="Rate limit of enrolments with valid tokens, per second, after a first burst; "
        "more are told to retry later.",
    )
    enrolment_failures_per_minute: Annotated[float, Field(gt=0)] = Field(
        30.0,
        description="Limit of enrolments with invalid tokens from one address, and for one token; "
        "more are told to retry later. Valid tokens are not affected.",
    )
    tick_seconds: Seconds = Field(0.5, description="Seconds between checks of the deadlines.")
    header_timeout: Seconds = Field(
        9.0, description="Seconds a connection may take to send a request's headers."
    )
    body_timeout: Seconds = Field(
        9.0, description="Seconds a body may stall before its connection is closed."
    )
    upload_seconds: Seconds = Field(
        600.0,
        description="Seconds an upload's body may take in all. After a twentieth of that time it "
        "must arrive at least at the even rate that meets the limit.",
    )
    max_part_bytes: int = Field(
        8 * MIB, ge=64 * 1024, description="Maximum bytes of one part of an upload in parts."
    )
    max_partial_bytes: int = Field(
        4096 * MIB,
        ge=1024,
        description="Maximum bytes of all unfinished uploads in parts together.",
    )
    partial_seconds: Seconds = Field(
        3600.0,
        description="Seconds that an unfinished upload in parts is kept after its last part.",
    )
    drain_seconds: Annotated[float, Field(ge=0, le=600)] = Field(
        3.0,
        description="Seconds for which a stopping server that shares its database still answers "
        "requests, with /readyz at 503, so that load balancers turn to the others.",
    )
    shutdown_seconds: int = Field(
        10, ge=1, description="Seconds that running requests are given when the server stops."
    )
    clock_skew: Annotated[float, Field(ge=0, le=300)] = Field(
        300.0, description="Seconds that a device's clock may be ahead of the server's."
    )
    worker_threads: int = Field(
        2,
        ge=1,
        le=64,
        description="Threads that check and aggregate uploads beside the event loop.",
    )
    lease_seconds: Seconds = Field(
        30.0,
        description="Seconds without a renewal after which another worker may take a worker's job.",
    )
    follow_seconds: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="Seconds between a server's checks for changes by other servers."
    )
    fold_memory_bytes: int = Field(
        256 * MIB,
        ge=MIB,
        description="Memory of an aggregation by a strategy that compares updates; also the size "
        "beyond which an array of an aggregation is a file in the data folder.",
    )
    retention_grace: Seconds = Field(
        7 * 86400.0,
        description="Seconds that every model and the events of every round are kept, whatever "
        "their task's retention: longer than the longest backup takes.",
    )
    retention_seconds: Seconds = Field(
        3600.0, description="Seconds between removals of what retention no longer keeps."
    )
    population: str = Field(
        "fedpress",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name of this server's devices in certificates of the masked lane.",
    )
    masking_authority: str = Field(
        "",
        description="Public key of the authority that certifies devices for masked sessions; "
        "empty: the server does, and masks protect only against a semi-honest server.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="Least severe message that is logged; SIGUSR1 switches to debug and back.",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="text for people, on stderr; json for machines, an object a line, on stdout.",
    )
    egress_price: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Cost of a GiB that this server sends, for its metrics and reports."
    )
    egress_currency: str = Field(
        "EUR", pattern=r"^[A-Za-z0-9 ./_-]{1,16}$", description="Currency of egress_price."
    )
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://[^@]+)?$",
        description="URL that traces are sent to by OTLP over HTTP, such as "
        "http://collector:4318/v1/traces; empty: none are sent. Needs fedpress[otel].",
    )
    trace_share: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="Share of the requests that are traced; rounds all are."
    )
    failpoint: str = Field(
        "",
        description="For crash tests: name:kill, name:raise or name:pause, with the number of the "
        "pass to do it at; docs/fault-table.md has the names.",
    )

    @classmethod
    def load(cls, config: Path | None = None, **flags: Any) -> Settings:
        """From `flags` that are not None, then the environment, then the TOML file `config`.

        Raises ConfigurationError with every fault found.
        """
        options = {name: value for name, value in flags.items() if value is not None}
        file = config

        class WithFile(cls):  # type: ignore[misc, valid-type]
            @classmethod
            def settings_customise_sources(
                cls,
                settings_cls: type[BaseSettings],
                init_settings: PydanticBaseSettingsSource,
                env_settings: PydanticBaseSettingsSource,
                dotenv_settings: PydanticBaseSettingsSource,
                file_secret_settings: PydanticBaseSettingsSource,
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                try:
                    toml = TomlConfigSettingsSource(settings_cls, file)
                except ValueError as exc:  # of TOML, or of UTF-8
                    raise ConfigurationError(f"{file} is not TOML: {exc}") from exc
                unknown = sorted(set(toml.toml_data) - set(Settings.model_fields))
                if unknown:
                    raise ConfigurationError(f"{file} sets {', '.join(unknown)}: no such setting")
                if file is not None and set(secret_settings()) & toml.toml_data.keys():
                    check_private(file, "a secret among the settings")
                return init_settings, env_settings, toml

        if config is not None and not config.is_file():
            raise ConfigurationError(f"there is no configuration file {config}")
        unknown = sorted(set(options) - set(cls.model_fields))
        if unknown:
            raise ConfigurationError(f"no such setting: {', '.join(unknown)}")
        try:
            loaded: Settings = WithFile(**options)
        except ValidationError as exc:
            raise ConfigurationError(format_validation_errors(exc)) from exc
        return loaded

    @model_validator(mode="after")
    def _secrets(self) -> Settings:
        for name in secret_settings():
            file = getattr(self, f"{name}_file")
            if file is None:
                continue
            if getattr(self, name):
                raise ValueError(f"give {name} or {name}_file, not both")
            try:
                check_private(file, f"{name}_file")
                text = file.read_text().strip()
            except ConfigurationError as exc:
                raise ValueError(str(exc)) from exc
            except OSError as exc:
                raise ValueError(f"{name}_file: {exc}") from exc
            if not text:
                raise ValueError(f"{name}_file: {file} is empty")
            object.__setattr__(self, name, text if name == "database_url" else SecretStr(text))
        if bool(self.store_access_key_id) != (self.store_secret_access_key is not None):
            raise ValueError("store_access_key_id and store_secret_access_key are given together")
        self._refuse_placeholders()
        self._check_store()
        _ = self.hosts  # which says what is none
        for name in ("admin_token", "metrics_token"):
            token: SecretStr | None = getattr(self, name)
            if token is not None and len(token.get_secret_value()) < 16:
                kind = name.replace("_", " ")
                raise ValueError(f"{name}: the {kind} has 16 characters at least")
        failpoints.parsed(self.failpoint)
        _ = self.proxies  # which says what is none
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key are given together")
        if self.admin_port == self.port != 0 and self.admin_host == self.host:
            raise ValueError(f"port and admin_port are both {self.port}: operators need one apart")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        return self

    def _refuse_placeholders(self) -> None:
        """Raises ValueError for a secret that anybody who has read an example knows."""
        secrets = {
            "admin_token": self.admin_token,
            "metrics_token": self.metrics_token,
            "store_secret_access_key": self.store_secret_access_key,
        }
        values = {name: each.get_secret_value() for name, each in secrets.items() if each}
        with suppress(ValueError):  # whoever opens the database says what is wrong with its URL
            values["database_url's password"] = unquote(urlsplit(self.database_url).password or "")
        for name, secret in values.items():
            if secret and _PLACEHOLDER.search(secret):
                raise ValueError(
                    f"{name} is a placeholder: put a long random string in its place, such as "
                    "openssl rand -hex 32 prints"
                )

    def _check_store(self) -> None:
        """Raises ValueError for an endpoint or a region that has no effect."""
        for name in ("store_endpoint", "store_region"):
            if getattr(self, name) and not self.store_url:
                raise ValueError(f"{name} needs store_url, such as s3://bucket/prefix")
        if self.store_endpoint and not _HTTP.match(self.store_endpoint):
            raise ValueError(
                f"store_endpoint {self.store_endpoint!r} is not an address such as "
                "https://s3.example.org"
            )

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of `allowed_hosts` in lower case; raises ValueError."""
        some = [each.strip().lower() for each in self.allowed_hosts.split(",") if each.strip()]
        for each in some:
            if not _HOST.fullmatch(each):
                raise ValueError(
                    f"allowed_hosts: {each!r} is not a host name; give names without scheme and "
                    "port, such as fl.example.org, *.example.org or [::1]"
                )
        return tuple(some)

    @property
    def proxies(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of `trusted_proxies`; raises ValueError."""
        some = [each.strip() for each in self.trusted_proxies.split(",") if each.strip()]
        try:
            return tuple(ip_network(each) for each in some)
        except ValueError as exc:
            raise ValueError(
                f"trusted_proxies: {exc}; give addresses or networks, such as 10.0.0.0/8"
            ) from exc

    @property
    def public_digest(self) -> str:
        """SHA-256, hex, of all settings that hold no secret: whether two servers have the same."""
        values = self.model_dump(mode="json", exclude=set(secret_settings()))
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @property
    def watched(self) -> list[Path]:
        """The data folder, and the other folders whose disks are watched."""
        others = [each.strip() for each in self.watched_folders.split(",")]
        return [self.data_dir, *(Path(each) for each in others if each)]

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / 'fedpress.db'}"


def secret_settings() -> list[str]:
    """The settings that hold a secret; each may come from a file, which is named by the setting of
    its name and `_file`."""
    return [
        name
        for name, field in Settings.model_fields.items()
        if field.annotation == SecretStr | None or not field.repr
    ]


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each FEDPRESS_* variable that nothing reads: it may be misspelt."""
    known = {name.upper() for name in Settings.model_fields}
    known |= {name.removeprefix("FEDPRESS_") for name in OTHER_VARIABLES}
    sentences = []
    for variable, value in sorted(environment.items()):
        prefix, _, name = variable.upper().partition("_")
        if prefix != "FEDPRESS" or name in known or value.startswith("tcp://"):
            continue
        if _SERVICE_LINK.search(name):
            continue
        nearest = get_close_matches(name, known, 1)
        meant = f": did you mean FEDPRESS_{nearest[0]}?" if nearest else ""
        sentences.append(f"nothing reads the variable {variable}{meant}")
    return sentences
