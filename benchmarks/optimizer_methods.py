"""Optimizer-coupled methods on the digits task: DGC, 1-bit Adam, 1-bit LAMB, and their warm-ups.

    python benchmarks/optimizer_methods.py [--quick] [--only WORD] [--seeds 0,1,2] [--json FILE]

Each method beside the same optimizer in float32. What runs is the product's own code without its
network: a task's schedule makes the plan of every round, devices keep accounts, the server
aggregates. Bytes are `len(body)` over all clients and rounds; the ratio is float32's bytes over the
method's. DGC is for always-on clients: 10 of them, all in every round. The others have 100, 10 a
round. The accuracy is the mean of the last ten rounds' on the held-out images.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products are too small to share

import numpy as np
from digits_task import SPEC, Digits, first_model
from federation import InMemory
from harness import parser, save, seed_list

from fedpress_client import Ledger
from fedpress_compression.compressor import to_config
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.messages import Assignment, Receipt, TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, RoundPlan
from fedpress_protocols.schedule import Period, sparsity_warm_up
from fedpress_protocols.signatures import DeviceKey
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.aggregation.masked import Host
from fedpress_server.coordination.opening import RoundCarryover, opened
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.signing import SigningKeys
from fedpress_server.storage.files import model_name
from fedpress_strategies import from_config

COHORT, ROUNDS, LAST = 10, 200, 10
NAME = "only"

Config = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A task's strategy, profiles and schedule, by a name for the table; `like` names the method in
    float32 that it is measured against."""

    name: str
    clients: int
    rate: float
    strategy: Config
    compressor: Config
    schedule: tuple[Period, ...] = ()
    like: str = ""


def profile(compressor: Config) -> Config:
    return {"name": NAME, "compressor": compressor}


def period(compressor: Config, **terms: Any) -> Period:
    return Period.model_validate({"profiles": [profile(compressor)], **terms})


FLOAT32: Config = {"id": "none"}
EIGHT_BITS: Config = {"id": "error_feedback", "inner": {"id": "quantize"}}
ONE_BIT: Config = {"id": "error_feedback", "inner": {"id": "sign", "chunk": 1024}}
MOMENTUM: Config = {"id": "fedavgm", "momentum": 0.9}
FEDAVG: Config = {"id": "fedavg"}
DGC = Dgc(TopK(0.002))
SILOS, DEVICES = 10, 100
SGD_RATE, ADAM_RATE = 0.05, 0.1
SERVER_RATES = {"adam": 0.01, "lamb": 0.005}
ALWAYS = period(FLOAT32, rounds=100_000, warms_up=True)


def dgc(name: str, *schedule: Period, method: Dgc = DGC) -> Method:
    return Method(name, SILOS, SGD_RATE, FEDAVG, to_config(method), schedule, "momentum, float32")


def onebit(name: str, optimizer: str, warm_up: Period, compressor: Config = ONE_BIT) -> Method:
    strategy = {"id": f"onebit_{optimizer}", "learning_rate": SERVER_RATES[optimizer]}
    like = "" if warm_up is ALWAYS else f"{optimizer}, float32"
    return Method(name, DEVICES, ADAM_RATE, strategy, compressor, (warm_up,), like)


