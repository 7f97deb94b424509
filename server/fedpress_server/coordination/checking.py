"""All that can be checked of a task before it begins: each of its plans against its model, its
strategy and this server's bounds."""

from __future__ import annotations

from collections.abc import Callable

from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.plan import TrainingTerms
from fedpress_server.aggregation.aggregate import check_strategy
from fedpress_server.aggregation.asynchronous import check_asynchronous
from fedpress_server.aggregation.downlink import check_downlink
from fedpress_server.aggregation.masked import check_masked_strategy
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.opening import check_warm_up, checked_bound, later_periods
from fedpress_strategies import Strategy
from fedpress_strategies.policies.sizes import check_order
from fedpress_strategies.private import check_private_strategy


def checked_task(
    config: TaskConfig,
    strategy: Strategy,
    begin: Callable[[TaskConfig], Attempt],
    spec: ModelSpec | None,
    *,
    most: int,
    memory: int,
) -> tuple[Attempt, int]:
    """The first attempt at a task, which `begin` opens, and the bytes of the largest upload of any
    of its rounds; raises ConfigurationError with the reason.

    `most` and `memory`: see `check_plan`. Without the `spec` of its model, what hangs on tensors is
    left out, and the bytes are 0. It takes a thread's time.
    """
    check_training(config.training, strategy)
    attempt, bound = begin(config), 0
    check_warm_up(attempt.terms, strategy)
    if spec is not None:
        check_ladder(config, spec)
    for each in (attempt, *map(begin, later_periods(config))):
        if spec is None:
            check_rules(each.terms, config, strategy, memory=memory)
        else:
            required = check_plan(each.terms, config, strategy, most=most, memory=memory)
            bound = max(bound, required)
    return attempt, bound


def check_training(training: TrainingTerms, strategy: Strategy) -> None:
    """Raise ConfigurationError for terms of a longer training than the strategy's one step."""
    lengths = ("local_epochs", "local_steps", "gradient_accumulation")
    idle = [name for name in lengths if (getattr(training, name) or 1) > 1]
    if strategy.client_terms.full_batch and idle:
        raise ConfigurationError(
            f"training.{idle[0]} of {getattr(training, idle[0])} under a strategy whose clients "
            "take one step along the gradient over all their examples",
            hint=f"leave {' and '.join(idle)} out of training, or choose another strategy",
        )


def check_plan(
    terms: RoundTerms, config: TaskConfig, strategy: Strategy, *, most: int, memory: int
) -> int:
    """The bytes of the plan's largest upload.

    `most` is what the server takes in one, `memory` what it gives a strategy that compares uploads.
    Raises ConfigurationError with the reason. It takes a thread's time: the strategy is tried.
    """
    bound = checked_bound(terms, most)
    check_rules(terms, config, strategy, memory=memory)
    return bound


def check_rules(terms: RoundTerms, config: TaskConfig, strategy: Strategy, *, memory: int) -> None:
    """Check that lane, compressors and strategy work together, whatever the model's size.

    Raises ConfigurationError with the reason. It takes a thread's time: the strategy is tried.
    """
    check_asynchronous(terms, strategy, config.asynchronous)
    check_strategy(terms, strategy, memory)
    check_private_strategy(terms, strategy)
    if terms.plan.lane == "masked":
        check_masked_strategy(terms, strategy)
    if config.downlink is not None:
        check_downlink(terms, strategy)


def check_ladder(config: TaskConfig, spec: ModelSpec) -> None:
    """Raises ConfigurationError for profiles in an order in which the task's policies would press
    harder where they mean to be gentle. It takes a thread's time: updates are really encoded."""
    if config.policies:
        check_order(config.profiles, spec)
