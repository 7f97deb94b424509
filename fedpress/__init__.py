"""The face of fedpress: `import fedpress` costs nothing until a name is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedpress_protocols import __version__

if TYPE_CHECKING:
    from fedpress.operator import Operator
    from fedpress_client import Client, Trainer
    from fedpress_client.torch_trainer import TorchTrainer
    from fedpress_compression.compressors.error_feedback import ErrorFeedback
    from fedpress_compression.compressors.none import Uncompressed
    from fedpress_compression.compressors.per_tensor import PerTensor
    from fedpress_compression.compressors.quantize import Quantize
    from fedpress_compression.compressors.topk import TopK
    from fedpress_compression.tensors import ModelSpec
    from fedpress_protocols.errors import FedpressError
    from fedpress_protocols.model import Model
    from fedpress_protocols.plan import RoundPlan

_HOMES = {
    "Client": "fedpress_client",
    "ErrorFeedback": "fedpress_compression.compressors.error_feedback",
    "FedpressError": "fedpress_protocols.errors",
    "Model": "fedpress_protocols.model",
    "ModelSpec": "fedpress_protocols.model",
    "Operator": "fedpress.operator",
    "PerTensor": "fedpress_compression.compressors.per_tensor",
    "Quantize": "fedpress_compression.compressors.quantize",
    "RoundPlan": "fedpress_protocols.plan",
    "TopK": "fedpress_compression.compressors.topk",
    "TorchTrainer": "fedpress_client.torch_trainer",
    "Trainer": "fedpress_client",
    "Uncompressed": "fedpress_compression.compressors.none",
}

__all__ = [
    "Client",
    "ErrorFeedback",
    "FedpressError",
    "Model",
    "ModelSpec",
    "Operator",
    "PerTensor",
    "Quantize",
    "RoundPlan",
    "TopK",
    "TorchTrainer",
    "Trainer",
    "Uncompressed",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedpress' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
