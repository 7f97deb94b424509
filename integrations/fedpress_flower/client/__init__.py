"""fedpress's mods for any Flower ClientApp: uploads compressed, or compressed and masked."""

from fedpress_protocols.errors import MissingExtra

try:
    import flwr  # noqa: F401
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "fedpress's mods need Flower", hint="pip install 'fedpress[flower]'"
    ) from exc

from fedpress_flower.client.account import DEVICE_ID, SEED, STATE_DIR
from fedpress_flower.client.budget import MAX_EPSILON
from fedpress_flower.client.compression import CompressionMod, compression_mod
from fedpress_flower.client.masking import MaskingMod, masking_mod

__all__ = [
    "DEVICE_ID",
    "MAX_EPSILON",
    "SEED",
    "STATE_DIR",
    "CompressionMod",
    "MaskingMod",
    "compression_mod",
    "masking_mod",
]
