"""Runs in Weights & Biases, online or offline."""

from __future__ import annotations

import wandb

from fedpress.callbacks.interface import Callback, ClosedRound, Result, Run


class WandB(Callback):
    """Sends each run to `project`. W&B's own settings say the rest: with WANDB_MODE=offline files
    are written below WANDB_DIR, which `wandb sync` sends later. A resumed run has the same id."""

    def __init__(self, project: str | None = None) -> None:
        self._project = project
        self._run: wandb.Run | None = None

    def begin(self, run: Run) -> None:
        self._run = wandb.init(
            project=self._project or "fedpress",
            name=run.name,
            id=run.id,
            resume="allow",
            config=dict(run.settings),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def round_closed(self, closed: ClosedRound) -> None:
        if self._run is not None:
            self._run.log(closed.scalars, step=closed.figures.round)

    def end(self, result: Result) -> None:
        if self._run is not None:
            if result.model is not None:
                self._run.summary["model"] = result.model
            self._run.finish(exit_code=0 if result.is_complete else 1)
            self._run = None


def make(argument: str) -> WandB:
    """From the argument of `--callback wandb[:PROJECT]`."""
    return WandB(argument or None)
