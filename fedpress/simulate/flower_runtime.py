"""Everything that hangs on Flower's insides: the identity of a run, messages as bytes, its engine.

Flower has no public way to run its simulation from a program, and none to make a message outside a
run. What is used of its insides is in this file and nowhere else.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import wraps
from typing import Any

from fedpress_protocols.errors import MissingExtra, ServerError

try:
    from flwr.app import Error, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
    from flwr.common.serde import (
        message_from_proto,
        message_to_proto,
        recorddict_from_proto,
        recorddict_to_proto,
    )
    from flwr.proto.message_pb2 import Message as ProtoMessage
    from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
    from flwr.serverapp.strategy import Strategy
    from flwr.supercore.task_identity import TaskIdentity
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "fedpress simulate needs Flower", hint="pip install 'fedpress[flower,demo]'"
    ) from exc

UserConfig = Mapping[str, bool | float | int | str]
APP_FAILED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
APP_CRASHED = ErrorCode.CLIENT_APP_CRASHED
_POLL_SECONDS = 0.02
_TASK = 1


def begin_run(run_id: int) -> None:
    """Let this process make messages of the run `run_id`."""
    TaskIdentity.task_id, TaskIdentity.run_id = _TASK, run_id
    TaskIdentity.node_id = SUPERLINK_NODE_ID


@contextmanager
def server_evaluations(
    noted: Callable[[int, dict[str, float]], None],
) -> Iterator[None]:
    """Have `noted` told what an app's server measures, by the number of the round: what the
    `evaluate_fn` returns that the app starts its strategy with."""
    start = Strategy.start

    @wraps(start)
    def noting(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(start).bind(self, *args, **kwargs)
        evaluate = bound.arguments.get("evaluate_fn")
        if evaluate is not None:

            def measured(number: int, arrays: Any) -> Any:
                metrics = evaluate(number, arrays)
                if metrics is not None:
                    plain = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
                    noted(number, plain)
                return metrics

            bound.arguments["evaluate_fn"] = measured
        return start(*bound.args, **bound.kwargs)

    Strategy.start = noting
    try:
        yield
    finally:
        Strategy.start = start


def named(message: Message, identifier: str) -> Message:
    """`message`, by an identifier that its reply will tell."""
    message.metadata.__dict__["_message_id"] = identifier
    return message


def copied(message: Message) -> Message:
    """A message whose records can be changed without changing this one's."""
    content = RecordDict({name: record.copy() for name, record in message.content.items()})
    return Message(content, metadata=copy(message.metadata))


def with_content(message: Message, content: RecordDict) -> Message:
    """A message that says what this one says of itself, and other things."""
    return Message(content, metadata=message.metadata)


def failed(message: Message, code: int, reason: str) -> Message:
    """The reply of a client that gave none."""
    return Message(Error(code, reason), reply_to=message)


def to_bytes(message: Message) -> bytes:
    data: bytes = message_to_proto(message).SerializeToString()
    return data


def from_bytes(data: bytes) -> Message:
    return message_from_proto(ProtoMessage.FromString(data))


def records_to_bytes(records: RecordDict) -> bytes:
    data: bytes = recorddict_to_proto(records).SerializeToString()
    return data


def records_from_bytes(data: bytes) -> RecordDict:
    return recorddict_from_proto(ProtoRecordDict.FromString(data))


def node_config(index: int, clients: int) -> dict[str, int]:
    """A simulated client's own configuration, by Flower's names."""
    return {"partition-id": index, "num-partitions": clients}


