"""Payloads in an S3 store shared by several servers, using obstore.

Objects are atomic, and readable by name after an acknowledged put; listings may lag, so only
sweeping uses them. Content-addressed objects are put with a checksum that the store verifies, first
with If-None-Match, and are verified against their name when read. A body is uploaded in one
request: an interrupted multipart upload would leave bytes without a name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from fedpress_protocols.errors import ConfigurationError, MissingExtra, NotFound, Unavailable
from fedpress_server import failpoints
from fedpress_server.observing.outages import Outage
from fedpress_server.settings import Settings
from fedpress_server.storage.payloads import LocalPayloads, Payloads, check_digest, digest_in

_log = logging.getLogger(__name__)

T = TypeVar("T")
_RETRY_AFTER = 5.0
_BACK_WITHIN = 65.0
"""Seconds within which a device that was put off comes back: its longest pause, after that."""
_LINKED = 1800.0
"""Seconds for which a presigned link is given out; it is good for as long after that."""
_MOST_LINKS = 4096


class Bucket(Payloads):
    """Objects under a prefix of a bucket. `grace`: seconds for which an object without a row is
    kept, since another server may be about to commit one."""

    is_local = False

    def __init__(
        self,
        url: str,
        cache: Path,
        *,
        endpoint: str = "",
        region: str = "",
        access_key_id: str = "",
        secret_access_key: str = "",
        timeout: float = 30.0,
        cache_bytes: int = 2**32,
        grace: float = 3600.0,
    ) -> None:
        """`url`: s3://bucket/prefix. Without keys obstore looks for them where S3 clients do, from
        AWS_* variables to the machine's role. Raises ConfigurationError or MissingExtra."""
        try:
            import obstore
            import obstore.exceptions
            import obstore.store
        except ModuleNotFoundError as exc:
            raise MissingExtra(
                "an S3 store needs obstore", hint="pip install fedpress[s3]"
            ) from exc
        self._api: Any = obstore
        self._errors: Any = obstore.exceptions
        bucket, prefix = _parsed(url)
        config: Any = {
            "endpoint": endpoint,
            "region": region or ("us-east-1" if endpoint else ""),
            "access_key_id": access_key_id,
            "secret_access_key": secret_access_key,
        }
        config = {name: value for name, value in config.items() if value}
        config["checksum_algorithm"] = "sha256"
        config["virtual_hosted_style_request"] = not endpoint
        self._where = f"{url.rstrip('/')} at {endpoint}" if endpoint else url
        self._store = obstore.store.S3Store(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=min(5.0, timeout)),
                "timeout": timedelta(seconds=timeout),
            },
            retry_config={
                "max_retries": 4,
                "retry_timeout": timedelta(seconds=timeout),
                "backoff": {
                    "init_backoff": timedelta(seconds=0.05),
                    "max_backoff": timedelta(seconds=2),
                    "base": 2,
                },
            },
        )
        self._grace = timedelta(seconds=grace)
        self._cache = _Cache(cache, cache_bytes)
        self._links: dict[str, tuple[str, float]] = {}
        """By name: presigned links, and until when they are given out."""
        self._away = Outage(
            _log,
            "the store failed at %s; check that it runs and is reachable: the server resumes by "
            "itself "
            "then",
            "the store answers again",
            quiet=_RETRY_AFTER,
        )
        self.scratch = cache

    @property
    def was_away(self) -> bool:
        return self._away.has_failed_within(_BACK_WITHIN)

    def put(self, name: str, data: bytes) -> None:
        if digest_in(name) is None:
            self._asked(name, lambda: self._put(name, data, "overwrite"))
            failpoints.reach("file-kept")
            return
        check_digest(name, data)
        try:
            self._asked(name, lambda: self._put(name, data, "create"))
        except self._errors.AlreadyExistsError:
            # Sweeping goes by age: the object must be younger than those left by a killed server.
            self._asked(name, lambda: self._put(name, data, "overwrite"))
        failpoints.reach("file-kept")

    def _put(self, name: str, data: bytes, mode: str) -> None:
        self._api.put(self._store, name, data, mode=mode, use_multipart=False)

    def get(self, name: str) -> bytes:
        data: bytes = self._asked(name, lambda: self._api.get(self._store, name).bytes().to_bytes())
        check_digest(name, data)
        return data

    def open(self, name: str) -> BinaryIO:
        """Open from the local cache, filled from the store."""
        return self._cache.open(name) or self._cache.keep(name, self.get(name))

    def link(self, name: str) -> str:
        """Path and query of a presigned GET. It is signed once in a while, as one for all."""
        now = time.monotonic()
        path, until = self._links.pop(name, ("", 0.0))
        if now > until:
            age = timedelta(seconds=2 * _LINKED)
            url: str = self._asked(name, lambda: self._api.sign(self._store, "GET", name, age))
            parts = urlsplit(url)
            path, until = f"{parts.path}?{parts.query}", now + _LINKED
        self._links[name] = path, until
        while len(self._links) > _MOST_LINKS:
            self._links.pop(next(iter(self._links)), None)
        return path

    def size(self, name: str) -> int:
        return int(self._asked(name, lambda: self._api.head(self._store, name))["size"])

    def drop(self, name: str) -> None:
        self._cache.drop(name)
        below = [each["path"] for each in self._listed(name)]
        for start in range(0, len(below), 1000):
            chunk = below[start : start + 1000]
            self._asked(name, partial(self._api.delete, self._store, chunk))
        if not below:
            self._asked(name, lambda: self._api.delete(self._store, [name]))

    def names(self, folder: str) -> Iterator[str]:
        listing = self._asked(
            folder, lambda: self._api.list_with_delimiter(self._store, f"{folder}/")
        )
        names = [each["path"] for each in listing["objects"]]
        yield from sorted([*listing["common_prefixes"], *names])

    def drop_settled(self, name: str, older_than: float = 0.0) -> None:
        below = [each["last_modified"] for each in self._listed(name)]
        try:
            if not below:
                head = self._asked(name, lambda: self._api.head(self._store, name))
                below = [head["last_modified"]]
        except NotFound:
            return
        if max(below) < self._before(older_than):
            self.drop(name)

    def settled(self, folder: str, older_than: float = 0.0) -> Iterator[str]:
        newest: dict[str, datetime] = {}
        for each in self._listed(folder):
            below = each["path"].removeprefix(f"{folder}/").partition("/")[0]
            name, at = f"{folder}/{below}", each["last_modified"]
            newest[name] = max(at, newest.get(name, at))
        before = self._before(older_than)
        yield from sorted(name for name, at in newest.items() if at < before)

    def _before(self, older_than: float) -> datetime:
        return datetime.now(UTC) - max(self._grace, timedelta(seconds=older_than))

    def _listed(self, folder: str) -> list[Any]:
        def listed() -> list[Any]:
            return [each for page in self._api.list(self._store, f"{folder}/") for each in page]

        return list(self._asked(folder, listed))

    def sweep_temporaries(self) -> int:
        return self._cache.clear()

    def check_writable(self) -> None:
        self.put("probe", b"\n")

    def check_settings(self) -> None:
        """Raise ConfigurationError if nothing can be stored."""
        try:
            self.put("probe", b"\n")
        except NotFound as exc:
            raise ConfigurationError(
                f"the store {self._where} has no such bucket", hint="create the bucket first"
            ) from exc
        except Unavailable as exc:
            raise ConfigurationError(
                f"the store {self._where} cannot be used: {_said(exc.__cause__ or exc)}",
                hint="check FEDPRESS_STORE_URL, FEDPRESS_STORE_ENDPOINT and the keys",
            ) from exc

    def _asked(self, name: str, ask: Callable[[], T]) -> T:
        """The store's answer, with retries until the timeout."""
        try:
            answer = ask()
        except FileNotFoundError as exc:
            self._away.worked()
            raise NotFound(f"no file {name}") from exc
        except self._errors.AlreadyExistsError:
            self._away.worked()
            raise
        except (self._errors.BaseError, OSError) as exc:
            self._away.failed(f"{name}: {_said(exc)}")
            raise Unavailable("the store does not answer", retry_after=_RETRY_AFTER) from exc
        self._away.worked()
        return answer


