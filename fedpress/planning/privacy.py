"""The plan of a private task: how much noise, how wide a ring, how large an error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from fedpress_compression.compressor import from_config
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.masking.graph import Adversary, honest_survivors, parameters
from fedpress_protocols.masking.ring import Packing
from fedpress_protocols.plan import (
    LEAST_CENTRAL,
    LEAST_HONEST,
    LEAST_MASKED,
    MAX_PARTICIPATIONS,
    AdaptiveClip,
    MaskingTerms,
    PrivacyTerms,
)
from fedpress_protocols.privacy import accounting, correlated
from fedpress_protocols.privacy.accounting import PrivacyLane, SharedNoise, participation
from fedpress_protocols.privacy.clipping import Shares
from fedpress_protocols.privacy.correlated import Correlation
from fedpress_protocols.privacy.grid import grid_of
from fedpress_protocols.upload import max_body_bytes

_TYPICAL = 8
"""The range of an upload's numbers over their root mean square: the rest is left over."""
_ROOM = 4
"""How many times its first value an adaptive clip may reach before the range cuts values off."""
_DEVIATIONS = 4
"""The range of noised numbers over the noise's deviation."""


class PrivateTask(BaseModel):
    """A private task; the names are those of `fedpress privacy plan`'s options."""

    model_config = ConfigDict(frozen=True)

    model: ModelSpec
    fraction: float
    """Share of the parameters that is sent."""
    cohort: int
    minimum: int
    population: int
    rounds: int
    participations: int
    epsilon: float
    delta: float
    clip: float
    corrupt: float
    adversary: Adversary
    lane: PrivacyLane = "distributed"
    noise: SharedNoise = "discrete_gaussian"
    """Of the distributed lane."""
    quantile: float | None = None
    """In the central lane: of the norms, that the clip adapts to, from `clip` on; None: fixed."""
    separation: int = 1
    """Rounds between two participations of a device; in the central lane the noise of more than 1
    is correlated over rounds."""
    max_draws: int = correlated.MAX_ROUNDS
    """Of correlated noise, in one round: each takes the server's time."""
    per_tensor: Shares = ()
    """In the central lane: of the clip, by pattern of tensors' names; see PrivacyTerms."""

    @property
    def size(self) -> int:
        """Parameters of the model."""
        return self.model.size


class PrivacyPlan(BaseModel):
    """`privacy`, `masking` and `compressor` are a task's; the other figures follow from them.

    `model_error` is the root mean square, over the rounds, of the noise's norm in the sum of all
    means so far, over `clip`: what correlated noise makes small, at `round_error` more in a round.
    `noise_norm` is the expected L2 norm of the noise in a round's mean, of a full cohort, and
    `round_error` that norm over `clip`, which is the largest norm of the mean without noise.
    `masking`, `noise_shares` and `ring_bits` are of the distributed lane; in the others
    `body_bytes` is the most that a body takes.
    """

    privacy: PrivacyTerms
    tensor_clips: dict[str, float] = {}
    """By tensor the largest norm of what is sent of it, where each has one of its own."""
    masking: MaskingTerms | None = None
    compressor: dict[str, Any]
    numbers_sent: int
    noise_shares: int | None = None
    ring_bits: int | None = None
    bits_per_parameter: float
    body_bytes: int
    noise_norm: float
    round_error: float
    model_error: float
    task_epsilon: float
    against: str


def planned(task: PrivateTask) -> PrivacyPlan:
    """The least noise that keeps the task's epsilon, and what it costs.

    Raises ConfigurationError with what to change where there is none.
    """
    least = LEAST_MASKED if task.lane == "distributed" else LEAST_CENTRAL
    if not least <= task.minimum <= task.cohort <= task.population:
        raise ConfigurationError(
            f"a minimum of {task.minimum}, a cohort of {task.cohort} and a population of "
            f"{task.population}; expected {least} <= minimum <= cohort <= population"
        )
    enough = math.ceil(task.rounds * task.minimum / task.population)
    if task.participations < enough:
        raise ConfigurationError(
            f"{task.rounds} rounds of {task.minimum} devices or more, out of {task.population}, "
            f"take {enough} participations of a device, not {task.participations}",
            hint="raise --participations or --population, or lower --rounds",
        )
    if task.participations > MAX_PARTICIPATIONS:
        raise ConfigurationError(
            f"{task.participations:,} participations of a device, more than {MAX_PARTICIPATIONS:,}",
            hint="raise --population, or lower --rounds",
        )
    _check_clips(task)
    correlation = _correlation(task)
    noise = accounting.noise_multiplier_for(
        task.epsilon,
        task.delta,
        task.participations,
        participation(task.lane, correlation, task.noise),
    )
    terms = PrivacyTerms(
        lane=task.lane,
        clip=task.clip,
        noise_multiplier=noise,
        participations=task.participations,
        epsilon=task.epsilon,
        delta=task.delta,
        correlation=correlation,
        noise=task.noise if task.lane == "distributed" else "skellam",
        adaptive=_adaptive(task, noise),
        per_tensor=task.per_tensor,
    )
    return _masked(task, terms) if terms.needs_masks else _clear(task, terms)


def _check_clips(task: PrivateTask) -> None:
    if task.per_tensor and (task.lane != "central" or task.quantile is not None):
        raise ConfigurationError(
            "tensors have clips of their own in the central lane only, and no adaptive ones",
            hint="choose --lane central and leave --quantile out, or leave --per-tensor out",
        )


