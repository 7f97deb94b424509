"""An aggregation that adds uploads straight from their bytes makes the model that one makes which
decodes them first, and refuses what that one refuses."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.errors import InvalidUpdate
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, FixedPointTerms, Profile, RoundPlan
from fedpress_protocols.upload import Upload
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import LocalPayloads, Payloads
from fedpress_strategies import from_config
from fedpress_strategies.strategy import ServerSGD, Strategy, WeightedMean

FIRST = Model.from_tensors(
    {"a": np.zeros((300, 101), np.float32), "b": np.ones((5,), np.float32)},
)
METHODS: list[Compressor[Any]] = [
    TopK(fraction=0.1, magnitude_bits=4),
    TopK(fraction=0.1, scope="tensor"),
    TopK(fraction=0.2, magnitude_bits=0),
    ErrorFeedback(TopK(fraction=0.1)),
    Quantize(bits=4),
    Quantize(bits=2, rounding="stochastic"),
    Quantize(bits=4, clip=1.0),
    Quantize(bits=1),
    Uncompressed(),
]


class Decoded(WeightedMean):
    """A mean that takes updates alone, since a subclass may do with them what it likes."""


STRAIGHT = from_config({"id": "fedavg"})
AFTER_DECODING = Strategy(Decoded, ServerSGD())


def job(
    payloads: Payloads, methods: list[Compressor[Any]], strategy: Strategy, largest: float = 1.0
) -> AggregationJob:
    """Two uploads under each of the methods."""
    payloads.put(model_name(FIRST.digest), FIRST.to_bytes())
    profiles = tuple(Profile(name=f"p{i}", compressor=made) for i, made in enumerate(methods))
    plan = RoundPlan(
        task="t",
        round=1,
        attempt=1,
        model=FIRST.digest,
        spec=FIRST.spec.digest,
        profiles=profiles,
        cohort=CohortRules(size=2 * len(profiles), minimum=1),
        deadline=0.0,
        fixed_point=FixedPointTerms(scale_bits=30, max_abs=2.0, max_examples=50),
        public_seed="1" * 64,
    )
    terms = RoundTerms(plan, FIRST.spec, payloads)
    staged = []
    rng = np.random.default_rng(4)
    for client in range(2 * len(profiles)):
        index = client % len(profiles)
        update = np.clip(rng.laplace(0, 0.1, FIRST.spec.size), -1, 1).astype(np.float32)
        update[client] = largest
        made = plan.compressor(f"p{index}")
        symbols, _ = made.compress(update, made.init(FIRST.spec), terms.public, rng)
        body = Upload(index, 1 + 7 * client % 50, symbols).to_bytes(
            terms.layouts[index], terms.contexts[index]
        )
        payloads.put(f"upload-{client}", body)
        digest = hashlib.sha256(body).hexdigest()
        staged.append(StagedUpload(f"upload-{client}", digest, f"p{index}"))
    return AggregationJob(terms, strategy, None, tuple(staged))


@pytest.mark.parametrize("methods", [[made] for made in METHODS] + [METHODS], ids=str)
def test_the_model_is_the_same_to_the_last_bit(
    methods: list[Compressor[Any]], tmp_path: Path
) -> None:
    payloads = LocalPayloads(tmp_path)
    straight = aggregate(job(payloads, methods, STRAIGHT), payloads)
    assert straight == aggregate(job(payloads, methods, AFTER_DECODING), payloads)
    assert straight.model != FIRST.digest


def test_the_fold_of_a_mean_decodes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = LocalPayloads(tmp_path)
    made = job(payloads, [METHODS[0]], STRAIGHT)
    monkeypatch.setattr(RoundTerms, "read", None)
    aggregate(made, payloads)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_values_beyond_the_plan_are_refused_alike(method: Compressor[Any], tmp_path: Path) -> None:
    payloads = LocalPayloads(tmp_path)
    refusals = []
    for strategy in (STRAIGHT, AFTER_DECODING):
        made = job(payloads, [method], strategy, largest=1e6)
        if isinstance(method, Quantize) and method.clip:
            aggregate(made, payloads)
            continue
        with pytest.raises(InvalidUpdate, match="larger than the plan's 2") as refused:
            aggregate(made, payloads)
        refusals.append(str(refused.value))
    assert len(set(refusals)) <= 1


def test_more_examples_than_the_plan_allows_are_refused(tmp_path: Path) -> None:
    payloads = LocalPayloads(tmp_path)
    terms = job(payloads, [METHODS[0]], STRAIGHT).terms
    body = payloads.get("upload-0")
    with pytest.raises(InvalidUpdate, match="num_examples is 51, expected at most 50"):
        terms.fields(body[:2] + b"\x33" + body[3:], "p0")
