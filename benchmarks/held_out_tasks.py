"""Tasks of accuracy_vs_bytes.py that were first run after the default was frozen.

Data, networks, clients and cohorts were chosen, and committed, before `auto` ran on any of them.
`data/mlbench` has the data sets of R's package mlbench, `data/dslabs` the files Rdata.rdb and
Rdata.rdx of the package dslabs (Debian: r-cran-dslabs; in /usr/lib/R/site-library/dslabs/data), and
`data/watch` the file watch_dataset.npy of the Python package seglearn. The clients of watch are the
arms of ten subjects, those of ratings are users.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from accuracy_tasks import Rows, Task, skewed_table, tensors
from r_data import frame, installed_frame
from torch import nn

Windows = tuple[npt.NDArray[np.float64], Rows]
_WINDOW, _STRIDE = 100, 50
_HISTORY, _FREQUENT, _EMBEDDED = 20, 10, 16


def _watch(data: Path, rng: np.random.Generator) -> Task:
    """Which of seven shoulder exercises a smartwatch's wearer does, of two seconds at 50 Hz; the
    last quarter of each recording is for tests. Burns et al. 2018, arXiv:1802.01489."""
    kept = np.load(data / "watch" / "watch_dataset.npy", allow_pickle=True).item()
    train, test, arms = list[Windows](), list[Windows](), list[Rows]()
    for series, label, subject, side in zip(
        kept["X"], kept["y"], kept["subject"], kept["side"], strict=True
    ):
        end = 3 * len(series) // 4
        for part, windows, step in ((series[:end], train, _STRIDE), (series[end:], test, _WINDOW)):
            cut = np.lib.stride_tricks.sliding_window_view(part, _WINDOW, axis=0)[::step]
            windows.append((cut, np.full(len(cut), int(label))))
        arms.append(np.full(len(train[-1][1]), 2 * int(subject) + int(side)))
    inputs, tests = (np.concatenate([cut for cut, _ in each]) for each in (train, test))
    labels, answers = (np.concatenate([kind for _, kind in each]) for each in (train, test))
    mean, deviation = inputs.mean((0, 2), keepdims=True), inputs.std((0, 2), keepdims=True)
    scaled, others = (((each - mean) / deviation).astype(np.float32) for each in (inputs, tests))
    arm = np.concatenate(arms)
    clients = [np.flatnonzero(arm == each) for each in np.unique(arm)]
    network = nn.Sequential(
        nn.Conv1d(6, 32, 9, 2, 4), nn.ReLU(), nn.Conv1d(32, 64, 5, 2, 2), nn.ReLU(),
        nn.Conv1d(64, 64, 5, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(832, 64), nn.ReLU(),
        nn.Linear(64, 7),
    )  # fmt: skip
    parts = tensors(scaled, labels, others, answers)
    return Task(*parts, clients, network, 10, 8, 32, 0.05, 60)


class _Taste(nn.Module):
    """Whether a user likes a film, of the film, its genres and the user's last ratings.

    Columns: film, genres, then the films rated before; `films` more for one that was not liked."""

    def __init__(self, films: int, genres: int) -> None:
        super().__init__()
        self.films = films
        self.film, self.genres = nn.Embedding(films, _EMBEDDED), nn.Embedding(genres, 8)
        self.rated = nn.Embedding(2 * films, _EMBEDDED)
        self.hidden, self.scores = nn.Linear(2 * _EMBEDDED + 9, 64), nn.Linear(64, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        history = rows[:, 2:]
        there = (history >= 0).float()
        count = there.sum(1, keepdim=True).clamp(min=1)
        rated = (self.rated(history.clamp(min=0)) * there[:, :, None]).sum(1) / count
        liked = ((history >= 0) & (history < self.films)).float().sum(1, keepdim=True) / count
        parts = [self.film(rows[:, 0]), self.genres(rows[:, 1]), rated, liked]
        scores: torch.Tensor = self.scores(nn.functional.relu(self.hidden(torch.cat(parts, 1))))
        return scores


def _ratings(data: Path, rng: np.random.Generator) -> Task:
    """Whether users give a film four stars or more, of what they rated before; a client for each
    user, the last fifth of whose ratings is for tests (4,000 of them). MovieLens, 671 users."""
    columns = installed_frame(data / "dslabs", "movielens")
    order = np.lexsort((columns["movieId"], columns["timestamp"], columns["userId"]))
    ids = columns["movieId"][order]
    known, counts = np.unique(ids, return_counts=True)
    frequent = known[counts >= _FREQUENT]
    films = np.where(np.isin(ids, frequent), np.searchsorted(frequent, ids) + 1, 0)
    liked = columns["rating"][order] >= 4
    users, genres = columns["userId"][order], columns["genres"][order].astype(np.int64)
    network = _Taste(frequent.size + 1, int(genres.max()) + 1)
    entries = np.where(liked, films, films + network.films)
    rows, is_test = [], []
    for user in np.unique(users):
        own = np.flatnonzero(users == user)
        before = np.concatenate([np.full(_HISTORY, -1), entries[own][:-1]])
        history = np.lib.stride_tricks.sliding_window_view(before, _HISTORY)
        rows.append(np.column_stack([films[own], genres[own], history]))
        is_test.append(np.arange(own.size) >= own.size - own.size // 5)
    inputs, late, labels = np.concatenate(rows), np.concatenate(is_test), liked.astype(np.int64)
    clients = [np.flatnonzero(users[~late] == user) for user in np.unique(users)]
    test = rng.permutation(np.flatnonzero(late))[:4000]
    parts = tensors(inputs[~late], labels[~late], inputs[test], labels[test])
    return Task(*parts, clients, network, 20, 8, 16, 0.1)


def _mlbench(
    name: str, hidden: tuple[int, ...], tests: int, clients: int, steps: int, batch: int
) -> Callable[[Path, np.random.Generator], Task]:
    def made(data: Path, rng: np.random.Generator) -> Task:
        columns = frame(data / "mlbench" / f"{name}.rda")
        return skewed_table(columns, "Class", hidden, tests, clients, steps, batch, rng)

    return made


HELD_OUT: dict[str, Callable[[Path, np.random.Generator], Task]] = {
    "watch": _watch,
    "ratings": _ratings,
    "dna": _mlbench("DNA", (128, 64), tests=600, clients=40, steps=8, batch=16),
    "shuttle": _mlbench("Shuttle", (256, 128), tests=4000, clients=50, steps=10, batch=32),
}
