"""The commands `fedpress privacy ...`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

import click

from fedpress.cli.tables import echo, fields, size, terminal_width
from fedpress.command_line import Command, Group, argument, as_json
from fedpress_protocols.masking.graph import Adversary
from fedpress_protocols.privacy.accounting import PrivacyLane, SharedNoise
from fedpress_protocols.privacy.correlated import MAX_ROUNDS, MAX_SEPARATION

if TYPE_CHECKING:
    from fedpress.planning.privacy import PrivacyPlan, PrivateTask


@click.group("privacy", cls=Group)
def privacy() -> None:
    """Plan differential privacy."""


@privacy.command("plan", cls=Command)
@argument("model", help="A safetensors file, or a number of parameters: 50826, 350k, 1.5M.")
@click.option("--epsilon", type=click.FloatRange(0, 30, min_open=True), required=True,
              help="What one device may lose in the whole task.")  # fmt: skip
@click.option("--delta", type=click.FloatRange(1e-11, 0.1, max_open=True), default=1e-5,
              help="The chance that epsilon does not hold.")  # fmt: skip
@click.option("--clip", type=click.FloatRange(1e-9, 2**20), required=True,
              help="L2 norm to which what a device sends is clipped.")  # fmt: skip
@click.option("--lane", type=click.Choice(get_args(PrivacyLane)), default="distributed",
              help="Whose noise: of the cohort (masked), the server, or each device.")  # fmt: skip
@click.option("--population", type=click.IntRange(min=2), required=True, help="Devices in all.")
@click.option("--cohort", type=click.IntRange(min=2), default=100, help="Devices of a round.")
@click.option("--minimum", type=click.IntRange(min=2), help="Survivors of a round, at least; 80 % "
              "of the cohort if not set.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=100, help="Rounds of the task.")
@click.option("--participations", type=click.IntRange(min=1, max=2**20), help="Of one device, at "
              "most; the least that is enough if not set.")  # fmt: skip
@click.option("--separation", type=click.IntRange(1, MAX_SEPARATION), default=1, help="Rounds "
              "between two participations of a device; above 1, in the central lane, the noise is "
              "correlated over rounds.")  # fmt: skip
@click.option("--max-draws", type=click.IntRange(2, MAX_ROUNDS), default=MAX_ROUNDS, help="Rounds "
              "whose noise is in one round's, at most: the server draws it again for each, in some "
              "0.05 s a million parameters.")  # fmt: skip
@click.option("--fraction", type=click.FloatRange(0, 1, min_open=True), help="Share of the "
              "parameters that is sent, of shared_support; 0.05 if not set, and 1 with "
              "--separation.")  # fmt: skip
@click.option("--corrupt", type=click.FloatRange(0, 1, max_open=True), default=0.1,
              help="Share of a cohort that may collude with the server.")  # fmt: skip
@click.option("--adversary", type=click.Choice(get_args(Adversary)), default="malicious",
              help="The server to withstand.")  # fmt: skip
@click.option(
    "--quantile",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Of the updates' norms, to which the clip adapts from --clip on; in the central lane.",
)
@click.option("--noise", type=click.Choice(get_args(SharedNoise)), default="discrete_gaussian",
              help="Of the distributed lane; older releases know skellam only.")  # fmt: skip
@click.option("--per-tensor", "shares", multiple=True, metavar="PATTERN=SHARE", help="Clip each "
              "tensor by itself, to its share of --clip; '*=1' for equal ones. The first pattern "
              "that fits a name counts; in the central lane.")  # fmt: skip
@as_json
def plan(model: str, minimum: int | None, participations: int | None, fraction: float | None,
         shares: tuple[str, ...], as_json: bool, **asked: Any) -> None:  # fmt: skip
    """Find the noise that keeps an epsilon, predict bits and error, and print the terms."""
    from fedpress.planning.privacy import PrivateTask, planned
    from fedpress.planning.situation import model_of

    spec, _ = model_of(model)
    least = math.ceil(0.8 * asked["cohort"]) if minimum is None else minimum
    enough = math.ceil(asked["rounds"] * asked["cohort"] / asked["population"])
    task = PrivateTask(
        model=spec,
        per_tensor=tuple(map(_share, shares)),
        minimum=max(3 if asked["lane"] == "distributed" else 2, least),
        participations=participations or enough,
        fraction=fraction or (0.05 if asked["separation"] == 1 else 1.0),
        **asked,
    )
    found = planned(task)
    echo(found, _lines(task, found), as_json=as_json)


def _share(text: str) -> tuple[str, float]:
    pattern, _, share = text.rpartition("=")
    try:
        number = float(share)
    except ValueError:
        number = 0.0
    if not pattern or not 1e-6 <= number <= 1e6:
        raise click.BadParameter(
            f"{text!r}, expected a pattern of tensors' names and a share in 1e-6 to 1e6, such as "
            "'*.bias=1'",
            param_hint="--per-tensor",
        )
    return pattern, number


def _lines(task: PrivateTask, plan: PrivacyPlan) -> Iterator[str]:
    terms = plan.privacy
    pairs = [
        ("epsilon", f"{plan.task_epsilon:.4g} at delta {terms.delta:g}, for one device after "
                    f"{terms.participations} participations"),
        ("against", plan.against),
        ("not hidden", "which devices take part, and when"),
        ("noise", f"{terms.update_multiplier:.6g} times the clip of {terms.clip:g} in each number "
                  f"of {_whose(plan)}"),
        ("error", f"noise of norm {plan.noise_norm:.3g} in a round's mean, {plan.round_error:.3g} "
                  f"times the clip; in the model {plan.model_error:.3g} times, over "
                  f"{task.rounds} rounds"),
    ]  # fmt: skip
    if terms.adaptive is not None:
        pairs.append(("clip", f"adapts to the {terms.adaptive.quantile:g} quantile of the norms, "
                      f"by a count with noise of {terms.adaptive.count_noise:g} devices; the error "
                      "is that at the first"))  # fmt: skip
    if plan.tensor_clips:
        clips = plan.tensor_clips.values()
        pairs.append(("clips", f"{min(clips):.4g} to {max(clips):.4g} for each of {len(clips)} "
                      f"tensors by itself, {terms.clip:g} for all together"))  # fmt: skip
    if terms.correlation is not None:
        pairs.insert(1, ("correlated", f"over {terms.correlation.rounds} rounds; a device rests "
                         f"until {terms.separation} rounds after its last one"))  # fmt: skip
    numbers, bits = f"{plan.numbers_sent:,} of {task.size:,}", plan.bits_per_parameter
    if plan.ring_bits is not None:
        pairs.append(("ring", f"{plan.ring_bits} bits a number, {numbers} numbers"))
    most = "" if plan.ring_bits is not None else f" at most, {numbers} numbers"
    pairs.append(("upload", f"{size(plan.body_bytes)}, {bits:.3g} bits a parameter{most}"))
    yield from fields(pairs, width=terminal_width())
    if plan.round_error > 1:
        yield ""
        yield (
            "The noise is larger than any update's mean: raise --cohort with --population, lower "
            "--fraction or --rounds, or raise --epsilon."
        )
    yield ""
    yield "In the task's configuration:"
    yield f'  "lane": "{"clear" if plan.masking is None else "masked"}",'
    feedback = f'{{"id": "error_feedback", "inner": {json.dumps(plan.compressor)}}}'
    yield f'  "profiles": [{{"name": "private", "compressor": {feedback}}}],'
    yield f'  "cohort": {{"size": {task.cohort}, "minimum": {task.minimum}}},'
    if plan.masking is not None:
        chosen = plan.masking.model_dump_json(include={"adversary", "corrupt"})
        yield f'  "masking": {chosen},'
    yield f'  "privacy": {terms.model_dump_json()}'


def _whose(plan: PrivacyPlan) -> str:
    if plan.privacy.lane == "central":
        return "the sum, from the server, once a round"
    if plan.privacy.lane == "local":
        return "every upload, from its device"
    return f"the sum, from {plan.noise_shares} devices that are sure to be honest"
