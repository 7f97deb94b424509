"""Roles of a play: each device has what one role says, and learns to foresee the next letter.

    python roles.py model.safetensors        the model that the task begins with
    DEVICE=0 fedpress client join URL --app roles:trainer --state-dir device-0
    fedpress simulate --task task.json --app roles:device --clients 6

`PLAYS` names a text of your own; without it there is `scene.txt`, the first scene of the second
act of A Midsummer Night's Dream, with six roles. See README.md for the whole run.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedpress import TorchTrainer
from fedpress.errors import ConfigurationError

SCENE = Path(__file__).with_name("scene.txt")
LETTERS = "\n !&'(),-.:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""All that a model tells apart; every other character is one more, the last."""
LENGTH = 32
"""Letters of an example."""
HELD_OUT = 5
"""Every fifth example of a role is kept for the evaluation of models."""


def trainer() -> TorchTrainer:
    """For `fedpress client join --app roles:trainer`: device DEVICE, counted from 0."""
    number = os.environ.get("DEVICE", "")
    if not number.isdecimal():
        raise ConfigurationError(f"DEVICE is {number!r}; set it to a whole number")
    return device(int(number), 0)


def device(index: int, devices: int) -> TorchTrainer:
    """For `fedpress simulate --app roles:device`. The role decides what a device has, so it is
    the same among any number of `devices`."""
    own = roles(Path(os.environ.get("PLAYS") or SCENE))
    if index >= len(own):
        raise ConfigurationError(
            f"device {index} has no role: {len(own)} in this text have enough to say",
            hint="devices count from 0; take fewer, or a longer text by PLAYS",
        )
    examples = pieces(list(own.values())[index])
    held_out = torch.arange(len(examples)) % HELD_OUT == HELD_OUT - 1
    parts = [
        TensorDataset(rows[:, :-1], rows[:, 1:])
        for rows in (examples[~held_out], examples[held_out])
    ]
    return TorchTrainer(
        network(),
        loss,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        parts[0],
        evaluation_data=parts[1],
        metrics=metrics,
    )


class NextLetter(nn.Module):
    """Scores [batch, length, letters] of the letter after each of [batch, length]."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS) + 1, 16)
        self.recurrent = nn.GRU(16, width, batch_first=True)
        self.scores = nn.Linear(width, len(LETTERS) + 1)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(self.recurrent(self.embedding(letters))[0])
        return scores


def network() -> NextLetter:
    """Equal in every process."""
    torch.manual_seed(0)
    return NextLetter()


def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def metrics(scores: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    return {"accuracy": (scores.argmax(-1) == targets).float().mean().item()}


def pieces(text: str) -> torch.Tensor:
    """A text's examples [n, LENGTH + 1]: letters, and the one that follows the last."""
    codes = torch.tensor([LETTERS.find(letter) % (len(LETTERS) + 1) for letter in text])
    return codes[: (len(codes) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)


@cache
def roles(file: Path) -> dict[str, str]:
    """What each role says, those with the most text first; those with too little are left out.

    A speech is a line `NAME:` and the lines that follow, until an empty one.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise ConfigurationError(
            f"cannot read {file}: {exc}", hint="PLAYS must name a text file"
        ) from exc
    speeches = re.findall(r"^([^\n:]+):\n((?:[^\n]+\n?)+)", text, re.MULTILINE)
    sizes = Counter[str]()
    own: dict[str, list[str]] = {}
    for name, speech in speeches:
        own.setdefault(name, []).append(speech)
        sizes[name] += len(speech)
    least = 2 * HELD_OUT * LENGTH
    largest = sorted((name for name in own if sizes[name] > least), key=lambda name: -sizes[name])
    if not largest:
        raise ConfigurationError(
            f"{file} has no role with more than {least} letters",
            hint="a speech is a line NAME: and the lines that follow, until an empty one",
        )
    return {name: "".join(own[name]) for name in largest}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python roles.py MODEL.safetensors")
    Path(sys.argv[1]).write_bytes(device(0, 1).initial_model().to_bytes())
