"""Partitions of examples among clients, uneven on purpose.

    iid            every client the like of all
    dirichlet:A    each client its own proportions of the classes, drawn from Dirichlet(A)
                   (Hsu et al. 2019, arXiv:1909.06335, Section 3.1)
    shards:K       K runs of examples sorted by class (McMahan et al. 2017,
                   arXiv:1602.05629, Section 3)
    quantity:A     the like of all, in numbers drawn from Dirichlet(A) (Li et al. 2022,
                   arXiv:2102.02079, Section IV-C)
    natural        the groups that the data came in: by role, by subject

Where clients outnumber what examples can be dealt to them, they draw theirs with replacement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import ConfigurationError

Rows = npt.NDArray[np.int64]
LEAST = 8
"""Examples that every client has, at least, unless its group has fewer."""

_KINDS = ("iid", "dirichlet", "shards", "quantity", "natural")
_USUAL = {"dirichlet": 0.3, "shards": 2.0, "quantity": 0.5}


@dataclass(frozen=True, slots=True)
class Partition:
    """A kind of the above, and its number."""

    kind: str = "dirichlet"
    amount: float = 0.3

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigurationError(f"no partition {self.kind!r}; known are {', '.join(_KINDS)}")
        if self.kind in _USUAL and not 0 < self.amount < math.inf:
            raise ConfigurationError(
                f"{self.kind}:{self.amount:g}, where a finite number of more than 0 is due"
            )
        if self.kind == "shards" and self.amount != int(self.amount):
            raise ConfigurationError(
                f"shards:{self.amount:g}, where a whole number of 1 or more is due"
            )

    @classmethod
    def parse(cls, text: str) -> Partition:
        """As typed, kind or kind:amount; raises ConfigurationError."""
        kind, colon, amount = text.partition(":")
        if colon and kind in _KINDS and kind not in _USUAL:
            raise ConfigurationError(f"partition {text!r}: {kind} takes no number")
        try:
            return cls(kind, float(amount) if colon else _USUAL.get(kind, 0.0))
        except ValueError as exc:
            raise ConfigurationError(f"partition {text!r}: {amount!r} is no number") from exc

    def deal(self, labels: Rows, clients: int, seed: int, groups: Rows | None = None) -> list[Rows]:
        """The rows of each client. `labels` [n] and, for `natural`, `groups` [n] are small whole
        numbers; no row is dealt twice unless drawn with replacement. Raises ConfigurationError."""
        rng = np.random.default_rng([seed, 0x5EED])
        if self.kind == "natural":
            return _natural(groups, clients)
        if clients * LEAST > labels.size:
            return self._drawn(labels, clients, rng)
        order = rng.permutation(labels.size)
        if self.kind == "iid":
            return [np.sort(part) for part in np.array_split(order, clients)]
        if self.kind == "quantity":
            spare = labels.size - clients * LEAST
            sizes = LEAST + _whole(rng.dirichlet([self.amount] * clients) * spare, spare)
            return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]
        if self.kind == "shards":
            each = int(self.amount)
            by_class = order[np.argsort(labels[order], kind="stable")]
            shards = np.array_split(by_class, clients * each)
            hands = rng.permutation(clients * each).reshape(clients, each)
            return [np.sort(np.concatenate([shards[s] for s in hand])) for hand in hands]
        return self._by_class(labels, clients, order, rng)

    def _by_class(
        self, labels: Rows, clients: int, order: Rows, rng: np.random.Generator
    ) -> list[Rows]:
        """Each class is cut in proportions of its own; who got too little takes from the rich."""
        parts: list[list[Rows]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            rows = order[labels[order] == label]
            sizes = _whole(rng.dirichlet([self.amount] * clients) * rows.size, rows.size)
            for part, piece in zip(parts, np.split(rows, np.cumsum(sizes)[:-1]), strict=True):
                part.append(piece)
        dealt = [np.concatenate(part) for part in parts]
        for poor in range(clients):
            while dealt[poor].size < LEAST:
                rich = max(range(clients), key=lambda client: dealt[client].size)
                missing = LEAST - dealt[poor].size
                num_moved = min(missing, (dealt[rich].size - LEAST + 1) // 2 or 1)
                dealt[poor] = np.concatenate([dealt[poor], dealt[rich][:num_moved]])
                dealt[rich] = dealt[rich][num_moved:]
        return [np.sort(rows) for rows in dealt]

    def _drawn(self, labels: Rows, clients: int, rng: np.random.Generator) -> list[Rows]:
        """LEAST rows for each, drawn with replacement in the client's proportions."""
        classes = np.unique(labels)
        pools = [np.flatnonzero(labels == label) for label in classes]
        frequent = np.array([pool.size for pool in pools]) / labels.size
        dealt = []
        for _ in range(clients):
            shares = frequent
            if self.kind == "dirichlet":
                shares = rng.dirichlet([self.amount] * classes.size)
            elif self.kind == "shards":
                count = min(classes.size, int(self.amount))
                shares = np.zeros(classes.size)
                shares[rng.choice(classes.size, count, replace=False)] = 1 / count
            drawn = rng.choice(classes.size, LEAST, p=shares)
            dealt.append(
                np.sort([pools[which][rng.integers(pools[which].size)] for which in drawn])
            )
        return dealt


def _whole(shares: npt.NDArray[np.float64], total: int) -> Rows:
    """Whole numbers near `shares` that sum to `total`: the largest remainders round up."""
    whole = np.floor(shares).astype(np.int64)
    up = np.argsort(whole - shares, kind="stable")[: total - int(whole.sum())]
    whole[up] += 1
    return whole


def _natural(groups: Rows | None, clients: int) -> list[Rows]:
    """The largest groups, a client each."""
    if groups is None:
        raise ConfigurationError("these data came in no groups; choose another partition")
    names, sizes = np.unique(groups, return_counts=True)
    if names.size < clients:
        raise ConfigurationError(
            f"{names.size} groups for {clients} clients", hint=f"ask for {names.size} at most"
        )
    largest = np.sort(names[np.argsort(-sizes, kind="stable")][:clients])
    return [np.flatnonzero(groups == name) for name in largest]
