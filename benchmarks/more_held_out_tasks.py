"""More tasks of accuracy_vs_bytes.py that were first run after the default was frozen.

Data, networks, clients, cohorts, local steps and rounds were chosen by float32 recipes alone, and
committed before `auto` or any compressed recipe ran on them. `data/ggplot2`, `data/janeaustenr`
and `data/dslabs` have the files Rdata.rdb and Rdata.rdx of R's packages of these names (Debian:
r-cran-NAME; in /usr/lib/R/site-library/NAME/data), `data/kernlab` the file spam.rda of kernlab. The
clients of diamonds are the groups of equal colour and clarity, those of austen are chapters, and
those of tweets are months.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from accuracy_tasks import Rows, Task, perceptron, skewed_table, tensors
from r_data import frame, installed_frame, installed_strings
from torch import nn

_MEASURES = ("carat", "depth", "table", "price", "x", "y", "z")
_SEQUENCE, _RARE, _HIDDEN = 24, 100, 96
_NOVELS = (
    "emma",
    "mansfieldpark",
    "northangerabbey",
    "persuasion",
    "prideprejudice",
    "sensesensibility",
)
_WORDS, _LENGTH, _FEWEST = 2500, 24, 40
_APPS = ("Twitter Web Client", "Twitter for Android", "Twitter for iPhone")


def _diamonds(data: Path, rng: np.random.Generator) -> Task:
    """Which of five cuts a diamond has, of its price and its measures; a client for each of the 56
    pairs of colour and clarity (42 to 2,470 diamonds, 4,000 in all of which are for tests)."""
    columns = installed_frame(data / "ggplot2", "diamonds")
    groups = (8 * columns["color"] + columns["clarity"]).astype(np.int64)
    inputs = np.stack([columns[name] for name in _MEASURES], 1)
    scaled = ((inputs - inputs.mean(0)) / inputs.std(0)).clip(-5, 5).astype(np.float32)
    cuts, order = columns["cut"].astype(np.int64), rng.permutation(groups.size)
    rest, test = order[4000:], order[:4000]
    parts = tensors(scaled[rest], cuts[rest], scaled[test], cuts[test])
    clients = [np.flatnonzero(groups[rest] == group) for group in np.unique(groups)]
    return Task(*parts, clients, perceptron(7, 256, 128, 5), 10, 8, 32, 0.1, 60)


def _spam(data: Path, rng: np.random.Generator) -> Task:
    """Whether a message is spam, of how frequent words and signs are in it (UCI's Spambase)."""
    columns = frame(data / "kernlab" / "spam.rda")
    return skewed_table(columns, "type", (256, 128), 1000, 40, 8, 16, rng)


class _Sequences(nn.Module):
    """Scores of each next letter, [sequences, letters, places], by a recurrent network."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 32)
        self.recurrent = nn.GRU(32, _HIDDEN, batch_first=True)
        self.scores = nn.Linear(_HIDDEN, letters)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embedding(letters))
        scores: torch.Tensor = self.scores(states).transpose(1, 2)
        return scores


def _austen(data: Path, rng: np.random.Generator) -> Task:
    """The next letter in Jane Austen's six novels; a client for each chapter, the last tenth of
    which is for tests (300 sequences of 24)."""
    chapters: list[str] = []
    for novel in _NOVELS:
        lines = installed_strings(data / "janeaustenr", novel)
        starts = [at for at, line in enumerate(lines) if re.match("(?i)chapter [ivxlc0-9]+", line)]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            chapters.append("\n".join(lines[start + 1 : end]).strip())
    counted = Counter("".join(chapters))
    frequent = sorted(letter for letter, count in counted.items() if count >= _RARE)
    codes = {letter: code for code, letter in enumerate(frequent, 1)}
    train, tests, clients, count = [], [], list[Rows](), 0
    for chapter in chapters:
        coded = np.array([codes.get(letter, 0) for letter in chapter])
        pieces = np.lib.stride_tricks.sliding_window_view(coded, _SEQUENCE + 1)[::_SEQUENCE]
        cut = len(pieces) - len(pieces) // 10
        train.append(pieces[:cut])
        tests.append(pieces[cut:])
        clients.append(np.arange(count, count + cut))
        count += cut
    own, others = np.concatenate(train), np.concatenate(tests)
    others = others[rng.permutation(len(others))[:300]]
    sets = (own[:, :-1], own[:, 1:], others[:, :-1], others[:, 1:])
    parts = tensors(*map(np.ascontiguousarray, sets))
    return Task(*parts, clients, _Sequences(len(frequent) + 1), 8, 6, 16, 0.5, 60)


class _Phrases(nn.Module):
    """Scores of a text's classes: convolutions over words, and the maximum of each over the text
    (Kim 2014, arXiv:1408.5882)."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 32)
        self.phrases, self.scores = nn.Conv1d(32, 64, 3, 1, 1), nn.Linear(64, classes)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        phrases = nn.functional.relu(self.phrases(self.embedding(words).transpose(1, 2)))
        scores: torch.Tensor = self.scores(phrases.amax(2))
        return scores


def _tweets(data: Path, rng: np.random.Generator) -> Task:
    """Which of three apps, or another, a politician's tweet was sent from, of its words; a client
    for each month, the last fifth of which is for tests (2,000 tweets)."""
    folder = data / "dslabs"
    times = installed_frame(folder, "trump_tweets")["created_at"]
    order = np.argsort(times, kind="stable")
    months = times[order].astype("datetime64[s]").astype("datetime64[M]").astype(np.int64)
    texts = installed_strings(folder, "trump_tweets", "text")
    sources = installed_strings(folder, "trump_tweets", "source")
    apps = {app: code for code, app in enumerate(_APPS)}
    labels = np.array([apps.get(sources[row], len(_APPS)) for row in order])
    known, counts = np.unique(months, return_counts=True)
    is_train, is_test = np.zeros(labels.size, bool), np.zeros(labels.size, bool)
    for month in known[counts >= _FEWEST]:
        own = np.flatnonzero(months == month)
        is_test[own[own.size - own.size // 5 :]] = True
        is_train[own[: own.size - own.size // 5]] = True
    split = [
        re.findall(r"[@#]?\w+|[^\w\s]", re.sub(r"https?://\S+", "http", texts[row].lower()))
        for row in order
    ]
    counted = Counter(word for at in np.flatnonzero(is_train) for word in split[at])
    codes = {word: code for code, (word, _) in enumerate(counted.most_common(_WORDS - 2), 2)}
    words = np.zeros((labels.size, _LENGTH), np.int64)
    for row, each in zip(words, split, strict=True):
        row[: len(each)] = [codes.get(word, 1) for word in each[:_LENGTH]]
    test = rng.permutation(np.flatnonzero(is_test))[:2000]
    parts = tensors(words[is_train], labels[is_train], words[test], labels[test])
    clients = [np.flatnonzero(months[is_train] == month) for month in known[counts >= _FEWEST]]
    return Task(*parts, clients, _Phrases(_WORDS, len(_APPS) + 1), 10, 8, 16, 0.1, 60)


MORE_HELD_OUT: dict[str, Callable[[Path, np.random.Generator], Task]] = {
    "diamonds": _diamonds,
    "spam": _spam,
    "austen": _austen,
    "tweets": _tweets,
}
