"""Every strategy, and what it takes to write one."""

from fedpress_compression.fixed_point import FixedPoint
from fedpress_strategies import Aggregator, ServerOptimizer, Strategy, from_config, strategies
from fedpress_strategies.adasum import adasum
from fedpress_strategies.bulyan import bulyan
from fedpress_strategies.diloco import diloco
from fedpress_strategies.ema import ema
from fedpress_strategies.fedadagrad import fedadagrad
from fedpress_strategies.fedadam import fedadam
from fedpress_strategies.fedasync import fedasync
from fedpress_strategies.fedavg import fedavg
from fedpress_strategies.fedavgm import fedavgm
from fedpress_strategies.fedbuff import fedbuff
from fedpress_strategies.feddyn import feddyn
from fedpress_strategies.fednova import fednova
from fedpress_strategies.fedper import fedper
from fedpress_strategies.fedprox import fedprox
from fedpress_strategies.fedsgd import fedsgd
from fedpress_strategies.fedyogi import fedyogi
from fedpress_strategies.fetchsgd import fetchsgd
from fedpress_strategies.geometric_median import geometric_median
from fedpress_strategies.krum import krum, multi_krum
from fedpress_strategies.lora import lora
from fedpress_strategies.median import median
from fedpress_strategies.norm_bounding import norm_bounding
from fedpress_strategies.onebit_adam import onebit_adam
from fedpress_strategies.onebit_lamb import onebit_lamb
from fedpress_strategies.qfedavg import qfedavg
from fedpress_strategies.scaffold import scaffold
from fedpress_strategies.spike_clipping import spike_clipping
from fedpress_strategies.strategy import (
    ALONE,
    NO_REPORT,
    Delta,
    OptimizerState,
    Properties,
    Report,
    ServerSGD,
    Tally,
    UniformMean,
    WeightedMean,
    strategy,
)
from fedpress_strategies.trimmed_mean import trimmed_mean

__all__ = [
    "ALONE",
    "NO_REPORT",
    "Aggregator",
    "Delta",
    "FixedPoint",
    "OptimizerState",
    "Properties",
    "Report",
    "ServerOptimizer",
    "ServerSGD",
    "Strategy",
    "Tally",
    "UniformMean",
    "WeightedMean",
    "adasum",
    "bulyan",
    "diloco",
    "ema",
    "fedadagrad",
    "fedadam",
    "fedasync",
    "fedavg",
    "fedavgm",
    "fedbuff",
    "feddyn",
    "fednova",
    "fedper",
    "fedprox",
    "fedsgd",
    "fedyogi",
    "fetchsgd",
    "from_config",
    "geometric_median",
    "krum",
    "lora",
    "median",
    "multi_krum",
    "norm_bounding",
    "onebit_adam",
    "onebit_lamb",
    "qfedavg",
    "scaffold",
    "spike_clipping",
    "strategies",
    "strategy",
    "trimmed_mean",
]
