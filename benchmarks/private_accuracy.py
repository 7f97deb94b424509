"""Accuracy of private tasks on the digits, lane by lane and epsilon by epsilon, with bytes.

    python benchmarks/private_accuracy.py [--epsilons 2,4,8] [--seeds 0,1] [--json FILE]

A softmax regression of 650 parameters on digits, split at random among 200 devices of
seven images each, which take part 8 times: all of them in each of 8 rounds or, where the noise is
correlated and once without that, a quarter of them in each of 32, so that a device rests for three
rounds. Delta is 1e-5, one device the unit.
The noise is the least that the epsilon allows, the clip the same for all. Nothing is tuned by lane.

What runs is the product's own code without its network: RoundPlan, Ledger, Payload and the server's
sums with their noise. Masks are left out, since they cancel exactly in the sum that is taken here.
Noise is drawn from the system's randomness: a run again differs by chance.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products are too small to share

import numpy as np
import numpy.typing as npt
from federation import InMemory
from harness import parser, save, seed_list
from sklearn.datasets import load_digits

from fedpress_client.ledger import Ledger
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.plan import (
    CohortRules,
    FixedPointTerms,
    MaskingTerms,
    PrivacyTerms,
    Profile,
    RoundPlan,
)
from fedpress_protocols.privacy import accounting, correlated
from fedpress_protocols.privacy.accounting import PrivacyLane
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload, sum_uploads
from fedpress_server.aggregation.private import NoisedSum
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_strategies.fedavg import FEDAVG
from fedpress_strategies.strategy import AggregationSpace

CLIENTS, TIMES, CLIP, DELTA = 200, 8, 0.5, 1e-5
SEPARATION = 4
STEPS, RATE, TEST_IMAGES = 5, 0.5, 360
SPEC = ModelSpec((TensorSpec("weight", (10, 64)), TensorSpec("bias", (10,))))
DENSE = {"id": "quantize", "clip": CLIP / 4}
TENTH = {"id": "shared_support", "fraction": 0.1, "clip": CLIP / 2}
Rows = npt.NDArray[np.int64]


class Method(NamedTuple):
    name: str
    lane: PrivacyLane | None
    compressor: Mapping[str, Any]
    separation: int = 1
    is_correlated: bool = False

    @property
    def cohort(self) -> int:
        return CLIENTS // self.separation

    @property
    def rounds(self) -> int:
        return TIMES * self.separation


METHODS = (
    Method("without noise", None, DENSE),
    Method("central", "central", DENSE),
    Method("central, a quarter a round", "central", DENSE, SEPARATION),
    Method("central, correlated, a quarter a round", "central", DENSE, SEPARATION, True),
    Method("distributed", "distributed", DENSE),
    Method("distributed, a tenth sent", "distributed", TENTH),
    Method("local", "local", DENSE),
)


class Data(NamedTuple):
    pixels: Vector
    labels: Rows
    test: Rows
    clients: tuple[Rows, ...]

    @classmethod
    def split(cls, seed: int) -> Data:
        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(labels.size)
        clients = tuple(np.array_split(order[TEST_IMAGES:], CLIENTS))
        return cls((pixels / 16).astype(np.float32), labels, order[:TEST_IMAGES], clients)

    def _scores(self, model: Vector, rows: Rows) -> Vector:
        tensors = SPEC.unflatten(model)
        return self.pixels[rows] @ tensors["weight"].T + tensors["bias"]

    def update(self, model: Vector, client: int) -> Vector:
        rows, trained = self.clients[client], model.copy()
        for _ in range(STEPS):
            scores = self._scores(trained, rows)
            back = np.exp(scores - scores.max(axis=1, keepdims=True))
            back /= back.sum(axis=1, keepdims=True)
            back[np.arange(rows.size), self.labels[rows]] -= 1
            gradient = {"weight": back.T @ self.pixels[rows], "bias": back.sum(axis=0)}
            trained -= np.float32(RATE / rows.size) * SPEC.flatten(gradient)
        return trained - model

    def accuracy(self, model: Vector) -> float:
        guesses = self._scores(model, self.test).argmax(axis=1)
        return float(np.mean(guesses == self.labels[self.test]))


def terms_of(method: Method, epsilon: float) -> PrivacyTerms | None:
    if method.lane is None:
        return None
    bands = separation = 1
    if method.is_correlated:
        separation = method.separation
        bands = correlated.best_bands(separation, TIMES, method.rounds)
    participation = accounting.participation(method.lane, bands, separation, TIMES)
    noise = accounting.noise_multiplier_for(epsilon, DELTA, TIMES, participation)
    return PrivacyTerms(
        lane=method.lane,
        clip=CLIP,
        noise_multiplier=noise,
        participations=TIMES,
        epsilon=epsilon,
        delta=DELTA,
        bands=bands,
        separation=separation,
    )


def plan_of(method: Method, terms: PrivacyTerms | None, number: int) -> RoundPlan:
    is_masked = method.lane == "distributed"
    max_abs = CLIP if method.lane == "central" else 256.0
    bounds = FixedPoint.widest(max_abs=max_abs, max_weight=method.cohort)
    inner = dict(method.compressor)
    if method.lane == "local" and terms is not None:
        inner["clip"] = 4 * terms.noise_multiplier * CLIP
    feedback = {"id": "error_feedback", "inner": inner}
    return RoundPlan(
        task="digits",
        round=number,
        attempt=1,
        model="a" * 64,
        previous_model="b" * 64,
        spec=SPEC.digest,
        lane="masked" if is_masked else "clear",
        masking=MaskingTerms(adversary="semi-honest") if is_masked else None,
        privacy=terms,
        profiles=(Profile(name="only", compressor=feedback),),
        cohort=CohortRules(size=method.cohort, minimum=method.cohort),
        deadline=0.0,
        fixed_point=FixedPointTerms(scale_bits=bounds.scale_bits, max_abs=max_abs, max_examples=1),
        public_seed=hashlib.sha256(f"{method.name}|{number}".encode()).hexdigest(),
    )


def mean_of(
    plan: RoundPlan,
    payloads: InMemory,
    bodies: list[bytes],
    step: Vector,
    secret: bytes,
    sums: list[NoisedSum],
) -> Vector:
    """The noisy mean of a round's bodies, as the server makes it; `sums` are those of the rounds
    before, newest first, to which this one's is added."""
    public = plan.public(SPEC, {"previous": step})
    if plan.lane == "masked":
        payload = Payload(plan, public)
        words = np.zeros(payload.packing.num_words, np.uint64)
        for body in bodies:
            words += payload.packing.from_bytes(body)
        return payload.decompress(payload.packing.unpack(words), len(bodies)).mean.dense()
    staged = []
    for index, body in enumerate(bodies):
        payloads.put(str(index), body)
        staged.append(StagedUpload(str(index), hashlib.sha256(body).hexdigest(), "only"))
    terms = RoundTerms(plan, SPEC, payloads)
    vars(terms)["public"] = public
    job = AggregationJob(
        terms, FEDAVG, None, tuple(staged), noise_secret=secret, noised_before=tuple(sums)
    )
    sums.insert(0, NoisedSum(plan.digest, tuple(each.digest for each in staged)))
    mean = sum_uploads(job, payloads, AggregationSpace(), {}).delta
    return mean.astype(np.float32)


