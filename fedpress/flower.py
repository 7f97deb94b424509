"""fedpress inside Flower: mods for a ClientApp, strategies for a ServerApp."""

from fedpress_flower.client import CompressionMod, MaskingMod, compression_mod, masking_mod
from fedpress_flower.server import FedpressStrategy, MaskedStrategy, Plan, RoundReport

__all__ = [
    "CompressionMod",
    "FedpressStrategy",
    "MaskedStrategy",
    "MaskingMod",
    "Plan",
    "RoundReport",
    "compression_mod",
    "masking_mod",
]
