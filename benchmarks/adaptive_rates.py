"""Policies over rounds on the digits task: bandwidth-aware, accuracy-driven, guarded rates.

    python benchmarks/adaptive_rates.py [--only SECTION] [--seeds 0,1,2] [--rounds N] [--json FILE]

Sections: fleet, accuracy, guard, probes, correction. `--quick` is six rounds of one seed.

What runs is the product's own code without its network: policies steer, the server opens rounds,
aggregates and compares probes, devices keep accounts and make real bodies. Simulated are the links
and the clock. 100 devices, 10 a round; accuracy is the mean of the last ten rounds' on the held-out
images. Losses are measured by a holder of 240 images that no device trains on, after each round.

fleet: uplinks from 0.2 to 50 Mbit/s, log-uniform, each transfer faster or slower by a fifth or so;
training takes 1 to 4 s. Bodies count as 100 times as long as they are, as for a model of 5 million
parameters. The deadline is the time within which two thirds of the fleet are in at the gentlest
rate. A client that misses it has its update back in its residual.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products are too small to share

import numpy as np
import numpy.typing as npt
from digits_task import LEARNING_RATE, SPEC, Digits, first_model, loss_of
from federation import InMemory
from harness import parser, save, seed_list

from fedpress_client import Ledger
from fedpress_compression.sketches import num_bytes
from fedpress_protocols.messages import Assignment, Receipt, TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, RoundPlan
from fedpress_protocols.policies import bandwidth_aware
from fedpress_protocols.signatures import DeviceKey
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.aggregation.masked import Host
from fedpress_server.aggregation.probing import compare
from fedpress_server.coordination.opening import RoundCarryover, opened
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.signing import SigningKeys
from fedpress_server.storage.files import model_name
from fedpress_strategies import from_config
from fedpress_strategies.policies.bandwidth_aware import Link, Transfer, choose
from fedpress_strategies.policies.decisions import next_course, with_comparison
from fedpress_strategies.policies.facts import Facts
from fedpress_strategies.policies.sizes import expected_bytes

CLIENTS, COHORT, ROUNDS, LAST, HELD_OUT = 100, 10, 100, 10, 240
TIMES_AS_LONG = 100
LADDER = (0.1, 0.03, 0.01, 0.003, 0.001)
Config = dict[str, Any]


def rung(fraction: float, factor: float = 1.0) -> Config:
    """Error feedback around the largest `fraction` of the values, two magnitude bits each."""
    inner = {"id": "topk", "fraction": fraction}
    return {
        "name": f"{100 * fraction:g}-percent",
        "compressor": {"id": "error_feedback", "inner": inner},
        **({"learning_rate_factor": factor} if factor != 1 else {}),
    }


@dataclass(frozen=True)
class Fleet:
    """`uplinks` in bytes a second and `training` in seconds, of each client."""

    uplinks: npt.NDArray[np.float64]
    training: npt.NDArray[np.float64]

    @classmethod
    def drawn(cls, seed: int) -> Fleet:
        rng = np.random.default_rng([seed, 3])
        uplinks = np.exp(rng.uniform(np.log(0.2), np.log(50), CLIENTS)) * 1e6 / 8
        return cls(uplinks, rng.uniform(1, 4, CLIENTS))

    def transfer(self, client: int, num_bytes: int, rng: np.random.Generator) -> Transfer:
        speed = self.uplinks[client] * np.exp(0.2 * rng.standard_normal())
        before = self.training[client] * np.exp(0.1 * rng.standard_normal())
        return Transfer(num_bytes, num_bytes / float(speed), float(before))

    def deadline(self, num_bytes: int) -> float:
        """Within which two thirds have sent so many bytes, on a day like any other."""
        return float(np.quantile(self.training + num_bytes / self.uplinks, 2 / 3))


@dataclass
class Run:
    """The outcome of a task."""

    accuracies: list[float] = field(default_factory=list)
    uploaded: int = 0
    sketched: int = 0
    """Of these bytes, what went out as sketches in a guard's probes."""
    given: int = 0
    came: int = 0
    rungs: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    progress: list[float | None] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.accuracies[-LAST:]))

    @property
    def figures(self) -> Config:
        return {**vars(self), "accuracy": self.accuracy}


def split(seed: int) -> tuple[Digits, npt.NDArray[np.int64]]:
    """The task, and the rows of the holder, taken from the clients."""
    digits = Digits.split(seed, CLIENTS)
    every = np.concatenate(digits.clients)
    held = np.random.default_rng([seed, 5]).choice(every, HELD_OUT, replace=False)
    left = [np.setdiff1d(rows, held) for rows in digits.clients]
    own = tuple(
        kept if kept.size else rows[:1] for kept, rows in zip(left, digits.clients, strict=True)
    )
    return Digits(digits.pixels, digits.labels, own, digits.test), held


