"""Accuracy against bytes on eight real tasks: what a task has by default, and float32.

    python benchmarks/accuracy_vs_bytes.py --data FOLDER [--tasks A,B] [--recipes "A;B"]
    python benchmarks/accuracy_vs_bytes.py --data FOLDER --table     # of what has been run
    python benchmarks/accuracy_vs_bytes.py --data FOLDER --table --work      # with more local work
    python benchmarks/accuracy_vs_bytes.py --data FOLDER --table --rdo       # with fewer bits
    python benchmarks/accuracy_vs_bytes.py --data FOLDER --table --links     # seconds on a link
    python benchmarks/accuracy_vs_bytes.py --data FOLDER --table --tuned     # at FedAvg's best rate
    python benchmarks/accuracy_vs_bytes.py --data FOLDER --table --tuned --held-out    # other tasks
    python benchmarks/accuracy_vs_bytes.py --data FOLDER --table --longer    # in twice the rounds
    python benchmarks/accuracy_vs_bytes.py --data FOLDER --rates --held-out  # and which that is

What runs is the product's own code without its network: plans are opened and policies decide as on
a server, devices keep ledgers and make real bodies, the server aggregates them and publishes models
for a downlink. Every run is kept as a JSON file of its own in benchmarks/results/accuracy_vs_bytes,
and is not run again. Accuracies are means of the last five measures, of the newest model and of the
average (with the same horizon for every recipe). Bytes are those of the bodies until the mean over
three measures is where float32 FedAvg ends less half a point; on the way down those of a device
that holds the model before. float32 recipes are tried on the task itself, auto is not. The tasks of
held_out_tasks.py and of more_held_out_tasks.py were first run after the default was frozen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import accuracy_tasks
import held_out_tasks
import more_held_out_tasks
import numpy as np
import torch
from federation import InMemory

from fedpress_client.ledger import Ledger
from fedpress_compression.errors import InvalidUpdate
from fedpress_compression.running_statistics import has_statistics
from fedpress_compression.values import flatness
from fedpress_protocols.defaults import completed
from fedpress_protocols.downlink import encode_difference
from fedpress_protocols.messages import FLAT, Assignment, Receipt, TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.signatures import DeviceKey
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload
from fedpress_server.aggregation.aggregate import aggregate, first_model, first_state
from fedpress_server.aggregation.masked import Host
from fedpress_server.aggregation.probing import compare
from fedpress_server.coordination.opening import RoundCarryover, opened
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.signing import SigningKeys
from fedpress_server.storage.files import model_name
from fedpress_strategies import from_config
from fedpress_strategies.policies.decisions import next_course, with_comparison
from fedpress_strategies.policies.facts import (
    FLAT_ROUNDS,
    Facts,
    estimated_population,
    least_population,
    mostly_flat,
)

STORE = Path(__file__).parent / "results" / "accuracy_vs_bytes"
EVERY, LAST, MARGIN = 3, 5, 0.005
HEADERS = 700
"""Bytes of an upload's signed request beside its body, as `fedpress demo` counts them."""
UP, DOWN = 1e6 / 8, 10e6 / 8
"""A link of 1 Mbit/s up and 10 down, in bytes a second."""
SEEDS = range(10)
HELD_OUT = {**held_out_tasks.HELD_OUT, **more_held_out_tasks.MORE_HELD_OUT}
TASKS = {**accuracy_tasks.TASKS, **HELD_OUT}
FACTORS = (1, 2, 4, 8, 16)
"""Of a task's learning rate, where `TUNED` was looked for."""
Config = dict[str, Any]
_FLOAT32: Config = {"profiles": [{"name": "float32", "compressor": {"id": "none"}}]}


class Recipe(NamedTuple):
    """Fields of the task's configuration, factors of its learning rate and of its local steps, and
    the weight of a proximal term."""

    fields: Config = {}  # noqa: RUF012 - never changed
    rate: float = 1.0
    steps: float = 1.0
    proximal: float = 0.0
    tuned: bool = False
    """Whether the rate is FedAvg's best, see `TUNED`."""
    rdo: float = 0.0
    """Of the default's `ecsq`: the weight of a bit in its rounding."""
    momentum: float | None = None
    """Of the default's strategy, in place of what it has."""
    rounds: int = 1
    """Times the task's own."""


