"""Event files for TensorBoard, by tensorboardX."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tensorboardX import SummaryWriter

from fedpress.callbacks.interface import Callback, ClosedRound, Result, Run
from fedpress_protocols.errors import ConfigurationError

# It warns of every NaN, and a run that diverges has many: the curves show them.
logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)


class TensorBoard(Callback):
    """Writes each run to a folder of its own below `folder`: its name and the start of its id.
    `tensorboard --logdir FOLDER` shows them all. After each round the files are flushed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def begin(self, run: Run) -> None:
        place = self._folder / f"{run.name}-{run.id[:8]}"
        # A suffix, as files are named by the second and a second writer would empty the first's.
        self._writer = SummaryWriter(
            str(place),
            purge_step=run.last_round + 1 if run.last_round else None,
            filename_suffix=f".after-{run.last_round}",
        )
        if not run.last_round:
            settings = json.dumps(dict(run.settings), indent=2)
            self._writer.add_text("settings", f"```\n{settings}\n```", 0)

    def round_closed(self, closed: ClosedRound) -> None:
        if self._writer is not None:
            for name, value in closed.scalars.items():
                self._writer.add_scalar(name, value, closed.figures.round)
            self._writer.flush()

    def end(self, result: Result) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def make(argument: str) -> TensorBoard:
    """From the argument of `--callback tensorboard:DIR`."""
    if not argument:
        raise ConfigurationError(
            "--callback tensorboard names no folder", hint="such as tensorboard:runs"
        )
    return TensorBoard(Path(argument))
