"""Clients of a Flower app in this process, whose messages and replies a test can lose."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedpress.simulate import flower_runtime as runtime
from fedpress_client.ledger import Ledger
from fedpress_flower import envelope

Fate = Callable[[int, int], str]
RUN = 7


def answers(call: int, node: int) -> str:
    return "answers"


class Fleet(Grid):
    """Nodes 1 to `count`. `fate(call, node)`, of the calls to train from 1, is "answers",
    "unreached", or "unheard" for a reply that is lost; what an app keeps in its state is kept. It
    has no `stream`, as Flower's grids. `on_way(message, reply)` may put another in a reply's
    place."""

    def __init__(
        self,
        app: ClientApp,
        count: int,
        *,
        fate: Fate = answers,
        run_config: dict[str, Any] | None = None,
    ) -> None:
        runtime.begin_run(RUN)
        self.app, self.count, self.fate = app, count, fate
        self.contexts = {
            node: Context(
                RUN, node, runtime.node_config(node - 1, count), RecordDict(), run_config or {}
            )
            for node in range(1, count + 1)
        }
        self.calls = 0
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise AssertionError("Message(...) makes messages, and no grid")

    def get_node_ids(self) -> set[int]:
        return set(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent, names = list(messages), []
        self.calls += bool(sent) and step_of(sent[0]) == "train"
        for message in sent:
            node = message.metadata.dst_node_id
            name = f"{self.calls}-{node}-{step_of(message)}"
            runtime.named(message, name)
            # As over a network: what arrives shares nothing with what was sent.
            arrived = runtime.from_bytes(runtime.to_bytes(message))
            self.sent.append(arrived)
            names.append(name)
            fate = self.fate_of(arrived)
            if fate == "unreached":
                continue
            try:
                reply = self.app(runtime.copied(arrived), self.contexts[node])
            except Exception as exc:
                reply = Message(Error(2, f"{type(exc).__name__}: {exc}"), reply_to=arrived)
            if fate == "answers":
                reply = self.on_way(arrived, reply)
                self._replies[name] = runtime.from_bytes(runtime.to_bytes(reply))
        return names

    def fate_of(self, message: Message) -> str:
        return self.fate(self.calls, message.metadata.dst_node_id)

    def on_way(self, message: Message, reply: Message) -> Message:
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """One at a time, the last first, so that nothing may hang on the order."""
        for name in sorted(message_ids, reverse=True):
            if name in self._replies:
                return [self._replies.pop(name)]
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        names, replies = set(self.push_messages(messages)), []
        while came := self.pull_messages(names):
            replies += came
        return replies

    def ledger(self, node: int) -> Ledger:
        """The account of a client that has uploaded."""
        path = Path(str(self.contexts[node].state["fedpress"]["account"]))
        return Ledger.from_bytes(path.read_bytes())


def step_of(message: Message) -> str:
    """Of a masked session, or the message's own type."""
    ours: Any = message.content.get(envelope.RECORD, {})
    return str(ours.get(envelope.STEP, message.metadata.message_type))


class StreamingFleet(Fleet):
    """Nobody waits for what is lost."""

    def stream(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        return iter(self.send_and_receive(messages))


def record_of(arrays: dict[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def reply(message: Message, arrays: dict[str, Any], **metrics: Any) -> Message:
    content = {"arrays": record_of(arrays), "metrics": MetricRecord({"num-examples": 3, **metrics})}
    return Message(RecordDict(content), reply_to=message)
