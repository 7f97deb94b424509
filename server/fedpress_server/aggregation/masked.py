"""Masked rounds outside of their state machine: how sessions begin, messages are read, and masked
bodies are summed and unmasked."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fedpress_protocols.errors import (
    IncompatiblePlan,
    MalformedRequest,
    ServerError,
)
from fedpress_protocols.masking import server as masking
from fedpress_protocols.masking.agreement import agreed, chosen
from fedpress_protocols.masking.keys import HYBRID_SEAL_BYTES, INTRODUCTION_BYTES, SEAL_BYTES
from fedpress_protocols.masking.messages import (
    ClientMessage,
    parse,
    survivors_digest,
)
from fedpress_protocols.masking.ring import Packing
from fedpress_protocols.masking.server import MaskingServer
from fedpress_protocols.masking.shamir import SHARE_BYTES
from fedpress_protocols.messages import MaskedSum, SessionStatus
from fedpress_protocols.plan import RoundPlan
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload, Summed
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.signing import SigningKeys
from fedpress_server.rounds import Step
from fedpress_server.rounds.session import MESSAGES, Session, Words
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import RoundKey
from fedpress_strategies import Strategy
from fedpress_strategies.strategy import Tally

_LASTS = 3600
"""Seconds that a session's offer is good for beyond its phases: devices' clocks are not exact."""
_HEAD = 4096
"""More than any message has besides its lists."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """The server's side of every session: its signing keys, and the authority that certifies its
    devices."""

    keys: SigningKeys
    authority: Authority


def message_bound(step: Step, plan: RoundPlan) -> int:
    """Bytes of the longest message of this step that an honest client of the plan sends."""
    others, hybrid = plan.cohort.size, plan.masking is not None and plan.masking.hybrid
    seal = HYBRID_SEAL_BYTES + INTRODUCTION_BYTES if hybrid else SEAL_BYTES
    lists = {"shares": others * (2 * SHARE_BYTES + seal + 8), "reveal": others * SHARE_BYTES}
    return _HEAD + lists.get(step, others // 8)


def read_message(step: Step, body: bytes) -> ClientMessage:
    """Parse `body`; raises MalformedRequest unless it is a message of this step."""
    message = parse(body)
    if not isinstance(message, MESSAGES[step]):
        raise MalformedRequest(f"a message of kind {message.NAME!r} for the step {step!r}")
    return message


@dataclass(frozen=True, slots=True)
class Message:
    """A device's message, and its Ed25519 key."""

    message: ClientMessage
    identity: bytes


@dataclass(frozen=True)
class SessionOpening:
    """All that a session of an attempt is begun with: its terms, and the server's key of
    `opened_at`, when the attempt began."""

    host: Host
    terms: RoundTerms
    opened_at: float

    def begin(self, queue: Collection[str], now: float) -> MaskingServer:
        """A session over the assignments in the queue; raises IncompatiblePlan.

        The assignments were drawn at random for this attempt alone, and so is the nonce that is
        made of them: it is on the disk with them, and in no other session.
        """
        host, payload = self.host, self.terms.payload
        key, population = host.keys.at(self.opened_at), host.authority.population
        config = agreed(payload, population=population, server_key=key.public)
        nonce = hashlib.sha256("|".join(["fedpress session", *sorted(queue)]).encode()).digest()
        lasts = sum(asdict(config.seconds).values()) + _LASTS
        config = chosen(config, nonce=nonce, expires=int(now) + lasts)
        return MaskingServer.open(config, key, authority=host.authority.public, now=now)


# The sum


class Sums:
    """Masked bodies, added up as they come: one array of words for each attempt under way.

    It is a saving of time and no more. What is on the disk counts: whatever was not added here, as
    after a restart, is added when the sum is asked for. Safe in many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[RoundKey, tuple[Words, set[str]]] = {}

    def add(self, key: RoundKey, upload: str, words: Words) -> None:
        """Take in the body of the file `upload`, which is staged."""
        with self._lock:
            total, added = self._sums.setdefault(key, (np.zeros_like(words), set()))
            if upload not in added:
                total += words
                added.add(upload)

    def total(
        self,
        key: RoundKey,
        uploads: Iterable[StagedUpload],
        payloads: Payloads,
        packing: Packing,
    ) -> Words:
        """The sum over exactly `uploads`; raises ServerError for a file that was changed, or if the
        attempt ended meanwhile."""
        due = {upload.name: upload for upload in uploads}
        with self._lock:
            _, added = self._sums.get(key, (None, set()))
            if not added <= due.keys():
                del self._sums[key]
                added = set()
        for name in sorted(due.keys() - added):
            body = payloads.get(name)
            if hashlib.sha256(body).hexdigest() != due[name].digest:
                raise ServerError(f"{name} was changed on the disk")
            self.add(key, name, packing.from_bytes(body))
        with self._lock:
            total, added = self._sums.get(key, (None, set()))
            if total is None or added != due.keys():
                raise ServerError("the attempt ended while its bodies were added up")
            return total.copy()

    def drop(self, key: RoundKey) -> None:
        with self._lock:
            self._sums.pop(key, None)


def unmasked(
    job: AggregationJob, session: Session, sums: Sums, payloads: Payloads
) -> tuple[Summed, MaskedSum, tuple[int, ...]]:
    """Return the aggregate of the cohort's updates, the name of the sum, and the slots whose shares
    were wrong.

    Raises InvalidShare if too many were, InvalidUpdate if the sum is not one that honest clients
    make.
    """
    plan, config = job.terms.plan, session.machine.config
    key = (plan.task, plan.round, plan.attempt)
    undo = session.machine.recover()
    words = undo.unmask([sums.total(key, job.uploads, payloads, config.packing)])
    payload = job.terms.payload
    decoded = payload.decompress(config.packing.unpack(words), len(job.uploads))
    over_symbols = job.strategy.symbol_aggregator is not None
    delta = decoded.numbers if over_symbols else decoded.mean.dense().astype(np.float64)
    summed = Summed(delta, decoded.num_examples, Tally(decoded.num_clients, decoded.report))
    return (
        summed,
        MaskedSum(
            session=session.machine.sid.hex(),
            survivors=survivors_digest(session.machine.survivors).hex(),
            aggregate=masking.aggregate_digest(config, words),
        ),
        undo.suspects,
    )


def left_out(
    sessions: Sequence[SessionStatus], turn: int, members: frozenset[str], minimum: int
) -> frozenset[str]:
    """Return the clients to exclude after these `sessions`, the last ones of a task: those that one
    session named, or that all of them together name. Of two clients that fail with each other and
    with nobody else, alternate by `turn`. The set is empty if too few of the `members`, where there
    are any, would be left."""
    failures = [pair for each in sessions for pair in each.failures]
    suspects = set(masking.blamed(failures)).union(*(each.suspects for each in sessions))
    apart = {tuple(sorted(pair)) for pair in failures if suspects.isdisjoint(pair)}
    suspects |= {pair[turn % 2] for pair in apart}
    if members and len(members - suspects) < minimum:
        return frozenset()
    return frozenset(suspects)


def check_masked_strategy(terms: RoundTerms, strategy: Strategy) -> None:
    """Raises IncompatiblePlan unless the strategy needs no more than the sum of the updates."""
    plan = terms.plan
    if strategy.planned_aggregator is not None or not getattr(
        strategy.aggregator(terms.shared.size, plan.sum_bounds()), "linear", False
    ):
        raise IncompatiblePlan(
            "the strategy looks at updates one by one, and masking leaves nothing but their sum",
            hint="choose a strategy that takes the mean of the updates, or the clear lane",
        )