def run(method: Method, epsilon: float, seed: int) -> dict[str, Any]:
    data, terms = Data.split(seed), terms_of(method, epsilon)
    payloads, rng = InMemory(Path()), np.random.default_rng(seed)
    ledgers = [Ledger("digits", str(client)) for client in range(CLIENTS)]
    model, step = np.zeros(SPEC.size, np.float32), np.zeros(SPEC.size, np.float32)
    num_bytes, secret, sums = 0, secrets.token_bytes(32), list[NoisedSum]()
    for number in range(1, method.rounds + 1):
        plan, bodies = plan_of(method, terms, number), list[bytes]()
        for client in range(number % method.separation, CLIENTS, method.separation):
            assignment = Assignment(
                assignment=f"a{number}", client_id=str(client), plan=plan, profile="only"
            )
            update = data.update(model, client)
            ledger, body = ledgers[client].prepare(
                assignment, update, 1, SPEC, rng, knowledge={"previous": step}
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
        step = mean_of(plan, payloads, bodies, step, secret, sums)
        model = model + step
    bits = 8 * num_bytes / (TIMES * CLIENTS * SPEC.size)
    return {
        "method": method.name,
        "epsilon": None if terms is None else epsilon,
        "against": "" if terms is None else terms.against(plan.masking),
        "seed": seed,
        "accuracy": data.accuracy(model),
        "bits_per_parameter": bits,
        "noise_multiplier": 0.0 if terms is None else terms.noise_multiplier,
    }


def table(rows: list[dict[str, Any]]) -> str:
    names = [method.name for method in METHODS]
    rows = sorted(rows, key=lambda row: (names.index(row["method"]), row["epsilon"] or 0))
    lines = ["| lane | epsilon | accuracy, % | bits a parameter and round |", "|---|---|---|---|"]
    for key in dict.fromkeys((row["method"], row["epsilon"]) for row in rows):
        same = [row for row in rows if (row["method"], row["epsilon"]) == key]
        accuracy = 100 * np.array([row["accuracy"] for row in same])
        bits = np.mean([row["bits_per_parameter"] for row in same])
        epsilon = "-" if key[1] is None else f"{key[1]:g}"
        spread = f"{accuracy.mean():.1f} ({accuracy.min():.1f} to {accuracy.max():.1f})"
        lines.append(f"| {key[0]} | {epsilon} | {spread} | {bits:.2f} |")
    return "\n".join(lines)


def main() -> None:
    made = parser(__doc__, quick="the first seed alone", seeds="0,1")
    made.add_argument("--epsilons", default="2,4,8", help="default 2,4,8")
    made.add_argument("--only", help="lanes whose name has this; other rows of the file are kept")
    made.add_argument("--table", action="store_true", help="print the table of the JSON file")
    options = made.parse_args()
    rows: list[dict[str, Any]] = []
    if options.table:
        print(table(json.loads(options.json.read_text())))
        return
    methods = [each for each in METHODS if options.only is None or options.only in each.name]
    if not methods:
        made.error(f"--only {options.only}: no such lane; {', '.join(m.name for m in METHODS)}")
    if options.only is not None and options.json is not None and options.json.exists():
        names = {each.name for each in methods}
        stored = json.loads(options.json.read_text())
        seeds = seed_list(options)
        rows = [each for each in stored if each["method"] not in names or each["seed"] not in seeds]
    for seed in seed_list(options):
        for method in methods:
            for epsilon in map(float, options.epsilons.split(",")):
                rows.append(run(method, epsilon, seed))
                save(rows, options.json)
                if method.lane is None:
                    break
    print(table(rows))


if __name__ == "__main__":
    main()