class RayEngine:
    """Flower's own engine. `client_app` must be small: it is sent along with every message."""

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        run_id: int,
        run_config: UserConfig,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        init_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._app, self._clients = client_app, clients
        self._run_id, self._run_config = run_id, dict(run_config)
        resources = {"num_cpus": cpus, "num_gpus": gpus}
        quiet = {"logging_level": 40, "log_to_driver": False}
        self._config = {"client_resources": resources, "init_args": quiet | dict(init_args or {})}

    def run(self, serve: Callable[[RayEngine], None]) -> None:
        """Call `serve`, which may use `stream`, while the engine runs; raises what it raises, and
        MissingExtra without Ray."""
        from flwr.compat.client.run_info_store import DeprecatedRunInfoStore
        from flwr.proto.task_pb2 import Task
        from flwr.server.superlink.fleet.vce import vce_api
        from flwr.server.superlink.fleet.vce.metrics import VceMetrics
        from flwr.server.superlink.linkstate import LinkStateFactory
        from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
        from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.supercore.run import Run
        from flwr.superlink.federation import NoOpFederationManager
        from flwr.superlink.grid import InMemoryGrid

        try:
            from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
        except ModuleNotFoundError as exc:
            if exc.name != "ray":
                raise
            raise MissingExtra(
                "--engine ray needs Ray, which is not installed",
                hint="pip install 'fedpress[flower,demo]' where Ray has a wheel for this Python, "
                "or use --engine processes",
            ) from exc
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it warns
        begin_run(self._run_id)
        run = Run.create_empty(run_id=self._run_id)
        run.primary_task_id, run.federation_id = _TASK, NOOP_FEDERATION_ID
        states = LinkStateFactory(
            FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()
        )
        state = states.state()
        state.run_ids[run.run_id] = RunRecord(run=run)
        state.task_store[_TASK] = Task(task_id=_TASK, run_id=run.run_id)
        grid = InMemoryGrid(states)
        grid.set_run(run)
        partitions = vce_api._register_nodes(self._clients, states)
        stores = {}
        for node, partition in partitions.items():
            stores[node] = DeprecatedRunInfoStore(node, node_config(partition, self._clients))
            stores[node].register_context(run.run_id, run)
            info = stores[node].run_infos[run.run_id]
            info.initial_run_config = dict(self._run_config)
            info.context.run_config = dict(self._run_config)
        self._real = {partition + 1: node for node, partition in partitions.items()}
        self._grid, self._stopped = grid, threading.Event()
        raised, stopped = list[BaseException](), self._stopped

        def served() -> None:
            try:
                serve(self)
            except BaseException as exc:
                raised.append(exc)
            finally:
                stopped.set()

        thread = threading.Thread(target=served, name="server-app")

        def interrupted(number: int, frame: object) -> None:
            raised.insert(0, KeyboardInterrupt())
            stopped.set()  # Flower's engine would wait for its own end first

        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, interrupted) if is_main else None
        thread.start()
        app = self._app
        try:
            vce_api.run_api(
                lambda: app,
                lambda: RayBackend(self._config),
                partitions,
                states,
                stores,
                stopped,
                VceMetrics(),
            )
        finally:
            stopped.set()
            thread.join()
            if is_main:
                signal.signal(signal.SIGINT, before)
        if raised:
            raise raised[0]

    def stream(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Replies as they arrive, until all have or `timeout` seconds are over. Nodes are known as
        1, 2, ..., whatever Flower's engine calls them."""
        sent: dict[str, tuple[str, int]] = {}
        for message in messages:
            node = message.metadata.dst_node_id
            real = copied(message)
            real.metadata.dst_node_id = self._real[node]
            (identifier,) = self._grid.push_messages([real])
            sent[identifier] = (message.metadata.message_id, node)
        waiting = set(sent)
        deadline = None if timeout is None else time.monotonic() + timeout
        while waiting and (deadline is None or time.monotonic() < deadline):
            if self._stopped.is_set():
                raise ServerError("Flower's engine stopped before all clients had answered")
            replies = list(self._grid.pull_messages(waiting))
            for reply in replies:
                waiting.discard(reply.metadata.reply_to_message_id)
                yield self._renamed(reply, *sent[reply.metadata.reply_to_message_id])
            if not replies:
                time.sleep(_POLL_SECONDS)

    def _renamed(self, reply: Message, identifier: str, node: int) -> Message:
        fields = reply.metadata.__dict__
        fields["_reply_to_message_id"], fields["_src_node_id"] = identifier, node
        return reply