def run(
    ladder: Sequence[Config],
    policies: Sequence[Config],
    seed: int,
    rounds: int,
    folder: Path,
    fleet: Fleet | None = None,
    deadline: float = float("inf"),
) -> Run:
    """A task from the first model to the last, every plan as the server makes it."""
    digits, held = split(seed)
    first = Model(SPEC, first_model(seed), {})
    payloads = InMemory(folder)
    payloads.put(model_name(first.digest), first.to_bytes())
    config = TaskConfig.model_validate(
        {
            "task": "digits",
            "model": first.digest,
            "rounds": rounds,
            "profiles": list(ladder),
            "policies": list(policies),
            "training": {"learning_rate": LEARNING_RATE},
            "cohort": CohortRules(size=COHORT, minimum=1),
            "max_examples": 4096,
            "seed": seed,
        }
    )
    strategy = from_config(config.strategy, config.training)
    key = DeviceKey.from_bytes(bytes(32))
    host = Host(SigningKeys.of(key), Authority("digits", key.public, key))
    ledgers = [Ledger("digits", f"client-{index}") for index in range(CLIENTS)]
    links: list[Link] = [Link() for _ in range(CLIENTS)]
    sizes = {
        each.name: TIMES_AS_LONG * expected_bytes(each.compressor, SPEC) for each in config.profiles
    }
    chosen, chance = np.random.default_rng([seed, 2]), np.random.default_rng([seed, 4])
    model, state, course = first, None, None
    losses: list[float | None] = []
    done = Run()
    for number in range(1, rounds + 1):
        if policies:
            course = next_course(
                config.policies, len(ladder), course, Facts(number, rounds, tuple(losses))
            )
            done.rungs.append(course.hardest)
            done.warnings += [f"round {number}: {each}" for each in course.warnings]
        left = RoundCarryover(model.digest, SPEC, model.digest, course=course)
        attempt = opened(
            config, strategy, payloads, host, carryover=left, number=number, attempt=1, now=0.0
        )
        plan, staged = attempt.terms.plan, []
        cohort = chosen.choice(CLIENTS, COHORT, replace=False).tolist()
        losses.append(loss_of(model.parameters, digits.pixels[held], digits.labels[held]))
        profiles = chosen_profiles(config, plan, cohort, links, sizes, deadline)
        for client, name in zip(cohort, profiles, strict=True):
            rng = np.random.default_rng([seed, number, client])
            rate = plan.training_of(name).learning_rate
            assert rate is not None  # the config has it
            update = digits.update(model.parameters, client, rng, rate)
            assignment = Assignment(
                assignment=f"a{number}",
                client_id=ledgers[client].client_id,
                plan=plan,
                profile=name,
            )
            examples = digits.clients[client].size
            ledgers[client], body = ledgers[client].prepare(assignment, update, examples, SPEC, rng)
            assert body is not None, "an update beyond the plan's bound"
            file, digest = f"uploads/{client}", hashlib.sha256(body).hexdigest()
            payloads.put(file, body)
            done.given += 1
            done.uploaded += len(body)
            if plan.sketch:
                done.sketched += num_bytes(plan.sketch)
            is_in, link = True, links[client]
            if fleet is not None:
                sent = fleet.transfer(client, TIMES_AS_LONG * len(body), chance)
                is_in = sent.before + sent.seconds < deadline
                missed = Link(link.transfers, link.missed + 1)
                links[client] = Link((sent, *link.transfers[:8])) if is_in else missed
            if is_in:
                staged.append(StagedUpload(file, digest, name, f"client-{client}"))
                done.came += 1
            receipt = receipt_of(ledgers[client], plan, digest, is_in=is_in)
            ledgers[client] = ledgers[client].settle(receipt).told()
        if staged:
            result = aggregate(
                AggregationJob(attempt.terms, strategy, state, tuple(staged)), payloads
            )
            state = result.optimizer_state
            model = Model.from_bytes(payloads.get(model_name(result.model)))
        if course is not None and course.probe:
            found = compare(attempt.terms, tuple(staged))
            course = with_comparison(course, found)
            done.progress.append(None if found is None else found.progress)
        done.accuracies.append(digits.accuracy(model.parameters))
    return done


def chosen_profiles(
    config: TaskConfig,
    plan: RoundPlan,
    cohort: Sequence[int],
    links: Sequence[Link],
    sizes: dict[str, int],
    deadline: float,
) -> list[str]:
    """The profile of each client of the cohort, as the server assigns it."""
    names = [each.name for each in plan.profiles]
    policy = bandwidth_aware(config.policies)
    if policy is None:
        return [names[0]] * len(cohort)
    in_order = [sizes[name] for name in names]
    return [names[choose(policy, links[client], in_order, deadline)] for client in cohort]


def receipt_of(ledger: Ledger, plan: RoundPlan, digest: str, *, is_in: bool) -> Receipt:
    return Receipt(
        assignment=f"a{plan.round}",
        client_id=ledger.client_id,
        task=plan.task,
        round=plan.round,
        attempt=plan.attempt,
        outcome="included" if is_in else "not-included",
        reason="included" if is_in else "missed-deadline",
        upload=digest if is_in else None,
        model=None,
        issued_at=0,
    )


Runs = dict[str, list[Run]]


