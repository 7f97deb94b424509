"""Body bytes that devices upload until a small task reaches an accuracy, method by method.

    python benchmarks/digits_bytes_to_accuracy.py [--quick] [--only WORD] [--json FILE]

scikit-learn's handwritten digits on 100 clients, split by Dirichlet(0.3) over the classes; 10
clients a round, 10 local steps of 16 images, a perceptron of 50,826 parameters. What runs is the
product's own code without its network: RoundPlan, Ledger, Upload and the server's aggregation.
Bytes are `len(body)` over all clients. The accuracy is the mean of three rounds' on the held-out
images. The rows with contexts want numba (the extra `fast`), or minutes each.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products are too small to share

import numpy as np
import numpy.typing as npt
from harness import parser, save, seed_list
from sklearn.datasets import load_digits

from fedpress_client.ledger import Ledger
from fedpress_compression.coding.fields import Layout, Reals, Symbols
from fedpress_compression.compressor import Public, Stateless, compressor, from_config, properties
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Piece, Update
from fedpress_protocols.errors import InvalidUpdate
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, FixedPointTerms, Profile, RoundPlan
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_strategies import from_config as strategy_from_config

CLIENTS, COHORT, ROUNDS = 100, 10, 100
STEPS, BATCH = 10, 16
TEST_IMAGES = 360
TARGETS = (0.90, 0.94)
SMOOTHED = 3
MAX_ABS, MAX_EXAMPLES = 64.0, 4096
HIDDEN = (256, 128)

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RawTopK(Stateless):
    """Top-k as it is often written: a 4-byte index and a 4-byte value for each, nothing coded."""

    fraction: float = 0.01

    def layout(self, spec: ModelSpec) -> Layout:
        return Reals(self._k(spec)), Reals(self._k(spec))

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        where = np.argsort(-np.abs(update), kind="stable")[: self._k(public.spec)]
        where.sort()
        return (where.astype("<f4"), update[where].astype("<f4")), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        values = symbols[1].astype(np.float32)
        return Update(public.spec.size, (Piece(symbols[0].astype(np.int64), values),))

    def _k(self, spec: ModelSpec) -> int:
        return math.ceil(self.fraction * spec.size)


@dataclass(frozen=True)
class Method:
    """A compressor, a strategy and the devices' learning rate, by a name for the table."""

    name: str
    compressor: Config
    strategy: Config
    learning_rate: float = 0.2

    @property
    def kind(self) -> str:
        keeps = properties(from_config(self.compressor)).client_state != "none"
        return "stateful" if keeps else "stateless"


def momentum(factor: float) -> Config:
    return {"id": "fedavgm", "momentum": factor}


def topk(fraction: float, bits: int = 0) -> Config:
    return {"id": "topk", "fraction": fraction, "magnitude_bits": bits}


def feedback(inner: Config) -> Config:
    return {"id": "error_feedback", "inner": inner}


def cafe(inner: Config, factor: float = 0.9, guard: float | None = 2.0) -> Config:
    return {"id": "cafe", "inner": inner, "factor": factor, "guard": guard}


def in_context(inner: Config) -> Config:
    """Through the range coder, which is told where the last step was large."""
    return {"id": "coded", "inner": inner, "contexts": "previous"}


def by_tensor(large: Config) -> Config:
    """8 bits for tensors too small to sparsify, as `fedpress plan` and the demo have it."""
    return {"id": "per_tensor", "large": large}


def bits(number: int) -> Config:
    return feedback({"id": "quantize", "bits": number})


FEDAVG: Config = {"id": "fedavg"}
FLOAT32: Config = {"id": "none"}
RAW: Config = {"id": "benchmark.raw_topk"}
STC: Config = {"id": "stc"}
ECSQ: Config = {"id": "ecsq", "target": 0.05}
EDEN: Config = {"id": "eden", "bits": 1}
LOWRANK: Config = {"id": "lowrank", "rest": {"id": "quantize", "bits": 4}}
POWERSGD: Config = {"id": "powersgd", "rank": 1, "width": 2}
ONE_SIDED: Config = {"id": "powersgd_onesided", "rank": 4}
EF21: Config = {"id": "ef21", "inner": topk(0.01), "participation": COHORT / CLIENTS}
SKETCH: Config = {"id": "count_sketch", "seed": 0}
FETCHSGD: Config = {"id": "fetchsgd", "momentum": 0.0}

