"""Accuracy of private tasks, lane by lane and epsilon by epsilon, with bytes.

    python benchmarks/private_accuracy.py [--epsilons 2,4,8] [--seeds 0,1] [--json FILE]
    python benchmarks/private_accuracy.py --data FOLDER --json FILE     # Fashion-MNIST, too
    python benchmarks/private_accuracy.py --json FILE --table           # of what has been run
    python benchmarks/private_accuracy.py --json FILE --table --plot FILE.svg

With --json a run that has been stopped goes on, and what has been run is not run again.

A softmax regression of 650 parameters on digits, split at random among 200 devices of
seven images each, which take part 8 times: all of them in each of 8 rounds or, where the noise is
correlated and once without that, a quarter of them in each of 32, so that a device rests for three
rounds. Where few bits are sent, at a seventh of the coordinates, all take part in 110 rounds.
Delta is 1e-5, one device the unit.
The noise is the least that the epsilon allows. A method has one clip for all epsilons. On the
digits it is the same for all, but where it is a tenth of that, once for good and once to adapt
from; a quarter where a quarter of the devices are in a round; and smaller where coordinates are
few, so that their norm is. There is no error feedback: under so much noise, and with updates beyond
the clip, it makes all of them worse.

FOLDER/fashion_mnist has the four files of Fashion-MNIST. Their images, halved to 14 by 14 pixels,
are learnt by a regression of 1,970 parameters on 200 devices of 100 images each, tested on the
10,000 that no device has. There a seventh of the coordinates is sent in each of 57 rounds. The
clips of the lanes "central" and "distributed" are chosen on a split of the training images by
benchmarks/private_settings.py. The other clips, the steps and the rate are from an earlier
simulation there, in proportion as on the digits to a clip of 1.

What runs is the product's own code without its network: RoundPlan, Ledger, Payload and the server's
sums with their noise. Masks are left out, since they cancel exactly in the sum that is taken here.
Noise is drawn from the system's randomness: a run again differs by chance.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products are too small to share

import numpy as np
import numpy.typing as npt
from federation import InMemory
from harness import parser, save, seed_list
from sklearn.datasets import load_digits

from fedpress.plotting import SUFFIXES
from fedpress.plotting import save as save_figure
from fedpress_client.ledger import Ledger
from fedpress_compression.fixed_point import FINEST_BITS, FixedPoint
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.plan import (
    AdaptiveClip,
    CohortRules,
    FixedPointTerms,
    MaskingTerms,
    PrivacyTerms,
    Profile,
    RoundPlan,
)
from fedpress_protocols.privacy import accounting, correlated
from fedpress_protocols.privacy.accounting import PrivacyLane, SharedNoise
from fedpress_protocols.upload import WITHIN_CLIP
from fedpress_server.aggregation.accumulate import (
    AggregationJob,
    StagedUpload,
    Summed,
    sum_uploads,
)
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_strategies.fedavg import FEDAVG
from fedpress_strategies.private import NoisedSum
from fedpress_strategies.strategy import AggregationSpace

TIMES, DELTA = 8, 1e-5
SEPARATION = 4
SEVENTH = {"id": "shared_support", "fraction": 0.14, "explore": 1.0}


class Settings(NamedTuple):
    """Of a task: the `clip` where all devices are in a round, a `quarter` of them, where a
    `seventh` of the parameters is sent, over `many` rounds, or each device adds its own noise,
    `alone`; and the `steps` of a device's training at their `rate`."""

    clip: float
    quarter: float
    seventh: float
    alone: float
    many: int
    steps: int
    rate: float


Rows = npt.NDArray[np.int64]


class Method(NamedTuple):
    name: str
    lane: PrivacyLane | None
    compressor: Mapping[str, Any]
    clip: float
    separation: int = 1
    is_correlated: bool = False
    is_adaptive: bool = False
    times: int = TIMES
    noise: SharedNoise = "skellam"

    @property
    def rounds(self) -> int:
        return self.times * self.separation


