"""Flower strategies around others, Flower's or ours, whose clients upload compressed or masked."""

from fedpress_protocols.errors import MissingExtra

try:
    import flwr  # noqa: F401
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "FedpressStrategy needs Flower", hint="pip install 'fedpress[flower]'"
    ) from exc

from fedpress_strategies.flower.compressed import FedpressStrategy
from fedpress_strategies.flower.masked import MaskedStrategy
from fedpress_strategies.flower.plan import NO_ANSWER, Plan, RoundReport

__all__ = ["NO_ANSWER", "FedpressStrategy", "MaskedStrategy", "Plan", "RoundReport"]
