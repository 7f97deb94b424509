"""What the starts of a strategy on one grid have in common, where one goes on from another.

Rounds count from 1 in every start, and a client's account knows an upload by its name. So starts
are numbered, and clients are told since which one the model has gone on: what they hold back of
updates waits for that model and for no other. A run that is resumed calls its app again from the
beginning, with a new grid, and comes to the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from flwr.serverapp import Grid

from fedpress_protocols.messages import Receipt

_HELD = "_fedpress_trainings"


@dataclass
class Training:
    """Starts that went on from one another's models: `start` is the newest, `since` the first.

    What became of uploads goes from start to start, whatever strategy objects they are of.
    """

    is_masked: bool
    start: int = 1
    since: int = 1
    models: frozenset[str] = frozenset()
    """Digests of the models that the next start may go on from."""
    receipts: dict[int, Receipt] = field(default_factory=dict)
    """By node: that of its last upload."""
    asks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By node: assignments of nodes that it was before, whose receipts it lacks."""
    ends: dict[int, dict[str, bytes]] = field(default_factory=dict)
    """By node and assignment: last words that the node is not known to have heard."""

    @classmethod
    def begun(cls, grid: Grid, task: str, model: str, *, is_masked: bool) -> Self:
        """That of a start now on `grid`, from the model of digest `model`."""
        held: dict[str, Self] = getattr(grid, _HELD, {})
        before = held.get(task)
        start = 1 if before is None else before.start + 1
        if before is not None and before.is_masked == is_masked and model in before.models:
            held[task] = replace(before, start=start)
        else:
            held[task] = cls(is_masked, start, start)
        setattr(grid, _HELD, held)
        return held[task]

    @property
    def goes_on(self) -> bool:
        return self.start != self.since
