"""Signs that a task's training diverges, in the figures of its last rounds.

Time plays no part: a sign shows in the round that has it, however long rounds take. Loss and norm
tell of training itself; where devices do not say their norms, as in masked and private rounds, the
aggregated update's does. NMSE and residual tell of compression that sends too little: a residual
that grows alone is normal while training with few coordinates begins, so it counts only where less
than a twentieth of what devices compute is sent. An NMSE above 1 is normal where only sums of
uploads come out right. Thresholds were set with the digits, where runs that learn at 1 and .1 %
top-k have none of the signs in their first eight rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedpress_compression.bias import is_noisy_alone
from fedpress_protocols.messages import DivergenceSign, RoundStatus, TaskConfig
from fedpress_strategies import Strategy

WINDOW = 8
"""Committed rounds that are looked at, the newest included."""
_RISE = 1.2
"""A loss that is as many times the lowest before, twice in a row, rises."""
_LEAP = 2.0
"""And so does one that is as many times the lowest at once."""
_REGAINED = 0.5
"""The share of its descent within the window that a loss must take back to rise: while a model
learns fast, a step of server momentum may double a loss that has come down by far more."""
_GROWTH = 10.0
"""A norm that is as many times the smallest before explodes."""
_AGGREGATED_GROWTH = 30.0
"""And so does one of an aggregated update, which grows besides when updates begin to agree."""
_UNSENT = 0.95
"""The NMSE above which a large residual is no beginning."""
_RESIDUAL = 3.0
"""Norms of an update that a residual may have."""
_RESIDUAL_GROWTH, _RESIDUAL_ROUNDS = 1.2, 3
"""A residual grows if it is as many times the smallest before, of so many rounds at least."""


def judges_nmse(config: TaskConfig, strategy: Strategy) -> bool:
    """Whether the NMSE of single uploads says how well the task compresses: no strategy decodes
    sums of symbols in their place, and no compressor is made for sums alone."""
    made = [profile.compressor for profile in config.every_profile]
    return strategy.symbol_aggregator is None and not any(map(is_noisy_alone, made))


def with_warnings(
    attempts: Sequence[RoundStatus], *, judges_nmse: bool = True
) -> list[RoundStatus]:
    """The attempts, oldest first, each committed one with the signs that it shows."""
    committed, marked = list[RoundStatus](), list[RoundStatus]()
    for each in attempts:
        if each.state == "committed":
            committed = [*committed[1 - WINDOW :], each]
            if signs := _signs(committed, judges_nmse):
                each = each.model_copy(update={"warnings": signs})
        marked.append(each)
    return marked


def current_warnings(attempts: Sequence[RoundStatus]) -> dict[DivergenceSign, str]:
    """The signs that a task shows now, its newest attempts oldest first.

    Devices measure a model in the round that begins with it, so the loss of the last round but one
    counts while the newest has none.
    """
    committed = [each for each in attempts if each.state == "committed"][-2:]
    if not committed:
        return {}
    warnings = dict(committed[-1].warnings)
    if "loss" not in committed[-1].metrics and "loss" in committed[0].warnings:
        warnings["loss"] = committed[0].warnings["loss"]
    return warnings


def _signs(rounds: Sequence[RoundStatus], judges_nmse: bool) -> dict[DivergenceSign, str]:
    """Of the newest of these committed rounds."""
    found: dict[DivergenceSign, str | None] = {
        "loss": _of_loss([each.metrics.get("loss") for each in rounds])
    }
    newest, aggregated = rounds[-1].figures, rounds[-1].update_norm
    if newest is None and aggregated is not None:
        norms = [each.update_norm for each in rounds[:-1] if each.update_norm is not None]
        found["norm"] = _of_norm(norms, aggregated, _AGGREGATED_GROWTH)
    if newest is not None:
        before = [each.figures for each in rounds[:-1] if each.figures is not None]
        found["norm"] = _of_norm([each.norm for each in before], newest.norm)
        if newest.nmse > 1 and judges_nmse:
            found["nmse"] = (
                f"compression loses more than the updates have: NMSE {newest.nmse:.3g}; "
                "compress less"
            )
        if newest.nmse > _UNSENT:
            residuals = [each.residual for each in before]
            found["residual"] = _of_residual(residuals, newest.residual)
    return {sign: why for sign, why in found.items() if why is not None}


def _of_loss(losses: Sequence[float | None]) -> str | None:
    *before, newest = losses
    measured = [each for each in before if each is not None]
    if newest is None or not measured:
        return None

    def exceeds(value: float, lowest: float, times: float) -> bool:
        regained = _REGAINED * (measured[0] - lowest)
        return value - lowest > max((times - 1) * abs(lowest), regained)

    lowest = min(measured)
    is_higher_again = len(measured) > 1 and all(
        exceeds(each, min(measured[:-1]), _RISE) for each in (measured[-1], newest)
    )
    if not is_higher_again and not exceeds(newest, lowest, _LEAP):
        return None
    return (
        f"the loss rises: {newest:.4g}, after {lowest:.4g}; training diverges or overfits: lower "
        "the learning rate, or roll back to the best version"
    )


def _of_norm(before: Sequence[float], newest: float, growth: float = _GROWTH) -> str | None:
    smallest = min((each for each in before if each > 0), default=None)
    if smallest is None or newest <= growth * smallest:
        return None
    return (
        f"updates explode: norm {newest:.3g}, after {smallest:.3g}; lower the learning rate or "
        "bound the norm"
    )


def _of_residual(before: Sequence[float], newest: float) -> str | None:
    if len(before) < _RESIDUAL_ROUNDS or newest <= _RESIDUAL:
        return None
    smallest = min(before)
    if newest <= _RESIDUAL_GROWTH * smallest:
        return None
    return (
        f"residuals grow: {newest:.3g} times an update, after {smallest:.3g}; send more a round, "
        "or lower the learning rate"
    )
