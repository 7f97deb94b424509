"""The grid that a simulated ServerApp talks to: an engine behind it, chance and a record between.

Whatever the engine, the nodes are 1, 2, ..., and the same seed loses the same messages.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedpress.simulate import flower_runtime as runtime
from fedpress.simulate.engines import Engine
from fedpress.simulate.replies import Call, Record
from fedpress_flower import envelope

_TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Chance:
    """Each client that is asked to train is lost with probability `dropout`: one half of them never
    hears of it, the other trains, and its reply does not arrive. In a masked round each is lost at
    one of the session's steps, by chance, and stays so."""

    dropout: float = 0.0
    seed: int = 0

    def fate(
        self, call: int, node: int, step: str = _TRAIN, steps: tuple[str, ...] = (_TRAIN,)
    ) -> str:
        """Of the node in the round whose training is the call of this number, at this one of its
        `steps`: "answers", "unreached" or "unheard"."""
        drawn = hashlib.sha256(f"{self.seed}|{call}|{node}".encode()).digest()
        chance = int.from_bytes(drawn[:8], "big") / 2**64
        lost_at = int.from_bytes(drawn[8:16], "big") % len(steps)
        if chance >= self.dropout or steps.index(step) < lost_at:
            return "answers"
        if steps.index(step) > lost_at:
            return "unreached"
        return "unreached" if chance < self.dropout / 2 else "unheard"


