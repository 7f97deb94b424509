"""What servers of several roles share in these tests."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedpress_protocols.signatures import DeviceKey
from tests import postgres, s3


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """What the servers of one PostgreSQL and one S3 store have in common."""
    if postgres.binaries() is None:
        pytest.skip(postgres.MISSING)
    for name in ("psycopg", "obstore", "moto"):
        pytest.importorskip(name)
    keys = {}
    for purpose in ("server", "authority"):
        file = tmp_path / f"{purpose}.pem"
        file.write_bytes(DeviceKey.generate().to_pem())
        keys[f"{purpose}_key_file"] = str(file)
    with ExitStack() as stack:
        url = stack.enter_context(postgres.cluster()).new()
        endpoint = stack.enter_context(s3.store())
        s3.make_bucket(endpoint, "models")
        yield {
            **keys,
            "database_url": url,
            "store_url": "s3://models/fedpress",
            "store_endpoint": endpoint,
            "store_region": "us-east-1",
            "store_access_key_id": s3.KEYS["access_key_id"],
            "store_secret_access_key": s3.KEYS["secret_access_key"],
            "lease_seconds": "2",
        }
