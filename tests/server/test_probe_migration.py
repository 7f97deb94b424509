"""Tasks whose policies probed by a reference go on, and probe by sketches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from pydantic import TypeAdapter

from fedpress_protocols.policies import Course, Policies
from tests.server.test_asynchronous_tasks import fill

REFERENCE = {"name": "probe", "compressor": {"id": "none"}}
BEFORE = [
    {"id": "auto", "share": 0.5, "floor": 0.6, "reference": REFERENCE},
    {"id": "divergence_guard", "share": 0, "reference": REFERENCE},
    {"id": "bandwidth_aware"},
]
COURSE = {
    "round": 4,
    "gentlest": 6,
    "hardest": 6,
    "probe": True,
    "pace": {"rung": 6, "probe_at": 4, "inner": 8000.0, "norm": 10000.0, "probes": 1},
    "watch": {"ceiling": 6, "inner": 8000.0, "norm": 10000.0},
    "comparison": {"progress": 0.5, "compressed": 5, "reference": 5, "extra_bytes": 9},
}


def test_a_task_that_probed_by_a_reference_probes_by_sketches(tmp_path: Path) -> None:
    engine, config = sa.create_engine(f"sqlite:///{tmp_path / 'test.db'}"), Config()
    config.set_main_option("script_location", "fedpress_server:migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0024")
        fill(connection, "models")
        fill(connection, "tasks", config=json.dumps({"model": "x", "policies": BEFORE}))
        fill(connection, "tasks", task="plain", config='{"model":"x"}')
        fill(connection, "rounds", round=4, course=COURSE)
        fill(connection, "rounds", round=5, task="plain")
        command.upgrade(config, "0025")
        policies, course = stored(connection)
        command.downgrade(config, "0024")
        again, _ = stored(connection)
    engine.dispose()
    auto, guard, links = TypeAdapter[Policies](Policies).validate_python(policies)
    assert (auto.id, guard.id, links.id) == ("auto", "divergence_guard", "bandwidth_aware")
    assert policies[0] == {"id": "auto", "floor": 0.6}
    assert policies[1] == {"id": "divergence_guard", "sketch": 0}
    read = Course.model_validate(course)
    assert read.comparison is None
    assert read.pace is not None
    assert read.watch is not None
    assert (read.pace.rung, read.pace.probe_at) == (6, 4)
    assert (read.pace.probes, read.pace.inner, read.pace.norm) == (0, 0.0, 0.0), "in other units"
    assert (read.watch.ceiling, read.watch.inner, read.watch.norm) == (6, 0.0, 0.0)
    assert again[1] == {"id": "divergence_guard", "share": 0}


def stored(connection: sa.Connection) -> tuple[Any, Any]:
    """The policies of the task x, and the course of its round."""
    tasks = sa.Table("tasks", sa.MetaData(), autoload_with=connection)
    rounds = sa.Table("rounds", sa.MetaData(), autoload_with=connection)
    query = sa.select(tasks.c.config).where(tasks.c.task == "x")
    policies = json.loads(connection.execute(query).scalar_one())["policies"]
    course = connection.execute(sa.select(rounds.c.course).where(rounds.c.task == "x")).scalar_one()
    return policies, course