def _float32(inner: Config, rate: float = 1.0, steps: float = 1.0) -> Recipe:
    return Recipe({**_FLOAT32, "strategy": {"id": "ema", "inner": inner}}, rate, steps)


def _refined(*, is_low_rank: bool) -> Recipe:
    """FedAvg of updates with an NMSE of .3, nothing of which is kept for later: of `ecsq` alone, or
    after low rank where it pays."""
    inner: Config = {"id": "ecsq", "control": "nmse", "target": 0.3, "rdo": 0.14}
    if is_low_rank:
        first = {"id": "lowrank", "rank": 3, "bits": 5, "rest": {"id": "half"}}
        stages = {"first": first, "second": inner, "target_of": "whole"}
        inner = {"id": "successive_refinement", **stages}
    coded = {"id": "coded", "contexts": "previous", "inner": inner}
    profile = {"name": "only", "compressor": coded}
    return Recipe({"profiles": [profile], "strategy": {"id": "ema", "inner": {"id": "fedavg"}}})


_FEDAVGM: Config = {"id": "fedavgm", "learning_rate": 1.0, "momentum": 0.8}
RECIPES: Mapping[str, Recipe] = {
    "auto": Recipe(),
    "auto, steps x 2": Recipe(steps=2.0),
    "auto, steps x 4": Recipe(steps=4.0),
    "auto, steps x 4, proximal .1": Recipe(steps=4.0, proximal=0.1),
    "auto, rdo .14": Recipe(rdo=0.14),
    "fedavg, steps x 4": _float32({"id": "fedavg"}, steps=4.0),
    "fedavg": _float32({"id": "fedavg"}),
    "fedavg, rate x 2": _float32({"id": "fedavg"}, 2.0),
    "fedavgm": _float32(_FEDAVGM),
    "fedavgm, rate / 2": _float32(_FEDAVGM, 0.5),
    "fedadam .01": _float32({"id": "fedadam", "learning_rate": 0.01}),
    "fedadam .03": _float32({"id": "fedadam", "learning_rate": 0.03}),
    "nmse .3": _refined(is_low_rank=False),
    "nmse .3, low rank": _refined(is_low_rank=True),
    "tuned auto": Recipe(tuned=True),
    "tuned auto, rounds x 2": Recipe(tuned=True, rounds=2),
    "tuned auto, momentum .8": Recipe(tuned=True, momentum=0.8),
    "tuned auto, momentum .5": Recipe(tuned=True, momentum=0.5),
    "tuned auto, momentum 0": Recipe(tuned=True, momentum=0.0),
    "tuned fedavg": _float32({"id": "fedavg"})._replace(tuned=True),
    "tuned fedavgm": _float32(_FEDAVGM)._replace(tuned=True),
    "tuned fedavgm, rate / 2": _float32(_FEDAVGM, 0.5)._replace(tuned=True),
    **{f"fedavg at x {factor}": _float32({"id": "fedavg"}, factor) for factor in FACTORS},
}
TUNED: Mapping[str, float] = {
    "digits": 4.0,
    "vowel": 4.0,
    "satellite": 8.0,
    "letters": 8.0,
    "shakespeare": 2.0,
    "fashion .1": 2.0,
    "fashion .5": 2.0,
    "fashion 1": 2.0,
    "dna": 2.0,
    "shuttle": 2.0,
    "ratings": 1.0,
    "watch": 2.0,
    "diamonds": 8.0,
    "spam": 1.0,
    "austen": 8.0,
    "tweets": 1.0,
}
"""Times the task's own learning rate: where FedAvg's newest models end highest on seed 0, of 1, 2,
4, 8 and 16 times, up to where it diverges; the lower one where they are within .3 points."""


@dataclass
class Run:
    """By measure: the round, the bytes up to then, accuracy and loss of the newest model and of the
    average; by round, what policies decided."""

    rounds: list[int] = field(default_factory=list)
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    newest: list[tuple[float, float]] = field(default_factory=list)
    average: list[tuple[float, float]] = field(default_factory=list)
    profiles: list[str] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    progress: dict[int, float | None] = field(default_factory=dict)
    refused: int = 0
    """Updates that hold NaN, or values beyond the plan's bound."""


