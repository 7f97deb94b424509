"""Runs in an MLflow tracking store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from fedpress.callbacks.interface import Callback, ClosedRound, Result, Run

_LONGEST_PARAM = 6000
_RUN_TAG = "fedpress.run"


class MLflow(Callback):
    """Writes each run to the tracking store at `uri`, into the experiment that
    MLFLOW_EXPERIMENT_NAME names, or `fedpress`. Without `uri` the store is what MLflow's own
    settings name. A resumed run is found by its tag `fedpress.run`. `clock`: Unix seconds."""

    def __init__(self, uri: str | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._uri, self._clock = uri, clock
        self._client: MlflowClient | None = None
        self._run = ""

    def begin(self, run: Run) -> None:
        client = self._client = MlflowClient(tracking_uri=self._uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedpress")
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if known is None else known.experiment_id
        tagged = client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{run.id}'")
        if tagged:
            self._run = tagged[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            return
        tags = {_RUN_TAG: run.id}
        self._run = client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        params = [
            Param(key, str(value)[:_LONGEST_PARAM]) for key, value in _flat(run.settings).items()
        ]
        for first in range(0, len(params), 100):  # a batch's limit
            client.log_batch(self._run, params=params[first : first + 100])

    def round_closed(self, closed: ClosedRound) -> None:
        if self._client is not None:
            now = int(1000 * self._clock())
            metrics = [
                Metric(name, value, now, closed.figures.round)
                for name, value in closed.scalars.items()
            ]
            self._client.log_batch(self._run, metrics=metrics)

    def end(self, result: Result) -> None:
        if self._client is not None:
            if result.model is not None:
                tags = [RunTag("fedpress.model", result.model)]
                self._client.log_batch(self._run, tags=tags)
            status = "FINISHED" if result.is_complete else "KILLED"
            self._client.set_terminated(self._run, status=status)
            self._client = None


def make(argument: str) -> MLflow:
    """From the argument of `--callback mlflow[:URI]`."""
    return MLflow(argument or None)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Settings by names with dots; lists become JSON, and what is not set is left out."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            flat[prefix + name] = json.dumps(value)
        elif value is not None:
            flat[prefix + name] = value
    return flat
