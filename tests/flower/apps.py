"""Small apps for the tests of the engines: they import nothing of fedpress but what is said."""

import os
import time
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result

SHAPES = {"w": (6, 4), "b": (4,)}


def arrays(value: float = 0.0) -> ArrayRecord:
    return ArrayRecord({n: Array(np.full(s, value, np.float32)) for n, s in SHAPES.items()})


def moved(message: Message, by: float, **metrics: float) -> RecordDict:
    """What the message brought, with `by` added everywhere."""
    found = {
        name: Array((array.numpy() + np.float32(by)).astype(np.float32))
        for name, array in message.content["arrays"].items()
    }
    return RecordDict(
        {"arrays": ArrayRecord(found), "metrics": MetricRecord({"num-examples": 2, **metrics})}
    )


stock = ClientApp()


@stock.train()
def train(message: Message, context: Context) -> Message:
    """Client i adds i + 1, and counts its turns in its state."""
    turns = 1
    if "turns" in context.state:
        turns += int(context.state["turns"]["count"])
    context.state["turns"] = ConfigRecord({"count": turns})
    by = float(context.node_config["partition-id"]) + 1
    return Message(moved(message, by, turns=float(turns)), reply_to=message)


@stock.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    mean = float(np.mean([a.numpy().mean() for a in message.content["arrays"].values()]))
    metrics = MetricRecord({"num-examples": 1, "mean": mean})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


server = ServerApp()
LAST: dict[str, Any] = {}


@server.main()
def main(grid: Grid, context: Context) -> None:
    result = FedAvg(fraction_train=1.0, fraction_evaluate=1.0).start(
        grid, arrays(), num_rounds=int(context.run_config.get("rounds", 3))
    )
    LAST["result"] = result


def pair() -> tuple[ServerApp, ClientApp]:
    return server, stock


class Saving(FedAvg):
    """Saves what it comes to, as a user's own strategy does."""

    def start(self, *args: Any, **kwargs: Any) -> Result:
        self.rounds = 0
        self.saved = super().start(*args, **kwargs)
        return self.saved

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.rounds += 1
        return super().aggregate_train(server_round, replies)


unruly = ClientApp()


@unruly.train()
def misbehave(message: Message, context: Context) -> Message:
    """Clients 0 to 5 each do something else that they should not; the others add 1."""
    found = moved(message, 1.0)
    match int(context.node_config["partition-id"]):
        case 0:
            raise RuntimeError("no data here")
        case 1:
            found["arrays"]["w"] = Array(np.full(SHAPES["w"], np.nan, np.float32))
        case 2:
            found["arrays"]["w"] = Array(np.zeros((5, 4), np.float32))
        case 3:
            del found["metrics"]["num-examples"]
        case 4:
            os._exit(9)
        case 5:
            time.sleep(3600)
    return Message(found, reply_to=message)


def late() -> ClientApp:
    """Of its clients the first fails once, and the second once has not the model it needs."""
    app, asked = ClientApp(), set[int]()

    @app.train()
    def train_late(message: Message, context: Context) -> Message:
        index = int(context.node_config["partition-id"])
        is_first = index not in asked
        asked.add(index)
        if is_first and index == 0:
            raise RuntimeError("no data yet")
        if is_first and index == 1:
            lacking = ConfigRecord({"holds": ""})
            return Message(RecordDict({"fedpress": lacking}), reply_to=message)
        return Message(moved(message, 1.0, loss=float(index)), reply_to=message)

    return app


class Late:
    def client_app(self) -> ClientApp:
        return late()


class Stock:
    def client_app(self) -> ClientApp:
        return stock


class Unruly:
    def client_app(self) -> ClientApp:
        return unruly


class Unbuildable:
    def client_app(self) -> ClientApp:
        raise ValueError("this app cannot be built")


evaluating = ServerApp()


@evaluating.main()
def evaluate_on_server(grid: Grid, context: Context) -> None:
    """Two rounds, after which the server finds an accuracy of 0.25 and 0.5."""

    def measured(number: int, found: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": number / 4})

    FedAvg(fraction_train=1.0, fraction_evaluate=0.0).start(
        grid, arrays(), num_rounds=2, evaluate_fn=measured
    )


def evaluated() -> tuple[ServerApp, ClientApp]:
    return evaluating, stock
