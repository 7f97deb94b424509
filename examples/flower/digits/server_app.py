"""The server: the strategy that would run without fedpress, wrapped."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits.task import Net, test, test_data
from fedpress.flower import (
    DownlinkTerms,
    ErrorFeedback,
    FedpressStrategy,
    PerTensor,
    Plan,
    TopK,
)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    strategy = FedAvg(
        fraction_train=float(context.run_config["fraction-train"]), fraction_evaluate=0.0
    )
    kept = float(context.run_config["fraction-kept"])
    if kept:
        compressor = ErrorFeedback(PerTensor(large=TopK(kept, magnitude_bits=1)))
        downlink = DownlinkTerms() if context.run_config["downlink"] else None
        strategy = FedpressStrategy(strategy, Plan(compressor, seed=0), downlink=downlink)
    result = strategy.start(
        grid,
        ArrayRecord(Net().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    for server_round, metrics in result.evaluate_metrics_serverapp.items():
        if server_round:
            trained = result.train_metrics_clientapp[server_round]
            up, down = (
                trained.get(f"fedpress-{way}-bytes", "all") for way in ("upload", "download")
            )
            accuracy = f"accuracy {metrics['accuracy']:.4f}"
            print(f"round {server_round}: {accuracy}, uploaded {up}, downloaded {down}")


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """On images that no client has."""
    torch.set_num_threads(1)
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(net, test_data())
    return MetricRecord({"loss": loss, "accuracy": accuracy})