@dataclass
class Exchange:
    """One sending of messages and what came back; bytes are those of Flower's records. `kind` is
    the messages' category, train or evaluate, or the step of a masked session.

    `link_bytes`: those of the client that moved most, down and up, which a round waits for.

    One that asks clients of the exchange before it again, who failed or lacked a model, `is_again`:
    its counts, failures and metrics are those of both together, its bytes and seconds its own."""

    kind: str
    number: int
    asked: int
    answered: int = 0
    lost: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    up_bytes: int = 0
    down_bytes: int = 0
    link_bytes: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of what the clients measured, weighted by their examples."""
    left_out: tuple[str, ...] = ()
    """Names of metrics of which some were NaN or infinite; those count in no mean."""
    silent: frozenset[int] = frozenset()
    """Of whom nothing came, once it is over."""
    is_over: bool = False
    is_again: bool = False
    server_round: int | None = None
    """As the strategy numbers it; None if the messages do not say."""
    lacking: set[int] = field(default_factory=set)
    """Clients that lacked the model that theirs is a difference to, and did nothing."""


class SimulatedGrid(Grid):
    """`engine` answers; `on_change` hears of every exchange as it goes on, `on_round` of what a
    FedpressStrategy reports."""

    def __init__(
        self,
        engine: Engine,
        clients: int,
        record: Record,
        chance: Chance,
        on_change: Callable[[Exchange], None],
        on_round: Callable[[Any], None],
    ) -> None:
        self._engine, self._clients, self._record, self._chance = engine, clients, record, chance
        self._on_change, self.round_closed = on_change, on_round
        self._calls = 0
        self._training: tuple[int, tuple[str, ...]] = (0, (_TRAIN,))
        self._newest: tuple[Exchange, _Means] | None = None
        self._run: Any = None
        self._pushed: list[tuple[set[str], Iterator[Message]]] = []
        self._unpulled: dict[str, Message] = {}

    def clock(self) -> float:
        """The time as strategies see it."""
        return self._record.clock()

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run

    def create_message(
        self,
        content: Any,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(range(1, self._clients + 1))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Clients are not asked before their replies are pulled."""
        sent = list(messages)
        replies = self.stream(sent)
        names = [message.metadata.message_id for message in sent]
        self._pushed.append((set(names), replies))
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """At least one of the replies, unless none is left to come."""
        wanted = set(message_ids)
        for names, replies in self._pushed:
            while wanted & names and not wanted & set(self._unpulled):
                reply = next(replies, None)
                if reply is None:
                    names.clear()
                    break
                name = reply.metadata.reply_to_message_id
                self._unpulled[name] = reply
                names.discard(name)
                if not names:
                    next(replies, None)  # so that the exchange ends
        self._pushed = [pushed for pushed in self._pushed if pushed[0]]
        return [self._unpulled.pop(name) for name in wanted & set(self._unpulled)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return list(self.stream(messages, timeout=timeout))

    def stream(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Replies as they arrive; nothing for what is lost, which nobody waits for here."""
        sent = list(messages)
        self._calls += 1
        for message in sent:
            runtime.named(message, f"{self._calls}-{message.metadata.dst_node_id}")
        return self._streamed(sent, self._calls, timeout)

    def _streamed(
        self, sent: list[Message], number: int, timeout: float | None
    ) -> Iterator[Message]:
        if not sent:
            return
        asked = sorted([m.metadata.dst_node_id, m.metadata.message_type] for m in sent)
        call = self._record.begin(asked)
        kind, down = _kind(sent[0]), _Sizes().of_all(sent)
        exchange, means = self._begun(kind, number, _server_round(sent[0]), set(down))
        if kind == _TRAIN and not exchange.is_again:
            self._training = (number, _steps(sent[0]))
        exchange.down_bytes = sum(down.values())
        self._newest = (exchange, means)
        self._on_change(exchange)
        started, answered = time.monotonic(), set[int]()
        for reply in self._replies(sent, number, kind, call, timeout):
            node, up = reply.metadata.src_node_id, _Sizes().of(reply)
            answered.add(node)
            exchange.up_bytes += up
            exchange.link_bytes = max(exchange.link_bytes, up + down.get(node, 0))
            if reply.has_error():
                exchange.failed[node] = reply.error.reason or ""
            elif _lacks_model(reply):
                exchange.lacking.add(node)
            else:
                exchange.answered += 1
                means.add(reply)
            self._on_change(exchange)
            yield reply
        exchange.silent |= frozenset(down) - answered
        exchange.lost = len(exchange.silent)
        exchange.seconds = time.monotonic() - started
        exchange.metrics, exchange.left_out = means.result(), means.left_out
        if call.figures is None:
            self._record.end(call, {"seconds": exchange.seconds})
        else:
            exchange.seconds = float(call.figures["seconds"])
        exchange.is_over = True
        self._on_change(exchange)

    def _begun(
        self, kind: str, number: int, server_round: int | None, nodes: set[int]
    ) -> tuple[Exchange, _Means]:
        """The exchange with `nodes`, which goes on with the newest if it asks these again."""
        if self._newest is not None and server_round is not None:
            before, means = self._newest
            is_same = (before.kind, before.server_round) == (kind, server_round)
            if is_same and nodes <= before.failed.keys() | before.lacking:
                again = Exchange(kind, number, before.asked, before.answered, before.lost)
                again.failed = {n: why for n, why in before.failed.items() if n not in nodes}
                again.silent, again.is_again = before.silent, True
                again.server_round = server_round
                return again, means
        return Exchange(kind, number, len(nodes), server_round=server_round), _Means()

    def _replies(
        self, sent: list[Message], number: int, kind: str, call: Call, timeout: float | None
    ) -> Iterator[Message]:
        """Those in the record, then those of the clients that are still to be asked."""
        for node in list(call.places):
            yield runtime.from_bytes(self._record.reply(call, node))
        if call.figures is not None:
            return
        (training, steps), fate = self._training, self._chance.fate
        fates = {
            node: fate(training, node, kind, steps) if kind in steps else "answers"
            for node in (message.metadata.dst_node_id for message in sent)
        }
        waiting = [
            message
            for message in sent
            if message.metadata.dst_node_id not in call.places
            and fates[message.metadata.dst_node_id] != "unreached"
        ]
        for reply in self._engine.stream(waiting, timeout=timeout):
            node = reply.metadata.src_node_id
            if fates[node] == "answers":
                self._record.replied(call, node, runtime.to_bytes(reply))
                yield reply


def _kind(message: Message) -> str:
    """A step of a masked session, or the category of the message."""
    step = message.content.get(envelope.RECORD, {}).get(envelope.STEP)
    return str(message.metadata.message_type).partition(".")[0] if step is None else str(step)


def _server_round(message: Message) -> int | None:
    for record in message.content.config_records.values():
        if isinstance(number := record.get("server-round"), int):
            return number
    return None


def _lacks_model(reply: Message) -> bool:
    return bool(reply.content.get(envelope.RECORD, {}).get(envelope.HOLDS) == "")


def _steps(training: Message) -> tuple[str, ...]:
    """The steps of a round, whose first is training."""
    is_masked = envelope.OFFER in training.content.get(envelope.RECORD, {})
    return (_TRAIN, *envelope.STEPS) if is_masked else (_TRAIN,)


class _Sizes:
    """Sizes of messages; records that several share are measured once."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, message: Message) -> int:
        if not message.has_content():
            return 0
        total = 0
        for record in message.content.values():
            if id(record) not in self._known:
                self._known[id(record)] = _num_bytes(record)
            total += self._known[id(record)]
        return total

    def of_all(self, messages: list[Message]) -> dict[int, int]:
        """By node."""
        return {message.metadata.dst_node_id: self.of(message) for message in messages}


def _num_bytes(record: Any) -> int:
    try:
        return int(record.count_bytes())
    except ValueError:  # Flower cannot count an empty text, as HOLDS has it without a model
        return 0


class _Means:
    """Means of finite scalar metrics over replies, weighted by "num-examples"; order-free to
    rounding. `left_out` names the metrics of which some were not finite."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float, dict[str, float]]] = []
        self.left_out: tuple[str, ...] = ()

    def add(self, reply: Message) -> None:
        metrics = {
            name: float(value)
            for record in reply.content.metric_records.values()
            for name, value in record.items()
            if isinstance(value, int | float)
        }
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.left_out = tuple(sorted({*self.left_out, *(metrics.keys() - finite.keys())}))
        weight = finite.pop("num-examples", 0.0 if "num-examples" in metrics else 1.0)
        self._rows.append((reply.metadata.src_node_id, weight, finite))

    def result(self) -> dict[str, float]:
        rows = sorted(self._rows, key=lambda row: row[0])
        means = {}
        for name in sorted({name for _, _, metrics in rows for name in metrics}):
            having = [(weight, metrics[name]) for _, weight, metrics in rows if name in metrics]
            total = sum(weight for weight, _ in having)
            means[name] = sum(weight * value for weight, value in having) / total if total else 0.0
        return means