def methods_of(own: Settings) -> tuple[Method, ...]:
    dense, clip, quarter = {"id": "quantize", "clip": own.alone / 4}, own.clip, own.quarter
    of_all, tenth = "central, correlated, a quarter a round", own.clip / 10
    return (
        Method("without noise", None, dense, clip),
        Method("central", "central", dense, clip),
        Method("central, a quarter a round", "central", dense, quarter, SEPARATION),
        Method(of_all, "central", dense, quarter, SEPARATION, is_correlated=True),
        Method("central, a tenth of the clip", "central", dense, tenth),
        Method("central, adaptive from a tenth", "central", dense, tenth, is_adaptive=True),
        Method("distributed, Skellam", "distributed", dense, clip),
        Method("distributed", "distributed", dense, clip, noise="discrete_gaussian"),
        Method(
            "distributed, a seventh sent",
            "distributed",
            SEVENTH,
            own.seventh,
            times=own.many,
            noise="discrete_gaussian",
        ),
        Method("local", "local", dense, own.alone),
    )


class Data(NamedTuple):
    """Images [n, pixels] and their `labels`; the rows of each client's, and of the `test`."""

    pixels: Vector
    labels: Rows
    test: Rows
    clients: tuple[Rows, ...]

    @property
    def spec(self) -> ModelSpec:
        shape = (10, self.pixels.shape[1])
        return ModelSpec((TensorSpec("weight", shape), TensorSpec("bias", (10,))))

    @classmethod
    def digits(cls, folder: Path, seed: int) -> Data:
        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(labels.size)
        clients = tuple(np.array_split(order[360:], 200))
        return cls((pixels / 16).astype(np.float32), labels, order[:360], clients)

    @classmethod
    def fashion(cls, folder: Path, seed: int) -> Data:
        def read(name: str) -> npt.NDArray[np.uint8]:
            data = gzip.decompress((folder / "fashion_mnist" / f"{name}-ubyte.gz").read_bytes())
            extents = np.frombuffer(data, ">u4", data[3], 4).astype(int)
            return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(extents)

        images = np.concatenate([read("train-images-idx3"), read("t10k-images-idx3")])
        halved = images.reshape(-1, 14, 2, 14, 2).mean((2, 4), np.float32).reshape(-1, 196)
        labels = np.concatenate([read("train-labels-idx1"), read("t10k-labels-idx1")])
        order = np.random.default_rng(seed).permutation(60_000)
        test = np.arange(60_000, labels.size)
        return cls(
            halved / 255, labels.astype(int), test, tuple(np.array_split(order[:20_000], 200))
        )

    def _scores(self, model: Vector, rows: Rows) -> Vector:
        tensors = self.spec.unflatten(model)
        return self.pixels[rows] @ tensors["weight"].T + tensors["bias"]

    def update(self, model: Vector, client: int, own: Settings) -> Vector:
        rows, trained = self.clients[client], model.copy()
        for _ in range(own.steps):
            scores = self._scores(trained, rows)
            back = np.exp(scores - scores.max(axis=1, keepdims=True))
            back /= back.sum(axis=1, keepdims=True)
            back[np.arange(rows.size), self.labels[rows]] -= 1
            gradient = {"weight": back.T @ self.pixels[rows], "bias": back.sum(axis=0)}
            trained -= np.float32(own.rate / rows.size) * self.spec.flatten(gradient)
        return trained - model

    def accuracy(self, model: Vector) -> float:
        guesses = self._scores(model, self.test).argmax(axis=1)
        return float(np.mean(guesses == self.labels[self.test]))


class Task(NamedTuple):
    data: Callable[[Path, int], Data]
    settings: Settings
    without: tuple[str, ...] = ()
    """Lanes, by a part of their names, that are not run."""

    @property
    def methods(self) -> tuple[Method, ...]:
        return tuple(
            each
            for each in methods_of(self.settings)
            if not any(part in each.name for part in self.without)
        )