def _adaptive(task: PrivateTask, noise: float) -> AdaptiveClip | None:
    """Terms whose count is worth a twentieth of the cohort, and costs updates 2 % at most."""
    if task.quantile is None:
        return None
    if task.lane != "central" or task.separation > 1:
        raise ConfigurationError(
            "a clip adapts in the central lane only, and not under noise that is correlated over "
            "rounds",
            hint="choose --lane central and leave --separation out, or leave --quantile out",
        )
    count_noise = max(task.cohort / 20, 2.5 * noise)
    return AdaptiveClip(quantile=task.quantile, count_noise=float(f"{count_noise:.4g}"))


def _correlation(task: PrivateTask) -> Correlation | None:
    """The correlation of noise that serves the task best; None without a separation."""
    if task.separation == 1:
        return None
    if task.lane != "central":
        raise ConfigurationError(
            f"a separation of {task.separation} rounds in the {task.lane} lane: noise is "
            "correlated over rounds only where the server adds it",
            hint="choose --lane central, or leave --separation out",
        )
    if task.fraction < 1:
        raise ConfigurationError(
            f"a separation of {task.separation} rounds with {task.fraction:g} of the parameters "
            "sent: correlated noise takes itself away only where every round sends all",
            hint="set --fraction 1, or leave --separation out",
        )
    at_once = (task.separation - 1) * task.cohort + task.minimum
    if at_once > task.population:
        raise ConfigurationError(
            f"a separation of {task.separation} rounds needs {at_once} devices for cohorts of "
            f"{task.cohort}, and the population is {task.population}",
            hint="lower --separation or --cohort, or raise --population",
        )
    if (task.participations - 1) * task.separation >= task.rounds:
        raise ConfigurationError(
            f"{task.participations} participations of a device, {task.separation} rounds apart, "
            f"do not fit into {task.rounds} rounds",
            hint="lower --participations or --separation",
        )
    return correlated.best(task.separation, task.rounds, task.max_draws)


def _masked(task: PrivateTask, terms: PrivacyTerms) -> PrivacyPlan:
    parameters(task.cohort, corrupt=task.corrupt, dropout=0.05, adversary=task.adversary)
    shares = honest_survivors(
        task.minimum, task.cohort, corrupt=task.corrupt, adversary=task.adversary
    )
    if shares < LEAST_HONEST:
        raise ConfigurationError(
            f"of {task.minimum} survivors in a cohort of {task.cohort} only {shares} are sure to "
            f"be honest, fewer than {LEAST_HONEST}",
            hint="raise --minimum, or lower --corrupt",
        )
    numbers = math.ceil(task.fraction * task.size)
    grid = grid_of(terms, numbers, shares, task.cohort)
    packing = Packing.of((grid.vector("values", task.cohort),), task.cohort)
    norm = math.sqrt(numbers * grid.variance / task.cohort) * grid.step
    masking = MaskingTerms(adversary=task.adversary, corrupt=task.corrupt)
    return PrivacyPlan(
        privacy=terms,
        masking=masking,
        compressor={"id": "shared_support", "fraction": task.fraction},
        numbers_sent=numbers,
        noise_shares=shares,
        ring_bits=(2 * grid.sum_bound(task.cohort)).bit_length(),
        bits_per_parameter=8 * packing.num_bytes / task.size,
        body_bytes=packing.num_bytes,
        noise_norm=norm,
        round_error=norm / task.clip,
        model_error=norm / task.clip * correlated.independent_error(task.rounds),
        task_epsilon=terms.spent(task.participations),
        against=masking.adversaries,
    )


def _clear(task: PrivateTask, terms: PrivacyTerms) -> PrivacyPlan:
    numbers, noise = math.ceil(task.fraction * task.size), terms.update_multiplier * terms.clip
    bounds = terms.bounds(task.model)
    if terms.lane == "central":
        drawn = noise * math.sqrt(numbers) / task.cohort
        largest = max(
            min(clip, _TYPICAL * clip / math.sqrt(max(1, math.ceil(task.fraction * size))))
            for clip, size in zip(bounds.clips.tolist(), bounds.sizes, strict=True)
        )
        if terms.adaptive is not None:
            largest *= _ROOM
    else:
        drawn = noise * math.sqrt(numbers / task.cohort)
        largest = _DEVIATIONS * noise
    compressor: dict[str, Any] = {"id": "shared_support", "fraction": task.fraction}
    in_round, in_model = 1.0, correlated.independent_error(task.rounds)
    if terms.correlation is not None:
        compressor = {"id": "quantize"}
        in_round = float(np.linalg.norm(terms.correlation.noising))
        in_model = terms.correlation.prefix_error(task.rounds)
    compressor["clip"] = float(f"{largest:.2g}")
    norm = drawn * in_round
    spec = ModelSpec((TensorSpec("all", (task.size,)),))
    body_bytes = max_body_bytes(from_config(compressor).layout(spec))
    return PrivacyPlan(
        privacy=terms,
        tensor_clips=dict(zip(bounds.names, bounds.clips.tolist(), strict=True))
        if terms.per_tensor
        else {},
        compressor=compressor,
        numbers_sent=numbers,
        bits_per_parameter=8 * body_bytes / task.size,
        body_bytes=body_bytes,
        noise_norm=norm,
        round_error=norm / task.clip,
        model_error=drawn / task.clip * in_model,
        task_epsilon=terms.spent(task.participations),
        against=terms.against(),
    )
