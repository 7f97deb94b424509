"""Compressed exchange of gradients for PyTorch's data parallelism."""

from fedpress_ddp.hook import Exchange, HookState, LocalSGD, Sent, Sites, comm_hook

__all__ = [
    "Exchange",
    "HookState",
    "LocalSGD",
    "Sent",
    "Sites",
    "comm_hook",
]
