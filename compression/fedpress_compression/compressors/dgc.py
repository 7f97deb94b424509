"""Deep gradient compression: momentum on the device, corrected for what waits to be sent (Lin et
al. 2018, arXiv:1712.01887, Section 3 and Algorithm 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedpress_compression.coding.fields import Symbols
from fedpress_compression.compressor import (
    Compressor,
    Lossy,
    Properties,
    Public,
    check_finite,
    check_shape,
    compressor,
    properties,
)
from fedpress_compression.compressors.error_feedback import ErrorFeedback, Feedback
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.kernels.buffer_pool import pooled
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_compression.values import check_positive, check_whole

SPARSITIES = (0.75, 0.9375, 0.984375, 0.996, 0.999)
"""The warm-up of Section 3.3: the share of the coordinates that is not sent, epoch by epoch."""


@compressor("dgc")
@dataclass(frozen=True, slots=True)
class Dgc(ErrorFeedback):
    """Error feedback over velocities: u = momentum * u + clipped update, v = v + u, send C(v).

    What is sent leaves v, and its coordinates of u go to zero (momentum factor masking), so that
    no old velocity pushes on where the model has just moved. Summed into v are velocities and not
    updates, since a coordinate that waits must collect the momentum it would have had (momentum
    correction). The paper's gradient is here the update, less the learning rate times it or the
    sum of several such steps, and so the server's half is the plain mean: `fedavg` as it is, as
    momentum on both sides would count twice.

    An update longer than `max_norm` * sqrt(`cohort`) is scaled down to that: Section 3.2's
    threshold for the round's step, as it is for one of `cohort` clients whose *mean* is taken (the
    paper sums gradients that were divided by N before, hence its N**-0.5). None clips nothing.

    For always-on clients alone. The velocity is of the steps that the model took while this client
    looked on; for one that takes part in a tenth of the rounds, it pushes towards where the model
    was ten rounds ago. There put momentum on the server (`fedavgm`), around error_feedback.

    By default 0.1 % of each tensor is sent, which the paper comes to over the sparsities of
    SPARSITIES; `schedule.sparsity_warm_up` makes a task's schedule of them. Residual and velocity
    go on when the rate changes. An upload that came to nothing counts as one that sent nothing.
    """

    inner: Compressor[Any] = field(default_factory=lambda: TopK(0.001, scope="tensor"))
    momentum: float = 0.9
    max_norm: float | None = None
    cohort: int = 1

    def __post_init__(self) -> None:
        ErrorFeedback.__post_init__(self)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {self.momentum}")
        if self.max_norm is not None:
            check_positive("max_norm", self.max_norm)
        check_whole("cohort", self.cohort, 1, 2**31)

    @property
    def properties(self) -> Properties:
        inner = properties(self.inner)
        return Properties(
            rate=inner.rate,
            client_state="residual, velocity",
            server_state=inner.server_state,
            source="Lin et al. 2018, Algorithm 4",
        )

    def compress(
        self, update: Vector, state: Feedback, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Feedback]:
        symbols, after, mark = self.send(self.inner, update, state, public, rng)
        return symbols, self.commit(after, mark, self.decompress(symbols, public))

    def send(
        self,
        channel: Lossy[Any],
        update: Vector,
        state: Feedback,
        public: Public,
        rng: np.random.Generator,
    ) -> tuple[Symbols, Feedback, Mapping[str, Any] | None]:
        check_shape(update, public.spec)
        velocity = self.velocity(update, state.velocity, public.spec)
        symbols, after, mark = ErrorFeedback.send(self, channel, velocity, state, public, rng)
        return symbols, after._replace(velocity=velocity), mark

    def commit(self, state: Feedback, mark: Mapping[str, Any] | None, sent: Update) -> Feedback:
        """Momentum factor masking: what was sent stands still."""
        after = ErrorFeedback.commit(self, state, mark, sent)
        if after.velocity is None:
            return after
        return after._replace(velocity=stilled(after.velocity, sent))

    def velocity(self, update: Vector, before: Vector | None, spec: ModelSpec) -> Vector:
        """momentum * `before` + `update`, which is clipped; None stands for zeros.

        Raises InvalidUpdate on NaN or infinity, also where only their sum is that.
        """
        clipped = self._clipped(update)
        if before is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # refused below
                pushed = pooled(update.size, np.float32)
                np.multiply(before, np.float32(self.momentum), out=pushed)
                clipped = np.add(pushed, clipped, out=pushed)
        check_finite(clipped, spec)
        return clipped

    def _clipped(self, update: Vector) -> Vector:
        if self.max_norm is None:
            return update
        most = self.max_norm * math.sqrt(self.cohort)
        norm = float(np.linalg.norm(update.astype(np.float64)))
        return update * np.float32(most / norm) if norm > most else update


def stilled(velocity: Vector, sent: Update) -> Vector:
    """`velocity` with zeros where `sent` is not zero."""
    left = pooled(velocity.size, np.float32)
    np.copyto(left, velocity)
    for piece in sent.pieces:
        left[piece.where] *= piece.values == 0
    return left