def run(
    name: str,
    recipe: str,
    seed: int,
    data: Path,
    rounds: int | None = None,
    cohort: int | None = None,
    clients: int | None = None,
) -> Run:
    """One task from its beginning to its end; of its first `clients`, and so many in a `cohort`."""
    task = accuracy_tasks.made(name, data, seed, TASKS)
    task.cohort = cohort or task.cohort
    task.clients = task.clients[:clients]
    changes, factor, steps, task.proximal, is_tuned, rdo, momentum, times = RECIPES[recipe]
    total = (rounds or task.rounds) * times
    factor *= TUNED[name] if is_tuned else 1.0
    task.steps = round(task.steps * steps)
    initial = Model.from_bytes(task.first_model.to_bytes())
    fields: Config = {
        "task": "task",
        "model": initial.digest,
        "rounds": total,
        "training": {"learning_rate": task.rate * factor},
        "cohort": {"size": task.cohort, "minimum": 1},
        "seed": seed,
    }
    ours = completed(fields)["strategy"]
    if momentum is not None:
        ours["inner"]["inner"]["momentum"] = momentum
        fields["strategy"] = ours
    strategy_fields = changes.get("strategy")
    if strategy_fields is not None:  # the same horizon for all
        changes = {**changes, "strategy": {**strategy_fields, "decay": ours["decay"]}}
    if rdo:
        fields = completed(fields)
        for profile in fields["profiles"]:
            profile["compressor"]["inner"]["inner"]["rdo"] = rdo
    config = TaskConfig.model_validate({**fields, **changes})
    with tempfile.TemporaryDirectory() as folder:
        return played(task, config, seed, InMemory(Path(folder)), initial)


def played(
    task: accuracy_tasks.Task,
    config: TaskConfig,
    seed: int,
    payloads: InMemory,
    initial: Model,
    every: int = EVERY,
    keep: Callable[[Run], None] = lambda done: None,
    lost: float = 0.0,
) -> Run:
    """A task of `config` from `initial` on; models are measured `every` so many rounds, and what
    there is until then goes to `keep`. The share `lost` of the uploads never arrives: their bytes
    count, and their devices learn so from the receipt."""
    done, total = Run(), config.rounds
    strategy = from_config(config.strategy, config.training)
    key = DeviceKey.from_bytes(bytes(32))
    host = Host(SigningKeys.of(key), Authority("task", key.public, key))
    ledgers = [Ledger("task", f"client-{index}") for index in range(len(task.clients))]
    payloads.put(model_name(initial.digest), initial.to_bytes())
    model, state = initial, None
    if config.downlink is not None:
        digest, _ = first_model(initial.digest, config.downlink, payloads)
        state = first_state(initial.digest, initial.spec, payloads)
        model = Model.from_bytes(payloads.get(model_name(digest)))
    before, course = model, None
    chosen, up, down = np.random.default_rng([seed, 2]), 0, 0
    drawn: list[list[int]] = []
    are_flat: list[list[bool]] = []
    losses: list[float | None] = []  # of a model, known once devices have trained from it
    for number in range(1, total + 1):
        if config.policies:
            recent = [client for each in drawn[-64:] for client in each]
            came = len(recent), len(set(recent))
            size = config.cohort.size
            population, least = estimated_population(*came), least_population(*came, size)
            known = (*losses, None)
            newest = [each for flat in are_flat[-FLAT_ROUNDS:] for each in flat]
            facts = Facts(
                number,
                total,
                known,
                size=size,
                population=population,
                least_population=least,
                are_flat=mostly_flat(sum(newest), len(newest)),
                has_statistics=has_statistics(model.spec),
            )
            course = next_course(config.policies, len(config.profiles), course, facts)
            if course.why:
                done.reasons[number] = course.why
        carryover = RoundCarryover(model.digest, model.spec, before.digest, course=course)
        attempt = opened(
            config, strategy, payloads, host, carryover=carryover, number=number, attempt=1, now=0.0
        )
        plan, staged = attempt.terms.plan, []
        cohort = chosen.choice(len(task.clients), config.cohort.size, replace=False).tolist()
        drawn.append(cohort)
        are_flat.append([])
        name = plan.profiles[0].name
        rate = plan.training.learning_rate or 0.0
        previous = model.parameters - before.parameters
        losses.append(_loss(task, model, seed, number))
        for client in cohort:
            rng = np.random.default_rng([seed, number, client])
            update = task.update(model, client, rng, rate)
            are_flat[-1].append(flatness(update) >= FLAT)
            assignment = Assignment(
                assignment=f"a{number}", client_id=f"client-{client}", plan=plan, profile=name
            )
            try:
                ledger, body = ledgers[client].prepare(
                    assignment,
                    update,
                    task.clients[client].size,
                    model.spec,
                    rng,
                    knowledge={"previous": previous if "previous" in plan.needs else None},
                )
            except InvalidUpdate:
                body = None
            if body is None:  # diverged, as a device says that skips the round
                done.refused += 1
                continue
            file, digest = f"uploads/{client}", hashlib.sha256(body).hexdigest()
            payloads.put(file, body)
            up += len(body)
            is_lost = is_upload_lost(lost, seed, number, client)
            if not is_lost:
                staged.append(StagedUpload(file, digest, name, f"client-{client}"))
            ledgers[client] = ledger.settle(_receipt(plan, client, digest, not is_lost)).told()
        momentum = None if course is None else course.momentum
        uploads = tuple(staged)
        job = AggregationJob(attempt.terms, strategy, state, uploads, config.downlink, momentum)
        result = aggregate(job, payloads)
        state, before = result.optimizer_state, model
        model = Model.from_bytes(payloads.get(model_name(result.model)))
        is_coded = config.downlink is not None
        down += len(encode_difference(before, model)) if is_coded else len(model.to_bytes())
        if course is not None and course.probe:
            found = compare(attempt.terms, tuple(staged))
            course = with_comparison(course, found)
            done.progress[number] = None if found is None else found.progress
        done.profiles.append(name)
        if number % every == 0 or number > total - LAST:
            average, _ = result.published["average"]
            done.rounds.append(number)
            done.up.append(up)
            done.down.append(down)
            done.newest.append(task.measure(model))
            done.average.append(task.measure(Model.from_bytes(payloads.get(model_name(average)))))
            keep(done)
    return done