TASKS = {
    "digits": Task(Data.digits, Settings(2.0, 0.5, 0.6, alone=2.0, many=110, steps=5, rate=1.0)),
    "fashion": Task(
        Data.fashion,
        Settings(2.0, 0.5, 0.8, alone=1.0, many=57, steps=20, rate=0.5),
        without=("tenth", "Skellam"),
    ),
}


def terms_of(method: Method, clients: int, epsilon: float) -> PrivacyTerms | None:
    if method.lane is None:
        return None
    correlation = None
    if method.is_correlated:
        correlation = correlated.best(method.separation, method.rounds)
    participation = accounting.participation(method.lane, correlation, method.noise)
    noise = accounting.noise_multiplier_for(epsilon, DELTA, method.times, participation)
    count_noise = max(clients / 20, 2.5 * noise)
    adaptive = AdaptiveClip(learning_rate=1.0, count_noise=count_noise)
    return PrivacyTerms(
        lane=method.lane,
        clip=method.clip,
        noise_multiplier=noise,
        participations=method.times,
        epsilon=epsilon,
        delta=DELTA,
        correlation=correlation,
        adaptive=adaptive if method.is_adaptive else None,
        noise=method.noise,
    )


def plan_of(
    data: Data, method: Method, terms: PrivacyTerms | None, number: int, clip: float, seed: int
) -> RoundPlan:
    """The plan of round `number`, with its `clip`."""
    is_masked, cohort = method.lane == "distributed", len(data.clients) // method.separation
    max_abs, bits = 256.0, FINEST_BITS
    if terms is not None and method.lane == "central":
        terms, max_abs = terms.with_clip(clip), clip
        bits -= math.ceil(math.log2(terms.update_multiplier * clip))  # as servers choose it
    bounds = FixedPoint.widest(max_abs=max_abs, max_weight=cohort, scale_bits=bits)
    compressor = dict(method.compressor)
    if method.lane == "local" and terms is not None:
        compressor["clip"] = 4 * terms.noise_multiplier * method.clip
    return RoundPlan(
        task="digits",
        round=number,
        attempt=1,
        model="a" * 64,
        previous_model="b" * 64,
        spec=data.spec.digest,
        lane="masked" if is_masked else "clear",
        masking=MaskingTerms(adversary="semi-honest") if is_masked else None,
        privacy=terms,
        report=(WITHIN_CLIP,) if method.is_adaptive else (),
        profiles=(Profile(name="only", compressor=compressor),),
        cohort=CohortRules(size=cohort, minimum=cohort),
        deadline=0.0,
        fixed_point=FixedPointTerms(scale_bits=bounds.scale_bits, max_abs=max_abs, max_examples=1),
        public_seed=hashlib.sha256(f"{method.name}|{number}|{seed}".encode()).hexdigest(),
    )


def mean_of(
    data: Data,
    plan: RoundPlan,
    payloads: InMemory,
    bodies: list[bytes],
    step: Vector,
    secret: bytes,
    sums: list[NoisedSum],
    first_clip: float,
) -> tuple[Vector, float]:
    """The noisy mean of a round's bodies, as the server makes it, and the clip of the round after;
    `sums` are those of the rounds before, newest first, to which this one's is added."""
    public = plan.public(data.spec, {"previous": step})
    clip = first_clip if plan.privacy is None else plan.privacy.clip
    if plan.lane == "masked":
        payload = Payload(plan, public)
        words = np.zeros(payload.packing.num_words, np.uint64)
        for body in bodies:
            words += payload.packing.from_bytes(body)
        values = payload.packing.unpack(words)
        return payload.decompress(values, len(bodies)).mean.dense(), clip
    staged = []
    for index, body in enumerate(bodies):
        payloads.put(str(index), body)
        staged.append(StagedUpload(str(index), hashlib.sha256(body).hexdigest(), "only"))
    terms = RoundTerms(plan, data.spec, payloads)
    vars(terms)["public"] = public
    job = AggregationJob(
        terms,
        FEDAVG,
        None,
        tuple(staged),
        noise_secret=secret,
        noised_before=tuple(sums),
        first_clip=first_clip,
    )
    sums.insert(0, NoisedSum(plan.digest, tuple(each.digest for each in staged)))
    summed: Summed = sum_uploads(job, payloads, AggregationSpace(), {})
    return summed.delta.astype(np.float32), summed.clip or clip


