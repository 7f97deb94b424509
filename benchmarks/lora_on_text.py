"""Bytes that federated LoRA takes to a loss: float16, a sparse adapter, and ours both ways.

    python benchmarks/lora_on_text.py --data TEXT [--seeds 0,1,2] [--only WORD] [--json FILE]
        # curves that FILE has by name and seed are not measured again
    python benchmarks/lora_on_text.py --table    # of the kept figures; measures nothing

A small transformer is trained on the first half of a text; four devices have a share of the rest
each, of which 4,096 characters are held out, and train adapters. All methods start from the same
base and take as many local steps. The target is the loss that LoRA in float16 ends at, and .005
more; bytes are those of one device until the mean held-out loss is there. Uploads of ours are
bodies as they are sent, downloads the coded difference to the model before. "Epsilon" is AdamW's,
else 1e-8. "Masked" bodies are those of the masked lane, without a session's keys; its models go
down in float16. "Sparse LoRA" stands
for FLASC (Kuo et al. 2024, arXiv:2406.05233): top-k both ways, without feedback, counted as 16 bits
a value and the ideal for its coordinates. EcoLoRA (arXiv:2506.02001) claims 89 % off the upload,
which is a factor of 9.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from codec import choose_bits
from federation import Federation
from harness import machine, parser, report, save, seed_list

from fedpress_compression.compressor import Compressor, Public, from_config
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import Vector
from fedpress_protocols.downlink import encode_difference
from fedpress_protocols.messages import DownlinkTerms
from fedpress_protocols.model import Model
from fedpress_protocols.plan import MaskingTerms, TrainingTerms
from fedpress_strategies.downlink import rounded, stepped

if TYPE_CHECKING:
    from fedpress.peft import PeftTrainer

TOLERANCE = 0.005
"""Losses are equal up to it, in nats: rounds of float16 near the end differ by as much."""
KEPT = Path(__file__).parent / "results" / "lora_on_text.json"
DEVICES, CONTEXT, RANK, WIDTH, STEPS = 4, 32, 4, 64, 10
RATE, EPSILON = 5e-3, 1e-8
HELD_OUT = 4096
"""The characters at the end of each device's text that none trains on."""
SPARSE = 0.078
"""With 16 bits a value and its coordinate a tenth of dense float16."""


@dataclass(frozen=True)
class Method:
    """How a round's updates go up and its model goes down, and AdamW's settings; with `masking`
    in the masked lane."""

    up: dict[str, Any] | None
    down: DownlinkTerms | float | None
    masking: MaskingTerms | None = None
    rate: float = RATE
    epsilon: float = EPSILON


def fed_back(fraction: float) -> dict[str, Any]:
    inner = {"id": "topk", "fraction": fraction, "magnitude_bits": 1}
    return {"id": "error_feedback", "inner": inner}


def quantised(bits: float) -> dict[str, Any]:
    inner = {"id": "ecsq", "control": "bits", "target": bits}
    return {"id": "error_feedback", "inner": inner}


SUPPORT = {"id": "shared_support", "fraction": 0.25, "explore": 0.7}
SEVEN = MaskingTerms(levels=3, headroom=4.0, first_range=0.05)
WIDE: dict[str, Any] = {"rate": 1e-2, "epsilon": 3e-3}
"""Steps in proportion to gradients but for the largest: most values hardly move."""

FIRST = "LoRA, float16"
"""The method that the others are compared with."""
METHODS = {
    FIRST: Method(None, None),
    "sparse LoRA, 10 x": Method({"id": "topk", "fraction": SPARSE, "magnitude_bits": 4}, SPARSE),
    "fedpress, 5 %": Method(fed_back(0.05), DownlinkTerms(bits=8, rate=0.5)),
    "fedpress, .25 bit": Method(quantised(0.25), DownlinkTerms(bits=8, rate=0.4)),
    "fedpress, .25 bit both ways": Method(
        quantised(0.25), DownlinkTerms(bits=8, rate=0.25, coder="auto")
    ),
    "LoRA, float16, epsilon .003": Method(None, None, **WIDE),
    "fedpress, .25 bit both ways, epsilon .003": Method(
        quantised(0.25), DownlinkTerms(bits=8, rate=0.25, coder="auto"), **WIDE
    ),
    "fedpress, masked, 25 % in 7 levels": Method(
        {"id": "error_feedback", "inner": SUPPORT}, None, SEVEN
    ),
}


