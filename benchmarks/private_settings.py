"""Choose clip, rounds, steps and rate of benchmarks/private_accuracy.py, on training images alone.

    python benchmarks/private_settings.py --data FOLDER --fraction 1 --rounds 8 --clips .5 1 2
    python benchmarks/private_settings.py --data FOLDER --fraction .14 --rounds 57 110 --clips .3 .6

Each line is the accuracy on 10,000 training images of Fashion-MNIST that no device has, for a
`fraction` of the coordinates in each of so many rounds, clip, local steps and rate: the mean over
the seeds, at each epsilon. What is simulated is the same training, clipping and drawing of
coordinates as there, in float32, with Gaussian noise of the deviation that the lane has: for a
fraction below 1 that of the distributed lane where a tenth of the cohort lies and all take part.
Rounding and masks are left out. The seeds are other ones than those that are reported.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import numpy as np
from private_accuracy import DELTA, Data, Settings

from fedpress_compression.tensors import Vector
from fedpress_protocols.privacy import accounting

FIRST_SEED, HELD_OUT = 100, 10_000
HONEST = 0.9


class Cohort:
    """All clients of `data` at once, each with as many images as the others."""

    def __init__(self, data: Data) -> None:
        rows = np.stack(data.clients)
        self._pixels = data.pixels[rows]
        self._labels = np.eye(10, dtype=np.float32)[data.labels[rows]]

    def updates(self, model: Vector, own: Settings) -> Vector:
        """Of every client [clients, parameters], as Data.update has them."""
        clients, images, pixels = self._pixels.shape
        weight = np.repeat(model[None, : 10 * pixels].reshape(1, 10, pixels), clients, axis=0)
        bias = np.repeat(model[None, None, 10 * pixels :], clients, axis=0)
        rate = np.float32(own.rate / images)
        for _ in range(own.steps):
            scores = self._pixels @ weight.transpose(0, 2, 1) + bias
            back = np.exp(scores - scores.max(axis=2, keepdims=True))
            back /= back.sum(axis=2, keepdims=True)
            back -= self._labels
            weight -= rate * (back.transpose(0, 2, 1) @ self._pixels)
            bias -= rate * back.sum(axis=1, keepdims=True)
        trained = np.concatenate([weight.reshape(clients, -1), bias.reshape(clients, -1)], axis=1)
        return trained - model


def accuracy(
    data: Data, cohort: Cohort, own: Settings, fraction: float, rounds: int, multiplier: float
) -> float:
    """After `rounds`, at the clip `own.clip` and noise of `multiplier` clips in the sum."""
    rng, size = np.random.default_rng(0), data.spec.size
    model, sent = np.zeros(size, np.float32), round(fraction * size)
    for _ in range(rounds):
        support = np.sort(rng.permutation(size)[:sent])
        updates = cohort.updates(model, own)[:, support]
        norms = np.linalg.norm(updates, axis=1, keepdims=True)
        total = (updates * np.minimum(1, own.clip / norms)).sum(axis=0)
        total += multiplier * own.clip * rng.standard_normal(sent).astype(np.float32)
        model[support] += total / np.float32(len(data.clients))
    return data.accuracy(model)


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--data", type=Path, required=True, help="a folder with fashion_mnist")
    made.add_argument("--fraction", type=float, default=1.0, help="below 1: distributed lane")
    made.add_argument("--rounds", type=int, nargs="+", default=[8])
    made.add_argument("--clips", type=float, nargs="+", required=True)
    made.add_argument("--steps", type=int, nargs="+", default=[20])
    made.add_argument("--rates", type=float, nargs="+", default=[0.5])
    made.add_argument("--epsilons", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    made.add_argument("--seeds", type=int, default=2)
    asked = made.parse_args()
    every = []
    for seed in range(FIRST_SEED, FIRST_SEED + asked.seeds):
        data = Data.fashion(asked.data, seed)
        others = np.setdiff1d(np.arange(60_000), np.concatenate(data.clients))
        every.append((data._replace(test=others[:HELD_OUT]), Cohort(data)))
    print("rounds   clip  steps   rate  " + "  ".join(f"eps {e:<4g}" for e in asked.epsilons))
    for rounds, clip, steps, rate in product(asked.rounds, asked.clips, asked.steps, asked.rates):
        own = Settings(clip, 0.0, 0.0, 0.0, 0, steps, rate)
        means = []
        for epsilon in asked.epsilons:
            # Discrete Gaussian noise has the curve of the central lane's.
            one = accounting.participation("central")
            noise = accounting.noise_multiplier_for(epsilon, DELTA, rounds, one)
            noise /= 1.0 if asked.fraction == 1 else HONEST**0.5
            runs = [accuracy(*each, own, asked.fraction, rounds, noise) for each in every]
            means.append(f"{100 * np.mean(runs):8.2f}")
        print(f"{rounds:6} {clip:6g} {steps:6} {rate:6g}  " + "  ".join(means), flush=True)


if __name__ == "__main__":
    main()
