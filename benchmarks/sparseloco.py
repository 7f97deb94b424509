"""Bytes of SparseLoCo's updates: its 14-bit packing, a Rice coder's positions, the ideal, and ours.

    python benchmarks/sparseloco.py --data TEXT [--rounds 6] [--json FILE]

A small transformer learns the characters of a text by SparseLoCo (Sarfi et al. 2025,
arXiv:2508.15706): two workers take local steps of AdamW, send 64 of each 4,096 entries of what
these came to in two bits under error feedback, and the outer step is the mean. Every body is the
product's, decoded again before it counts. Beside it, over the same entries: 12 bits for a position
in its chunk and 2 for its value (Covenant-72B's wire, arXiv:2603.08163); Rice-coded gaps, chunk by
chunk at the best parameter, and 2 bits; log2 C(4096, 64) bits a chunk and 2, the ideal for
positions without structure. Times are CPU seconds of one thread, medians, on the last update.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from codec import choose_bits
from harness import machine, parser, report
from torch import nn

from fedpress_compression.coding import decode, encode
from fedpress_compression.compressor import Public
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec

CHUNK, KEPT, WORKERS, CONTEXT, BATCH = 4096, 64, 2, 64, 16
REPEATS = 9


class Characters(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        here = self.tokens(codes) + self.places.weight[: codes.shape[1]]
        scores: torch.Tensor = self.head(self.layers(here, mask=mask, is_causal=True))
        return scores


def local_steps(model: nn.Module, codes: torch.Tensor, steps: int, rng: torch.Generator) -> float:
    """Train by AdamW on windows of `codes`; return the mean loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = 0.0
    for _ in range(steps):
        starts = torch.randint(0, len(codes) - CONTEXT - 1, (BATCH,), generator=rng)
        windows = torch.stack([codes[i : i + CONTEXT + 1] for i in starts.tolist()])
        scores = model(windows[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / steps


def updates(data: Path, rounds: int, steps: int, width: int) -> Iterator[dict[str, Any]]:
    """For each round: the loss, and of the first worker the input of top-k and its symbols."""
    text = data.read_bytes()
    codes = torch.tensor([min(each, 127) for each in text])
    shares = torch.tensor_split(codes, WORKERS)
    torch.manual_seed(0)
    model = Characters(width, layers=4)
    spec = ModelSpec((TensorSpec("all", (sum(p.numel() for p in model.parameters()),)),))
    made = ErrorFeedback(TopK(count=KEPT, chunk=CHUNK, magnitude_bits=1))
    states = [made.init(spec) for _ in range(WORKERS)]
    generators = [torch.Generator().manual_seed(seed) for seed in range(WORKERS)]
    anchor = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for number in range(1, rounds + 1):
        public = Public(spec, PublicRandomness(bytes(32)), {}, round=number)
        mean = np.zeros(spec.size, np.float32)
        rows: list[dict[str, Any]] = []
        for worker in range(WORKERS):
            nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
            loss = local_steps(model, shares[worker], steps, generators[worker])
            moved = nn.utils.parameters_to_vector(model.parameters()).detach() - anchor
            update = moved.numpy()
            residual = states[worker].residual
            fed = update if residual is None else update + residual
            rng = np.random.default_rng([number, worker])
            symbols, states[worker] = made.compress(update, states[worker], public, rng)
            body = encode(symbols, made.layout(spec))
            back = decode(body, made.layout(spec))
            assert all(np.array_equal(a, b) for a, b in zip(symbols, back, strict=True))
            mean += made.decompress(back, public).dense() / WORKERS
            rows.append({"loss": loss, "bytes": len(body), "where": symbols[0], "fed": fed})
        anchor = anchor + torch.from_numpy(mean)
        loss = statistics.mean(row["loss"] for row in rows)
        yield {**rows[0], "round": number, "loss": loss, "spec": spec, "public": public}


def rice_bits(where: npt.NDArray[np.int64]) -> float:
    """The bits of the gaps in each chunk, coded by Rice at the parameter best for the chunk."""
    total = 0.0
    chunks = where // CHUNK
    for chunk in np.unique(chunks):
        inside = where[chunks == chunk] - chunk * CHUNK
        gaps = np.diff(inside, prepend=-1) - 1
        total += min(float((gaps >> k).sum() + gaps.size * (k + 1)) for k in range(12))
    return total


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """Bits an entry and times less than float32 of the four wires."""
    where, size = row["where"], row["spec"].size
    number = len(where)
    whole, rest = divmod(size, CHUNK)
    ideal = whole * choose_bits(CHUNK, KEPT) + choose_bits(rest, min(KEPT, rest))
    bits = {
        "14-bit packing": 14.0 * number,
        "Rice, 2 bits": rice_bits(where) + 2 * number,
        "structureless ideal": ideal + 2 * number,
        "fedpress": 8.0 * row["bytes"],
    }
    wires = {
        name: {"bits_an_entry": each / number, "times_less": 32 * size / each}
        for name, each in bits.items()
    }
    return {"round": row["round"], "loss": row["loss"], "entries": number, "wires": wires}


def speeds(row: dict[str, Any]) -> dict[str, float]:
    """Gigabytes of float32 update a second, of one thread: top-k with levels; encoding; both."""
    times = len(row["fed"])
    copies = max(1, 2**24 // times)
    update = np.tile(row["fed"], copies)
    spec = ModelSpec((TensorSpec("all", (update.size,)),))
    public = Public(spec, PublicRandomness(bytes(32)), {}, round=1)
    made = TopK(count=KEPT, chunk=CHUNK, magnitude_bits=1)
    rng, layout = np.random.default_rng(0), made.layout(spec)
    taken: dict[str, list[float]] = {"compress": [], "encode": []}
    for _ in range(REPEATS):
        begin = time.thread_time()
        symbols, _ = made.compress(update, None, public, rng)
        middle = time.thread_time()
        encode(symbols, layout)
        taken["compress"].append(middle - begin)
        taken["encode"].append(time.thread_time() - middle)
    least = {name: statistics.median(each) for name, each in taken.items()}
    least["both"] = least["compress"] + least["encode"]
    return {name: update.nbytes / seconds / 1e9 for name, seconds in least.items()}


def table(found: dict[str, Any]) -> str:
    last = found["rounds"][-1]
    lines = [
        f"{found['values']:,} values, round {last['round']} of {len(found['rounds'])}, loss "
        f"{found['rounds'][0]['loss']:.2f} -> {last['loss']:.2f}",
        "",
        "| wire | bits an entry | times less than float32 |",
        "| --- | --- | --- |",
    ]
    for name in last["wires"]:
        each = [row["wires"][name] for row in found["rounds"]]
        entry = statistics.mean(row["bits_an_entry"] for row in each)
        less = statistics.mean(row["times_less"] for row in each)
        lines.append(f"| {name} | {entry:.2f} | {less:.0f} |")
    speed = ", ".join(f"{name} {rate:.2f}" for name, rate in found["gigabytes_a_second"].items())
    return "\n".join([*lines, "", f"GB/s of update on one core: {speed}"])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="a text")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--steps", type=int, default=15, help="local steps of a round")
    options.add_argument("--width", type=int, default=128)
    asked = options.parse_args()
    torch.set_num_threads(1)
    rows, row = [], cast(dict[str, Any], {})
    for row in updates(asked.data, asked.rounds, asked.steps, asked.width):
        rows.append(figures(row))
    measured = {
        "values": row["spec"].size,
        "rounds": rows,
        "gigabytes_a_second": speeds(row),
        "machine": machine(),
    }
    report(table(measured), measured, asked.json)


if __name__ == "__main__":
    main()
