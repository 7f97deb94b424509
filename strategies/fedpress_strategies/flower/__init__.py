"""Flower strategies around others, Flower's or ours, whose clients upload compressed or masked.

Beside them the compressors that most plans are made of; fedpress_protocols.compression has all.
"""

from fedpress_protocols.errors import MissingExtra

try:
    import flwr  # noqa: F401
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "FedpressStrategy needs Flower", hint="pip install 'fedpress[flower]'"
    ) from exc

from fedpress_protocols.compression.error_feedback import ErrorFeedback
from fedpress_protocols.compression.per_tensor import PerTensor
from fedpress_protocols.compression.shared_support import SharedSupport
from fedpress_protocols.compression.topk import TopK
from fedpress_protocols.messages import DownlinkTerms
from fedpress_strategies.flower.compressed import FedpressStrategy
from fedpress_strategies.flower.masked import MaskedStrategy
from fedpress_strategies.flower.plan import NO_ANSWER, Plan, RoundReport

__all__ = [
    "NO_ANSWER",
    "DownlinkTerms",
    "ErrorFeedback",
    "FedpressStrategy",
    "MaskedStrategy",
    "PerTensor",
    "Plan",
    "RoundReport",
    "SharedSupport",
    "TopK",
]
