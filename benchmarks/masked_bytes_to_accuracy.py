"""Body bytes that devices upload under masks until a task reaches an accuracy, method by method.

    python benchmarks/masked_bytes_to_accuracy.py [--task digits] [--only WORD] [--json FILE]
    python benchmarks/masked_bytes_to_accuracy.py --task fashion --data FOLDER
    python benchmarks/masked_bytes_to_accuracy.py --task vowel --data FOLDER [--tuned]

`digits`: a perceptron of 50,826 parameters, 100 clients split by Dirichlet(0.3), 20 a round.
`fashion`: a convolutional network of 106,122, Dirichlet(0.1), 10 a round; it wants torch and the
folder of the four files of Fashion-MNIST. The tasks of accuracy_tasks.py (`vowel`, `satellite`,
`letters`, `fashion .1`, `fashion .5`, and the digits with 10 a round as `digits 10`) compare the
default of a masked task with float32, at the task's own learning rate or, with `--tuned`, at the
one that is FedAvg's best. In each round a tenth of the cohort drops out, whose updates go back to
their residuals; their bodies are counted as if they had been sent.

What runs is the product's own code without its network: RoundPlan, Ledger, Payload, Packing and the
strategy. Masks are left out, since they cancel exactly in the sum that is taken here. Bytes are
`len(body)`; what a session costs besides (keys, shares, signatures; see `session_bytes`) is beside
it. Each method is measured on the newest model and on the average of the models that the strategy
`ema` keeps, which costs no upload (0.9 of it stays in a round). The target is where the newest
models of float32 FedAvg end, less a margin; a figure is the mean over the seeds, `never` if one of
them did not arrive.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products are too small to share

import digits_task
import numpy as np
import numpy.typing as npt
from harness import parser, save, seed_list

if TYPE_CHECKING:
    import accuracy_tasks

from fedpress_client.ledger import Ledger
from fedpress_compression.compressor import Compressor, Public, from_config
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_protocols.defaults import masked_default, strategy_for
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.messages import AVERAGE, Assignment, Receipt
from fedpress_protocols.model import Model
from fedpress_protocols.plan import (
    CohortRules,
    FixedPointTerms,
    MaskingTerms,
    Profile,
    RoundPlan,
    TrainingTerms,
)
from fedpress_strategies import from_config as strategy_from_config
from fedpress_strategies.strategy import published

DROPPED, SMOOTHED, LAST = 0.1, 3, 5
MAX_ABS, MAX_EXAMPLES = 64.0, 4096

Config = Mapping[str, Any]


class Data(Protocol):
    """A task split among its clients."""

    @property
    def clients(self) -> tuple[npt.NDArray[np.int64], ...]: ...

    def update(
        self,
        model: Vector,
        client: int,
        rng: np.random.Generator,
        rate: float,
        support: npt.NDArray[np.int64] | None,
    ) -> Vector: ...

    def accuracy(self, model: Vector) -> float: ...


class Task(NamedTuple):
    """`margin` is what a method may lose against float32 FedAvg; accuracy is measured `every` so
    many rounds."""

    data: Data
    spec: ModelSpec
    first: Vector
    cohort: int
    rounds: int
    every: int
    margin: float
    decay: float = 0.9
    """Of the average."""
    rate: float = 0.0
    """The task's own learning rate, which untuned methods have."""


class Table:
    """A task of accuracy_tasks.py as `Data`."""

    def __init__(self, task: accuracy_tasks.Task) -> None:
        self._task, self._model = task, Model.from_bytes(task.first_model.to_bytes())
        self.clients = tuple(task.clients)

    def update(
        self,
        model: Vector,
        client: int,
        rng: np.random.Generator,
        rate: float,
        support: npt.NDArray[np.int64] | None,
    ) -> Vector:
        before = self._model.with_parameters(model)
        return self._task.update(before, client, rng, rate, support)

    def accuracy(self, model: Vector) -> float:
        return self._task.measure(self._model.with_parameters(model))[0]


