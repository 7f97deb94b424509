"""How long a fleet of slow and fast devices takes, round by round and asynchronously.

    python benchmarks/asynchronous_fleet.py [--seeds 3] [--tune] [--json FILE]

The digits task of `digits_task.py`: 100 clients, 10 local steps. A client's steps take between 1
and 10 s, log-uniform, always as long on the same client but for 10 % of chance, and nothing to do
with its data; networks and aggregation take no time. At most 20 train at a time by the server's
will (in synchronous rounds those that a round left behind finish their steps besides, at no cost to
it). What runs is the product's own: the round machine with its events, plans, ledgers with error
feedback over top-k 10 %, bodies, aggregation; the clock alone is the simulation's. Time to a target
is when the mean accuracy over 10 s, the model looked at every second, is first above it.

--tune prints every setting that was tried, on seeds of its own; the table is of the best. `counted`
are the uploads in models, `slowest` the share of the slowest quarter of the clients among them,
`MB` the bodies' bytes until the last target.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products are too small to share

import numpy as np
from digits_task import CLIENTS, LOCAL_STEPS, SPEC, Digits, first_model
from federation import InMemory
from harness import parser, save

from fedpress_client import Ledger
from fedpress_protocols.errors import InvalidUpdate
from fedpress_protocols.messages import Assignment, Receipt, TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey
from fedpress_server.aggregation.accumulate import AggregationJob
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.aggregation.masked import Host
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.opening import RoundCarryover, opened
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.signing import SigningKeys
from fedpress_server.rounds import (
    Aggregated,
    ClientCheckedIn,
    Effect,
    Event,
    OpenRound,
    Settle,
    StartAggregation,
    UploadStaged,
)
from fedpress_server.storage.files import model_name, upload_name
from fedpress_strategies import from_config

CONCURRENCY, FASTEST, SPREAD, JITTER = 20, 1.0, 10.0, 0.1
TARGETS = (0.85, 0.9, 0.93)
LOOK, WINDOW, LONGEST = 1.0, 10, 300.0
TUNING_SEEDS = (1000, 1001)
FEEDBACK = {
    "id": "error_feedback",
    "inner": {"id": "topk", "fraction": 0.1, "magnitude_bits": 4},
}
UPDATE_BOUND = 16.0


@dataclass(frozen=True)
class Mode:
    """How the server goes about it. `asynchronous`: buffers of `size`; else rounds for which `size`
    times `over` clients are chosen."""

    name: str
    size: int
    rate: float
    """Of the clients' steps."""
    over: float = 1.0
    asynchronous: bool = False
    strategy: dict[str, Any] = field(default_factory=lambda: {"id": "fedavg"})
    max_staleness: int = 50

    def config(self, model: Model) -> TaskConfig:
        terms = {"concurrency": CONCURRENCY, "max_staleness": self.max_staleness}
        return TaskConfig.model_validate(
            {
                "task": "fleet",
                "model": model.digest,
                "rounds": 2**30,
                "strategy": self.strategy,
                "profiles": [{"name": "one", "compressor": FEEDBACK}],
                "training": {"local_steps": LOCAL_STEPS},
                "cohort": {"size": self.size, "minimum": self.size, "over_selection": self.over},
                "round_seconds": 1e6,
                "max_abs": UPDATE_BOUND,
                "asynchronous": terms if self.asynchronous else None,
                "seed": 0,
            }
        )


@dataclass
class Run:
    """The outcome of one: accuracies by second, and its cost."""

    accuracies: list[float] = field(default_factory=list)
    models: int = 0
    trained: int = 0
    included: int = 0
    of_slow: int = 0
    """Of the included, those of the slowest quarter of the clients."""
    staleness: int = 0
    """Summed over the included."""
    uploaded: int = 0

    def time_to(self, target: float) -> float | None:
        """Seconds; None if it was not reached."""
        if len(self.accuracies) < WINDOW:
            return None
        means = np.convolve(self.accuracies, np.ones(WINDOW), "valid") / WINDOW
        above = np.flatnonzero(means >= target)
        return float((above[0] + WINDOW) * LOOK) if above.size else None


