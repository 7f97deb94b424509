"""Checks of a task with a downlink; fedpress_strategies.downlink computes what such a task
publishes."""

from __future__ import annotations

import numpy as np

from fedpress_protocols.errors import IncompatiblePlan
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_strategies import Strategy
from fedpress_strategies.strategy import CONTROL, published


def check_downlink(terms: RoundTerms, strategy: Strategy) -> None:
    """Raise IncompatiblePlan where what is published would not do, or the promise not hold."""
    if CONTROL in published(strategy.optimizer, strategy.optimizer.init(np.zeros(1, np.float32))):
        raise IncompatiblePlan(
            "the strategy sends a vector of the model's size with every round, which no downlink "
            "codes, so that there would be little to gain",
            hint="use a strategy without control variates, or a task without a downlink",
        )
    for profile in terms.plan.profiles:
        if getattr(profile.compressor, "needs_plain_mean", False):
            raise IncompatiblePlan(
                f"profile {profile.name!r} counts on a model that moves by the very mean of the "
                "updates, and with a downlink it moves by what is published of it",
                hint="use error_feedback, or a task without a downlink",
            )


__all__ = ["check_downlink"]
