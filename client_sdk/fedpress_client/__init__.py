"""The device SDK: train on data that stays here, send little, lose nothing."""

from typing import TYPE_CHECKING, Any

from fedpress_client.apps import load_trainer
from fedpress_client.client import Client, Event, Summary
from fedpress_client.failures import FailurePolicy
from fedpress_client.ledger import Discard, Ledger, ResidualRules
from fedpress_client.masking import MaskingRules
from fedpress_client.trainer import Evaluation, Trained, Trainer, Work
from fedpress_client.transport import HttpTransport, Retries, Traffic, Transport
from fedpress_protocols.model import Model

if TYPE_CHECKING:
    from fedpress_client.torch_trainer import TorchTrainer

__all__ = [
    "Client",
    "Discard",
    "Evaluation",
    "Event",
    "FailurePolicy",
    "HttpTransport",
    "Ledger",
    "MaskingRules",
    "Model",
    "ResidualRules",
    "Retries",
    "Summary",
    "TorchTrainer",
    "Traffic",
    "Trained",
    "Trainer",
    "Transport",
    "Work",
    "load_trainer",
]


def __getattr__(name: str) -> Any:
    """TorchTrainer on first use: torch is large, and an extra."""
    if name != "TorchTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedpress_client.torch_trainer import TorchTrainer

    return TorchTrainer
