"""The common parts of every benchmark here: its options, the machine's description, its report.

A benchmark is a script with a `main`; `python benchmarks/NAME.py --help` shows its options. Those
that print figures for machines take `--json FILE`, and `--json -` prints these alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_compression import kernels


def parser(doc: str | None, *, quick: str = "", seeds: str = "") -> argparse.ArgumentParser:
    """A parser with the first line of `doc` and `--json`; with `--quick` if `quick` says what it
    leaves out, with `--seeds` (a list, see `seed_list`) if `seeds` is the default."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if quick:
        made.add_argument("--quick", action="store_true", help=quick)
    if seeds:
        made.add_argument("--seeds", default=seeds, help=f"seeds, default {seeds}")
    made.add_argument("--json", type=Path, metavar="FILE|-", help="write the figures there")
    return made


def seed_list(options: argparse.Namespace) -> list[int]:
    """The seeds to run: the first alone with `--quick`."""
    return [0] if options.quick else [int(seed) for seed in options.seeds.split(",")]


def report(text: str, figures: Mapping[str, Any] | Sequence[Any], file: Path | None) -> None:
    """Print `text` and write `figures` as JSON to `file`; `-` prints the figures alone."""
    if file == Path("-"):
        print(json.dumps(figures, indent=2))
        return
    save(figures, file)
    print(text)


def save(figures: Mapping[str, Any] | Sequence[Any], file: Path | None) -> None:
    """Write `figures` as JSON to `file`, if there is one; long runs call it after every row."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """The machine: kernels, versions, processors, the load while it ran."""
    return {
        "kernels": kernels.CHOSEN,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


SLOW_SECONDS = 0.02
"""From here on a case of `shuffled_medians` is repeated a few times only."""


def shuffled_medians(
    cases: Mapping[str, Callable[[], object]], repeats: int, seed: int = 5
) -> dict[str, float]:
    """Median seconds of thread CPU time of each case after a warm-up call. All cases are shuffled
    in every repeat, so that each finds the caches as another left them."""
    rng = np.random.default_rng(seed)
    times: dict[str, list[float]] = {}
    for name, case in cases.items():
        case()
        times[name] = [_seconds(case)]
    slow = {name for name, taken in times.items() if taken[0] > SLOW_SECONDS}
    for repeat in range(repeats):
        for name in rng.permutation(list(cases)).tolist():
            if name not in slow or repeat < max(2, repeats // 4):
                times[name].append(_seconds(cases[name]))
    return {name: float(np.median(taken)) for name, taken in times.items()}


def _seconds(case: Callable[[], object]) -> float:
    begun = time.thread_time()
    case()
    return time.thread_time() - begun
