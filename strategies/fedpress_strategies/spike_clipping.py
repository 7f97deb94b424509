"""Clip a round's mean update by the norms of the rounds before it (Seetharaman et al. 2020,
"AutoClip", arXiv:2007.14469; by a running mean as Kumar et al. 2025, "ZClip", arXiv:2504.02507)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import ConfigurationError
from fedpress_strategies.fedavg import FEDAVG
from fedpress_strategies.strategy import (
    ALONE,
    Delta,
    OptimizerState,
    Strategy,
    Tally,
    figures,
    norm_of,
    strategy,
)
from fedpress_strategies.wrapped import Wrapped

CLIPPED_SHARE = "clipped_share"
"""Of the norm of the last round's mean update: how much clipping took off; among the
figures of a round that was clipped."""
_KEPT = 0.9
"""The weight of a round in the mean norm, relative to that of the next."""
_KNOWN, _WIDER = 2.0, 2.0
"""The total weight of three rounds, and the factor of the bound while fewer are known."""


@strategy("spike_clipping", inner={"id": "fedavg"})
def spike_clipping(ratio: float = 1.5, inner: Strategy = FEDAVG) -> Strategy:
    """Run `inner` on mean updates whose L2 norm is `ratio` times the mean norm of the rounds before
    at most, twice that in the second and the third round. A device whose training diverges may send
    an update of a hundred times the usual norm, and server momentum repeats it: one such round can
    end a training. The mean norm has a decay of .9 and counts norms as clipped, so that it follows
    norms that grow for good by 5 to 15 % a round. Refuses strategies with control variates, which
    clients move by whole updates. State: `inner`'s and the sums of norms and of their weights [2];
    linear as `inner`."""
    if inner.client_terms.control is not None:
        raise ConfigurationError(
            "spike_clipping cannot wrap a strategy with control variates: clients move theirs by "
            "whole updates, and the server would move its own by a clipped mean",
            hint="leave spike_clipping out, or use a strategy without control variates",
        )
    state = inner.properties.server_state
    keeps = "norms [2]" if state == "none" else f"{state}, norms [2]"
    about = replace(inner.properties, server_state=keeps, source="Kumar et al. 2025, Section 3")
    return inner._replace(optimizer=SpikeClipping(inner.optimizer, ratio), properties=about)


@dataclass(frozen=True, slots=True)
class SpikeClipping(Wrapped):
    """delta *= min(1, ratio * mean norm / norm) before `inner`."""

    ratio: float

    def __post_init__(self) -> None:
        if not self.ratio >= 1:
            raise ConfigurationError(
                f"ratio must be 1 or more, not {self.ratio}",
                hint="1.5 clips a mean update that is half as long again as the rounds' mean",
            )

    def init(self, parameters: Vector) -> OptimizerState:
        own = {"norms": np.zeros(2), CLIPPED_SHARE: np.zeros(1)}
        return self.with_inner(own, self.inner.init(parameters))

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        total, weight = state["norms"]
        size = parameters.size
        norm = norm_of(delta[:size]) if tally.norm is None else tally.norm
        ratio = self.ratio if weight > _KNOWN else _WIDER * self.ratio
        bound = ratio * total / weight if total else np.inf
        kept = min(1.0, bound / norm) if norm else 1.0
        if kept < 1:
            delta, tally = delta * kept, replace(tally, norm=kept * norm)
            delta[size:] *= kept  # of `lora`: products of two changes
        moved, inner = self.inner.apply(parameters, delta, self.of_inner(state), tally)
        after = {
            "norms": np.array([_KEPT * total + kept * norm, _KEPT * weight + 1]),
            CLIPPED_SHARE: np.array([1 - kept]),
        }
        return moved, self.with_inner(after, inner)

    def figures(self, state: OptimizerState) -> Mapping[str, float]:
        share = float(state[CLIPPED_SHARE][0])
        own = {CLIPPED_SHARE: share} if share else {}
        return own | dict(figures(self.inner, self.of_inner(state)))
