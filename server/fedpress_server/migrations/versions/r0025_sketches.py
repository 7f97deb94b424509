"""Policies probe by sketches, where part of a cohort sent a reference before."""

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

Policy = dict[str, Any]
_PROBING = ("auto", "divergence_guard")
_TASKS = sa.table("tasks", sa.column("task", sa.Text), sa.column("config", sa.Text))
_ROUNDS = sa.table(
    "rounds",
    sa.column("task", sa.Text),
    sa.column("round", sa.Integer),
    sa.column("attempt", sa.Integer),
    sa.column("course", sa.JSON),
)


def upgrade() -> None:
    def by_sketches(policy: Policy) -> Policy:
        share = policy.get("share")
        kept = {key: value for key, value in policy.items() if key not in ("share", "reference")}
        return {**kept, "sketch": 0} if share == 0 else kept

    _rewrite(by_sketches)


def downgrade() -> None:
    def by_a_reference(policy: Policy) -> Policy:
        kept = {key: value for key, value in policy.items() if key != "sketch"}
        return {**kept, "share": 0} if policy.get("sketch") == 0 else kept

    _rewrite(by_a_reference)


def _rewrite(change: Callable[[Policy], Policy]) -> None:
    """Change the policies that probe, and forget what probes have told: it is in other units."""
    connection = op.get_bind()
    row = _ROUNDS.c
    for task, text in connection.execute(sa.select(_TASKS.c.task, _TASKS.c.config)).all():
        config = json.loads(text)
        before = config.get("policies") or []
        after = [change(each) if each.get("id") in _PROBING else each for each in before]
        if after != before:
            config["policies"] = after
            text = json.dumps(config, separators=(",", ":"))
            connection.execute(sa.update(_TASKS).where(_TASKS.c.task == task).values(config=text))
        courses = sa.select(row.round, row.attempt, row.course).where(row.task == task)
        for number, attempt, course in connection.execute(courses).all():
            if course is not None:
                here = (row.task == task) & (row.round == number) & (row.attempt == attempt)
                values = {"course": _without_probes(course)}
                connection.execute(sa.update(_ROUNDS).where(here).values(values))


def _without_probes(course: dict[str, Any]) -> dict[str, Any]:
    """With the rates that were chosen, and no more."""
    pace, watch = course.get("pace"), course.get("watch")
    forgotten: dict[str, Any] = {"comparison": None}
    if pace:
        forgotten["pace"] = {**pace, "inner": 0.0, "norm": 0.0, "probes": 0}
    if watch:
        forgotten["watch"] = {**watch, "inner": 0.0, "norm": 0.0}
    return {**course, **forgotten}
