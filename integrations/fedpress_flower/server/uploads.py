"""The uploads of a round of the clear lane, decoded as they arrive; what will not do is dropped."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict

from fedpress_compression.coding.fields import Contexts, Layout
from fedpress_compression.compressor import Compressor
from fedpress_compression.contexts import contexts_of
from fedpress_compression.tensors import Vector
from fedpress_compression.update import Update
from fedpress_flower import envelope
from fedpress_flower.server.arrays import moved
from fedpress_flower.server.rounds import Round
from fedpress_protocols.errors import FedpressError, InvalidUpdate
from fedpress_protocols.messages import FLAT
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.policies import Comparison
from fedpress_protocols.privacy.clipping import Bounds
from fedpress_protocols.upload import Upload
from fedpress_strategies.policies.probing import Probe

_ASSIGNMENT = re.compile(r"(?:([2-9]|[1-9][0-9]{1,9})-)?([1-9][0-9]{0,9})-([0-9]{1,20})")
_FAILED = 2
"""Flower's code for a client app that raised."""


@dataclass(slots=True)
class Taken:
    """A reply that is good: its weight, what it measured, and, for a strategy of Flower's, it."""

    examples: int
    metrics: MetricRecord
    error: float
    report: Mapping[str, float]
    left_out: tuple[str, ...] = ()
    """The metrics that were NaN or infinite, which are not in `metrics`."""
    is_flat: bool = False
    decoded: Message | None = None


class Accumulator(Protocol):
    """Adds uploads up, one by one; see aggregation.py."""

    def add(self, update: Update, upload: Taken) -> None: ...

    def add_body(self, node: int, body: bytes, upload: Taken) -> None: ...

    def result(self) -> ArrayRecord: ...


class Format(NamedTuple):
    """The layouts and contexts of the uploads of a plan of one profile."""

    compressor: Compressor[Any]
    layouts: tuple[Layout, ...]
    contexts: Contexts


