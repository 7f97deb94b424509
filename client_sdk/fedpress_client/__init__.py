"""The device SDK: train on data that stays here, send little, lose nothing."""

import warnings
from typing import TYPE_CHECKING, Any

from fedpress_client.apps import load_trainer
from fedpress_client.background import BackgroundRun
from fedpress_client.bandwidth import Bandwidth
from fedpress_client.client import Client, Summary
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
from fedpress_client.failures import FailurePolicy
from fedpress_client.ledger import Ledger
from fedpress_client.ledger_records import Discard, ResidualRules
from fedpress_client.masking_rules import MaskingRules
from fedpress_client.privacy_budget import PrivacyRules
from fedpress_client.progress import Progress
from fedpress_client.trainer import Evaluation, Trained, Trainer, TrainingRequest
from fedpress_client.transport import HttpTransport, Retries, Traffic, Transport
from fedpress_protocols.model import Model

if TYPE_CHECKING:
    from fedpress_client.torch_trainer import TorchTrainer

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
    "Evaluation",
    "EvaluationFailed",
    "Event",
    "FailurePolicy",
    "HttpTransport",
    "KeyRotated",
    "Ledger",
    "MaskingRules",
    "Model",
    "ModelEvaluated",
    "ModelFineTuned",
    "ParticipationPostponed",
    "PrivacyRules",
    "PrivacySpent",
    "Progress",
    "ReceiptReceived",
    "ResidualRules",
    "Retries",
    "RoundAssigned",
    "ServerRestored",
    "SessionAdvanced",
    "Summary",
    "TaskEnded",
    "TaskJoined",
    "TorchTrainer",
    "Traffic",
    "Trained",
    "Trainer",
    "TrainingRequest",
    "Transport",
    "UpdateTrained",
    "UpdateUploaded",
    "UploadRefused",
    "load_trainer",
]


def __getattr__(name: str) -> Any:
    """TorchTrainer on first use: torch is large, and an extra. And the former name `Work`."""
    if name == "TorchTrainer":
        from fedpress_client.torch_trainer import TorchTrainer

        return TorchTrainer
    if name == "Work":
        warnings.warn("Work is now called TrainingRequest", DeprecationWarning, stacklevel=2)
        return TrainingRequest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