# Learning rates and momenta of float32 are the best of 0.05 to 0.5 and of 0 to 0.9; those of the
# others the better of two to four tried.
METHODS = (
    Method("float32, FedAvg", FLOAT32, FEDAVG, 0.3),
    Method("float32, M .8", FLOAT32, momentum(0.8), 0.3),
    Method("8 bits, EF, M .8", bits(8), momentum(0.8), 0.3),
    Method("4 bits, EF, M .8", bits(4), momentum(0.8), 0.3),
    Method("top-k 2 % + 1 bit, EF, M .8", feedback(by_tensor(topk(0.02, 1))), momentum(0.8)),
    Method("top-k 1 % raw, EF", feedback(RAW), FEDAVG),
    Method("top-k 1 % raw, EF, M .8", feedback(RAW), momentum(0.8)),
    Method("stc 1 %, EF", feedback(STC), FEDAVG),
    Method("stc 1 %, EF, M .8", feedback(STC), momentum(0.8)),
    Method("top-k .1 % ternary, M .8", topk(0.001), momentum(0.8)),
    Method("top-k .2 % ternary, M .9", topk(0.002), momentum(0.9), 0.1),
    Method("top-k .1 % ternary, EF, M .8", feedback(topk(0.001)), momentum(0.8), 0.1),
    Method("top-k .2 % ternary, EF, M .8", feedback(topk(0.002)), momentum(0.8), 0.1),
    Method("eden 1 bit, M .8", EDEN, momentum(0.8)),
    Method("ecsq .05 bit, M .8", ECSQ, momentum(0.8)),
    Method("low rank 1, 4 bit, EF, M .8", feedback(LOWRANK), momentum(0.8)),
    Method("low rank 1, 4 bit, CAFe x .9", cafe(LOWRANK), FEDAVG),
    Method("PowerSGD rank 1, EF, M .8", feedback(POWERSGD), momentum(0.8)),
    Method("one-sided PowerSGD rank 4, EF", feedback(ONE_SIDED), FEDAVG),
    Method("count sketch, FetchSGD", SKETCH, FETCHSGD),
    Method("top-k 1 % ternary, EF21", EF21, FEDAVG),
    Method("ecsq .05 bit, CAFe x .9", cafe(ECSQ), FEDAVG),
    Method("stc 1 %, CAFe x .9", cafe(STC), FEDAVG),
    Method("top-k .1 % ternary, CAFe x .9", cafe(topk(0.001)), FEDAVG),
    Method("top-k .1 % ternary, CAFe", cafe(topk(0.001), 1.0), FEDAVG),
    Method("stc 1 %, CAFe x .9, contexts", in_context(cafe(STC)), FEDAVG),
    Method("top-k .1 % ternary, CAFe, contexts", in_context(cafe(topk(0.001), 1.0)), FEDAVG),
    Method(
        "top-k .1 % ternary, EF, M .8, contexts",
        feedback(in_context(topk(0.001))),
        momentum(0.8),
        0.1,
    ),
)


class Images(NamedTuple):
    """`pixels` [n, 64] float32 in [0, 1], `labels` [n]."""

    pixels: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def take(self, rows: npt.NDArray[np.int64]) -> Images:
        return Images(self.pixels[rows], self.labels[rows])


def split(seed: int) -> tuple[Images, list[Images]]:
    """The test images, and each client's own; who got none takes one from who got most."""
    pixels, labels = load_digits(return_X_y=True)
    everything = Images((pixels / 16).astype(np.float32), labels.astype(np.int64))
    rng = np.random.default_rng([1, seed])
    order = rng.permutation(labels.size)
    test, rest = order[:TEST_IMAGES], order[TEST_IMAGES:]
    rows_of: list[list[int]] = [[] for _ in range(CLIENTS)]
    for digit in range(10):
        rows = rest[everything.labels[rest] == digit]
        cuts = (np.cumsum(rng.dirichlet([0.3] * CLIENTS))[:-1] * rows.size).astype(np.int64)
        for mine, part in zip(rows_of, np.split(rows, cuts), strict=True):
            mine.extend(part.tolist())
    for mine in rows_of:
        if not mine:
            mine.append(max(rows_of, key=len).pop())
    return everything.take(test), [everything.take(np.array(mine)) for mine in rows_of]


def first_model(seed: int) -> Model:
    """He's initialisation; 64-256-128-10."""
    rng = np.random.default_rng([2, seed])
    widths = (64, *HIDDEN, 10)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for index, (rows, columns) in enumerate(zip(widths[1:], widths[:-1], strict=True)):
        weight = rng.standard_normal((rows, columns)) * np.sqrt(2 / columns)
        tensors[f"{index}.weight"] = weight.astype(np.float32)
        tensors[f"{index}.bias"] = np.zeros(rows, np.float32)
    return Model.from_tensors(tensors)


