"""Four hospitals with biopsies of their own: a logistic regression in numpy, and nothing else.

    python hospital.py model.safetensors       the model that the task begins with
    HOSPITAL=1 fedpress client join URL --app hospital:trainer --state-dir hospital-1

The records are those of 569 patients that scikit-learn has (Street, Wolberg and Mangasarian 1993,
Wisconsin diagnostic breast cancer). See README.md for the whole run.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_breast_cancer

from fedpress import Evaluation, Model, Trained, TrainingRequest
from fedpress.errors import ConfigurationError

Array = npt.NDArray[np.float32]

HOSPITALS = 4
TEST_PATIENTS = 169
"""Patients who gave their records to the public: they measure models, and train none."""
COLUMNS = slice(20, 30)
"""The largest nuclei of a biopsy: radius, texture, perimeter, area, smoothness, compactness,
concavity, concave points, symmetry, fractal dimension."""
CENTRES = np.array([16, 26, 107, 880, 0.13, 0.25, 0.27, 0.115, 0.29, 0.084], np.float32)
WIDTHS = np.array([5, 6, 34, 570, 0.023, 0.16, 0.21, 0.066, 0.062, 0.018], np.float32)
"""The usual middle and spread of each, as published. Every hospital scales by the same figures;
figures of its own would make models that do not add, and would tell about its patients."""


class HospitalTrainer:
    """Logistic regression on `records` [n, 10], scaled; `malignant` [n] is 0 or 1."""

    honours = frozenset({"proximal", "control"})

    def __init__(self, records: Array, malignant: Array) -> None:
        self.records, self.malignant = records, malignant

    def train(self, model: Model, request: TrainingRequest) -> Trained:
        terms, flat = request.terms, model.parameters.copy()
        tensors = model.spec.unflatten(flat)  # views: a step changes `flat`
        for _ in range(terms.local_steps or 10):
            error = chance(tensors, self.records) - self.malignant
            slope = self.records.T @ error / np.float32(len(error))
            gradient = model.spec.flatten({"weight": slope, "bias": error.mean(keepdims=True)})
            flat -= (terms.learning_rate or 0.5) * (gradient + request.added(model, flat))
        return Trained(flat, len(self.malignant))

    def evaluate(self, model: Model) -> Evaluation:
        """Under masks this stays in the hospital, unless its own rules allow the report."""
        is_right = (chance(model.tensors(), self.records) > 0.5) == (self.malignant > 0.5)
        return Evaluation(len(is_right), {"accuracy": float(is_right.mean())})


def chance(tensors: dict[str, Array], records: Array) -> Array:
    """Of each record [n], that the biopsy is malignant."""
    chances: Array = 1 / (1 + np.exp(-records @ tensors["weight"] - tensors["bias"]))
    return chances


def initial_model() -> Model:
    width = len(CENTRES)
    return Model.from_tensors(
        {"weight": np.zeros(width, np.float32), "bias": np.zeros(1, np.float32)}
    )


@cache
def patients() -> tuple[tuple[Array, Array], ...]:
    """Records and diagnoses of the public patients, and then of each hospital's.

    Hospitals differ in size, and in how many of their patients are ill.
    """
    data = load_breast_cancer()
    records = ((data.data[:, COLUMNS] - CENTRES) / WIDTHS).astype(np.float32)
    malignant = (data.target == 0).astype(np.float32)
    rng = np.random.default_rng(27)
    public, rest = np.split(rng.permutation(len(records)), [TEST_PATIENTS])
    houses: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(HOSPITALS)]
    for diagnosis in (0, 1):
        rows = rest[malignant[rest] == diagnosis]
        cuts = np.cumsum(rng.dirichlet([1.0] * HOSPITALS))[:-1] * len(rows)
        for house, part in zip(houses, np.split(rows, cuts.astype(int)), strict=True):
            house.append(part)
    groups = [public, *(np.concatenate(house) for house in houses)]
    return tuple((records[rows], malignant[rows]) for rows in groups)


def trainer() -> HospitalTrainer:
    """For `fedpress client join --app hospital:trainer`: the hospital that HOSPITAL names."""
    text = os.environ.get("HOSPITAL", "")
    if text not in map(str, range(1, HOSPITALS + 1)):
        raise ConfigurationError(f"HOSPITAL is {text!r}; set it to a number from 1 to {HOSPITALS}")
    return HospitalTrainer(*patients()[int(text)])


def accuracy(model: Model) -> float:
    """The share of the public patients that the model diagnoses right."""
    return HospitalTrainer(*patients()[0]).evaluate(model).metrics["accuracy"]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python hospital.py MODEL.safetensors")
    Path(sys.argv[1]).write_bytes(initial_model().to_bytes())
