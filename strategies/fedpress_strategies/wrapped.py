"""The base of server optimizers around another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedpress_compression.tensors import Vector
from fedpress_strategies.strategy import OptimizerState, ServerOptimizer, figures, published

_INNER = "inner."


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A server optimizer that hands updates on to `inner`, and keeps its state beside its own."""

    inner: ServerOptimizer

    @property
    def is_by_coordinate(self) -> bool:
        return bool(getattr(self.inner, "is_by_coordinate", False))

    def published(self, state: OptimizerState) -> Mapping[str, Vector]:
        return published(self.inner, self.of_inner(state))

    def figures(self, state: OptimizerState) -> Mapping[str, float]:
        return figures(self.inner, self.of_inner(state))

    def of_inner(self, state: OptimizerState) -> OptimizerState:
        """The state of `inner` in the `state` of both."""
        return {n.removeprefix(_INNER): each for n, each in state.items() if n.startswith(_INNER)}

    def with_inner(self, own: OptimizerState, inner: OptimizerState) -> OptimizerState:
        """The state of both, by the names of `own` and, under a prefix, those of `inner`."""
        return {**own, **{_INNER + name: each for name, each in inner.items()}}