def task_of(name: str, folder: Path | None, seed: int, *, is_tuned: bool = False) -> Task:
    if name == "digits":
        digits = digits_task.Digits.split(seed)
        return Task(digits, digits_task.SPEC, digits_task.first_model(seed), 20, 150, 1, 0.015)
    if name != "fashion":
        import accuracy_tasks
        from accuracy_vs_bytes import TUNED

        name = name.removesuffix(" 10")
        made = accuracy_tasks.made(name, folder or Path("data"), seed)
        made.rate *= TUNED[name] if is_tuned else 1.0
        first = Model.from_bytes(made.first_model.to_bytes())
        decay = strategy_for(made.rounds)["decay"]
        return Task(
            *(Table(made), first.spec, first.parameters, made.cohort, made.rounds, 3, 0.005),
            *(decay, made.rate),
        )
    import fashion_task  # torch, which only this task wants

    if folder is None:
        raise SystemExit("--task fashion wants --data")
    fashion = fashion_task.Fashion.split(folder, seed)
    return Task(fashion, fashion_task.SPEC, fashion_task.first_model(seed), 10, 99, 3, 0.005)


@dataclass(frozen=True)
class Method:
    """A compressor, a strategy and the devices' learning rate, by a name for the table; `masking`
    None is the clear lane."""

    name: str
    compressor: Config
    strategy: Config | None
    """None: that of a masked task by default."""
    rate: float
    masking: Config | None = field(default_factory=dict)
    restricted: bool = False
    shares: tuple[float, float] | None = None
    """Of a support, in the first round and in the last; from one to the next a constant factor."""

    def made(self, progress: float) -> Compressor[Any]:
        """The compressor when `progress` of the rounds, 0 to 1, are over."""
        if self.shares is None:
            return from_config(self.compressor)
        first, last = self.shares
        return from_config(with_small(support(first * (last / first) ** progress)))


def momentum(factor: float, rate: float = 1.0) -> Config:
    return {"id": "fedavgm", "momentum": factor, "learning_rate": rate}


def support(fraction: float, explore: float = 0.1) -> Config:
    return {"id": "shared_support", "fraction": fraction, "explore": explore}


def with_small(large: Config) -> Config:
    """`large` for the matrices, and every value of the tensors of less than 1024."""
    return {"id": "per_tensor", "large": large, "small": DENSE}


def feedback(inner: Config) -> Config:
    return {"id": "error_feedback", "inner": inner}


FEDAVG: Config = {"id": "fedavg"}
FLOAT32: Config = {"id": "none"}
DENSE: Config = {"id": "quantize", "clip": 0.1}
ONE_SIDED: Config = {"id": "powersgd_onesided", "rank": 4}
RANDOM: Config = {"id": "randomk", "fraction": 0.05, "bits": 8}

W32: Config = {"max_weight": 32}
FINE: Config = {"levels": 102, "first_range": 0.05}
NINE: Config = {"levels": 4, "first_range": 0.05}
SEVEN: Config = {"levels": 3, "headroom": 6.0, "first_range": 0.05}
FIVE: Config = {"levels": 2, "headroom": 5.0, "first_range": 0.05}
WIDE: Config = {"levels": 1000, "headroom": 64.0, "first_range": 1.0}

# The rows are the best of each kind that was tried on one seed; docs/bench-masked.md says what was.
METHODS: dict[str, tuple[Method, ...]] = {
    "digits": (
        Method("float32, FedAvg", FLOAT32, FEDAVG, 0.5, None),
        Method("float32, M .8", FLOAT32, momentum(0.8), 0.3, None),
        Method("5 %, EF", feedback(support(0.05)), FEDAVG, 0.3),
        Method("5 %, EF, M .8", feedback(support(0.05)), momentum(0.8), 0.2),
        Method("5 %, EF, M .8, by examples", feedback(support(0.05)), momentum(0.8), 0.2, W32),
        Method("5 %, restricted, M .8", support(0.05), momentum(0.8), 0.3, {}, True),
        Method(
            "5 % + small, restricted, M .8, 9 levels",
            with_small(support(0.05)),
            momentum(0.8),
            0.3,
            NINE,
            True,
        ),
        Method(
            "2 % + small, restricted, M .8, 7 levels",
            with_small(support(0.02)),
            momentum(0.8),
            0.3,
            SEVEN,
            True,
        ),
        Method("random 5 %, EF, M .8", feedback(RANDOM), momentum(0.8), 0.2),
        Method("rank 4, EF, M .8", feedback(ONE_SIDED), momentum(0.8), 0.2, WIDE),
        Method("all, M .8, 5 levels", DENSE, momentum(0.8), 0.3, FIVE),
    ),
    "fashion": (
        Method("float32, FedAvg", FLOAT32, FEDAVG, 0.05, None),
        Method("float32, M .8", FLOAT32, momentum(0.8), 0.05, None),
        Method(
            "4 % + small, restricted, M .8, 9 levels",
            with_small(support(0.04)),
            momentum(0.8),
            0.15,
            NINE,
            True,
        ),
        Method(
            "1 % + small, restricted, M .7, 7 levels",
            with_small(support(0.01)),
            momentum(0.7),
            0.3,
            SEVEN,
            True,
        ),
        Method(
            "2.5 % + small, restricted, M .7, 7 levels",
            with_small(support(0.025)),
            momentum(0.7),
            0.2,
            SEVEN,
            True,
        ),
        Method("5 %, restricted, M .8, 205 levels", support(0.05), momentum(0.8), 0.1, FINE, True),
        Method("5 %, EF, M .8, 205 levels", feedback(support(0.05)), momentum(0.8), 0.05, FINE),
        Method("all, M .8, 5 levels", DENSE, momentum(0.8), 0.05, FIVE),
    ),
}


