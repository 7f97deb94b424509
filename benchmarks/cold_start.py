"""The time of a fresh process until its first update is coded, kernels taken from a warm cache."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median
from typing import Any

_FIRST_UPDATE = """
import numpy as np, fedpress_client
from fedpress_compression import coding
from fedpress_compression.compressor import Public
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_compression.randomness import PublicRandomness
import time
update = np.random.default_rng(0).normal(size=1_000_000).astype("f4")
public = Public(ModelSpec((TensorSpec("w", (update.size,)),)), PublicRandomness(bytes(32)))
method = TopK(magnitude_bits=4)
coding.encode(method.compress(update, None, public, None)[0], method.layout(public.spec))
print(time.process_time())
"""
_HIDDEN = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("scipy", "rich", "pygments"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
"""
"""numba imports scipy and httpx imports rich wherever they are; `fedpress[fast]` brings neither."""


def measure(runs: int) -> dict[str, Any]:
    """CPU seconds of fresh processes that import the SDK and code an update of 1M values: the
    median and the most of `runs` that find what `fedpress[fast]` installs, and the median of some
    that find all that is installed here."""
    _seconds(_FIRST_UPDATE)  # fills the cache
    device = [_seconds(_HIDDEN + _FIRST_UPDATE) for _ in range(runs)]
    here = [_seconds(_FIRST_UPDATE) for _ in range(max(1, runs // 3))]
    return {
        "cold_start_seconds": median(device),
        "cold_start_worst_seconds": max(device),
        "cold_start_here_seconds": median(here),
    }


def _seconds(code: str) -> float:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    return float(done.stdout)
