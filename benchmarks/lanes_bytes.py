"""Bytes of real updates in interleaved lanes, beside static codes and the range coder.

    python benchmarks/lanes_bytes.py [--data FOLDER]

Updates are those of `trained_updates.py`; with the folder of Fashion-MNIST also what a few hundred
images change in networks of 1.7M to 7.9M parameters. Bytes are of the whole body under `coded`,
without contexts. `one lane` is the same body in lanes, of which each field has one: what lanes cost
by themselves. The second table says what is in a body of lanes, as shares of the range coder's
whole body: `states` are 4 bytes of each lane, two of which one coder would need too, and `others`
fields for which lanes do not pay. CPU seconds are the least of three, on one thread. Needs torch
and scikit-learn.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import trained_updates
from torch import nn

from fedpress_compression import coding, kernels
from fedpress_compression.coding import Coder, laned
from fedpress_compression.coding.alphabets import read_alphabet
from fedpress_compression.coding.bits import Reader
from fedpress_compression.coding.exp_golomb import read_numbers
from fedpress_compression.coding.fields import Layout
from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.ecsq import Ecsq
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.sign import Sign
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec

Update = dict[str, npt.NDArray[np.float32]]
CODERS: tuple[Coder, ...] = ("huffman", "lanes", "range")
PARTS = ("levels", "tables", "states", "words", "others")
METHODS: dict[str, Compressor[Any]] = {
    "topk 1 %": TopK(),
    "topk 1 %, 4 bits": TopK(magnitude_bits=4),
    "topk 10 %": TopK(fraction=0.1),
    "ecsq": Ecsq(),
    "quantize 4 bits": Quantize(bits=4),
    "sign": Sign(),
}


def larger(folder: Path) -> list[tuple[str, Update]]:
    """Updates of an MLP, a CNN and a wider MLP on Fashion-MNIST."""
    from fashion_task import Fashion

    data = Fashion.split(folder, 0)
    pixels, labels = data.pixels.flatten(1), data.labels
    torch.manual_seed(0)

    def mlp(*widths: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, after in zip((784, *widths), (*widths, 10), strict=True):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    cnn = nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
    found = []
    for name, model, before in (
        ("MLP", mlp(1024, 1024), 3000),
        ("CNN", cnn, 1500),
        ("MLP", mlp(2048, 2048, 1024), 1000),
    ):
        _epoch(model, pixels[:before], labels[:before], 0.05)
        start = [p.detach().clone() for p in model.parameters()]
        _epoch(model, pixels[30_000:30_400], labels[30_000:30_400], 0.02)
        update = {
            key: (after.detach() - old).numpy()
            for (key, after), old in zip(model.named_parameters(), start, strict=True)
        }
        found.append((name, update))
    return found


def _epoch(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor, rate: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for rows in torch.randperm(len(labels)).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels[rows]), labels[rows]).backward()
        optimizer.step()


def contents(body: bytes, layout: Layout) -> Counter[str]:
    """Bytes of the levels, tables, states and words in a body of lanes, and of what is not in
    lanes."""
    sizes: Counter[str] = Counter()

    def measured(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(reader: Reader, *arguments: Any) -> Any:
            start = reader.at
            result = read(reader, *arguments)
            sizes[name] += (reader.at - start) // 8
            return result

        return reading

    decode = kernels.decode_lanes

    def decode_lanes(octets: Any, at: int, num_words: Any, *arguments: Any) -> Any:
        sizes["states"] += 4 * arguments[-1]
        sizes["words"] += 2 * int(num_words.sum())
        return decode(octets, at, num_words, *arguments)

    with (
        patch.object(laned, "read_alphabet", measured("levels", read_alphabet)),
        patch.object(laned, "read_numbers", measured("tables", read_numbers)),
        patch.object(kernels, "decode_lanes", decode_lanes),
    ):
        coding.decode(body, layout)
    sizes["others"] = len(body) - sizes.total()
    return sizes


def least(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `call`, and the least CPU seconds of three."""
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        result = call()
        seconds.append(time.process_time() - begin)
    return result, min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder with the files of Fashion-MNIST")
    asked = parser.parse_args()
    kernels.limit_threads(1)
    torch.set_num_threads(1)
    updates = [*trained_updates.shaped().items()]
    updates += [] if asked.data is None else larger(asked.data)
    print("| update | method | static | lanes | range | lanes / static | lanes / range ", end="")
    print("| lanes / one lane | encode ms: lanes, range | decode ms: static, lanes, range |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    inside = []
    for name, update in updates:
        spec = ModelSpec(tuple(TensorSpec(key, part.shape) for key, part in update.items()))
        public = Public(spec, PublicRandomness(bytes(32)))
        vector = np.concatenate([part.ravel() for part in update.values()])
        for method, inner in METHODS.items():
            symbols, _ = inner.compress(vector, inner.init(spec), public, np.random.default_rng(0))
            size, encoding, decoding = {}, {}, {}
            parts: Counter[str] = Counter()
            for coder in CODERS:
                layout = Coded(inner, coder).layout(spec)
                body, encoding[coder] = least(partial(coding.encode, symbols, layout))
                _, decoding[coder] = least(partial(coding.decode, body, layout))
                size[coder] = len(body)
                if coder == "lanes":
                    parts = contents(body, layout)
            with patch.object(laned, "_MOST_LANES", 1):
                one = len(coding.encode(symbols, Coded(inner, "lanes").layout(spec)))
            print(
                f"| {name} {vector.size / 1e6:.1f}M | {method} "
                + "".join(f"| {size[coder]:,} " for coder in CODERS)
                + "".join(
                    f"| {size['lanes'] / other:.3f} "
                    for other in (size["huffman"], size["range"], one)
                )
                + f"| {1e3 * encoding['lanes']:.0f}, {1e3 * encoding['range']:.0f} | "
                + ", ".join(f"{1e3 * decoding[coder]:.1f}" for coder in CODERS)
                + " |",
                flush=True,
            )
            shares = (f"{parts[part] / size['range']:.3f}" for part in PARTS)
            inside.append(f"| {name} {vector.size / 1e6:.1f}M | {method} | {' | '.join(shares)} |")
    print(f"\n| update | method | {' | '.join(PARTS)} |\n|---|---|{'---|' * len(PARTS)}")
    print("\n".join(inside))


if __name__ == "__main__":
    main()
