"""The public names of fedpress: `import fedpress` costs nothing until a name is used.

A device needs the names here. Everything else is in a namespace: `fedpress.compressors`,
`fedpress.conditions`, `fedpress.errors`, `fedpress.strategies`, `fedpress.server`,
`fedpress.simulation`, `fedpress.flower`, `fedpress.ddp`, `fedpress.experimental`.
The packages behind them (`fedpress_client` and others) may move names between releases.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fedpress.lazy import exports

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "fedpress is not tested without Python's global interpreter lock; start this build of "
        "Python with PYTHON_GIL=1, or use one that has the lock"
    )

if TYPE_CHECKING:
    from fedpress import (
        compressors,
        conditions,
        ddp,
        errors,
        flower,
        server,
        simulation,
        strategies,
    )
    from fedpress.operator import Operator
    from fedpress_client import (
        BackgroundRun,
        Bandwidth,
        Client,
        Discard,
        Evaluation,
        FailurePolicy,
        MaskingRules,
        PrivacyRules,
        Progress,
        ResidualRules,
        Retries,
        Summary,
        Trained,
        Trainer,
        TrainingRequest,
    )
    from fedpress_client.events import (
        ApprovalPending,
        AssignmentDeclined,
        ClientWaiting,
        DeviceApproved,
        DeviceEnrolled,
        EvaluationFailed,
        Event,
        KeyRotated,
        ModelEvaluated,
        ModelFineTuned,
        ParticipationPostponed,
        PrivacySpent,
        ReceiptReceived,
        RoundAssigned,
        ServerRestored,
        SessionAdvanced,
        TaskEnded,
        TaskJoined,
        UpdateTrained,
        UpdateUploaded,
        UploadRefused,
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
    from fedpress_protocols.plan import RoundPlan, TrainingTerms

__all__ = [
    "ApprovalPending",
    "AssignmentDeclined",
    "BackgroundRun",
    "Bandwidth",
    "Client",
    "ClientWaiting",
    "DeviceApproved",
    "DeviceEnrolled",
    "Discard",
    "ErrorFeedback",
    "Evaluation",
    "EvaluationFailed",
    "Event",
    "FailurePolicy",
    "FedpressError",
    "KeyRotated",
    "MaskingRules",
    "Model",
    "ModelEvaluated",
    "ModelFineTuned",
    "ModelSpec",
    "Operator",
    "ParticipationPostponed",
    "PerTensor",
    "PrivacyRules",
    "PrivacySpent",
    "Progress",
    "Quantize",
    "ReceiptReceived",
    "ResidualRules",
    "Retries",
    "RoundAssigned",
    "RoundPlan",
    "ServerRestored",
    "SessionAdvanced",
    "Summary",
    "TaskEnded",
    "TaskJoined",
    "TopK",
    "TorchTrainer",
    "Trained",
    "Trainer",
    "TrainingRequest",
    "TrainingTerms",
    "Uncompressed",
    "UpdateTrained",
    "UpdateUploaded",
    "UploadRefused",
    "__version__",
    "compressors",
    "conditions",
    "ddp",
    "errors",
    "flower",
    "server",
    "simulation",
    "strategies",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "ApprovalPending": "fedpress_client.events",
        "AssignmentDeclined": "fedpress_client.events",
        "BackgroundRun": "fedpress_client",
        "Bandwidth": "fedpress_client",
        "Client": "fedpress_client",
        "ClientWaiting": "fedpress_client.events",
        "DeviceApproved": "fedpress_client.events",
        "DeviceEnrolled": "fedpress_client.events",
        "Discard": "fedpress_client",
        "ErrorFeedback": "fedpress_compression.compressors.error_feedback",
        "Evaluation": "fedpress_client",
        "EvaluationFailed": "fedpress_client.events",
        "Event": "fedpress_client.events",
        "FailurePolicy": "fedpress_client",
        "FedpressError": "fedpress_protocols.errors",
        "KeyRotated": "fedpress_client.events",
        "MaskingRules": "fedpress_client",
        "Model": "fedpress_protocols.model",
        "ModelEvaluated": "fedpress_client.events",
        "ModelFineTuned": "fedpress_client.events",
        "ModelSpec": "fedpress_compression.tensors",
        "Operator": "fedpress.operator",
        "ParticipationPostponed": "fedpress_client.events",
        "PerTensor": "fedpress_compression.compressors.per_tensor",
        "Progress": "fedpress_client",
        "Quantize": "fedpress_compression.compressors.quantize",
        "PrivacyRules": "fedpress_client",
        "PrivacySpent": "fedpress_client.events",
        "ReceiptReceived": "fedpress_client.events",
        "ResidualRules": "fedpress_client",
        "Retries": "fedpress_client",
        "RoundAssigned": "fedpress_client.events",
        "RoundPlan": "fedpress_protocols.plan",
        "ServerRestored": "fedpress_client.events",
        "SessionAdvanced": "fedpress_client.events",
        "Summary": "fedpress_client",
        "TaskEnded": "fedpress_client.events",
        "TaskJoined": "fedpress_client.events",
        "TopK": "fedpress_compression.compressors.topk",
        "TorchTrainer": "fedpress_client.torch_trainer",
        "Trained": "fedpress_client",
        "Trainer": "fedpress_client",
        "TrainingRequest": "fedpress_client",
        "TrainingTerms": "fedpress_protocols.plan",
        "Uncompressed": "fedpress_compression.compressors.none",
        "UpdateTrained": "fedpress_client.events",
        "UpdateUploaded": "fedpress_client.events",
        "UploadRefused": "fedpress_client.events",
        "__version__": "fedpress_protocols",
        "compressors": "fedpress.compressors",
        "conditions": "fedpress.conditions",
        "ddp": "fedpress.ddp",
        "errors": "fedpress.errors",
        "flower": "fedpress.flower",
        "server": "fedpress.server",
        "simulation": "fedpress.simulation",
        "strategies": "fedpress.strategies",
    },
    renamed={"Work": "TrainingRequest"},
)
