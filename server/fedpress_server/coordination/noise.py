"""The records that noise which is correlated over rounds is drawn again from."""

from __future__ import annotations

from collections import defaultdict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.plan import RoundPlan
from fedpress_server.registry import restores
from fedpress_server.storage.tables import assignments, rounds, uploads
from fedpress_strategies.private import NoisedSum


def noised_before(connection: Connection, plan: RoundPlan) -> tuple[NoisedSum, ...]:
    """The sums of the rounds before the plan's, newest first, that its noise is correlated with.

    They go back to a round without a sum or of other terms, to a multiple of the correlation's
    `rounds`, and to a restore: rounds before it may have been followed by others that these records
    do not have, and noise that both take away would be too little for the devices in them.
    """
    terms = plan.privacy
    if terms is None or terms.correlation is None:
        return ()
    together = terms.correlation.rounds
    first = (plan.round - 1) // together * together + 1
    if first == plan.round:
        return ()
    row, restore = rounds.c, restores.newest(connection)
    since = 0 if restore is None else restore.restored_at
    recent = sa.select(row.round, row.attempt, row.state, row.plan, row.included).where(
        row.task == plan.task, row.round.between(first, plan.round), row.opened_at > since
    )
    found = connection.execute(recent).all()
    if (plan.round, plan.attempt) not in {(each.round, each.attempt) for each in found}:
        return ()
    committed = {each.round: each for each in found if each.state == "committed"}
    receipts = (
        sa.select(assignments.c.round, uploads.c.digest)
        .join(uploads, uploads.c.assignment == assignments.c.assignment)
        .where(
            assignments.c.task == plan.task,
            assignments.c.round.in_(committed),
            assignments.c.receipt.contains('"outcome":"included"'),
        )
    )
    digests = defaultdict[int, list[str]](list)
    for number, digest in connection.execute(receipts):
        digests[number].append(digest)
    before = list[NoisedSum]()
    for number in range(plan.round - 1, first - 1, -1):
        each, sent = committed.get(number), tuple(digests[number])
        if each is None or len(sent) != each.included:
            break
        earlier = RoundPlan.from_json(each.plan)
        same = (earlier.privacy, earlier.spec, earlier.fixed_point)
        if same != (terms, plan.spec, plan.fixed_point):
            break
        before.append(NoisedSum(earlier.digest, sent))
    return tuple(before)
