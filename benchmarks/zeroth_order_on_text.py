"""Loss against bytes of zeroth-order training, beside LoRA and full fine-tuning, on a text.

    python benchmarks/zeroth_order_on_text.py --data TEXT [--seeds 0,1,2] [--json FILE]
    python benchmarks/zeroth_order_on_text.py --table    # of the kept figures; measures nothing

The base, the devices and their texts are those of lora_on_text.py: a small transformer that half of
the text has trained, and four devices. All methods begin with one base. Bytes are one device's, up,
as bodies are sent or 16 bits a value for the two methods in float16. A step of first order is a
forward and a backward pass over 16 windows, one of zeroth order two forward passes over as many.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from federation import Federation
from harness import machine, parser, report, save, seed_list
from lora_on_text import DEVICES, HELD_OUT, Windows, devices, quantised, trained_base

from fedpress import TorchTrainer
from fedpress.experimental import ZerothOrderTrainer
from fedpress_compression.compressor import Compressor, from_config
from fedpress_protocols.plan import TrainingTerms

KEPT = Path(__file__).parent / "results" / "zeroth_order_on_text.json"
FED_BACK = quantised(0.25)


@dataclass(frozen=True)
class Method:
    """The trainer, its `steps` a round, and how its updates go up; None: 16 bits a value."""

    trainer: str
    steps: int
    rounds: int
    up: dict[str, Any] | None
    num_weights: int = 0
    learning_rate: float = 0.0


METHODS = {
    "full, float16": Method("full", 10, 12, None),
    "LoRA, float16": Method("LoRA", 10, 12, None),
    "K = 4096, float32": Method("zeroth", 50, 12, {"id": "none"}, 4096, 1e-3),
    "K = 4096, .25 bit": Method("zeroth", 50, 12, FED_BACK, 4096, 1e-3),
}
SHOWN = (1, 4, 12)
"""The rounds whose losses the table has."""


class Pairs(torch.utils.data.Dataset[Any]):
    """The windows with their labels apart."""

    def __init__(self, text: bytes) -> None:
        self._windows = Windows(text)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        window = self._windows[index]
        return window, window["labels"]


def loss_of(outputs: Any, labels: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs.loss
    return loss


def no_metrics(outputs: Any, labels: Any) -> dict[str, float]:
    return {}


def trainers(method: Method, base: Any, texts: list[bytes], seed: int) -> Sequence[TorchTrainer]:
    if method.trainer == "LoRA":
        return devices(base, texts, seed)
    kind: Callable[..., TorchTrainer] = TorchTrainer
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=1e-3)
    if method.trainer == "zeroth":
        kind = partial(ZerothOrderTrainer, num_weights=method.num_weights, seed=seed)
        optimizer = partial(torch.optim.SGD, lr=method.learning_rate)
    return [
        kind(
            copy.deepcopy(base),
            loss_of,
            optimizer,
            Pairs(text[:-HELD_OUT]),
            evaluation_data=Pairs(text[-HELD_OUT:]),
            batch_size=16,
            metrics=no_metrics,
        )
        for text in texts
    ]


def held_out(made: Sequence[TorchTrainer], model: Any) -> float:
    losses = [trainer.evaluate(model) for trainer in made]
    return statistics.mean(each.metrics["loss"] for each in losses if each)


def run(method: Method, base: Any, texts: list[bytes], seed: int) -> Iterator[tuple[float, int]]:
    """The held-out loss before the first round and after each, and the bytes a device sent."""
    made = trainers(method, base, texts, seed)
    first = made[0].initial_model()

    def compressor(number: int) -> Compressor[Any]:
        return from_config(method.up or {"id": "none"})

    yield held_out(made, first), 0
    with tempfile.TemporaryDirectory() as folder:
        terms = TrainingTerms(local_steps=method.steps)
        fleet = Federation(Path(folder), first, {"id": "fedavg"}, made, terms, compressor, 64.0)
        for _ in range(method.rounds):
            sent = fleet.uploaded
            fleet.run(range(DEVICES))
            up = 2 * first.spec.size if method.up is None else (fleet.uploaded - sent) // DEVICES
            yield held_out(made, fleet.model), up


def measure(
    data: Path, base_steps: int, seeds: list[int], only: str, file: Path | None
) -> dict[str, Any]:
    text = data.read_bytes()
    half = len(text) // 2
    share = (len(text) - half) // DEVICES
    texts = [text[half + i * share :][:share] for i in range(DEVICES)]
    figures: dict[str, Any] = {"seeds": {}, "machine": machine()}
    for seed in seeds:
        base = trained_base(text[:half], base_steps, seed)
        curves: dict[str, list[tuple[float, int]]] = {}
        figures["seeds"][str(seed)] = curves
        for name, method in METHODS.items():
            if only in name:
                curves[name] = list(run(method, base, texts, seed))
                save(figures, file)
    return figures


def table(figures: dict[str, Any]) -> str:
    rounds = " | ".join(f"after {number}" for number in SHOWN)
    lines = [
        f"| | steps a round | bytes a round | before | {rounds} |",
        "| --- " * (4 + len(SHOWN)) + "|",
    ]
    for name, method in METHODS.items():
        curves = [each[name] for each in figures["seeds"].values() if name in each]
        if not curves:
            continue
        up = statistics.mean(row[1] for curve in curves for row in curve[1:])
        losses = [
            f"{statistics.mean(curve[number][0] for curve in curves):.3f}"
            if number <= method.rounds
            else ""
            for number in (0, *SHOWN)
        ]
        lines.append(f"| {name} | {method.steps} | {up:,.0f} | {' | '.join(losses)} |")
    return "\n".join(lines)


def main() -> None:
    warnings.filterwarnings("ignore", "`is_.*` is deprecated", FutureWarning)
    options = parser(__doc__, quick="one seed", seeds="0,1,2")
    options.add_argument("--data", type=Path, help="a text")
    options.add_argument("--only", default="", help="methods whose name holds this")
    options.add_argument("--base-steps", type=int, default=300)
    options.add_argument("--table", action="store_true", help="of the kept figures")
    asked = options.parse_args()
    if asked.table:
        print(table(json.loads(KEPT.read_text())))
        return
    if asked.data is None:
        raise SystemExit("--data TEXT is missing; --table prints the kept figures")
    torch.set_num_threads(1)
    kept = None if asked.json == Path("-") else asked.json
    figures = measure(asked.data, asked.base_steps, seed_list(asked), asked.only, kept)
    report(table(figures), figures, asked.json)


if __name__ == "__main__":
    main()