def _loss(task: accuracy_tasks.Task, model: Model, seed: int, number: int) -> float | None:
    """As devices would report it: over 256 examples that clients train on, others in each round."""
    rng = np.random.default_rng([seed, 9, number])
    rows = np.concatenate(task.clients)
    drawn = torch.from_numpy(rng.choice(rows, min(256, rows.size), replace=False))
    kept = task.test_inputs, task.test_labels
    task.test_inputs, task.test_labels = task.inputs[drawn], task.labels[drawn]
    try:
        return task.measure(model)[1]
    finally:
        task.test_inputs, task.test_labels = kept


def is_upload_lost(share: float, seed: int, number: int, client: int) -> bool:
    return bool(share) and np.random.default_rng([seed, 11, number, client]).random() < share


def _receipt(plan: RoundPlan, client: int, digest: str, is_included: bool) -> Receipt:
    return Receipt(
        assignment=f"a{plan.round}",
        client_id=f"client-{client}",
        task=plan.task,
        round=plan.round,
        attempt=plan.attempt,
        outcome="included" if is_included else "not-included",
        reason="included" if is_included else "dropped-out",
        upload=digest,
        model=None,
        issued_at=0,
    )


# The table


@dataclass
class Curve:
    """Of one kind of model over the measures of a run."""

    accuracies: list[float]
    up: list[int]
    down: list[int]
    rounds: list[int]

    @property
    def end(self) -> float:
        return float(np.mean(self.accuracies[-LAST:]))

    def reached(self, target: float) -> int | None:
        """The first measure from which the mean over three is at the target."""
        for place in range(len(self.accuracies)):
            if np.mean(self.accuracies[max(0, place - 2) : place + 1]) >= target:
                return place
        return None


def _file(store: Path, task: str, recipe: str, seed: int) -> Path:
    return store / (re.sub("[^A-Za-z0-9.]+", "-", f"{task} {recipe} {seed}") + ".json")