@dataclass
class Uploads(Round):
    """A round whose uploads are decoded one by one."""

    taken: dict[int, Taken] = field(default_factory=dict)
    bodies: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By node: the assignment that it answered, and the body's SHA-256."""
    own: Vector | None = None
    """The strategy's own parameters [size], where the model is what a downlink made of them."""
    needed: frozenset[str] = frozenset()
    """Metrics that the strategy cannot do without."""
    accumulator: Accumulator | None = None
    """The running sum of the uploads, if the strategy is one of fedpress's."""
    capped: set[int] = field(default_factory=set)
    """Nodes with more examples than one may count for, where the sum is weighted here."""
    _failed: set[int] = field(init=False, default_factory=set)
    _compared: dict[int, bytes] = field(init=False, default_factory=dict)
    """In a probe, the bodies by node."""

    @cached_property
    def format(self) -> Format:
        """That of all nodes' uploads."""
        layouts = self.plan.layouts(self.model.spec)
        contexts = contexts_of(layouts[0], self.public)
        return Format(self.plan.profiles[0].compressor, layouts, contexts)

    def parsed(self, body: bytes) -> Upload:
        """The upload in `body`; raises InvalidUpdate."""
        plan, own = self.plan, self.format
        return Upload.from_bytes(body, own.layouts, 0, own.contexts, plan.report, plan.sketch)

    def comparison(self) -> Comparison | None:
        """The comparison by a probe's uploads; None if this is no probe, or too few came."""
        if not self.plan.sketch:
            return None
        probe = Probe(self.public, self.plan.sketch)
        for node in sorted(self._compared.keys() & self.taken.keys()):
            upload = self.parsed(self._compared[node])
            probe.add(upload, self.updated(upload))
        return probe.comparison()

    def take(self, reply: Message, weight: str) -> None:
        """Decode one reply, and add it up if there is an accumulator; one that will not do is
        dropped. Anything but the first reply of a node that was asked is passed over."""
        node = reply.metadata.src_node_id
        if node not in self.asked or node in self.taken or node in self.dropped:
            return
        if reply.has_error():
            self._failed.add(node)
            self.drop(node, f"failed: {(reply.error.reason or 'no reason given').strip()}")
            return
        try:
            self.taken[node] = self._taken(node, reply, weight)
        except FedpressError as exc:
            self.drop(node, exc.detail)

    def _taken(self, node: int, reply: Message, weight: str) -> Taken:
        metrics, value, left_out = metrics_of(reply, weight, self.needed)
        if self.accumulator is not None and not value.is_integer():
            raise InvalidUpdate(
                f"{weight!r} is {value:g}, and fedpress's strategies weight by whole numbers: "
                "report whole ones, such as 90 and 10 for 0.9 and 0.1"
            )
        if self.accumulator is not None and value > self.plan.fixed_point.max_examples:
            self.capped.add(node)
        records = reply.content.array_records
        if len(records) != 1:
            raise InvalidUpdate(f"{len(records)} array records in the reply, where one is due")
        key, arrays = next(iter(records.items()))
        self.upload_bytes += sum(len(array.data) for array in arrays.values())
        if list(arrays) != [envelope.BODY] or arrays[envelope.BODY].stype != envelope.STYPE:
            if self.plan.privacy is not None:
                raise InvalidUpdate("a model without noise: the app has no compression_mod")
            examples = min(max(1, round(value)), self.plan.fixed_point.max_examples)
            taken = Taken(examples, metrics, 0.0, _reported(self.plan, metrics), left_out)
            update = self._plain(arrays)
        else:
            own: Any = reply.content.get(envelope.RECORD, {})
            body = arrays[envelope.BODY].data
            name = self.assignment(node)
            if own.get(envelope.ASSIGNMENT) != name:
                raise InvalidUpdate(
                    f"an upload for {own.get(envelope.ASSIGNMENT)!r}, not this round"
                )
            self.bodies[node] = (name, hashlib.sha256(body).hexdigest())
            error = own.get(envelope.ERROR)
            error = error if isinstance(error, float) else math.nan
            flat = own.get(envelope.FLATNESS)
            is_flat = isinstance(flat, float) and flat >= FLAT
            taken = Taken(0, metrics, error, {}, left_out, is_flat)
            if self.plan.sketch:
                self._compared[node] = body
            if self.accumulator is not None:
                self.accumulator.add_body(node, body, taken)
                return taken
            update = self.updated(self.read(body, taken))
        if self.accumulator is not None:
            self.accumulator.add(update, taken)
            return taken
        parameters = (self.model.parameters if self.own is None else self.own).copy()
        update.add_to(parameters)
        whole = moved(self.arrays, self.model.spec, parameters)
        content = {n: each for n, each in reply.content.items() if n != envelope.RECORD}
        content[key] = whole
        taken.decoded = Message(RecordDict(content), reply_to=self.asked[node])
        return taken

    def read(self, body: bytes, taken: Taken) -> Upload:
        """The upload in `body`; `taken` is told what it says. Raises InvalidUpdate."""
        upload = self.parsed(body)
        self.weigh(taken, upload.num_examples, upload.report)
        return upload

    def weigh(self, taken: Taken, num_examples: int, report: tuple[float, ...]) -> None:
        """Raises InvalidUpdate for more examples than the plan allows."""
        if num_examples > self.plan.fixed_point.max_examples:
            raise InvalidUpdate(f"num_examples of {num_examples}, more than the plan allows")
        taken.examples = num_examples
        taken.report = dict(zip(self.plan.report, report, strict=True))

    def updated(self, upload: Upload) -> Update:
        """Decompress an upload, within the plan's bounds; raises InvalidUpdate."""
        with np.errstate(over="ignore", invalid="ignore"):  # forged values; check refuses them
            update = self.format.compressor.decompress(upload.symbols, self.public)
            update.check(self.plan.fixed_point.max_abs)
        if self.bounds is not None:
            self.bounds.check(update)
        return update

    @cached_property
    def bounds(self) -> Bounds | None:
        """On the norms of uploads that the server adds noise to; None where it adds none."""
        terms = self.plan.privacy
        return None if terms is None or terms.lane != "central" else terms.bounds(self.shared)

    @property
    def may_have_sent(self) -> set[int]:
        """The nodes that sent an upload, or did not answer."""
        return set(self.asked) - self._failed

    def _plain(self, arrays: ArrayRecord) -> Update:
        """Of a client without our mod: its whole model less the round's."""
        spec = self.model.spec
        try:
            trained = spec.flatten({name: array.numpy() for name, array in arrays.items()})
        except (FedpressError, TypeError, ValueError, EOFError, MemoryError) as exc:
            raise InvalidUpdate(f"the reply's model: {exc}") from exc
        with np.errstate(over="ignore", invalid="ignore"):
            update = Update.from_dense(trained - self.model.parameters)
        update.check(self.plan.fixed_point.max_abs)
        return update

    def drop_the_odd(self) -> None:
        """Strategies of Flower's take no round in which metrics have other names here and there:
        those of fewer clients than another set of names has are dropped."""
        names = {
            node: tuple(sorted({*upload.metrics, *upload.left_out}))
            for node, upload in self.taken.items()
        }
        if len(set(names.values())) > 1:
            usual = Counter(names[node] for node in sorted(names)).most_common(1)[0][0]
            for node in [node for node in names if names[node] != usual]:
                if self.taken[node].decoded is not None:
                    self.drop(node, f"measured {names[node]}, and most measured {usual}")

    def drop(self, node: int, reason: str) -> None:
        self.taken.pop(node, None)
        self.dropped[node] = reason

    @property
    def left_out(self) -> dict[int, tuple[str, ...]]:
        """By node: the metrics of updates taken in that were NaN or infinite."""
        return {n: each.left_out for n, each in sorted(self.taken.items()) if each.left_out}

    def metrics_of_all(self) -> list[MetricRecord]:
        """The metrics that every client has, in the order of nodes."""
        missing = {name for names in self.left_out.values() for name in names}
        return [_without(self.taken[node].metrics, missing) for node in sorted(self.taken)]

    def metrics_of_some(self, weight: str) -> dict[str, list[MetricRecord]]:
        """By name: a metric that some left out, with the weight, of those that have it."""
        missing = sorted({name for names in self.left_out.values() for name in names})
        records = [self.taken[node].metrics for node in sorted(self.taken)]
        return {
            name: [MetricRecord({name: r[name], weight: r[weight]}) for r in records if name in r]
            for name in missing
        }

    def answers(self) -> list[Message]:
        """Return the replies for a strategy of Flower's, in the order of nodes. Metrics have the
        same names everywhere: those that one left out are left out of all."""
        replies: dict[int, Message] = {}
        for node, metrics in zip(sorted(self.taken), self.metrics_of_all(), strict=True):
            reply = cast(Message, self.taken[node].decoded)
            (name,) = reply.content.metric_records
            reply.content = RecordDict({**reply.content, name: metrics})
            replies[node] = reply
        for node, reason in self.dropped.items():
            replies[node] = Message(Error(_FAILED, reason), reply_to=self.asked[node])
        return [replies[node] for node in sorted(replies)]


