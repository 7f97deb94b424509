"""Every compressor, and what it takes to write one."""

from fedpress_compression.coding import decode, encode
from fedpress_compression.coding.fields import Alphabet, Integers, Layout, Positions, Reals, Symbols
from fedpress_compression.compressor import (
    Compressor,
    Properties,
    Public,
    Stateful,
    Stateless,
    Wrapper,
    check_finite,
    compressor,
    compressors,
    from_config,
    to_config,
)
from fedpress_compression.compressors.bernoulli import Bernoulli
from fedpress_compression.compressors.cafe import Cafe
from fedpress_compression.compressors.clip import Clip
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_compression.compressors.delta import Delta
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.ecsq import Ecsq
from fedpress_compression.compressors.eden import Eden
from fedpress_compression.compressors.ef21 import EF21
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.half import Half
from fedpress_compression.compressors.lowrank import LowRank
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.compressors.powersgd_onesided import OneSidedPowerSGD
from fedpress_compression.compressors.qsgd import Qsgd
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.randomk import RandomK
from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_compression.compressors.sign import Sign
from fedpress_compression.compressors.simhash import SimHash
from fedpress_compression.compressors.stc import SparseTernary
from fedpress_compression.compressors.structured import Structured
from fedpress_compression.compressors.successive_refinement import SuccessiveRefinement
from fedpress_compression.compressors.terngrad import TernGrad
from fedpress_compression.compressors.threshold import Threshold
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_compression.update import Update

__all__ = [
    "EF21",
    "Alphabet",
    "Bernoulli",
    "Cafe",
    "Clip",
    "Coded",
    "Compressor",
    "CountSketch",
    "Delta",
    "Dgc",
    "Ecsq",
    "Eden",
    "ErrorFeedback",
    "Half",
    "Integers",
    "Layout",
    "LowRank",
    "ModelSpec",
    "OneSidedPowerSGD",
    "PerTensor",
    "Positions",
    "PowerSGD",
    "Properties",
    "Public",
    "PublicRandomness",
    "Qsgd",
    "Quantize",
    "RandomK",
    "Reals",
    "SharedSupport",
    "Sign",
    "SimHash",
    "SparseTernary",
    "Stateful",
    "Stateless",
    "Structured",
    "SuccessiveRefinement",
    "Symbols",
    "TensorSpec",
    "TernGrad",
    "Threshold",
    "TopK",
    "Uncompressed",
    "Update",
    "Wrapper",
    "check_finite",
    "compressor",
    "compressors",
    "decode",
    "encode",
    "from_config",
    "to_config",
]