_PROFILE, _TERMS = masked_default(is_restricted=True)
_WHOLE, _DENSE = masked_default(is_restricted=False)
_OWN = 0.0
"""The learning rate of methods that have the task's own."""
UNTUNED: tuple[Method, ...] = (
    Method("float32, FedAvg", FLOAT32, FEDAVG, _OWN, None),
    Method("float32, M .8", FLOAT32, momentum(0.8), _OWN, None),
    Method("default", _PROFILE["compressor"], None, _OWN, _TERMS, True),
    Method("default, not restricted", _WHOLE["compressor"], None, _OWN, _DENSE),
)
_BEFORE: tuple[Config, float, Config, bool] = (momentum(0.8), _OWN, _TERMS, True)
"""Of an earlier default, which took a tenth of its support at random."""
UNTUNED += (
    Method("a tenth drawn, rate 1", with_small(support(0.05)), *_BEFORE),
    Method("half drawn, rate 1", with_small(support(0.05, 0.5)), *_BEFORE),
    Method("rate 1", _PROFILE["compressor"], *_BEFORE),
    # Both send as much in all as 5 % throughout, by 2 in 100.
    Method("8 to 3 %, a tenth drawn, rate 1", {}, *_BEFORE, (0.08, 0.03)),
    Method("3 to 8 %, a tenth drawn, rate 1", {}, *_BEFORE, (0.03, 0.08)),
)
UNTUNED_TASKS = ("digits 10", "vowel", "satellite", "letters", "fashion .1", "fashion .5")
METHODS |= dict.fromkeys(UNTUNED_TASKS, UNTUNED)


def session_bytes(n: int, malicious: bool = True) -> int:
    """The bytes of a client in a session of `n` besides its body, in a complete graph: keys and
    signature, a sealed pair of shares and a share for every other, consent, and the reveal's head.
    """
    return 208 + (n - 1) * 100 + 160 * malicious + (n - 1) * 44


class Curve(NamedTuple):
    """After each measurement: the round, body bytes and session bytes so far, and accuracies of the
    newest model and of the average."""

    rounds: list[int]
    bodies: list[int]
    sessions: list[int]
    newest: list[float]
    averaged: list[float]

    def bytes_to(self, target: float, of: str) -> tuple[float, float]:
        """Of bodies, and with sessions; NaN if `target` was not reached."""
        smoothed = np.convolve(getattr(self, of), np.ones(SMOOTHED) / SMOOTHED, "valid")
        reached = np.flatnonzero(smoothed >= target)
        if not reached.size:
            return math.nan, math.nan
        at = int(reached[0]) + SMOOTHED - 1
        return float(self.bodies[at]), float(self.bodies[at] + self.sessions[at])

    def final(self, of: str) -> float:
        """The mean of the last measurements."""
        return float(np.mean(getattr(self, of)[-LAST:]))