def run(task: str, folder: Path, method: Method, epsilon: float, seed: int) -> dict[str, Any]:
    own, data = TASKS[task].settings, TASKS[task].data(folder, seed)
    clients, spec = len(data.clients), data.spec
    terms = terms_of(method, clients, epsilon)
    payloads, rng = InMemory(Path()), np.random.default_rng(seed)
    ledgers = [Ledger("digits", str(client)) for client in range(clients)]
    model, step = np.zeros(spec.size, np.float32), np.zeros(spec.size, np.float32)
    num_bytes, secret, sums, clip = 0, secrets.token_bytes(32), list[NoisedSum](), method.clip
    for number in range(1, method.rounds + 1):
        plan, bodies = plan_of(data, method, terms, number, clip, seed), list[bytes]()
        of_round = Assignment(assignment=f"a{number}", client_id="0", plan=plan, profile="only")
        for client in range(number % method.separation, clients, method.separation):
            assignment = of_round.model_copy(update={"client_id": str(client)})
            update = data.update(model, client, own)
            ledger, body = ledgers[client].prepare(
                assignment, update, 1, spec, rng, knowledge={"previous": step}
            )
            assert body is not None
            bodies.append(body)
            receipt = Receipt(
                assignment=assignment.assignment,
                client_id=str(client),
                task="digits",
                round=number,
                attempt=1,
                outcome="included",
                reason="included",
                upload=ledger.pending[assignment.assignment].digest,
                model=None,
                issued_at=0,
            )
            ledgers[client] = ledger.settle(receipt).told()
        num_bytes += sum(map(len, bodies))
        step, clip = mean_of(data, plan, payloads, bodies, step, secret, sums, method.clip)
        model = model + step
    return {
        "task": task,
        "method": method.name,
        "epsilon": None if terms is None else epsilon,
        "against": "" if terms is None else terms.against(plan.masking),
        "seed": seed,
        "accuracy": data.accuracy(model),
        "bits_per_parameter": 8 * num_bytes / (method.times * clients * spec.size),
        "noise_multiplier": 0.0 if terms is None else terms.noise_multiplier,
        "clip": clip,
    }


class Mean(NamedTuple):
    """The rows of one task, method and epsilon: `accuracy` in percent, mean, least and largest."""

    method: str
    epsilon: float | None
    accuracy: float
    least: float
    largest: float
    bits: float


def means(rows: list[dict[str, Any]], task: str) -> list[Mean]:
    names = [method.name for method in TASKS[task].methods]
    rows = [row for row in rows if row["task"] == task]
    rows.sort(key=lambda row: (names.index(row["method"]), row["epsilon"] or 0))
    found = []
    for method, epsilon in dict.fromkeys((row["method"], row["epsilon"]) for row in rows):
        same = [row for row in rows if (row["method"], row["epsilon"]) == (method, epsilon)]
        accuracy = [100 * row["accuracy"] for row in same]
        bits = float(np.mean([row["bits_per_parameter"] for row in same]))
        span = (float(np.mean(accuracy)), min(accuracy), max(accuracy))
        found.append(Mean(method, epsilon, *span, bits))
    return found


