"""fedpress inside Flower: mods for a ClientApp, strategies for a ServerApp.

Beside them the compressors that most plans are made of; `fedpress.compressors` has all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpress.lazy import exports

if TYPE_CHECKING:
    from fedpress_flower.client import CompressionMod, MaskingMod, compression_mod, masking_mod
    from fedpress_flower.server import (
        NO_ANSWER,
        Auto,
        DownlinkTerms,
        ErrorFeedback,
        FedpressStrategy,
        MaskedStrategy,
        PerTensor,
        Plan,
        PrivacyTerms,
        RoundReport,
        SharedSupport,
        TopK,
    )

__all__ = [
    "NO_ANSWER",
    "Auto",
    "CompressionMod",
    "DownlinkTerms",
    "ErrorFeedback",
    "FedpressStrategy",
    "MaskedStrategy",
    "MaskingMod",
    "PerTensor",
    "Plan",
    "PrivacyTerms",
    "RoundReport",
    "SharedSupport",
    "TopK",
    "compression_mod",
    "masking_mod",
]

# A ClientApp loads no strategy, a ServerApp no mod.
__getattr__, __dir__ = exports(
    __name__,
    {
        "Auto": "fedpress_flower.server",
        "CompressionMod": "fedpress_flower.client",
        "DownlinkTerms": "fedpress_flower.server",
        "ErrorFeedback": "fedpress_flower.server",
        "FedpressStrategy": "fedpress_flower.server",
        "MaskedStrategy": "fedpress_flower.server",
        "MaskingMod": "fedpress_flower.client",
        "NO_ANSWER": "fedpress_flower.server",
        "PerTensor": "fedpress_flower.server",
        "Plan": "fedpress_flower.server",
        "PrivacyTerms": "fedpress_flower.server",
        "RoundReport": "fedpress_flower.server",
        "SharedSupport": "fedpress_flower.server",
        "TopK": "fedpress_flower.server",
        "compression_mod": "fedpress_flower.client",
        "masking_mod": "fedpress_flower.client",
    },
    extra="flower",
)