def parts_of(name: str) -> tuple[int, int, int] | None:
    """The start, the round and the node of an assignment; None for what names none."""
    found = _ASSIGNMENT.fullmatch(name)
    return None if found is None else (int(found[1] or 1), int(found[2]), int(found[3]))


def asked_in(reply: Message, start: int, last_round: int) -> tuple[str, ...]:
    """The assignments up to the last round of this start that a reply asks about; anything else is
    passed over."""
    ours: Any = reply.content.get(envelope.RECORD, {})
    asks = ours.get(envelope.ASKS, [])
    names = asks[: envelope.MOST_ASKS] if isinstance(asks, list) else []
    return tuple(
        name
        for name in names
        if isinstance(name, str)
        and (parts := parts_of(name)) is not None
        and parts[:2] <= (start, last_round)
    )


def metrics_of(
    reply: Message, weight: str, needed: frozenset[str] = frozenset()
) -> tuple[MetricRecord, float, tuple[str, ...]]:
    """The reply's one metric record without what is not finite, its weight, and the names of what
    is not. Raises InvalidUpdate if that is the weight or a metric `needed`."""
    records = list(reply.content.metric_records.values())
    if len(records) != 1:
        raise InvalidUpdate(f"{len(records)} metric records in the reply, where one is due")
    metrics = records[0]
    reported = metrics.get(weight)
    if not isinstance(reported, int | float) or not 0 < reported < math.inf:
        raise InvalidUpdate(f"{weight!r} is {reported!r}, where a positive number is due")
    left_out = tuple(name for name, value in metrics.items() if not _is_finite(value))
    for name in left_out:
        if name in needed:
            raise InvalidUpdate(f"the strategy needs {name!r}, which is {metrics[name]!r}")
    return _without(metrics, left_out), float(reported), left_out


def _is_finite(value: int | float | list[int] | list[float]) -> bool:
    return all(math.isfinite(each) for each in (value if isinstance(value, list) else [value]))


def _without(metrics: MetricRecord, names: Collection[str]) -> MetricRecord:
    return MetricRecord({name: each for name, each in metrics.items() if name not in names})


def _reported(plan: RoundPlan, metrics: MetricRecord) -> dict[str, float]:
    missing = [name for name in plan.report if not isinstance(metrics.get(name), int | float)]
    if missing:
        raise InvalidUpdate(f"the strategy needs {', '.join(missing)}, which was not measured")
    return {name: float(metrics[name]) for name in plan.report}