def scores(layers: list[npt.NDArray[np.float32]], pixels: npt.NDArray[np.float32]) -> Any:
    """The inputs of every layer, and the outputs of the last."""
    inputs = [pixels]
    for weight, bias in zip(layers[0::2], layers[1::2], strict=True):
        out = inputs[-1] @ weight.T + bias
        inputs.append(np.maximum(out, 0))
    return inputs[:-1], out


def accuracy(model: Model, images: Images) -> float:
    _, out = scores(list(model.tensors().values()), images.pixels)
    return float((out.argmax(axis=1) == images.labels).mean())


def trained(model: Model, images: Images, rate: float, rng: np.random.Generator) -> Vector:
    """The update [size] of STEPS steps of SGD on cross-entropy."""
    flat = model.parameters.copy()
    layers = list(model.spec.unflatten(flat).values())  # views: a step moves `flat`
    order = np.concatenate([rng.permutation(images.labels.size) for _ in range(STEPS * BATCH)])
    size = min(BATCH, images.labels.size)
    for step in range(STEPS):
        batch = images.take(order[step * size : (step + 1) * size])
        inputs, out = scores(layers, batch.pixels)
        out = np.exp(out - out.max(axis=1, keepdims=True))
        error = out / out.sum(axis=1, keepdims=True)
        error[np.arange(size), batch.labels] -= 1
        error /= size
        for index in reversed(range(len(inputs))):
            weight, bias = layers[2 * index], layers[2 * index + 1]
            back = (error @ weight) * (inputs[index] > 0)
            weight -= np.float32(rate) * (error.T @ inputs[index])
            bias -= np.float32(rate) * error.sum(axis=0)
            error = back
    return flat - model.parameters


class Curve(NamedTuple):
    """After each round: bytes uploaded so far, and the accuracy."""

    uploaded: list[int]
    accuracies: list[float]

    def smoothed(self) -> npt.NDArray[np.float64]:
        """The mean over the last SMOOTHED rounds, from the first round that has as many."""
        return np.convolve(self.accuracies, np.ones(SMOOTHED) / SMOOTHED, "valid")

    def bytes_to(self, target: float) -> float:
        """NaN if it was never reached."""
        reached = np.flatnonzero(self.smoothed() >= target)
        return float(self.uploaded[reached[0] + SMOOTHED - 1]) if reached.size else float("nan")

    @property
    def final(self) -> float:
        """The mean over the last ten rounds."""
        return float(np.mean(self.accuracies[-10:]))


