"""A device without torch: a pump learns to foresee the temperature of its bearing, in numpy alone.

    python sensor.py model model.safetensors        the model that the task begins with
    python sensor.py readings pump-1.csv --seed 1   made-up readings, in the place of yours
    SENSOR_CSV=pump-1.csv fedpress client join URL --app sensor:trainer --state-dir pump-1

See README.md for the whole run.
"""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedpress import Evaluation, Model, Trained, TrainingRequest
from fedpress.errors import ConfigurationError

Array = npt.NDArray[np.float32]

COLUMNS = ("temperature", "vibration", "current", "flow", "temperature_later")
"""Of a file of readings, in degrees C, mm/s, A, l/min, and degrees C ten minutes later."""
CENTRES = np.array([60, 3, 12, 80, 60], np.float32)
WIDTHS = np.array([15, 1.5, 4, 20, 15], np.float32)
"""Every device scales by the same figures: scales of its own would make models that do not add."""
FEATURES = len(COLUMNS) - 1


class SensorTrainer:
    """Linear regression on scaled `readings` [n, FEATURES + 1]; the last column is the target."""

    honours = frozenset({"proximal", "control"})

    def __init__(self, readings: Array) -> None:
        split = len(readings) - len(readings) // 5
        self.train_rows, self.test_rows = readings[:split], readings[split:]

    def train(self, model: Model, request: TrainingRequest) -> Trained:
        terms, flat = request.terms, model.parameters.copy()
        tensors = model.spec.unflatten(flat)  # views: a step changes `flat`
        rng = np.random.default_rng(request.seed)
        size = (terms.batch_size or 32) * terms.gradient_accumulation
        per_epoch = -(-len(self.train_rows) // size)
        for step in range(terms.local_steps or per_epoch * (terms.local_epochs or 1)):
            if step % per_epoch == 0:
                order = rng.permutation(len(self.train_rows))
            begin = step % per_epoch * size
            rows = self.train_rows[order[begin : begin + size]]
            error = predict(tensors["weight"], tensors["bias"], rows) - rows[:, -1]
            slope = rows[:, :-1].T @ error / np.float32(len(rows))
            gradient = model.spec.flatten({"weight": slope, "bias": error.mean(keepdims=True)})
            flat -= (terms.learning_rate or 0.1) * (gradient + request.added(model, flat))
        return Trained(flat, len(self.train_rows))

    def evaluate(self, model: Model) -> Evaluation:
        tensors = model.tensors()
        error = predict(tensors["weight"], tensors["bias"], self.test_rows) - self.test_rows[:, -1]
        degrees = float(WIDTHS[-1] * np.sqrt(np.mean(error**2)))
        return Evaluation(len(self.test_rows), {"rmse_degrees": degrees})


def predict(weight: Array, bias: Array, rows: Array) -> Array:
    scores: Array = rows[:, :-1] @ weight + bias
    return scores


def initial_model() -> Model:
    zeros = {"weight": np.zeros(FEATURES, np.float32), "bias": np.zeros(1, np.float32)}
    return Model.from_tensors(zeros)


def read(path: Path) -> Array:
    """The scaled readings of a CSV file. Raises ConfigurationError that names the wrong line."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
    except OSError as exc:
        raise ConfigurationError(f"cannot read {path}: {exc.strerror}") from exc
    if not rows or tuple(rows[0]) != COLUMNS:
        raise ConfigurationError(f"{path} must begin with the line {','.join(COLUMNS)}")
    if len(rows) < 6:
        raise ConfigurationError(f"{path} has {len(rows) - 1} readings; at least 5 are needed")
    for number, row in enumerate(rows[1:], 2):
        try:
            is_right = len(row) == len(COLUMNS) and bool(np.isfinite([*map(float, row)]).all())
        except ValueError:
            is_right = False
        if not is_right:
            raise ConfigurationError(f"line {number} of {path} must be {len(COLUMNS)} numbers")
    return (np.array(rows[1:], np.float32) - CENTRES) / WIDTHS


def trainer() -> SensorTrainer:
    """For `fedpress client join --app sensor:trainer`."""
    path = os.environ.get("SENSOR_CSV")
    if not path:
        raise ConfigurationError("set SENSOR_CSV to this device's file of readings")
    return SensorTrainer(read(Path(path)))


def write_readings(path: Path, seed: int, number: int = 400) -> None:
    """Make up readings of a pump whose usual load is its own, while the physics are everybody's."""
    rng = np.random.default_rng(seed)
    load = rng.normal(scale=0.6) + rng.normal(scale=0.5, size=(number, 1))
    scaled = load + rng.normal(scale=0.5, size=(number, FEATURES))
    later = scaled @ [0.6, 0.3, 0.25, -0.2] + 0.1 + rng.normal(scale=0.1, size=number)
    values = np.column_stack([scaled, later]) * WIDTHS + CENTRES
    np.savetxt(path, values, "%.3f", ",", header=",".join(COLUMNS), comments="")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the files of the example.")
    parser.add_argument("make", choices=("model", "readings"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.make == "model":
        arguments.path.write_bytes(initial_model().to_bytes())
    else:
        write_readings(arguments.path, arguments.seed)


if __name__ == "__main__":
    main()
