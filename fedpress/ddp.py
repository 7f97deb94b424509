"""Compressed exchange of gradients for PyTorch's data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpress.lazy import exports

if TYPE_CHECKING:
    from fedpress_ddp.hook import (
        BiasWarning,
        DivergenceWarning,
        Exchange,
        HookState,
        LocalSGD,
        ProcessLost,
        Sent,
        Sites,
        StepMetrics,
        comm_hook,
    )
    from fedpress_ddp.optimizers import OneBitAdam, OneBitLamb
    from fedpress_ddp.sharded import CompressedReduceScatter
    from fedpress_protocols.schedule import sparsity_warm_up

__all__ = [
    "BiasWarning",
    "CompressedReduceScatter",
    "DivergenceWarning",
    "Exchange",
    "HookState",
    "LocalSGD",
    "OneBitAdam",
    "OneBitLamb",
    "ProcessLost",
    "Sent",
    "Sites",
    "StepMetrics",
    "comm_hook",
    "sparsity_warm_up",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "BiasWarning": "fedpress_ddp.hook",
        "CompressedReduceScatter": "fedpress_ddp.sharded",
        "DivergenceWarning": "fedpress_ddp.hook",
        "Exchange": "fedpress_ddp.hook",
        "HookState": "fedpress_ddp.hook",
        "LocalSGD": "fedpress_ddp.hook",
        "OneBitAdam": "fedpress_ddp.optimizers",
        "OneBitLamb": "fedpress_ddp.optimizers",
        "ProcessLost": "fedpress_ddp.hook",
        "Sent": "fedpress_ddp.hook",
        "Sites": "fedpress_ddp.hook",
        "StepMetrics": "fedpress_ddp.hook",
        "comm_hook": "fedpress_ddp.hook",
        "sparsity_warm_up": "fedpress_protocols.schedule",
    },
    extra="torch",
)