def opened_payloads(settings: Settings) -> Payloads:
    """Open the S3 store of the settings, or the data folder; raises ConfigurationError."""
    if not settings.store_url:
        return LocalPayloads(settings.data_dir)
    secret = settings.store_secret_access_key
    bucket = Bucket(
        settings.store_url,
        settings.data_dir / "cache",
        endpoint=settings.store_endpoint,
        region=settings.store_region,
        access_key_id=settings.store_access_key_id,
        secret_access_key=secret.get_secret_value() if secret else "",
        timeout=settings.store_timeout,
        cache_bytes=settings.store_cache_bytes,
    )
    bucket.check_settings()
    return bucket


class _Cache:
    """An LRU cache of the store's files in a local folder of at most `room` bytes. An open file can
    be read to its end."""

    def __init__(self, folder: Path, room: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._room = folder, room
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self.clear()

    def open(self, name: str) -> BinaryIO | None:
        with self._lock:
            if name not in self._sizes:
                return None
            self._sizes.move_to_end(name)
            return self._path(name).open("rb")

    def keep(self, name: str, data: bytes) -> BinaryIO:
        """Cache a file if there is room, and return it opened at its start."""
        file: BinaryIO = tempfile.NamedTemporaryFile(dir=self._folder, delete=False)  # type: ignore[assignment] # noqa: SIM115
        beside = Path(file.name)
        try:
            file.write(data)
            file.seek(0)
            with self._lock:
                if len(data) <= self._room and digest_in(name) is not None:
                    beside.rename(self._path(name))
                    self._sizes[name] = len(data)
                    self._sizes.move_to_end(name)
                    self._make_room()
        except BaseException:
            file.close()
            raise
        finally:
            beside.unlink(missing_ok=True)
        return file

    def drop(self, name: str) -> None:
        with self._lock:
            if self._sizes.pop(name, None) is not None:
                self._path(name).unlink(missing_ok=True)

    def clear(self) -> int:
        with self._lock:
            self._sizes.clear()
            paths = list(self._folder.iterdir())
            for path in paths:
                path.unlink(missing_ok=True)
            return len(paths)

    def _make_room(self) -> None:
        while sum(self._sizes.values()) > self._room:
            name, _ = self._sizes.popitem(last=False)
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / hashlib.sha256(os.fsencode(name)).hexdigest()


def _parsed(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or parts.query:
        raise ConfigurationError(
            "store_url must have the form s3://bucket/prefix",
            hint="the endpoint and the keys are settings of their own",
        )
    return parts.netloc, parts.path.strip("/")


def _said(exc: BaseException) -> str:
    """The store's own message, without the library's list of retries."""
    return " ".join(str(exc).partition("Debug source")[0].split())[:300]