class Simulation:
    """A fleet and its server. The heap has the ends of training, in their order."""

    def __init__(self, mode: Mode, seed: int, folder: Path) -> None:
        self.mode, self.now, self.run = mode, 0.0, Run()
        self.rng = np.random.default_rng([seed, 7])
        self.digits = Digits.split(seed)
        speeds = np.random.default_rng([seed, 8]).uniform(0, np.log(SPREAD), CLIENTS)
        self.seconds = FASTEST * np.exp(speeds)
        self.slow = frozenset(np.argsort(self.seconds)[-CLIENTS // 4 :].tolist())
        self.ledgers = [Ledger("fleet", f"c{index}") for index in range(CLIENTS)]
        self.idle = list(range(CLIENTS))
        self.ends: list[tuple[float, int, int, Assignment]] = []
        self.payloads = InMemory(folder)
        self.model = Model(SPEC, first_model(seed), {})
        self.payloads.put(model_name(self.model.digest), self.model.to_bytes())
        self.config = mode.config(self.model)
        self.strategy = from_config(self.config.strategy, self.config.training)
        self.state: str | None = None
        key = DeviceKey.generate()
        self.host = Host(SigningKeys.of(key), Authority("fleet", key.public, None))
        self.attempt = self._opened(self.model.digest, self.model.digest, 1)

    def go(self, seconds: float) -> Run:
        """Until then or the last target, looking at the model every LOOK seconds."""
        self._call_up()
        for look in np.arange(LOOK, seconds + LOOK / 2, LOOK):
            while self.ends and self.ends[0][0] <= look:
                self.now, _, index, assignment = heapq.heappop(self.ends)
                self._upload(index, assignment)
                self._call_up()
            self.run.accuracies.append(self.digits.accuracy(self.model.parameters))
            if self.run.time_to(TARGETS[-1]) is not None:
                break
        return self.run

    def _call_up(self) -> None:
        """Idle clients check in, in any order, while there are places."""
        self.rng.shuffle(self.idle)
        while self.idle and self.attempt.has_place_for(f"c{self.idle[-1]}"):
            index = self.idle.pop()
            self._apply(ClientCheckedIn(f"c{index}", f"a{self.run.trained}"))
            assignment = self.attempt.assignment_of(f"c{index}")
            assert assignment is not None
            lasts = self.seconds[index] * (1 + JITTER * self.rng.uniform(-1, 1))
            due = (self.now + float(lasts), self.run.trained, index, assignment)
            heapq.heappush(self.ends, due)
            self.run.trained += 1

    def _upload(self, index: int, assignment: Assignment) -> None:
        """The client's steps are done: its update goes through its ledger, and out if it may."""
        plan, name = assignment.plan, assignment.assignment
        begun = Model.from_bytes(self.payloads.get(model_name(plan.model))).parameters
        update = self.digits.update(begun, index, self.rng, self.mode.rate)
        examples = min(self.digits.clients[index].size, self.config.max_examples)
        ledger, body = self.ledgers[index].prepare(assignment, update, examples, SPEC, self.rng)
        assert body is not None
        self.ledgers[index] = ledger.told()
        self.idle.append(index)
        if not self.attempt.takes_upload(name, self.now):
            self._settle(plan.round, plan.attempt, Settle(name, "round-full", None), index)
            return
        digest = hashlib.sha256(body).hexdigest()
        key = (plan.task, plan.round, plan.attempt)
        self.payloads.put(upload_name(key, name, digest), body)
        self.run.uploaded += len(body)
        self._apply(UploadStaged(name, digest))

    def _apply(self, event: Event) -> None:
        before = self.attempt
        self.attempt, effects = before.after(event, self.now)
        assert effects, f"{event} in {before.round.phase}"
        self._follow(effects)
        if StartAggregation() in effects:
            self._aggregate()

    def _follow(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Settle) and effect.upload is not None:
                _, number, attempt = self.attempt.key_of(effect.assignment)
                part = self.attempt.round.parts[effect.assignment]
                if effect.reason == "included":
                    self.run.included += 1
                    self.run.of_slow += int(part.client_id[1:]) in self.slow
                    self.run.staleness += self.attempt.round.staleness(part)
                self._settle(number, attempt, effect, int(part.client_id[1:]))

    def _aggregate(self) -> None:
        """The next model, and the attempt that begins with it."""
        full = self.attempt
        job = AggregationJob(full.terms, self.strategy, self.state, full.staged)
        result = aggregate(job, self.payloads)
        self.state = result.optimizer_state
        before, self.model = (
            self.model,
            Model.from_bytes(self.payloads.get(model_name(result.model))),
        )
        self.run.models += 1
        self.attempt, effects = full.after(Aggregated(result.model), self.now)
        self._follow(effects)
        opening = next(each for each in effects if isinstance(each, OpenRound))
        follows = self._opened(result.model, before.digest, opening.number)
        if opening.opening is not None:
            follows, begun = follows.taking_over(self.attempt, opening.opening, self.now)
            self.attempt = follows
            self._follow(begun)
        self.attempt = follows

    def _opened(self, model: str, previous: str, number: int) -> Attempt:
        return opened(
            self.config,
            self.strategy,
            self.payloads,
            self.host,
            carryover=RoundCarryover(model, SPEC, previous),
            number=number,
            attempt=1,
            now=self.now,
        )

    def _settle(self, number: int, attempt: int, settled: Settle, index: int) -> None:
        is_in = settled.reason == "included"
        receipt = Receipt(
            assignment=settled.assignment,
            client_id=f"c{index}",
            task="fleet",
            round=number,
            attempt=attempt,
            outcome="included" if is_in else "not-included",
            reason=settled.reason,
            upload=settled.upload,
            model=None,
            issued_at=int(self.now),
        )
        self.ledgers[index] = self.ledgers[index].settle(receipt).told()


def simulated(mode: Mode, seed: int, seconds: float = LONGEST) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        return Simulation(mode, seed, Path(folder)).go(seconds)


def synchronous(size: int, over: float, rate: float, server: float) -> Mode:
    name = f"rounds, over-selection {over:g}" if over > 1 else "rounds"
    strategy = {"id": "fedavg", "learning_rate": server}
    return Mode(name, size, rate, over, strategy=strategy)


def buffered(size: int, rate: float, server: float) -> Mode:
    strategy = {"id": "fedbuff", "learning_rate": server}
    return Mode("fedbuff", size, rate, asynchronous=True, strategy=strategy)


def mixing(share: float, rate: float) -> Mode:
    strategy = {"id": "fedasync", "mixing": share}
    return Mode("fedasync", 1, rate, asynchronous=True, strategy=strategy)


def tried() -> Iterator[Mode]:
    """The settings among which the best is chosen, for each name; the same rates for all."""
    for rate in (0.2, 0.4, 0.8):
        for server in (1.0, 2.0):
            for size, over in ((10, 1.0), (20, 1.0), (10, 1.3), (15, 1.3), (10, 2.0)):
                yield synchronous(size, over, rate, server)
            for size in (3, 5, 10):
                yield buffered(size, rate, server)
        for share in (0.1, 0.3, 0.6):
            yield mixing(share, rate)


CHOSEN = (
    synchronous(20, 1.0, 0.4, 2.0),
    synchronous(15, 1.3, 0.4, 2.0),
    synchronous(10, 2.0, 0.4, 1.0),
    buffered(5, 0.4, 1.0),
    mixing(0.6, 0.4),
)
"""The best of each name by the mean time to the last target on TUNING_SEEDS."""


def described(mode: Mode) -> str:
    settings = {k: v for k, v in mode.strategy.items() if k != "id"}
    return f"size {mode.size}, rate {mode.rate:g}, " + ", ".join(
        f"{name.replace('_', ' ')} {value:g}" for name, value in settings.items()
    )


def mean_time(runs: list[Run], target: float) -> float | None:
    """None unless every run reached it."""
    times = [run.time_to(target) for run in runs]
    reached = [time for time in times if time is not None]
    return float(np.mean(reached)) if len(reached) == len(times) else None


def tune() -> None:
    """Print what every setting takes to each target, on seeds that no table uses."""
    for mode in tried():
        try:
            runs = [simulated(mode, seed) for seed in TUNING_SEEDS]
            times = "  ".join(_seconds(mean_time(runs, target)) for target in TARGETS)
        except InvalidUpdate:
            times = f"diverges: an update goes beyond {UPDATE_BOUND:g}"
        print(f"{mode.name:26} {described(mode):40} {times}", flush=True)


def table(seeds: int) -> list[dict[str, Any]]:
    rows = []
    for mode in CHOSEN:
        runs = [simulated(mode, seed) for seed in range(seeds)]
        included = sum(run.included for run in runs)
        rows.append(
            {
                "mode": mode.name,
                "settings": described(mode),
                "seconds": {str(target): mean_time(runs, target) for target in TARGETS},
                "each": [run.time_to(TARGETS[-1]) for run in runs],
                "models": float(np.mean([run.models for run in runs])),
                "trained": float(np.mean([run.trained for run in runs])),
                "included": included / seeds,
                "of_slowest_quarter": sum(run.of_slow for run in runs) / included,
                "staleness": sum(run.staleness for run in runs) / included,
                "megabytes": float(np.mean([run.uploaded for run in runs])) / 1e6,
            }
        )
    return rows


def _seconds(time: float | None) -> str:
    return f"{'-' if time is None else format(time, '.0f') + ' s':>6}"


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--tune", action="store_true")
    asked = command.parse_args()
    if asked.tune:
        tune()
        return
    rows = table(asked.seeds)
    heads = "  ".join(f"{format(target, '.0%'):>6}" for target in TARGETS)
    print(f"{'':26} {'best settings':40} {heads}  models trained counted slowest stale   MB")
    for row in rows:
        times = "  ".join(map(_seconds, row["seconds"].values()))
        costs = f"{row['models']:6.0f} {row['trained']:7.0f} {row['included']:7.0f}"
        shares = f"{row['of_slowest_quarter']:7.0%} {row['staleness']:5.1f} {row['megabytes']:4.1f}"
        print(f"{row['mode']:26} {row['settings']:40} {times}  {costs} {shares}")
    save(rows, asked.json)


if __name__ == "__main__":
    main()
