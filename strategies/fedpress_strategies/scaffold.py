"""SCAFFOLD: control variates against the drift of clients that see different data (Karimireddy et
al. 2020, arXiv:1910.06378, Algorithm 1, option II)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.plan import ClientTerms, ControlTerms, TrainingTerms
from fedpress_strategies.strategy import (
    ALONE,
    CONTROL,
    Delta,
    OptimizerState,
    Properties,
    Strategy,
    Tally,
    UniformMean,
    check_clients,
    strategy,
)


@strategy("scaffold", clients=100)
def scaffold(
    clients: int, learning_rate: float = 1.0, damping: float = 1.0, *, training: TrainingTerms
) -> Strategy:
    """Correct client drift: to every gradient clients add the server's control variate c and
    subtract their own, c_i. `clients` is the number of clients in the task. State: c [size], and
    c_i [size] on every device; linear.

    With K local steps at rate r, the same for all, c_i moves by -(c + update / (K r)). So
    clients upload one vector, v = update + K r c, and c_i moves by -`damping` v / (K r) as decoded:
    the server gets c, the mean of all c_i, from the decoded uploads. Compression errors of v remain
    in the difference between gradient and c_i, as in EF21, so error feedback is refused.
    """
    if training.local_steps is None or training.learning_rate is None:
        raise ConfigurationError(
            "scaffold computes the gradient from the number of steps and their rate",
            hint="set training.local_steps and training.learning_rate",
        )
    check_clients(clients)
    length = training.local_steps * training.learning_rate
    optimizer = Controlled(clients, length, learning_rate, damping)
    terms = ClientTerms(control=ControlTerms(scale=-damping / length, offset=length))
    about = Properties(
        "control variate [d]", "control variate [d]", source="Karimireddy et al. 2020, Algorithm 1"
    )
    return Strategy(UniformMean, optimizer, terms, properties=about)


@dataclass(frozen=True, slots=True)
class Controlled:
    """parameters += learning_rate * (delta - length * c); c moves like the mean of the clients'
    c_i."""

    clients: int
    length: float
    learning_rate: float
    damping: float
    is_by_coordinate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ConfigurationError(f"learning_rate must be positive, not {self.learning_rate}")
        if not 0 < self.damping <= 1:
            raise ConfigurationError(f"damping must lie in (0, 1], not {self.damping}")

    def init(self, parameters: Vector) -> OptimizerState:
        return {CONTROL: np.zeros(parameters.size)}

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        added = np.float32(self.length) * state[CONTROL].astype(np.float32)  # as each client did
        moved = parameters.astype(np.float64) + self.learning_rate * (delta - added)
        share = min(1.0, tally.count / self.clients)
        control = state[CONTROL] - self.damping * share / self.length * delta
        return moved.astype(np.float32), {CONTROL: control}

    def published(self, state: OptimizerState) -> Mapping[str, Vector]:
        return {CONTROL: state[CONTROL].astype(np.float32)}
