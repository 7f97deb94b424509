"""Write the update fixture: what four clients of the digits task send in round 30, uncompressed.

    python benchmarks/make_update_fixture.py [file]

Plain FedAvg as in `digits_task.py`. Updates and the two vectors that the models give (the last
step, the way since the first model) are float16, which changes them by a thousandth: what is
measured on them is measured against the float16 values.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from digits_task import SPEC, Digits, cohorts, first_model

SEED, ROUND, KEPT = 0, 30, 4
FIXTURE = Path(__file__).parent / "fixtures" / "digits_mlp_round30.npz"


def main(path: Path) -> None:
    """Train for a round less than ROUND, then write what its clients make of the model."""
    digits, model = Digits.split(SEED), first_model(SEED)
    first, previous = model, np.zeros_like(model)
    for number, cohort in enumerate(cohorts(SEED, ROUND), start=1):
        updates = [
            digits.update(model, c, np.random.default_rng([SEED, number, c])) for c in cohort
        ]
        if number == ROUND:
            break
        shares = np.array([digits.clients[c].size for c in cohort], np.float32)
        previous = (np.stack(updates) * (shares / shares.sum())[:, np.newaxis]).sum(axis=0)
        model = model + previous
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        names=np.array([tensor.name for tensor in SPEC.tensors]),
        shapes=np.array([",".join(map(str, tensor.shape)) for tensor in SPEC.tensors]),
        updates=np.stack(updates[:KEPT]).astype("<f2"),
        previous=previous.astype("<f2"),
        drift=(model - first).astype("<f2"),
    )
    print(f"{path}: {path.stat().st_size} bytes, test accuracy {digits.accuracy(model):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURE)