def table(rows: list[dict[str, Any]], task: str) -> str:
    lines = ["| lane | epsilon | accuracy, % | bits a parameter and round |", "|---|---|---|---|"]
    for each in means(rows, task):
        epsilon = "-" if each.epsilon is None else f"{each.epsilon:g}"
        spread = f"{each.accuracy:.1f} ({each.least:.1f} to {each.largest:.1f})"
        lines.append(f"| {each.method} | {epsilon} | {spread} | {each.bits:.2f} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], task: str, path: Path) -> None:
    """Accuracy over epsilon, and over bits a parameter, by lane; in the format of the name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_epsilon, by_bits) = pyplot.subplots(
        1, 2, figsize=(11, 5), layout="constrained", sharey=True
    )
    every = means(rows, task)
    for name in dict.fromkeys(each.method for each in every):
        same = [each for each in every if each.method == name]
        accuracy = [each.accuracy for each in same]
        errors = [
            [each.accuracy - each.least for each in same],
            [each.largest - each.accuracy for each in same],
        ]
        if same[0].epsilon is None:
            by_epsilon.axhline(accuracy[0], color="black", ls="--", label=name)
            by_bits.plot([same[0].bits], accuracy, "k*", label=name)
            continue
        epsilons = [each.epsilon for each in same]
        by_epsilon.errorbar(epsilons, accuracy, errors, marker=".", capsize=3, label=name)
        by_bits.plot([each.bits for each in same], accuracy, ".-", label=name)
    by_epsilon.set_xscale("log", base=2)
    by_epsilon.set(xlabel="epsilon at delta 1e-5, of one device", ylabel="accuracy, %", title=task)
    by_bits.set_xscale("log", base=2)
    by_bits.set(xlabel="bits a parameter and round")
    for axes in (by_epsilon, by_bits):
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    figure.legend(*by_epsilon.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_figure(figure, path)


def main() -> None:
    made = parser(__doc__, quick="the first seed alone", seeds="0,1")
    made.add_argument("--epsilons", default="2,4,8", help="default 2,4,8")
    made.add_argument("--only", help="lanes whose name has this")
    made.add_argument("--data", type=Path, help="a folder with fashion_mnist; digits need none")
    made.add_argument("--task", choices=TASKS, help="this one alone")
    made.add_argument("--table", action="store_true", help="run nothing, print what is stored")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the figure of one task")
    options = made.parse_args()
    rows: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text())
    asked = [options.task or "digits"]
    if options.task is None and options.data is not None:
        asked.append("fashion")
    if "fashion" in asked and options.data is None and not options.table:
        made.error("--task fashion needs --data FOLDER")
    if options.plot is not None and options.plot.suffix not in SUFFIXES:
        made.error(f"--plot {options.plot} is of no known format; {', '.join(SUFFIXES)}")
    if options.plot is not None and len(asked) > 1:
        made.error("--plot draws one task; choose it with --task")
    names = [each.name for each in TASKS["digits"].methods]
    chosen = [name for name in names if options.only is None or options.only in name]
    if not chosen:
        made.error(f"--only {options.only}: no such lane; {', '.join(names)}")
    if not options.table:
        _run_missing(rows, asked, chosen, options)
    for task in asked:
        if not means(rows, task):
            made.error(f"--json has no rows of {task}; leave --table out to run it")
        if options.plot is not None:
            draw(rows, task, options.plot)
    print("\n\n".join(table(rows, task) for task in asked))


def _run_missing(
    rows: list[dict[str, Any]], asked: list[str], chosen: list[str], options: Any
) -> None:
    """Run what `rows` does not have, and store each row at once."""
    keys = ("task", "method", "epsilon", "seed")
    known = {tuple(row[key] for key in keys) for row in rows}
    for seed in seed_list(options):
        for task in asked:
            for method in TASKS[task].methods:
                if method.name not in chosen:
                    continue
                for epsilon in map(float, options.epsilons.split(",")):
                    key = (task, method.name, epsilon if method.lane else None, seed)
                    if key in known:
                        continue
                    rows.append(run(task, options.data, method, epsilon, seed))
                    known.add(key)
                    save(rows, options.json)


if __name__ == "__main__":
    main()
