"""One sign for each value, one scale for each tensor: a compressor as a plug-in."""

from .tensor_sign import TensorSign

__all__ = ["TensorSign"]