def _curve(store: Path, task: str, recipe: str, seed: int, kind: str) -> Curve | None:
    file = _file(store, task, recipe, seed)
    if not file.exists():
        return None
    kept = json.loads(file.read_text())
    accuracies = [accuracy for accuracy, _ in kept[kind]]
    return Curve(accuracies, kept["up"], kept["down"], kept["rounds"])


def table(
    store: Path, tasks: Sequence[str], *, is_tuned: bool = False, variant: str = ""
) -> Iterator[str]:
    """Markdown, of the runs that are there: means over the seeds that have auto and FedAvg."""
    yield (
        "| task | model | seeds | FedAvg ends | best float32 ends | auto ends | above FedAvg | "
        "up to FedAvg's end - .5: times less than FedAvg | than the best | both directions | "
        "bits a value |"
    )
    yield "|" + "---|" * 11
    for task in tasks:
        for kind in ("average", "newest"):
            row = _row(store, task, kind, ("tuned " if is_tuned else "") + "auto" + variant)
            if row:
                yield row


def variants(store: Path, tasks: Sequence[str], main: str) -> Iterator[str]:
    """Markdown, beside auto and FedAvg, of the kind of `main` (other local work, fewer bits) on
    the tasks and seeds that it was run on."""
    yield (
        "| task | recipe | seeds | newest ends | average ends | up to FedAvg's end - .5: times "
        "less than FedAvg, newest | average | MB up in all |"
    )
    yield "|" + "---|" * 8
    for task in tasks:
        word = main.split()[1]
        for recipe in ("auto", *(each for each in RECIPES if word in each)):
            needed = (recipe, "fedavg", main)
            seeds = [s for s in SEEDS if all(_file(store, task, n, s).exists() for n in needed)]
            if not seeds:
                continue
            cells, sent = [], dict[int, float]()
            for kind in ("newest", "average"):
                ends, times = [], []
                for seed in seeds:
                    own, plain = (_curve(store, task, n, seed, kind) for n in (recipe, "fedavg"))
                    assert own is not None
                    assert plain is not None
                    here, there = (each.reached(plain.end - MARGIN) for each in (own, plain))
                    ends.append(100 * own.end)
                    sent[seed] = own.up[-1] / 1e6
                    if here is not None and there is not None:
                        times.append(plain.up[there] / own.up[here])
                never = len(ends) - len(times)
                reached = f"{np.mean(times):.0f}" if times else "never"
                cells.append(
                    (
                        f"{np.mean(ends):.1f}",
                        reached + f" ({never} never)" * (0 < never < len(ends)),
                    )
                )
            (newest, fewer), (average, fewer_average) = cells
            yield (
                f"| {task} | {recipe} | {len(seeds)} | {newest} | {average} | {fewer} | "
                f"{fewer_average} | {np.mean(list(sent.values())):.3f} |"
            )


def link_table(store: Path, tasks: Sequence[str]) -> Iterator[str]:
    """Markdown: the transfers of a device that takes part in every round until the average is at
    the target; means over the seeds that reach it."""
    yield (
        "| task | rounds: FedAvg | auto | kB up a round, headers too: FedAvg | auto | up in all: "
        "times less | seconds on the link: FedAvg | auto |"
    )
    yield "|" + "---|" * 8
    for task in tasks:
        rows = []
        for seed in SEEDS:
            plain, ours = (_curve(store, task, n, seed, "average") for n in ("fedavg", "auto"))
            if plain is None or ours is None:
                continue
            cohort = plain.up[-1] / plain.down[-1]
            places = [each.reached(plain.end - MARGIN) for each in (plain, ours)]
            row: list[float] = []
            for curve, place in zip((plain, ours), places, strict=True):
                if place is not None:
                    sent = curve.up[place] / cohort + HEADERS * curve.rounds[place]
                    row += [curve.rounds[place], sent, sent / UP + curve.down[place] / DOWN]
            if len(row) == 6:
                rows.append(row)
        if rows:
            there, up, slow, here, few, fast = np.mean(rows, axis=0)
            yield (
                f"| {task} | {there:.0f} | {here:.0f} | {up / there / 1e3:.1f} | "
                f"{few / here / 1e3:.2f} | {up / few:.0f} | {slow:.0f} | {fast:.1f} |"
            )


