"""The public names of fedpress: `import fedpress` costs nothing until a name is used.

Here is what a device needs. Everything else is in a namespace: `fedpress.compressors`,
`fedpress.strategies`, `fedpress.server`, `fedpress.simulation`, `fedpress.flower`, `fedpress.ddp`.
The packages behind them (`fedpress_client` and others) may move names between releases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpress.lazy import exports

if TYPE_CHECKING:
    from fedpress import compressors, ddp, flower, server, simulation, strategies
    from fedpress.operator import Operator
    from fedpress_client import (
        Client,
        Discard,
        Evaluation,
        Event,
        FailurePolicy,
        MaskingRules,
        ResidualRules,
        Retries,
        Summary,
        Trained,
        Trainer,
        TrainingRequest,
    )
    from fedpress_client.torch_trainer import TorchTrainer
    from fedpress_compression.compressors.error_feedback import ErrorFeedback
    from fedpress_compression.compressors.none import Uncompressed
    from fedpress_compression.compressors.per_tensor import PerTensor
    from fedpress_compression.compressors.quantize import Quantize
    from fedpress_compression.compressors.topk import TopK
    from fedpress_compression.tensors import ModelSpec
    from fedpress_protocols import __version__
    from fedpress_protocols.errors import FedpressError
    from fedpress_protocols.model import Model
    from fedpress_protocols.plan import RoundPlan

__all__ = [
    "Client",
    "Discard",
    "ErrorFeedback",
    "Evaluation",
    "Event",
    "FailurePolicy",
    "FedpressError",
    "MaskingRules",
    "Model",
    "ModelSpec",
    "Operator",
    "PerTensor",
    "Quantize",
    "ResidualRules",
    "Retries",
    "RoundPlan",
    "Summary",
    "TopK",
    "TorchTrainer",
    "Trained",
    "Trainer",
    "TrainingRequest",
    "Uncompressed",
    "__version__",
    "compressors",
    "ddp",
    "flower",
    "server",
    "simulation",
    "strategies",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "__version__": "fedpress_protocols",
        "Client": "fedpress_client",
        "Discard": "fedpress_client",
        "ErrorFeedback": "fedpress_compression.compressors.error_feedback",
        "Evaluation": "fedpress_client",
        "Event": "fedpress_client",
        "FailurePolicy": "fedpress_client",
        "FedpressError": "fedpress_protocols.errors",
        "MaskingRules": "fedpress_client",
        "Model": "fedpress_protocols.model",
        "ModelSpec": "fedpress_compression.tensors",
        "Operator": "fedpress.operator",
        "PerTensor": "fedpress_compression.compressors.per_tensor",
        "Quantize": "fedpress_compression.compressors.quantize",
        "ResidualRules": "fedpress_client",
        "Retries": "fedpress_client",
        "RoundPlan": "fedpress_protocols.plan",
        "Summary": "fedpress_client",
        "TopK": "fedpress_compression.compressors.topk",
        "TorchTrainer": "fedpress_client.torch_trainer",
        "Trained": "fedpress_client",
        "Trainer": "fedpress_client",
        "Uncompressed": "fedpress_compression.compressors.none",
        "TrainingRequest": "fedpress_client",
        "compressors": "fedpress.compressors",
        "ddp": "fedpress.ddp",
        "flower": "fedpress.flower",
        "server": "fedpress.server",
        "simulation": "fedpress.simulation",
        "strategies": "fedpress.strategies",
    },
)
