"""Peak memory and seconds of one round of a large model: device, server, the next model.

    python benchmarks/large_models.py [--values 10000000,100000000] [--json FILE]

One synthetic update (normal values) is compressed under error feedback (top-k 1 %) and coded by the
product's ledger, and aggregated to a model by the product's aggregation, in files. Device and
server are processes of their own, each with the memory that the system counts at its peak, less
what it has after its imports. Seconds are CPU time. Bytes a value are the slope between two sizes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, parser, report

from fedpress_client import Ledger
from fedpress_compression.compressor import from_config
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.messages import Assignment
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, FixedPointTerms, Profile, RoundPlan, TrainingTerms
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_strategies import from_config as strategy_of

COMPRESSOR = {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.01}}
COLUMNS = 2500


def spec_of(values: int) -> ModelSpec:
    return ModelSpec((TensorSpec("weight", (values // COLUMNS, COLUMNS)),))


def plan_of(spec: ModelSpec, model: str) -> RoundPlan:
    return RoundPlan(
        task="task",
        round=1,
        attempt=1,
        model=model,
        spec=spec.digest,
        profiles=(Profile(name="one", compressor=from_config(COMPRESSOR)),),
        training=TrainingTerms(),
        cohort=CohortRules(size=1, minimum=1),
        deadline=1e9,
        fixed_point=FixedPointTerms(scale_bits=24, max_abs=256.0, max_examples=1000),
        public_seed="0" * 64,
    )


def peak() -> int:
    """The bytes of this process's memory at its peak."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def device(folder: Path, values: int) -> dict[str, Any]:
    """Prepare an upload of an update, and put it where the server finds it."""
    spec = spec_of(values)
    plan = plan_of(spec, (folder / "digest").read_text())
    before = peak()
    rng = np.random.default_rng(0)
    update = rng.standard_normal(values, np.float32)
    update *= np.float32(1e-3)
    begin = time.process_time()
    assignment = Assignment(assignment="a1", client_id="client", plan=plan, profile="one")
    ledger = Ledger("task", "client")
    _, body = ledger.prepare(assignment, update, 1, spec, np.random.default_rng(1))
    assert body is not None
    seconds = time.process_time() - begin
    (folder / "body").write_bytes(body)
    return {"bytes": len(body), "seconds": seconds, "memory": peak() - before}


def server(folder: Path, values: int) -> dict[str, Any]:
    """Aggregate the upload to the next model."""
    spec, payloads = spec_of(values), LocalPayloads(folder / "server")
    plan = plan_of(spec, (folder / "digest").read_text())
    body = (folder / "body").read_bytes()
    digest = hashlib.sha256(body).hexdigest()
    payloads.put("uploads/one", body)
    before = peak()
    begin = time.process_time()
    staged = StagedUpload("uploads/one", digest, "one", "client")
    terms = RoundTerms(plan, spec, payloads)
    result = aggregate(
        AggregationJob(terms, strategy_of({"id": "fedavg"}), None, (staged,)), payloads
    )
    seconds = time.process_time() - begin
    return {"bytes": result.num_bytes, "seconds": seconds, "memory": peak() - before}


def first_model(folder: Path, values: int) -> dict[str, Any]:
    """Store a model of zeros."""
    spec = spec_of(values)
    model = Model(spec, np.zeros(values, np.float32), {})
    LocalPayloads(folder / "server").put(model_name(model.digest), model.to_bytes())
    (folder / "digest").write_text(model.digest)
    return {}


PARTS = {"first-model": first_model, "device": device, "server": server}


def measured(values: int) -> dict[str, Any]:
    found: dict[str, Any] = {"values": values}
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            command = [sys.executable, __file__, "--part", part, "--folder", folder]
            done = subprocess.run(
                [*command, "--values", str(values)], check=True, capture_output=True, text=True
            )
            found[part] = json.loads(done.stdout)
    del found["first-model"]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| values | process | bytes | CPU seconds | peak memory, MB | bytes a value |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['values']:,} | {part} | {row[part]['bytes']:,} | {row[part]['seconds']:.1f} | "
        f"{row[part]['memory'] / 1e6:,.0f} | {row[part]['memory'] / row['values']:.1f} |"
        for row in rows
        for part in ("device", "server")
    ]
    return "\n".join(lines)


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--values", default="10000000,100000000")
    made.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return made.parse_args()


def main() -> None:
    asked = options()
    if asked.part is not None:
        print(json.dumps(PARTS[asked.part](asked.folder, int(asked.values))))
        return
    rows = [measured(int(each)) for each in asked.values.split(",")]
    report(table(rows), {"rows": rows, "machine": machine()}, asked.json)


if __name__ == "__main__":
    main()
