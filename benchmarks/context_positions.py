"""The bytes that contexts save in uploads of sparse ternary compression with CAFe x 0.9.

    python benchmarks/context_positions.py [--rounds 60] [--data FOLDER]

Trains the digits task, or with --data the Fashion-MNIST task, on what its clients' uploads decode
to, and codes each upload in every way: the choice of code changes no symbol. A body is counted
whole. CAFe is without its guard, as in the literature, unless --guard gives one. What a device has
to download for the contexts stands below: `previous` costs one that has sat out a model, `activity`
costs every one the map of each round that it takes part in.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

import digits_task
import numpy as np

from fedpress_compression import activity
from fedpress_compression.coding.fields import Coder, Known
from fedpress_compression.compressor import Public
from fedpress_compression.compressors.cafe import Cafe
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.stc import SparseTernary
from fedpress_compression.contexts import contexts_of
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import Vector
from fedpress_protocols.upload import Upload

CODERS: dict[str, tuple[Coder, Literal["none"] | Known]] = {
    "static codes": ("huffman", "none"),
    "range coder": ("auto", "none"),
    "range coder, contexts: drift": ("auto", "drift"),
    "range coder, contexts: previous": ("auto", "previous"),
    "range coder, contexts: activity": ("auto", "activity"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guard", type=float, default=None, help="CAFe's guard")
    parser.add_argument("--data", type=Path, help="a folder with the files of Fashion-MNIST")
    asked = parser.parse_args()
    task: Any = digits_task
    if asked.data is None:
        data: Any = digits_task.Digits.split(asked.seed)
    else:
        import fashion_task  # torch, which only this task needs

        task = fashion_task
        data = fashion_task.Fashion.split(asked.data, asked.seed)
    plain = Cafe(SparseTernary(0.01), 0.9, asked.guard)
    ways = {name: Coded(plain, *way) for name, way in CODERS.items()}
    model = task.first_model(asked.seed)
    first, previous, average, maps = model, np.zeros_like(model), np.zeros_like(model), 0
    sizes = dict.fromkeys(CODERS, 0)
    for number, cohort in enumerate(task.cohorts(asked.seed, asked.rounds), start=1):
        randomness = PublicRandomness(number.to_bytes(32, "little"))
        published = activity.to_bytes(average, task.SPEC)
        known = activity.from_bytes(published, task.SPEC)
        public = Public(
            task.SPEC,
            randomness,
            {"previous": previous, "drift": model - first, "activity": known},
            round=number,
        )
        maps += len(published) if number > 1 else 0
        layouts = {name: way.layout(task.SPEC) for name, way in ways.items()}
        contexts = {name: contexts_of(layout, public) for name, layout in layouts.items()}
        total = np.zeros_like(model)
        for client in cohort:
            rng = np.random.default_rng([asked.seed, number, client])
            update: Vector = data.update(model, client, rng)
            symbols, _ = plain.compress(update, None, public, rng)
            for name, layout in layouts.items():
                body = Upload(0, 1, symbols).to_bytes(layout, contexts[name])
                found = Upload.from_bytes(body, (layout,), 0, contexts[name])
                assert all((a == b).all() for a, b in zip(found.symbols, symbols, strict=True))
                sizes[name] += len(body)
            plain.decompress(symbols, public).add_to(total)
        previous = total / np.float32(len(cohort))
        model = model + previous
        average = activity.averaged(average, previous)
    uploads = asked.rounds * task.COHORT
    print(f"{uploads} uploads, d = {task.SPEC.size}, test accuracy {data.accuracy(model):.3f}")
    for name, size in sizes.items():
        shares = [f"{100 * (1 - size / sizes[other]):5.1f} %" for other in list(CODERS)[:2]]
        print(
            f"{name:34s} {size / uploads:8.1f} bytes  less by {shares[0]} than static codes", end=""
        )
        print(f", {shares[1]} than the range coder without")
    whole, of_map = 4 * task.SPEC.size, maps / asked.rounds
    saved = (sizes["range coder"] - sizes["range coder, contexts: activity"]) / uploads
    print(f"to download: a model is {whole} bytes, the map of activity {of_map:.1f} on the mean")
    print(f"  of the rounds, {100 * of_map / whole:.1f} % of a model, for {saved:.1f} bytes less")
    print("  in an upload than the range coder without")


if __name__ == "__main__":
    main()
