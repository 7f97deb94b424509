"""Federated fine-tuning of Hugging Face models: the adapters of PEFT travel, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpress.lazy import exports

if TYPE_CHECKING:
    from fedpress_peft.adapters import save_adapter
    from fedpress_peft.trainer import PeftTrainer, averaging_error

__all__ = ["PeftTrainer", "averaging_error", "save_adapter"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "PeftTrainer": "fedpress_peft.trainer",
        "averaging_error": "fedpress_peft.trainer",
        "save_adapter": "fedpress_peft.adapters",
    },
    extra="peft",
)
