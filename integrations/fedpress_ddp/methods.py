"""Methods that `fedpress plan --ddp` compares and `benchmarks/data_parallel_links.py` measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHODS: Mapping[str, Mapping[str, Any]] = {
    "top-k 1 %, feedback": {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.01}},
    "top-k .1 %, feedback": {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.001}},
    "sign, feedback": {"id": "error_feedback", "inner": {"id": "sign"}},
    "PowerSGD, rank 2, feedback": {
        "id": "error_feedback",
        "inner": {"id": "powersgd", "rank": 2},
    },
}
"""Configurations for `HookState(from_config(...))`, by the names of tables."""

HALVES: Mapping[str, str] = {"torch fp16": "fp16_compress_hook"}
"""torch's own hooks for 16 bits, by their names in `default_hooks`."""

LOSSES: Mapping[str, float] = {
    "torch fp16": 0.5,
    "top-k 1 %, feedback": 0.2,
    "top-k .1 %, feedback": 0.4,
    "sign, feedback": 0.9,
    "PowerSGD, rank 2, feedback": 0.0,
}
"""Points of accuracy below float32 at its best learning rate; half a point is within chance."""

MEASURED_ON = (
    "on scikit-learn's digits, a perceptron of 50,826 parameters, two processes, three seeds "
    "(python benchmarks/data_parallel_digits.py)"
)
