"""The client: one line is fedpress's."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import Net, own_data, test, train
from fedpress.flower import compression_mod

app = ClientApp(mods=[compression_mod()])


def prepared(message: Message, context: Context) -> tuple[Net, torch.utils.data.DataLoader]:
    """The model as it came, and this client's data."""
    torch.set_num_threads(1)
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    partition = int(context.node_config["partition-id"])
    partitions = int(context.node_config["num-partitions"])
    server_round = int(message.content["config"]["server-round"])
    batch_size = int(context.run_config["batch-size"])
    return net, own_data(partition, partitions, batch_size, 1000 * server_round + partition)


@app.train()
def train_fn(message: Message, context: Context) -> Message:
    net, batches = prepared(message, context)
    epochs = int(context.run_config["local-epochs"])
    loss = train(net, batches, epochs, float(context.run_config["learning-rate"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(batches.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate_fn(message: Message, context: Context) -> Message:
    net, batches = prepared(message, context)
    loss, accuracy = test(net, batches)
    metrics = MetricRecord(
        {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(batches.dataset)}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
