"""From a trained update to a durable account: what a device does in a round beside training.

    python benchmarks/device_round.py [--quick] [--json FILE]

Top-k of 1 % under error feedback, with a residual. `fused` is compression and coding alone;
`prepare` is `Ledger.prepare`, which checks and decodes, too; `save` makes the account durable,
residual and body; `copy_and_write` copies as many bytes, writes and syncs them. Seconds are CPU
time of one thread, the system's share included: each the median of repeats that are shuffled among
each other, so that ratios hold on a busy machine. What the disk takes is in neither side.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, parser, report, shuffled_medians

from fedpress_client import Ledger
from fedpress_client.state import StateDirectory
from fedpress_compression import coding, kernels
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.messages import Assignment
from fedpress_protocols.model import Model
from fedpress_protocols.plan import (
    CohortRules,
    FixedPointTerms,
    Profile,
    RoundPlan,
    TrainingTerms,
)

SEED = 5
MADE = ErrorFeedback(TopK(fraction=0.01, magnitude_bits=4))


def _assignment(model: Model, number: int) -> Assignment:
    plan = RoundPlan(
        task="benchmark",
        round=number,
        attempt=1,
        model=model.digest,
        spec=model.spec.digest,
        profiles=(Profile(name="only", compressor=MADE),),
        training=TrainingTerms(),
        cohort=CohortRules(size=10, minimum=10),
        deadline=0.0,
        fixed_point=FixedPointTerms(scale_bits=24, max_abs=100.0, max_examples=1000),
        public_seed=bytes(32).hex(),
    )
    return Assignment(assignment=f"a{number}", client_id="me", plan=plan, profile="only")


def measure(size: int, repeats: int, folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    model = Model.from_tensors({"w": np.zeros(size, np.float32)})
    update = rng.standard_t(3, size).astype(np.float32) * np.float32(1e-3)
    ledger, _ = Ledger("benchmark", "me").prepare(
        _assignment(model, 1), update, 100, model.spec, rng
    )
    assignment = _assignment(model, 2)
    public = assignment.plan.public(model.spec)
    layout = MADE.layout(model.spec)
    _, state = MADE.compress(update, MADE.init(model.spec), public, rng)
    after, body = ledger.prepare(assignment, update, 100, model.spec, rng)
    data = after.to_bytes()
    files = StateDirectory.open(folder / f"state-{size}").task("benchmark")
    copied, file = bytearray(len(data)), folder / "copy"

    def copy_and_write() -> None:
        copied[:] = data
        with file.open("wb") as out:
            out.write(copied)
            out.flush()
            os.fsync(out.fileno())

    seconds = shuffled_medians(
        {
            "memcpy": lambda: update.copy(),
            "fused": lambda: coding.encode(MADE.compress(update, state, public, rng)[0], layout),
            "prepare": lambda: ledger.prepare(assignment, update, 100, model.spec, rng),
            "save": lambda: files.save(after),
            "copy_and_write": copy_and_write,
        },
        repeats,
        SEED,
    )
    files.close()
    return {
        "size": size,
        "body_bytes": len(body or b""),
        "account_bytes": len(data),
        "seconds": seconds,
        "prepare / fused": seconds["prepare"] / seconds["fused"],
        "save / copy_and_write": seconds["save"] / seconds["copy_and_write"],
    }


def main() -> None:
    options = parser(__doc__, quick="leaves 10M values out").parse_args()
    sizes = [1_000_000] if options.quick else [1_000_000, 10_000_000]
    kernels.limit_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(size, 20, Path(folder)) for size in sizes]
    text = "\n".join(
        f"{row['size']:>10,} values: "
        + ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in row["seconds"].items())
        + f"; prepare / fused {row['prepare / fused']:.2f}, "
        f"save / copy_and_write {row['save / copy_and_write']:.2f}"
        for row in rows
    )
    report(text, {"machine": machine(), "rows": rows}, options.json)


if __name__ == "__main__":
    main()