TENTH = ROUNDS // 10
METHODS = (
    Method("momentum, float32", SILOS, SGD_RATE, MOMENTUM, FLOAT32),
    dgc("DGC, .5 %", method=Dgc(TopK(0.005))),
    dgc("DGC, .2 %, no warm-up"),
    dgc("DGC, .2 %, a tenth in float32", period(FLOAT32, rounds=TENTH)),
    dgc("DGC, .2 %, sparsities by rounds", *sparsity_warm_up(DGC, rounds=TENTH // 4)),
    dgc("DGC, .2 %, sparsities on a budget", *sparsity_warm_up(DGC, budget=0.001)),
    *(
        method
        for optimizer in ("adam", "lamb")
        for method in (
            onebit(f"{optimizer}, float32", optimizer, ALWAYS),
            onebit(
                f"1-bit {optimizer}, a tenth in float32",
                optimizer,
                period(FLOAT32, rounds=TENTH, warms_up=True),
            ),
            onebit(
                f"1-bit {optimizer}, a tenth in 8 bits",
                optimizer,
                period(EIGHT_BITS, rounds=TENTH, warms_up=True),
            ),
            onebit(
                f"1-bit {optimizer}, float32 on a budget",
                optimizer,
                period(FLOAT32, budget=0.0125, warms_up=True),
            ),
            onebit(
                f"1-bit {optimizer}, 8 bits on a budget",
                optimizer,
                period(EIGHT_BITS, budget=0.0125, warms_up=True),
            ),
        )
    ),
)


@dataclass(frozen=True)
class Run:
    """The outcome of a method under one seed."""

    accuracy: float
    uploaded: int
    warm_up_rounds: int
    """Those before the method's own compressor."""
    warm_up_bytes: int


def run(method: Method, seed: int, rounds: int, folder: Path) -> Run:
    """A task from the first model to the last, every plan as the server makes it."""
    digits = Digits.split(seed, method.clients)
    first = Model(SPEC, first_model(seed), {})
    payloads = InMemory(folder)
    payloads.put(model_name(first.digest), first.to_bytes())
    config = TaskConfig(
        task="digits",
        model=first.digest,
        rounds=rounds,
        strategy=method.strategy,
        profiles=(profile(method.compressor),),
        schedule=method.schedule,
        cohort=CohortRules(size=COHORT, minimum=COHORT),
        max_examples=4096,
        seed=seed,
    )
    strategy = from_config(method.strategy)
    key = DeviceKey.from_bytes(bytes(32))
    host = Host(SigningKeys.of(key), Authority("digits", key.public, key))
    ledgers = [Ledger("digits", f"client-{index}") for index in range(method.clients)]
    chosen = np.random.default_rng([seed, 2])
    model, state = first, None
    uploaded: list[int] = []
    warming: list[bool] = []
    accuracies = []
    for number in range(1, rounds + 1):
        attempt = opened(
            config,
            strategy,
            payloads,
            host,
            carryover=replace(
                RoundCarryover.beginning(model.digest, SPEC), uploaded=tuple(uploaded)
            ),
            number=number,
            attempt=1,
            now=0.0,
        )
        cohort = chosen.choice(method.clients, COHORT, replace=False).tolist()
        plan, staged = attempt.terms.plan, []
        for client in cohort:
            rng = np.random.default_rng([seed, number, client])
            update = digits.update(model.parameters, client, rng, method.rate)
            assignment = Assignment(
                assignment=f"a{number}",
                client_id=ledgers[client].client_id,
                plan=plan,
                profile=NAME,
            )
            examples = digits.clients[client].size
            ledgers[client], body = ledgers[client].prepare(assignment, update, examples, SPEC, rng)
            if body is None:
                raise ValueError(f"{method.name}: an update beyond the plan's bound")
            name = f"uploads/{client}"
            payloads.put(name, body)
            staged.append(StagedUpload(name, hashlib.sha256(body).hexdigest(), NAME))
        uploaded.append(sum(len(payloads.get(each.name)) for each in staged))
        warming.append(plan.profiles != config.profiles)
        result = aggregate(AggregationJob(attempt.terms, strategy, state, tuple(staged)), payloads)
        state = result.optimizer_state
        model = Model.from_bytes(payloads.get(model_name(result.model)))
        for client, upload in zip(cohort, staged, strict=True):
            receipt = included(ledgers[client], plan, upload.digest)
            ledgers[client] = ledgers[client].settle(receipt).told()
        accuracies.append(digits.accuracy(model.parameters))
    spent = sum(cost for cost, is_warm in zip(uploaded, warming, strict=True) if is_warm)
    return Run(float(np.mean(accuracies[-LAST:])), sum(uploaded), sum(warming), spent)


def included(ledger: Ledger, plan: RoundPlan, digest: str) -> Receipt:
    return Receipt(
        assignment=f"a{plan.round}",
        client_id=ledger.client_id,
        task=plan.task,
        round=plan.round,
        attempt=plan.attempt,
        outcome="included",
        reason="included",
        upload=digest,
        model=None,
        issued_at=0,
    )


def line(method: Method, runs: Sequence[Run], rounds: int, reference: Sequence[Run]) -> str:
    whole = 4 * SPEC.size * COHORT * rounds
    ratio = whole / np.mean([each.uploaded for each in runs])
    share = np.mean([each.warm_up_bytes for each in runs]) / whole
    warm = np.mean([each.warm_up_rounds for each in runs])
    found = 100 * np.array([each.accuracy for each in runs])
    behind = ""
    if reference:
        behind = f"{found.mean() - 100 * np.mean([each.accuracy for each in reference]):+6.2f}"
    each = " ".join(f"{one:5.2f}" for one in found)
    return f"{method.name:36} {ratio:8.1f} {warm:7.1f} {100 * share:8.3f}   {each}  {behind}"


def main() -> None:
    command = parser(__doc__, quick="four rounds of one seed: a smoke test", seeds="0,1,2")
    command.add_argument("--only", default="", help="methods whose name holds this")
    command.add_argument("--rounds", type=int, default=ROUNDS)
    asked = command.parse_args()
    seeds = seed_list(asked)
    rounds = 4 if asked.quick else asked.rounds
    print(f"{rounds} rounds of {COHORT}, seeds {seeds}; warm-up in rounds and % of float32's bytes")
    print(f"{'method':36} {'ratio':>8} {'warm-up':>7} {'bytes %':>8}   accuracy %, to float32's")
    done: dict[str, list[Run]] = {}
    start = time.process_time()
    for method in METHODS:
        if asked.only not in method.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            done[method.name] = [run(method, seed, rounds, Path(folder)) for seed in seeds]
        print(line(method, done[method.name], rounds, done.get(method.like, [])), flush=True)
        rows = {name: [vars(each) for each in runs] for name, runs in done.items()}
        save({"rounds": rounds, "seeds": seeds, "methods": rows}, asked.json)
    print(f"{time.process_time() - start:.0f} CPU seconds")


if __name__ == "__main__":
    main()