def momentum_table(store: Path, tasks: Sequence[str]) -> Iterator[str]:
    """Markdown: where averages end, in %, by seed."""
    recipes = ["tuned fedavg", *(each for each in RECIPES if "momentum" in each)]
    yield "| task | " + " | ".join(each.removeprefix("tuned ") for each in recipes) + " |"
    yield "|" + "---|" * (1 + len(recipes))
    for task in tasks:
        cells = []
        for recipe in recipes:
            curves = [_curve(store, task, recipe, seed, "average") for seed in SEEDS]
            cells.append(", ".join(f"{100 * each.end:.1f}" for each in curves if each is not None))
        if any(cells):
            yield f"| {task} | " + " | ".join(cells) + " |"


def rates_table(store: Path, tasks: Sequence[str]) -> Iterator[str]:
    """Markdown: where FedAvg's newest models end on seed 0, in %, by the factor of the rate."""
    yield "| task | " + " | ".join(f"x {factor}" for factor in FACTORS) + " | of the table |"
    yield "|" + "---|" * (2 + len(FACTORS))
    for task in tasks:
        curves = [_curve(store, task, f"fedavg at x {factor}", 0, "newest") for factor in FACTORS]
        if any(curves):
            cells = ["" if each is None else f"{100 * each.end:.1f}" for each in curves]
            chosen = f"x {TUNED[task]:g}" if task in TUNED else ""
            yield f"| {task} | " + " | ".join(cells) + f" | {chosen} |"


def _is_usual(recipe: str) -> bool:
    others = ("steps", "rounds", "rdo", "momentum", "nmse", " at x ")
    return not any(word in recipe for word in others)


