"""A server in this process, whose clock the test turns."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress_protocols.model import Model
from fedpress_server import Settings, create_app
from tests import databases, postgres
from tests.devices import ADMIN_TOKEN, Device, Operator
from tests.server.in_process import Clock, Server, Start, running
from tests.server.replicated import Databases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("both_databases")
    if mark is not None and "dialect" in metafunc.fixturenames:
        is_short = mark.kwargs.get("short", False)
        other = pytest.param("postgresql", marks=() if is_short else pytest.mark.slow(short=False))
        metafunc.parametrize("dialect", ["sqlite", other], indirect=True)


@pytest.fixture(scope="session")
def cluster() -> Iterator[postgres.Cluster]:
    """A PostgreSQL for as many tests as need it; each takes a database of its own."""
    if postgres.binaries() is None:
        pytest.skip(postgres.MISSING)
    pytest.importorskip("psycopg")
    with postgres.cluster() as running:
        yield running


@pytest.fixture
def dialect(request: pytest.FixtureRequest) -> str:
    """What the test's servers keep their records in; tests marked `both_databases` run on both."""
    return getattr(request, "param", "sqlite")


@pytest.fixture
def database_url(
    request: pytest.FixtureRequest, dialect: str, tmp_path: Path
) -> Iterator[Callable[[Path], str]]:
    """The database of the server whose data folder it is, empty as a setting for SQLite's."""
    urls: dict[Path, str] = {}

    def url(data_dir: Path) -> str:
        if dialect == "sqlite":
            return ""
        if data_dir not in urls:
            urls[data_dir] = request.getfixturevalue("cluster").new()
        return urls[data_dir]

    yield url
    for used in urls.values():
        request.getfixturevalue("cluster").give_back(used)


@pytest.fixture(name="databases")
def databases_of_a_kind(request: pytest.FixtureRequest, dialect: str) -> Databases:
    """For tests that open some themselves."""
    return Databases(None if dialect == "sqlite" else request.getfixturevalue("cluster"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(tmp_path: Path, clock: Clock, database_url: Callable[[Path], str]) -> Start:
    """Starts the server on the test's data folder; ends it, and may be used again."""

    def started(**settings: Any) -> AbstractContextManager[Server]:
        data_dir = settings.get("data_dir", tmp_path / "data")
        defaults = {
            "data_dir": data_dir,
            "database_url": database_url(data_dir),
            "admin_token": ADMIN_TOKEN,
            "tick_seconds": 3600,
        }
        chosen = Settings(**(defaults | settings))
        if not chosen.database_url:
            databases.lay(chosen.data_dir / "fedpress.db")
        return running(create_app(chosen, clock=clock))

    return started


@pytest.fixture
def http(start: Start) -> Iterator[Server]:
    with start() as client:
        yield client


@pytest.fixture
def operator(http: httpx.Client) -> Operator:
    return Operator(http)


@pytest.fixture
def enrolled(http: httpx.Client, operator: Operator, clock: Clock) -> Callable[[], Device]:
    """Makes devices, enrolled."""

    def make() -> Device:
        device = Device(http, clock)
        device.enrol(operator.token())
        return device

    return make


@pytest.fixture
def model() -> Model:
    weights = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    return Model.from_tensors({"weight": weights, "steps": np.array([3], np.int64)})