def fleet_runs(seed: int, rounds: int, folder: Path) -> dict[str, Run]:
    """Two thirds are in by the deadline at the gentlest rate; and with a rate for each."""
    ladder, fleet = [rung(share) for share in LADDER], Fleet.drawn(seed)
    gentlest = run(ladder[:1], [], seed, rounds, folder)
    size = TIMES_AS_LONG * gentlest.uploaded // gentlest.given
    deadline = fleet.deadline(size)
    aware = [{"id": "bandwidth_aware"}]
    return {
        "fixed 10 %, no deadline": gentlest,
        "fixed 10 %, deadline": run(ladder[:1], [], seed, rounds, folder, fleet, deadline),
        "fixed 0.1 %, deadline": run(ladder[-1:], [], seed, rounds, folder, fleet, deadline),
        "bandwidth-aware, deadline": run(ladder, aware, seed, rounds, folder, fleet, deadline),
    }


def accuracy_runs(seed: int, rounds: int, folder: Path) -> dict[str, Run]:
    """A scan of fixed rates, and the closed loop over the same ladder with its defaults."""
    ladder = [rung(share) for share in LADDER]
    fixed = {
        f"fixed {100 * share:g} %": run([each], [], seed, rounds, folder)
        for share, each in zip(LADDER, ladder, strict=True)
    }
    loop = run(ladder, [{"id": "accuracy_driven"}], seed, rounds, folder)
    return {**fixed, "accuracy-driven": loop}


TOO_HIGH = (0.01, 0.003, 0.001, 0.0001)


def guard_runs(seed: int, rounds: int, folder: Path) -> dict[str, Run]:
    """A rate that is too high for the task, alone and watched."""
    ladder = [rung(share) for share in TOO_HIGH]
    return {
        "fixed 0.01 %": run(ladder[-1:], [], seed, rounds, folder),
        "fixed 1 %": run(ladder[:1], [], seed, rounds, folder),
        "guarded": run(ladder, [{"id": "divergence_guard"}], seed, rounds, folder),
    }


def correction_runs(seed: int, rounds: int, folder: Path) -> dict[str, Run]:
    """The learning rate a tenth or a fifth lower or higher, at aggressive rates."""
    return {
        f"{100 * share:g} %, rate x {factor:g}": run(
            [rung(share, factor)], [], seed, rounds, folder
        )
        for share in (0.01, 0.001)
        for factor in (0.8, 0.9, 1.0, 1.1, 1.2)
    }


def probe_runs(seed: int, rounds: int, folder: Path) -> dict[str, Run]:
    """The progress that probes measure at constant rates, in rounds 1 to 5 and every tenth."""
    guard = {"id": "divergence_guard", "first": 5, "every": 10, "patience": 10**6}
    return {
        f"probed {100 * share:g} %": run([rung(1.0), rung(share)], [guard], seed, rounds, folder)
        for share in TOO_HIGH
    }


SECTIONS = {
    "fleet": fleet_runs,
    "accuracy": accuracy_runs,
    "guard": guard_runs,
    "correction": correction_runs,
    "probes": probe_runs,
}


def line(name: str, runs: Sequence[Run]) -> str:
    accuracies = 100 * np.array([each.accuracy for each in runs])
    each = " ".join(f"{one:5.2f}" for one in accuracies)
    in_time = 100 * sum(one.came for one in runs) / sum(one.given for one in runs)
    megabytes = np.mean([one.uploaded for one in runs]) / 1e6
    sketched = np.mean([one.sketched for one in runs]) / 1e6
    mean = accuracies.mean()
    return f"{name:30} {in_time:7.1f} {megabytes:8.3f} {sketched:9.3f}  {each}  {mean:6.2f}"


def main() -> None:
    command = parser(__doc__, quick="six rounds of one seed", seeds="0,1,2")
    command.add_argument("--only", choices=sorted(SECTIONS), help="one section alone")
    command.add_argument("--rounds", type=int, default=ROUNDS)
    asked = command.parse_args()
    seeds = seed_list(asked)
    rounds = 6 if asked.quick else asked.rounds
    start, figures = time.process_time(), {}
    for section in [asked.only] if asked.only else SECTIONS:
        print(f"{section}: {rounds} rounds of {COHORT}, seeds {seeds}")
        print(f"{'':30} {'in time':>7} {'MB up':>8} {'sketches':>9}  accuracy %, mean")
        done: Runs = {}
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                for name, found in SECTIONS[section](seed, rounds, Path(folder)).items():
                    done.setdefault(name, []).append(found)
        for name, runs in done.items():
            print(line(name, runs), flush=True)
            for seed, found in zip(seeds, runs, strict=True):
                told = ["-" if each is None else f"{each:.2f}" for each in found.progress]
                if told:
                    print(f"    seed {seed}, progress in probes: {' '.join(told)}")
        figures[section] = {name: [each.figures for each in runs] for name, runs in done.items()}
        save({"rounds": rounds, "seeds": seeds, **figures}, asked.json)
    print(f"{time.process_time() - start:.0f} CPU seconds")


if __name__ == "__main__":
    main()