class Server:
    """The newest model, how it came about, and the average of all."""

    def __init__(self, task: Task, method: Method, seed: int, rounds: int) -> None:
        self.task, self.method, self.seed, self.rounds = task, method, seed, rounds
        usual = strategy_for(rounds, task.cohort, is_masked=True, is_restricted=method.restricted)
        inner = usual["inner"] if method.strategy is None else method.strategy
        averaged = {"id": "ema", "decay": task.decay, "inner": inner}
        self.optimizer = strategy_from_config(averaged).optimizer
        self.parameters = task.first
        self.previous = np.zeros(task.spec.size, np.float32)
        self.state = self.optimizer.init(task.first)
        self.round = 0

    def plan(self) -> RoundPlan:
        """The next round's."""
        self.round += 1
        task, method = self.task, self.method
        progress = (self.round - 1) / max(self.rounds - 1, 1)
        bounds = FixedPoint.widest(max_abs=MAX_ABS, max_weight=MAX_EXAMPLES * task.cohort)
        model = hashlib.sha256(self.parameters.tobytes()).hexdigest()
        return RoundPlan(
            task="benchmark",
            round=self.round,
            attempt=1,
            model=model,
            spec=task.spec.digest,
            lane="clear" if method.masking is None else "masked",
            masking=None if method.masking is None else MaskingTerms(**method.masking),
            profiles=(Profile(name="only", compressor=method.made(progress)),),
            training=TrainingTerms(restricted=method.restricted),
            cohort=CohortRules(size=task.cohort, minimum=3),
            deadline=0.0,
            fixed_point=FixedPointTerms(
                scale_bits=bounds.scale_bits, max_abs=MAX_ABS, max_examples=MAX_EXAMPLES
            ),
            public_seed=hashlib.sha256(f"{self.seed} {self.round}".encode()).hexdigest(),
            previous_model=model,  # any will do: what it gives is handed over below
        )

    def public(self, plan: RoundPlan) -> Public:
        return plan.public(self.task.spec, {"previous": self.previous})

    def apply(self, delta: npt.NDArray[np.float64]) -> None:
        before = self.parameters
        self.parameters, self.state = self.optimizer.apply(before, delta, self.state)
        self.previous = self.parameters - before

    @property
    def average(self) -> Vector:
        return published(self.optimizer, self.state)[AVERAGE]


def mean_of(plan: RoundPlan, public: Public, ledgers: list[Ledger], key: str) -> Any:
    """The mean update of the pendings under `key`: from the sum of their bodies in the masked lane,
    from what each decodes to in the clear."""
    pendings = [ledger.pending[key] for ledger in ledgers]
    if plan.lane == "clear":
        weight = sum(held.num_examples for held in pendings)
        return sum(held.num_examples / weight * held.update.dense() for held in pendings)
    payload = Payload(plan, public)
    words = np.zeros(payload.packing.num_words, np.uint64)
    for held in pendings:
        words += payload.packing.from_bytes(held.body)
    aggregate = payload.decompress(payload.packing.unpack(words), len(pendings))
    return aggregate.mean.dense().astype(np.float64)


def train(task: Task, method: Method, seed: int, rounds: int) -> Curve:
    """One federated run, from the first model to the last."""
    server = Server(task, method, seed, rounds)
    ledgers = [Ledger("benchmark", f"client-{i}") for i in range(len(task.data.clients))]
    chance, rate = np.random.default_rng([3, seed]), method.rate or task.rate
    curve, bodies, sessions = Curve([], [], [], [], []), 0, 0
    for number in range(1, rounds + 1):
        plan = server.plan()
        public, key = server.public(plan), f"round-{number}"
        may_move = plan.support("only", task.spec, public)
        cohort = chance.choice(len(ledgers), task.cohort, replace=False).tolist()
        staying = cohort[: math.floor((1 - DROPPED) * task.cohort)]
        for client in cohort:
            assignment = Assignment(
                assignment=key, client_id=ledgers[client].client_id, plan=plan, profile="only"
            )
            private = np.random.default_rng([4, seed, number, client])
            ledger, body = ledgers[client].prepare(
                assignment,
                task.data.update(server.parameters, client, private, rate, may_move),
                task.data.clients[client].size,
                task.spec,
                private,
                knowledge={"previous": server.previous},
                secret=private.bytes(48),
            )
            assert body is not None
            bodies += len(body)
            if plan.lane == "masked":
                ledger = ledger.masked(key, "0" * 64, body)
                sessions += session_bytes(task.cohort)
            ledgers[client] = ledger.told()
        server.apply(mean_of(plan, public, [ledgers[client] for client in staying], key))
        for client in cohort:
            is_in = client in staying
            receipt = Receipt(
                assignment=key,
                client_id=ledgers[client].client_id,
                task="benchmark",
                round=number,
                attempt=1,
                outcome="included" if is_in else "not-included",
                reason="included" if is_in else "dropped-out",
                upload=ledgers[client].pending[key].digest,
                model=None,
                issued_at=0,
            )
            ledgers[client] = ledgers[client].settle(receipt).told()
        if number % task.every == 0:
            curve.rounds.append(number)
            curve.bodies.append(bodies)
            curve.sessions.append(sessions)
            curve.newest.append(task.data.accuracy(server.parameters))
            curve.averaged.append(task.data.accuracy(server.average))
    return curve