class Windows(torch.utils.data.Dataset[Any]):
    """Consecutive windows of CONTEXT characters."""

    def __init__(self, text: bytes) -> None:
        self.codes = torch.tensor([min(each, 127) for each in text])

    def __len__(self) -> int:
        return len(self.codes) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.codes[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


def trained_base(text: bytes, steps: int, seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # which --table does without

    torch.manual_seed(seed)
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    config = GPT2Config(**sizes, vocab_size=128, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(Windows(text), 16, shuffle=True)
    left = steps
    while left > 0:
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            left -= 1
            if not left:
                break
    return model


def devices(
    base: Any, texts: list[bytes], seed: int, rate: float = RATE, epsilon: float = EPSILON
) -> list[PeftTrainer]:
    from peft import LoraConfig, get_peft_model

    from fedpress.peft import PeftTrainer

    made = []
    for text in texts:
        torch.manual_seed(seed)
        config = LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=["c_attn", "c_proj", "c_fc"],
            fan_in_fan_out=True,
        )
        adapter = get_peft_model(copy.deepcopy(base), config)
        cut = len(text) - HELD_OUT
        made.append(
            PeftTrainer(
                adapter,
                Windows(text[:cut]),
                evaluation_data=Windows(text[cut:]),
                optimizer=partial(torch.optim.AdamW, lr=rate, eps=epsilon),
                batch_size=16,
            )
        )
    return made


def run(
    method: Method, base: Any, texts: list[bytes], rounds: int, seed: int
) -> Iterator[tuple[float, int, int]]:
    """The held-out loss after each round, and the bytes that a device sent and received in it."""
    trainers = devices(base, texts, seed, method.rate, method.epsilon)
    first = trainers[0].initial_model()
    size = first.spec.size
    down = method.down
    if isinstance(down, DownlinkTerms):
        first = rounded(first, down)

    def compressor(number: int) -> Compressor[Any]:
        return from_config(method.up or {"id": "none"})

    with tempfile.TemporaryDirectory() as folder:
        fleet = Federation(
            Path(folder),
            first,
            {"id": "fedavg"},
            trainers,
            TrainingTerms(local_steps=STEPS),
            compressor,
            max_abs=64.0,
            masking=method.masking,
        )
        master = first.parameters
        for _ in range(rounds):
            before, sent = fleet.model, fleet.uploaded
            fleet.run(range(DEVICES))
            up = (fleet.uploaded - sent) // DEVICES
            if method.up is None:
                up = 2 * size
            elif down == SPARSE:
                up = sparse_bytes(size)
            master = master + (fleet.model.parameters - before.parameters)
            model, received = published(before, master, down)
            fleet.publish(model)
            losses = [trainer.evaluate(model) for trainer in trainers]
            yield statistics.mean(each.metrics["loss"] for each in losses if each), up, received


def published(
    before: Model, master: Vector, down: DownlinkTerms | float | None
) -> tuple[Model, int]:
    """The next model that devices get, and the bytes that it takes."""
    size = before.spec.size
    if isinstance(down, DownlinkTerms):
        model = stepped(before, master, down)
        return model, len(encode_difference(before, model, down.coder))
    if down is None:
        return before.with_parameters(master), 2 * size
    made, public = TopK(down, magnitude_bits=4), Public(before.spec, PublicRandomness(bytes(32)))
    gap = master - before.parameters
    symbols, _ = made.compress(gap, None, public, np.random.default_rng(0))
    step = made.decompress(symbols, public).dense()
    return before.with_parameters(before.parameters + step), sparse_bytes(size)


def sparse_bytes(size: int) -> int:
    kept = int(SPARSE * size)
    return int((16 * kept + choose_bits(size, kept)) / 8)


def measure(
    data: Path, rounds: int, base_steps: int, seeds: list[int], only: str, file: Path | None
) -> dict[str, Any]:
    """The curves of the first method, and of all whose name holds `only`, for every seed; written
    to `file` as they come, and read from it where it has them."""
    text = data.read_bytes()
    half = len(text) // 2
    share = (len(text) - half) // DEVICES
    texts = [text[half + i * share :][:share] for i in range(DEVICES)]
    found: dict[str, Any] = {"rounds": rounds, "seeds": {}, "machine": machine()}
    if file is not None and file.exists():
        found = json.loads(file.read_text())
        if found["rounds"] != rounds:
            raise SystemExit(f"{file} has {found['rounds']} rounds, not {rounds}: name another")
    for seed in seeds:
        base = trained_base(text[:half], base_steps, seed)
        curves: dict[str, list[tuple[float, int, int]]] = found["seeds"].setdefault(str(seed), {})
        for name, method in METHODS.items():
            target = curves[FIRST][-1][0] if curves else None
            if name in curves or (target is not None and only not in name):
                continue
            curves[name] = []
            for row in run(method, base, texts, rounds if target is None else 2 * rounds, seed):
                curves[name].append(row)
                if target is not None and row[0] <= target + TOLERANCE:
                    break
            save(found, file)
    return found


def until(curve: list[list[float]], target: float) -> tuple[int, float, float] | None:
    """The rounds, and the bytes up and down, until the loss is at `target`."""
    for number, (loss, _, _) in enumerate(curve, 1):
        if loss <= target:
            return number, sum(r[1] for r in curve[:number]), sum(r[2] for r in curve[:number])
    return None


def table(found: dict[str, Any]) -> str:
    lines = [
        "| | rounds to the loss | bytes up | bytes down | up, times less | down, times less |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in METHODS:
        rows = []
        measured = [curves for curves in found["seeds"].values() if name in curves]
        if not measured:
            continue
        for curves in measured:
            reference = curves[FIRST]
            target = reference[-1][0] + TOLERANCE
            whole, here = until(reference, target), until(curves[name], target)
            if whole is not None and here is not None:
                rows.append((*here, whole[1] / here[1], whole[2] / here[2]))
        if len(rows) < len(measured):
            lines.append(f"| {name} | not reached by {len(measured) - len(rows)} | | | | |")
            continue
        number, up, down, less_up, less_down = map(statistics.mean, zip(*rows, strict=True))
        lines.append(
            f"| {name} | {number:.0f} | {up:,.0f} | {down:,.0f} | {less_up:.0f} | {less_down:.0f} |"
        )
    lines.append("| EcoLoRA, as its authors say | | | | 9 | |")
    return "\n".join(lines)


def main() -> None:
    warnings.filterwarnings("ignore", "`is_.*` is deprecated", FutureWarning)
    options = parser(__doc__, quick="one seed", seeds="0,1,2")
    options.add_argument("--data", type=Path, help="a text")
    options.add_argument("--rounds", type=int, default=24, help="of LoRA in float16; others twice")
    options.add_argument("--only", default="", help="methods whose name holds this, and float16")
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
    figures = measure(
        asked.data, asked.rounds, asked.base_steps, seed_list(asked), asked.only, kept
    )
    report(table(figures), figures, asked.json)


if __name__ == "__main__":
    main()
