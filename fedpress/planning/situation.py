"""Inputs of a prediction: the model, the links, the devices, the deadline."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Model

Lane = Literal["clear", "masked"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)([kMG]?)")
_UNITS = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}
_WIDEST = 1024


@dataclass(frozen=True, slots=True)
class Situation:
    """Links are in Mbit/s of one device, times in seconds, sizes in bytes.

    `compute` is the training of one round on the device. `slowdown` is how many times slower than
    this machine the device does its compressing and coding. All devices together get no more than
    `server_link` from the server, and as much to it. `most_loss`, in points of accuracy, is what a
    profile may cost to be recommended. `price_gb` is the price of 1e9 bytes on a device's link.
    """

    model: str
    """As it was named."""
    spec: ModelSpec
    model_bytes: int
    uplink: float
    downlink: float
    cohort: int
    lane: Lane = "clear"
    compute: float = 30.0
    deadline: float = 600.0
    rounds: int = 100
    round_trip: float = 0.05
    slowdown: float = 1.0
    server_link: float = 1000.0
    most_loss: float = 1.0
    metered: bool = False
    """True if bytes cost more than seconds."""
    coded_downloads: bool = False
    """True if the task has a `downlink`."""
    price_gb: float = 0.0

    def __post_init__(self) -> None:
        positive = {
            "--link": self.uplink,
            "--downlink": self.downlink,
            "--deadline": self.deadline,
            "--device-slowdown": self.slowdown,
            "--server-link": self.server_link,
        }
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{name} of {value:g}, which must be a positive number")
        others = {
            "--compute": self.compute,
            "--round-trip": self.round_trip,
            "--most-loss": self.most_loss,
            "--price-gb": self.price_gb,
        }
        for name, value in others.items():
            if not 0 <= value < math.inf:
                raise ConfigurationError(f"{name} of {value:g}, which must be 0 or more")
        if self.cohort < 1 or self.rounds < 1:
            raise ConfigurationError(
                f"a cohort of {self.cohort} over {self.rounds} rounds; both must be 1 or more"
            )

    @property
    def uploads(self) -> int:
        """Of the whole task."""
        return self.rounds * self.cohort

    @property
    def up(self) -> float:
        """Mbit/s that each device of the cohort has for its upload."""
        return min(self.uplink, self.server_link / self.cohort)

    @property
    def down(self) -> float:
        """Mbit/s that each device of the cohort has for its downloads."""
        return min(self.downlink, self.server_link / self.cohort)


def model_of(text: str) -> tuple[ModelSpec, int]:
    """The tensors of the model that `text` names, and the bytes of its file.

    `text` is a safetensors file, or a number of parameters with k, M or G behind it; see `sized`.
    Raises ConfigurationError if it is neither.
    """
    match = _SIZE.fullmatch(text)
    if match is None or Path(text).is_file():
        try:
            data = Path(text).read_bytes()
        except OSError as exc:
            raise ConfigurationError(
                f"{text!r} is no model: {exc.strerror}",
                hint="give a safetensors file, or a number of parameters such as 50826, 350k, 1.5M",
            ) from exc
        return Model.from_bytes(data).spec, len(data)
    size = round(float(match[1]) * _UNITS[match[2]])
    if not 1 <= size <= 100 * _UNITS["G"]:
        raise ConfigurationError(f"a model of {size:,} parameters, outside [1, 100G]")
    spec = sized(size)
    return spec, 4 * size + _head(spec)


def sized(size: int) -> ModelSpec:
    """`size` parameters as a stack of square layers of at most 1024 inputs, each with its biases;
    the last has what is left."""
    width = max(1, min(_WIDEST, math.isqrt(size)))
    tensors, left, number = [], size, 0
    while left:
        rows = min(width, max(1, left // (width + 1)))
        if rows * width > left:
            tensors.append(TensorSpec(f"{number}.bias", (left,)))
            break
        tensors.append(TensorSpec(f"{number}.weight", (rows, width)))
        left -= rows * width
        if biases := min(rows, left):
            tensors.append(TensorSpec(f"{number}.bias", (biases,)))
            left -= biases
        number += 1
    return ModelSpec(tuple(tensors))


def sample(spec: ModelSpec, most: int) -> tuple[ModelSpec, float]:
    """A spec of about `most` values that is like `spec`, and how many times larger `spec` is.

    Every tensor gives up the same share of its first extent; a matrix keeps 4096 values, so that
    it counts as one. `spec` itself if it is no larger.
    """
    if spec.size <= most:
        return spec, 1.0
    share = most / spec.size
    tensors = []
    for tensor in spec.trained:
        first, *others = tensor.shape or (1,)
        row = math.prod(others)
        least = -(-4096 // max(1, row)) if others else 1
        rows = min(first, max(math.ceil(first * share), least))
        tensors.append(TensorSpec(tensor.name, (rows, *others)))
    smaller = ModelSpec(tuple(tensors))
    return smaller, spec.size / smaller.size


def _head(spec: ModelSpec) -> int:
    """Bytes of a safetensors header, about: a line for each tensor, its name twice."""
    return 64 + sum(90 + 2 * len(tensor.name) for tensor in spec.tensors)