def _row(store: Path, task: str, kind: str, recipe: str) -> str:
    is_tuned = RECIPES[recipe].tuned
    tune = "tuned " if is_tuned else ""
    usual = [each for each, made in RECIPES.items() if _is_usual(each) and made.tuned == is_tuned]
    tuned = [each for each in usual if any(_file(store, task, each, s).exists() for s in SEEDS)]
    has_momentum = any(each.startswith(f"{tune}fedavgm") for each in tuned)
    needed = [recipe, f"{tune}fedavg"]
    needed += [each for each in tuned if each == f"{tune}fedavgm"]
    seeds = [
        seed for seed in SEEDS if all(_file(store, task, each, seed).exists() for each in needed)
    ]
    if not seeds:
        return ""

    def curves(name: str) -> list[Curve]:
        found = [_curve(store, task, name, seed, kind) for seed in seeds]
        return [each for each in found if each is not None]

    float32 = {
        name: made
        for name in usual
        if not name.startswith(f"{tune}auto") and len(made := curves(name)) == len(seeds)
    }
    plain = [name for name in float32 if name in (f"{tune}fedavg", "fedavg, rate x 2")]
    ends = {name: float(np.mean([each.end for each in made])) for name, made in float32.items()}
    fedavg = max(plain, key=lambda name: ends[name])
    best = max(ends, key=lambda name: ends[name])
    ours = curves(recipe)
    fewer, than_best, both = [], [], []
    for mine, other, top in zip(ours, float32[fedavg], float32[best], strict=True):
        target = other.end - MARGIN
        here, there, best_there = (each.reached(target) for each in (mine, other, top))
        if here is None or there is None or best_there is None:
            continue
        fewer.append(other.up[there] / mine.up[here])
        than_best.append(top.up[best_there] / mine.up[here])
        cohort = other.up[there] / other.down[there]
        both.append(
            (other.up[there] + cohort * other.down[there])
            / (mine.up[here] + cohort * mine.down[here])
        )
    mean = float(np.mean([each.end for each in ours]))
    spread = float(np.std([each.end for each in ours]))
    each_round = [[run.up[-1] / run.rounds[-1] for run in runs] for runs in (float32[fedavg], ours)]
    whole = float(np.mean([f / m for f, m in zip(*each_round, strict=True)]))

    def times(values: Sequence[float]) -> str:
        if not values:
            return "never"
        missing = len(ours) - len(values)
        return f"{np.mean(values):.0f}" + (f" ({missing} never)" if missing else "")

    reached = f"{100 * ends[best]:.1f} ({best.removeprefix(tune)})" if has_momentum else "not run"
    return (
        f"| {task} | {kind} | {len(seeds)} | {100 * ends[fedavg]:.1f} | {reached} | "
        f"{100 * mean:.1f} +- {100 * spread:.1f} | {100 * (mean - ends[fedavg]):+.1f} | "
        f"{times(fewer)} | {times(than_best) if has_momentum else '-'} | {times(both)} | "
        f"{32 / whole:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="see accuracy_tasks.py")
    parser.add_argument("--tasks", help="with commas; those of accuracy_tasks.py, if not given")
    usual = ";".join(each for each in RECIPES if _is_usual(each) and "tuned" not in each)
    parser.add_argument("--recipes", default=usual, help="separated by semicolons")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, help="fewer than the task's own")
    parser.add_argument("--cohort", type=int, help="devices in a round, in place of the task's")
    parser.add_argument("--clients", type=int, help="so many of the task's")
    parser.add_argument("--store", type=Path, default=STORE, help="where runs are kept")
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    parser.add_argument("--work", action="store_true", help="the table of other local work")
    parser.add_argument("--rdo", action="store_true", help="the table of rounding by bits")
    parser.add_argument("--links", action="store_true", help="the table of seconds on a link")
    parser.add_argument("--tuned", action="store_true", help="the table at FedAvg's best rate")
    parser.add_argument("--longer", action="store_true", help="the table of twice the rounds")
    parser.add_argument("--momentum", action="store_true", help="the table of server momentum")
    parser.add_argument("--held-out", action="store_true", help="the tasks held out")
    parser.add_argument("--rates", action="store_true", help="FedAvg at multiples of the rate")
    parser.add_argument("--quick", action="store_true", help="digits, 12 rounds, FedAvg and auto")
    asked = parser.parse_args()
    usual_tasks = HELD_OUT if asked.held_out else accuracy_tasks.TASKS
    tasks = asked.tasks.split(",") if asked.tasks else list(usual_tasks)
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    recipes, rounds, store = asked.recipes.split(";"), asked.rounds, asked.store
    if asked.rates:
        seeds, recipes = [0], [each for each in RECIPES if " at x " in each]
    if (rounds or asked.cohort or asked.clients) and store == STORE and not asked.quick:
        parser.error("--rounds, --cohort and --clients make other tasks: name another --store")
    if asked.quick:
        tasks, seeds, recipes, rounds = ["digits"], [0], ["auto", "fedavg"], 12
        store = Path(tempfile.mkdtemp())
    store.mkdir(parents=True, exist_ok=True)
    for seed in seeds if not asked.table else ():
        for task in tasks:
            for recipe in recipes:
                file = _file(store, task, recipe, seed)
                if file.exists():
                    continue
                done = run(task, recipe, seed, asked.data, rounds, asked.cohort, asked.clients)
                file.write_text(json.dumps(vars(done)) + "\n")
                ends = [
                    100 * np.mean([a for a, _ in e[-LAST:]]) for e in (done.newest, done.average)
                ]
                print(
                    f"{task:12} {recipe:18} seed {seed}: newest {ends[0]:.1f}, "
                    f"average {ends[1]:.1f}, {done.up[-1] / 1e6:.3f} MB up",
                    flush=True,
                )
    if asked.rates:
        print("\n".join(rates_table(store, tasks)))
        return
    if asked.momentum:
        print("\n".join(momentum_table(store, tasks)))
        return
    if asked.tuned or asked.longer:
        variant = ", rounds x 2" if asked.longer else ""
        print("\n".join(table(store, tasks, is_tuned=True, variant=variant)))
        return
    if asked.work or asked.rdo:
        main_recipe = "auto, rdo .14" if asked.rdo else "auto, steps x 4"
        print("\n".join(variants(store, tasks, main_recipe)))
        return
    print("\n".join((link_table if asked.links else table)(store, tasks)))


if __name__ == "__main__":
    main()
