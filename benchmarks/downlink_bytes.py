"""The accuracy that a downlink costs and the bytes that it saves, on the digits task.

    python benchmarks/downlink_bytes.py [--rounds 60] [--seeds 3] [--data FOLDER] [--only TEXT]
    python benchmarks/downlink_bytes.py --seconds

Devices train on what is published, the strategy (momentum 0.8) goes on with its own parameters.
Uploads are not compressed, so that the downlink alone is seen. Accuracy is that of the published
model, the mean of the last ten rounds and of the seeds. Bytes are those of the coded forms in every
fourth round of the last third: of the difference to the model 1, 4 and 8 rounds before, of the
whole, and of what a device of this fleet (10 of 100 in a round, `keep` of 8) downloads when it
takes part.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from time import thread_time
from typing import Any

import digits_task
import numpy as np

from fedpress_compression import coding
from fedpress_compression.compressor import Public
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import Vector
from fedpress_protocols.downlink import (
    decode_difference,
    decode_model,
    encode_difference,
    encode_model,
)
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import DownlinkTerms
from fedpress_protocols.model import Model
from fedpress_strategies.downlink import rounded, stepped

MOMENTUM = 0.8
BACK = (1, 4, 8)
HALF = DownlinkTerms(rate=0.5)
Publish = Callable[[Model, Vector], tuple[Model, int]]
"""From the model before and the strategy's parameters to the next, and what its step is coded in;
0 where its difference is to be coded as a downlink codes it."""


def plain(base: Model, target: Vector) -> tuple[Model, int]:
    return base.with_parameters(target), 0


def grid_alone(base: Model, target: Vector) -> tuple[Model, int]:
    return rounded(base.with_parameters(target), DownlinkTerms(bits=12)), 0


def by_steps(terms: DownlinkTerms) -> Publish:
    return lambda base, target: (stepped(base, target, terms), 0)


def by_topk(fraction: float, bits: int) -> Publish:
    """DoubleSqueeze with a sparse compressor, in float32: there is no grid, and no coded whole."""
    compressor = TopK(fraction, magnitude_bits=bits)
    public = Public(digits_task.SPEC, PublicRandomness(bytes(32)))

    def publish(base: Model, target: Vector) -> tuple[Model, int]:
        gap = target - base.parameters
        symbols, _ = compressor.compress(gap, None, public, np.random.default_rng(0))
        size = len(coding.encode(symbols, compressor.layout(base.spec)))
        step = compressor.decompress(symbols, public).dense()
        return base.with_parameters(base.parameters + step), size

    return publish


def steps_of(**terms: Any) -> tuple[Publish, DownlinkTerms, bool]:
    made = DownlinkTerms(**terms)
    return by_steps(made), made, True


WAYS: dict[str, tuple[Publish, DownlinkTerms | None, bool]] = {
    "float32, as it is": (plain, None, True),
    "12-bit grid, all that moves": (grid_alone, DownlinkTerms(), True),
    **{f"steps, rate {rate:g}": steps_of(rate=rate) for rate in (3.2, 1, 0.5, 0.25, 0.1)},
    "steps, rate 0.5, range coder": steps_of(rate=0.5, coder="auto"),
    "steps, rate 0.5, no feedback": (by_steps(HALF), HALF, False),
    **{f"steps, rate 0.5, {bits} bits": steps_of(rate=0.5, bits=bits) for bits in (6, 8, 10, 14)},
    "top-k 1 %, 2 bits, float32": (by_topk(0.01, 2), None, True),
    "top-k 5 %, 2 bits, float32": (by_topk(0.05, 2), None, True),
}


class Tally:
    """The outcome of one way, over seeds."""

    def __init__(self) -> None:
        self.accuracies: list[float] = []
        self.bytes: defaultdict[str, list[int]] = defaultdict(list)

    def row(self, name: str, whole: int) -> str:
        cells = [f"{name:30s} {100 * mean(self.accuracies):6.2f}"]
        for what in (*map(str, BACK), "whole", "fleet"):
            found = mean(self.bytes[what]) if self.bytes[what] else float("nan")
            cells.append(f"{found:9,.0f} {100 * found / whole:5.1f}")
        return "  ".join(cells)


def follow(
    task: Any,
    data: Any,
    seed: int,
    rounds: int,
    way: tuple[Publish, DownlinkTerms | None, bool],
    tally: Tally,
) -> None:
    """One task from its beginning."""
    publish, terms, feeds_back = way
    first = Model(task.SPEC, task.first_model(seed), {})
    line = [first if terms is None else rounded(first, terms)]
    target, velocity = first.parameters.astype(np.float64), np.zeros(task.SPEC.size)
    held: dict[int, int] = {}
    accuracies = []
    for number, cohort in enumerate(task.cohorts(seed, rounds)):
        model = line[-1]
        is_late = number >= 2 * rounds // 3 and number % 4 == 0
        for client in cohort:
            if is_late:
                tally.bytes["fleet"].append(downloaded(line, held.get(client), terms))
            held[client] = number
        rng = np.random.default_rng([seed, 5, number])
        updates = [data.update(model.parameters, client, rng) for client in cohort]
        sizes = [data.clients[client].size for client in cohort]
        velocity = MOMENTUM * velocity + np.average(updates, axis=0, weights=sizes)
        target = (target + velocity).astype(np.float32).astype(np.float64)
        published, step_bytes = publish(model, target.astype(np.float32))
        if not feeds_back:
            target = published.parameters.astype(np.float64)
        line.append(published)
        if is_late:
            if step_bytes:
                tally.bytes["1"].append(step_bytes)
            for what, size in forms(line, terms, is_coarse=bool(step_bytes)):
                tally.bytes[what].append(size)
        if number >= rounds - 10:
            accuracies.append(data.accuracy(published.parameters))
    tally.accuracies.append(mean(accuracies))


def forms(
    line: list[Model], terms: DownlinkTerms | None, *, is_coarse: bool
) -> Iterator[tuple[str, int]]:
    if terms is None:
        if not is_coarse:
            yield "1", len(line[-1].to_bytes())
        yield "whole", len(line[-1].to_bytes())
        return
    yield "whole", len(encode_model(line[-1], terms.coder))
    for back in BACK:
        if back < len(line):
            yield str(back), len(encode_difference(line[-1 - back], line[-1], terms.coder))


def downloaded(line: list[Model], held: int | None, terms: DownlinkTerms | None) -> int:
    """By a device that holds the model of round `held`; for the newest."""
    if terms is None:
        return len(line[-1].to_bytes())
    whole = len(encode_model(line[-1], terms.coder))
    if held is None or len(line) - 1 - held > terms.keep:
        return whole
    try:
        return min(whole, len(encode_difference(line[held], line[-1], terms.coder)))
    except ConfigurationError:
        return whole


def show_seconds() -> None:
    """The CPU of one thread, for a model of 4 million parameters whose moves are heavy-tailed."""
    rng = np.random.default_rng(0)
    weights = 0.03 * rng.standard_normal((8, 500, 1000))
    first = Model.from_tensors({f"w{i}": w.astype(np.float32) for i, w in enumerate(weights)})
    base = rounded(first, HALF)
    scale = 0.002 * rng.gamma(0.4, 1, first.spec.size)
    target = (base.parameters + scale * rng.standard_normal(scale.size)).astype(np.float32)
    model = stepped(base, target, HALF)  # which compiles what is not yet
    difference, whole = encode_difference(base, model), encode_model(model)
    timed: dict[str, Callable[[], object]] = {
        "a step": lambda: stepped(base, target, HALF),
        "to code a difference": lambda: encode_difference(base, model),
        "to decode it": lambda: decode_difference(difference, base),
        "to code a whole": lambda: encode_model(model),
        "to decode it ": lambda: decode_model(whole, 2**30),
    }
    for what, work in timed.items():
        begun = thread_time()
        work()
        print(f"{what:22s} {thread_time() - begun:6.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="a folder with the files of Fashion-MNIST")
    parser.add_argument("--only", default="", help="the ways whose name has this in it")
    parser.add_argument("--seconds", action="store_true", help="what the coding costs, and no more")
    asked = parser.parse_args()
    if asked.seconds:
        show_seconds()
        return
    task: Any = digits_task
    split: Callable[[int], Any] = digits_task.Digits.split
    if asked.data is not None:
        import fashion_task

        task, split = fashion_task, lambda seed: fashion_task.Fashion.split(asked.data, seed)
    whole = len(Model(task.SPEC, task.first_model(0), {}).to_bytes())
    print(f"d = {task.SPEC.size}, a model is {whole:,} bytes; bytes and % of them")
    heads = [f"{back} before" if back > 1 else "previous" for back in BACK]
    print(f"{'':30s} {'acc. %':>6s}  " + "  ".join(f"{h:>15s}" for h in (*heads, "whole", "fleet")))
    for name, way in WAYS.items():
        if asked.only not in name or (task is not digits_task and "top-k" in name):
            continue
        tally = Tally()
        for seed in range(asked.seeds):
            follow(task, split(seed), seed, asked.rounds, way, tally)
        print(tally.row(name, whole), flush=True)


if __name__ == "__main__":
    main()
