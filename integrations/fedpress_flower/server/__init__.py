"""Flower strategies around others, Flower's or ours, whose clients upload compressed or masked.

Beside them the compressors that most plans are made of; `fedpress.compressors` has all.
"""

from fedpress_protocols.errors import MissingExtra

try:
    import flwr  # noqa: F401
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "FedpressStrategy needs Flower", hint="pip install 'fedpress[flower]'"
    ) from exc

from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_compression.compressors.topk import TopK
from fedpress_flower.server.compressed import FedpressStrategy
from fedpress_flower.server.masked import MaskedStrategy
from fedpress_flower.server.plan import NO_ANSWER, Plan, RoundReport
from fedpress_protocols.messages import DownlinkTerms
from fedpress_protocols.plan import PrivacyTerms
from fedpress_protocols.policies import Auto

__all__ = [
    "NO_ANSWER",
    "Auto",
    "DownlinkTerms",
    "ErrorFeedback",
    "FedpressStrategy",
    "MaskedStrategy",
    "PerTensor",
    "Plan",
    "PrivacyTerms",
    "RoundReport",
    "SharedSupport",
    "TopK",
]
