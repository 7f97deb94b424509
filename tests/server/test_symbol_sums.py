"""The aggregation of a strategy that sums symbols: staged bytes to a model, nothing
decompressed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_protocols.errors import IncompatiblePlan, InvalidUpdate
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, FixedPointTerms, Profile, RoundPlan
from fedpress_protocols.upload import Upload
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import LocalPayloads, Payloads
from fedpress_strategies import from_config

MADE = CountSketch(fraction=0.5, seed=0)
STRATEGY = from_config({"id": "fetchsgd", "sketch_fraction": 0.5, "fraction": 0.01})
FIRST = Model.from_tensors({"w": np.zeros((40, 50), np.float32)})


def job(payloads: Payloads, *, profiles: int = 1, examples: int = 4) -> AggregationJob:
    """Three clients whose updates are large at one coordinate."""
    payloads.put(model_name(FIRST.digest), FIRST.to_bytes())
    plan = RoundPlan(
        task="t",
        round=1,
        attempt=1,
        model=FIRST.digest,
        spec=FIRST.spec.digest,
        profiles=tuple(Profile(name=f"p{i}", compressor=MADE) for i in range(profiles)),
        cohort=CohortRules(size=3, minimum=3),
        deadline=0.0,
        fixed_point=FixedPointTerms(scale_bits=16, max_abs=16.0, max_examples=4),
        public_seed="1" * 64,
    )
    terms = RoundTerms(plan, FIRST.spec, payloads)
    staged = []
    for client in range(3):
        update = np.zeros(FIRST.spec.size, np.float32)
        update[123] = 1 + client
        symbols, _ = MADE.compress(update, None, terms.public, np.random.default_rng(0))
        body = Upload(0, examples, symbols).to_bytes(terms.layouts[0])
        payloads.put(f"upload-{client}", body)
        staged.append(StagedUpload(f"upload-{client}", hashlib.sha256(body).hexdigest(), "p0"))
    return AggregationJob(terms, STRATEGY, None, tuple(staged))


def test_sketches_become_the_next_model(tmp_path: Path) -> None:
    payloads = LocalPayloads(tmp_path)
    result = aggregate(job(payloads), payloads)
    after = Model.from_bytes(payloads.get(model_name(result.model)))
    assert result.num_examples == 12
    assert np.flatnonzero(after.parameters).tolist() == [123]
    assert after.parameters[123] == pytest.approx(2.0)
    assert result.optimizer_state is not None
    assert aggregate(job(payloads), payloads) == result


def test_bounds_hold_for_symbols_too(tmp_path: Path) -> None:
    payloads = LocalPayloads(tmp_path)
    with pytest.raises(InvalidUpdate, match="num_examples is 5, expected at most 4"):
        aggregate(job(payloads, examples=5), payloads)


def test_symbols_of_several_profiles_cannot_be_summed(tmp_path: Path) -> None:
    payloads = LocalPayloads(tmp_path)
    with pytest.raises(IncompatiblePlan, match="takes one profile, the plan has 2"):
        aggregate(job(payloads, profiles=2), payloads)