def measured(
    methods: tuple[Method, ...], tasks: Mapping[int, Task], rounds: int
) -> Iterator[dict[str, Any]]:
    """One row for each method, as it is done; the first is what the others are measured by."""
    targets: dict[str, list[float]] = {}
    for method in methods:
        start = time.process_time()
        curves = [train(task, method, seed, rounds) for seed, task in tasks.items()]
        margin = next(iter(tasks.values())).margin
        targets = targets or {
            of: [curve.final("newest") - margin for curve in curves]
            for of in ("newest", "averaged")
        }
        yield {
            **vars(method),
            "targets": targets,
            "final": {of: [curve.final(of) for curve in curves] for of in targets},
            "bytes_to": {
                of: [curve.bytes_to(at, of) for curve, at in zip(curves, each, strict=True)]
                for of, each in targets.items()
            },
            "bytes": [curve.bodies[-1] for curve in curves],
            "cpu_seconds": (time.process_time() - start) / len(curves),
            "curves": [curve._asdict() for curve in curves],
        }


def line(row: Mapping[str, Any], first: Mapping[str, Any], best: Mapping[str, float]) -> str:
    """Megabytes to the target, and how many times less than float32 FedAvg and the best float32."""
    cells = [f"{row['name']:44}"]
    for of in ("newest", "averaged"):
        bodies, both = np.mean(row["bytes_to"][of], axis=0)
        begun = np.mean(first["bytes_to"][of], axis=0)[0]
        cells.append(f"{np.mean(row['final'][of]):7.4f} ±{np.std(row['final'][of]):.4f}")
        if np.isnan(bodies):
            cells.append(f"{'never':>8}" + " " * 18)
        else:
            ratios = (begun / bodies, best[of] / bodies, begun / both)
            cells.append(f"{bodies / 1e6:8.3f}" + "".join(f"{ratio:5.0f}x" for ratio in ratios))
    return " ".join([*cells, f"{np.mean(row['bytes']) / 1e6:9.3f} {row['cpu_seconds']:6.0f}"])


def main() -> None:
    command = parser(__doc__, quick="nine rounds of one seed: a smoke test", seeds="0,1,2")
    command.add_argument("--task", choices=sorted(METHODS), default="digits")
    command.add_argument("--data", type=Path, help="the folder of Fashion-MNIST's four files")
    command.add_argument("--only", default="", help="methods that this pattern fits, and the first")
    command.add_argument("--rounds", type=int, help="of each run")
    command.add_argument(
        "--tuned", action="store_true", help="at FedAvg's best learning rate, of untuned methods"
    )
    asked = command.parse_args()
    seeds = seed_list(asked)
    tasks = {seed: task_of(asked.task, asked.data, seed, is_tuned=asked.tuned) for seed in seeds}
    rounds = asked.rounds or (9 if asked.quick else tasks[seeds[0]].rounds)
    first, *others = METHODS[asked.task]
    methods = (first, *(method for method in others if re.search(asked.only, method.name)))
    cohort = tasks[seeds[0]].cohort
    print(
        f"{asked.task}: {cohort} clients a round, {DROPPED:.0%} drop out, {rounds} rounds, seeds "
        f"{seeds}; for the newest model and for the average: the end, MB of bodies to float32 "
        f"FedAvg's end less {100 * tasks[seeds[0]].margin:.1f} points, how many times less than "
        f"FedAvg's and than the best float32's, and than FedAvg's with the session's "
        f"{session_bytes(cohort)} bytes; MB in all; CPU seconds a run"
    )
    rows: list[dict[str, Any]] = []
    best = {"newest": math.nan, "averaged": math.nan}
    for row in measured(methods, tasks, rounds):
        rows.append(row)
        if row["masking"] is None:
            reached = {of: float(np.mean(row["bytes_to"][of], axis=0)[0]) for of in best}
            best = {of: float(np.fmin(best[of], reached[of])) for of in best}
        print(line(row, rows[0], best), flush=True)
        save({"rounds": rounds, "seeds": seeds, "rows": rows}, asked.json)


if __name__ == "__main__":
    main()