class _InMemory(LocalPayloads):
    """The server's files without the disk: a benchmark need not wait for fsync."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._files: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self._files[name] = data

    def get(self, name: str) -> bytes:
        return self._files[name]

    def size(self, name: str) -> int:
        return len(self._files[name])

    def drop(self, name: str) -> None:
        self._files.pop(name, None)


def train(method: Method, seed: int, rounds: int, folder: Path) -> Curve:
    """One federated run, from the first model to the last."""
    test, images = split(seed)
    made, strategy = from_config(method.compressor), strategy_from_config(method.strategy)
    first = first_model(seed)
    payloads = _InMemory(folder)
    payloads.put(model_name(first.digest), first.to_bytes())
    bounds = FixedPoint.widest(max_abs=MAX_ABS, max_weight=MAX_EXAMPLES * COHORT)
    ledgers = [Ledger("digits", f"client-{index}") for index in range(CLIENTS)]
    chosen = np.random.default_rng([3, seed])
    models: dict[str, Model] = {first.digest: first}
    model = before = first.digest
    optimizer_state: str | None = None
    curve, total = Curve([], []), 0
    for number in range(1, rounds + 1):
        plan = RoundPlan(
            task="digits",
            round=number,
            attempt=1,
            model=model,
            spec=first.spec.digest,
            profiles=(Profile(name="only", compressor=made),),
            cohort=CohortRules(size=COHORT, minimum=COHORT),
            deadline=0.0,
            fixed_point=FixedPointTerms(
                scale_bits=bounds.scale_bits, max_abs=MAX_ABS, max_examples=MAX_EXAMPLES
            ),
            public_seed=hashlib.sha256(f"{seed} {number}".encode()).hexdigest(),
            previous_model=before if "previous" in made.needs else None,
            first_model=first.digest if "drift" in made.needs else None,
        )
        terms = RoundTerms(plan, first.spec, payloads)
        cohort = chosen.choice(CLIENTS, COHORT, replace=False)
        staged = []
        for client in map(int, cohort):
            assignment = Assignment(
                assignment=f"{number}-{client}",
                client_id=ledgers[client].client_id,
                plan=plan,
                profile="only",
            )
            update = trained(
                models[model],
                images[client],
                method.learning_rate,
                np.random.default_rng([4, seed, number, client]),
            )
            ledgers[client], body = ledgers[client].prepare(
                assignment,
                update,
                images[client].labels.size,
                first.spec,
                np.random.default_rng([5, seed, number, client]),
                knowledge=terms.public.knowledge,
            )
            if body is None:
                raise InvalidUpdate(f"round {number}: an update beyond the plan's max_abs")
            ledgers[client] = ledgers[client].told()
            name = f"uploads/{assignment.assignment}"
            payloads.put(name, body)
            staged.append(StagedUpload(name, hashlib.sha256(body).hexdigest(), "only"))
            total += len(body)
        result = aggregate(
            AggregationJob(terms, strategy, optimizer_state, tuple(staged)), payloads
        )
        optimizer_state = result.optimizer_state
        before, model = model, result.model
        models = {d: Model.from_bytes(payloads.get(model_name(d))) for d in {before, model}}
        for client, upload in zip(map(int, cohort), staged, strict=True):
            receipt = Receipt(
                assignment=f"{number}-{client}",
                client_id=ledgers[client].client_id,
                task="digits",
                round=number,
                attempt=1,
                outcome="included",
                reason="included",
                upload=upload.digest,
                model=model,
                issued_at=0,
            )
            ledgers[client] = ledgers[client].settle(receipt)
            payloads.drop(upload.name)
        curve.uploaded.append(total)
        curve.accuracies.append(accuracy(models[model], test))
    return curve


def measured(methods: list[Method], seeds: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each method, as it is done."""
    for method in methods:
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            curves = [train(method, seed, rounds, Path(folder)) for seed in seeds]
        reached = {
            f"{target:.2f}": [curve.bytes_to(target) for curve in curves] for target in TARGETS
        }
        yield {
            "name": method.name,
            "kind": method.kind,
            "compressor": method.compressor,
            "strategy": method.strategy,
            "learning_rate": method.learning_rate,
            "bytes_to": reached,
            "final": [curve.final for curve in curves],
            "bits_per_parameter": float(
                np.mean([8 * curve.uploaded[-1] / (rounds * COHORT * 50826) for curve in curves])
            ),
            "cpu_seconds": time.process_time() - start,
            "curves": [curve._asdict() for curve in curves],
        }


def line(row: Mapping[str, Any]) -> str:
    """Megabytes are means over the seeds, `never` if one of them did not arrive."""
    megabytes = []
    for target in TARGETS:
        mean = float(np.mean(row["bytes_to"][f"{target:.2f}"])) / 1e6
        megabytes.append("   never" if np.isnan(mean) else f"{mean:8.3f}")
    final = row["final"]
    return (
        f"{row['name']:44} {row['kind']:9} {row['bits_per_parameter']:8.4f} {' '.join(megabytes)}"
        f" {np.mean(final):8.4f} ±{np.std(final):.4f} {row['cpu_seconds'] / len(final):7.0f}"
    )


def main() -> None:
    command = parser(__doc__, quick="three rounds of one seed: a smoke test", seeds="0,1,2")
    command.add_argument("--only", default="", help="methods whose name holds this")
    command.add_argument("--rounds", type=int, default=ROUNDS)
    asked = command.parse_args()
    compressor("benchmark.raw_topk")(RawTopK)  # here, so that an import registers nothing
    seeds = seed_list(asked)
    rounds = SMOOTHED if asked.quick else asked.rounds
    methods = [method for method in METHODS if asked.only in method.name]
    print(
        f"{CLIENTS} clients, {COHORT} a round, {rounds} rounds, seeds {seeds}; MB of bodies until "
        f"{' and '.join(f'{target:.0%}' for target in TARGETS)}; CPU seconds a run"
    )
    print(f"{'method':44} {'kind':9} {'bit/par':>8} {'to 90%':>8} {'to 94%':>8} {'final':>8}")
    rows = []
    for row in measured(methods, seeds, rounds):
        print(line(row), flush=True)
        rows.append(row)
        save({"rounds": rounds, "seeds": seeds, "rows": rows}, asked.json)


if __name__ == "__main__":
    main()
