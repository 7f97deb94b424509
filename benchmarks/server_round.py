"""From an accepted upload to the sum: what a server does for each body of a round.

    python benchmarks/server_round.py [--quick] [--json FILE]

Eight bodies of top-k 1 % in the store. `decode_add` decodes bytes in memory and adds them: the
kernels and nothing else. `mean` turns the sum into the mean, once a round. `sum` is the
aggregation's own path to the mean (`sum_uploads`): it reads each file, compares its SHA-256,
checks the number of examples, decodes and adds. `check` is the validation before a body is
accepted. Seconds are CPU time of one thread, the system's share included: the median of repeats
that are shuffled among each other, so that ratios hold on a busy machine.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, parser, report, shuffled_medians

from fedpress_compression import kernels
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.decode_add import decode_add
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, FixedPointTerms, Profile, RoundPlan
from fedpress_protocols.upload import Upload
from fedpress_server.aggregation.accumulate import (
    AggregationJob,
    StagedUpload,
    make_accumulator,
    sum_uploads,
)
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_strategies import from_config
from fedpress_strategies.strategy import AggregationSpace, WeightedMean

SEED = 5
NUM_BODIES = 8
MADE = TopK(fraction=0.01, magnitude_bits=4)


def _terms(model: Model, payloads: LocalPayloads) -> RoundTerms:
    plan = RoundPlan(
        task="benchmark",
        round=1,
        attempt=1,
        model=model.digest,
        spec=model.spec.digest,
        profiles=(Profile(name="only", compressor=MADE),),
        cohort=CohortRules(size=NUM_BODIES, minimum=1),
        deadline=0.0,
        fixed_point=FixedPointTerms(scale_bits=24, max_abs=100.0, max_examples=1000),
        public_seed=bytes(32).hex(),
    )
    return RoundTerms(plan, model.spec, payloads)


def measure(size: int, repeats: int, folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    payloads = LocalPayloads(folder)
    model = Model.from_tensors({"w": np.zeros(size, np.float32)})
    terms = _terms(model, payloads)
    layout, contexts = terms.layouts[0], terms.contexts[0]
    bodies, staged = list[bytes](), list[StagedUpload]()
    for client in range(NUM_BODIES):
        update = rng.standard_t(3, size).astype(np.float32) * np.float32(1e-3)
        symbols, _ = MADE.compress(update, None, terms.public, rng)
        body = Upload(0, 100, symbols).to_bytes(layout, contexts)
        payloads.put(f"upload-{client}", body)
        digest = hashlib.sha256(body).hexdigest()
        bodies.append(body)
        staged.append(StagedUpload(f"upload-{client}", digest, "only"))
    strategy = from_config({"id": "fedavg"})
    job = AggregationJob(terms, strategy, None, tuple(staged))

    def add_all() -> WeightedMean:
        mean = make_accumulator(terms, strategy, AggregationSpace(), {}).aggregator
        assert isinstance(mean, WeightedMean)
        for body in bodies:
            _, _, fields = Upload.find(body, terms.layouts, 0, contexts, ())
            decode_add(fields, MADE, terms.public, mean.sums, 100)
        return mean

    summed = add_all()
    seconds = shuffled_medians(
        {
            "decode_add": add_all,
            "mean": summed.result,
            "sum": lambda: sum_uploads(job, payloads, AggregationSpace(), {}),
            "check": lambda: [terms.decoded(body, "only", "me") for body in bodies],
        },
        repeats,
        SEED,
    )
    return {
        "size": size,
        "body_bytes": len(bodies[0]),
        "seconds": seconds,
        "ratio": seconds["sum"] / (seconds["decode_add"] + seconds["mean"]),
    }


def main() -> None:
    options = parser(__doc__, quick="leaves 10M values out").parse_args()
    sizes = [1_000_000] if options.quick else [1_000_000, 10_000_000]
    kernels.limit_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(size, 20, Path(folder) / str(size)) for size in sizes]
    text = "\n".join(
        f"{row['size']:>10,} values, {row['body_bytes']:,} bytes: "
        + ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in row["seconds"].items())
        + f"; sum / (decode_add + mean) {row['ratio']:.2f}"
        for row in rows
    )
    report(text, {"machine": machine(), "rows": rows}, options.json)


if __name__ == "__main__":
    main()
