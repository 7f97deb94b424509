"""A clip on each tensor: what is sent keeps all of them, and so the clip on the whole."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedpress_client import channels
from fedpress_client.ledger import Ledger
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_compression.update import Update
from fedpress_protocols.errors import IncompatiblePlan, InvalidUpdate
from fedpress_protocols.plan import PrivacyTerms, RoundPlan
from fedpress_protocols.privacy.clipping import NORM_TOLERANCE, Bounds
from fedpress_server.aggregation.terms import RoundTerms
from tests.protocols.test_masked_payload import KNOWN, SHARED, SPEC, made_plan

CLIP = 0.3
TERMS: dict[str, Any] = {
    "lane": "central", "clip": CLIP, "noise_multiplier": 2.1, "participations": 5, "epsilon": 6.0,
    "per_tensor": [["b", 0.5], ["*", 2]],
}  # fmt: skip
METHODS: tuple[dict[str, Any], ...] = (
    {"id": "none"},
    {"id": "quantize", "clip": 0.1},
    {"id": "qsgd", "levels": 16, "bucket": 100},
    {"id": "count_sketch", "fraction": 0.3},
    {**SHARED, "clip": 0.2},
    {"id": "per_tensor", "large": SHARED, "small": {"id": "quantize"}, "min_size": 200},
)


def terms_with(**changes: Any) -> PrivacyTerms:
    return PrivacyTerms.model_validate({**TERMS, **changes})


def plan_of(compressor: dict[str, Any], **privacy: Any) -> RoundPlan:
    return made_plan(
        {"id": "error_feedback", "inner": compressor},
        privacy={**TERMS, **privacy},
        lane="clear",
        masking=None,
        fixed_point={
            "scale_bits": 30,
            "max_abs": privacy.get("clip", CLIP),
            "max_examples": 1,
        },
    )


def norms_of(dense: np.ndarray, spec: ModelSpec = SPEC) -> dict[str, float]:
    return {
        name: float(np.linalg.norm(dense[where].astype(np.float64)))
        for name, where in spec.slices.items()
    }


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40),
    st.floats(1e-9, 2.0**20),
)
def test_the_bounds_are_in_proportion_and_together_the_clip(
    shares: list[float], clip: float
) -> None:
    spec = ModelSpec(tuple(TensorSpec(f"t{i}", (i % 3, 2)) for i in range(len(shares))))
    pairs = tuple((f"t{i}", share) for i, share in enumerate(shares))
    bounds = Bounds.of(clip, pairs, spec)
    together = math.sqrt(math.fsum(each * each for each in bounds.clips.tolist()))
    assert clip * (1 - 1e-11) <= together <= clip
    assert bounds.clips / bounds.clips[0] == pytest.approx(np.array(shares) / shares[0])


def test_an_equal_share_is_the_clip_over_the_root_of_the_number_of_tensors() -> None:
    bounds = terms_with(per_tensor=[["*", 7]]).bounds(SPEC)
    assert bounds.names == ("w", "b", "conv")
    assert bounds.clips == pytest.approx(np.full(3, CLIP / math.sqrt(3)))


@given(st.data())
def test_no_update_moves_a_sum_by_more_than_the_clip(data: st.DataObject) -> None:
    """Whatever the update, and what error feedback adds: each tensor of what the server decodes is
    within its bound, and all of it within the clip."""
    shares = data.draw(st.sampled_from([(), TERMS["per_tensor"]]))
    plan = plan_of(data.draw(st.sampled_from(METHODS)), per_tensor=shares)
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    payloads: Any = SimpleNamespace()
    terms = RoundTerms(plan, SPEC, payloads)
    vars(terms)["public"] = plan.public(SPEC, {"previous": KNOWN})
    bounds = plan.privacy.bounds(SPEC) if plan.privacy is not None else None
    assert bounds is not None
    ledger = Ledger("digits", "me")
    for number in range(2):
        update = rng.standard_t(2, SPEC.size)
        for where in SPEC.slices.values():
            update[where] *= 10.0 ** data.draw(st.integers(-12, 12))
        assignment: Any = SimpleNamespace(assignment=str(number), plan=plan, profile="only")
        ledger, body = ledger.prepare(
            assignment, update.astype(np.float32), 5, SPEC, rng, knowledge={"previous": KNOWN}
        )
        assert body is not None
        decoded, _, _ = terms.decoded(body, "only", "me")
        norms = norms_of(decoded.dense())
        for name, clip in zip(bounds.names, bounds.clips, strict=True):
            assert norms.get(name, 0) <= clip * (1 + NORM_TOLERANCE)
        assert math.hypot(*norms.values()) <= CLIP * (1 + NORM_TOLERANCE)


def test_a_tensor_within_its_bound_is_sent_as_it_is_and_the_rest_of_others_is_left() -> None:
    plan = plan_of({"id": "none"})
    update = np.zeros(SPEC.size, np.float32)
    update[SPEC.slices["w"]] = 1.0
    update[SPEC.slices["b"]] = 0.001
    assignment: Any = SimpleNamespace(assignment="a", plan=plan, profile="only")
    ledger, _ = Ledger("digits", "me").prepare(
        assignment, update, 5, SPEC, np.random.default_rng(1), knowledge={"previous": KNOWN}
    )
    sent = ledger.pending["a"].update.dense()
    assert (sent[SPEC.slices["b"]] == np.float32(0.001)).all()
    bound = CLIP * 2 / math.sqrt(0.5**2 + 2 * 2**2)
    assert 0.998 * bound < norms_of(sent)["w"] <= bound
    assert ledger.residual is not None
    np.testing.assert_allclose(sent + ledger.residual, update, rtol=1e-6)


@pytest.mark.parametrize("name", ["w", "b", "conv"])
def test_a_tensor_beyond_its_bound_is_refused_by_name(name: str) -> None:
    """Also where the whole update is within the clip."""
    bounds, values = terms_with().bounds(SPEC), np.zeros(SPEC.size, np.float32)
    where = SPEC.slices[name]
    clip = bounds.clips[bounds.names.index(name)]
    values[where] = 0.99999 * clip / math.sqrt(where.stop - where.start)
    assert bounds.excess(Update.from_dense(values)) == ""
    values[where.start] = clip
    excess = bounds.excess(Update.from_dense(values))
    assert excess.startswith(f"the norm of tensor {name!r} is ")
    assert excess.endswith(f"larger than the clip of {clip:g}")
    assert bounds.excess(Update.from_dense(values), tolerance=1.0) == ""


def test_a_tensor_whose_clip_is_finer_than_the_compressor_s_steps_waits_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Just below the step, .1 / 127: nothing of it is sent, and nothing of it is lost."""
    bound = 0.00078
    shares = [["b", bound], ["*", 0.1]]
    clip = math.hypot(bound, 0.1, 0.1)
    plan = plan_of({"id": "shared_support", "fraction": 1.0}, per_tensor=shares, clip=clip)
    update = np.zeros(SPEC.size, np.float32)
    update[[SPEC.slices["w"].start, SPEC.slices["b"].start]] = 0.05
    assignment: Any = SimpleNamespace(assignment="a", plan=plan, profile="only")

    def prepared() -> Ledger:
        ledger, _ = Ledger("digits", "me").prepare(
            assignment, update, 5, SPEC, np.random.default_rng(1), knowledge={"previous": KNOWN}
        )
        return ledger

    ledger = prepared()
    norms = norms_of(ledger.pending["a"].update.dense())
    assert norms == pytest.approx({"w": 0.05, "b": 0, "conv": 0}, rel=0.02)
    assert ledger.residual is not None
    assert ledger.residual[SPEC.slices["b"].start] == np.float32(0.05)
    monkeypatch.setattr(channels, "_TRIES", 1)
    with pytest.raises(InvalidUpdate, match=r"the norm of tensor 'b' is .*choose a compressor"):
        prepared()


@pytest.mark.parametrize(
    ("shares", "reason"),
    [
        ([["b", 1], ["w", 1]], "fits the tensor 'conv', which would have no bound"),
        ([["*", 1], ["b", 1]], "'b' in privacy.per_tensor is the first pattern to fit of no"),
        ([["*", 1], ["x.*", 1]], "'x.\\*' in privacy.per_tensor is the first pattern to fit of no"),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(shares: Any, reason: str) -> None:
    with pytest.raises(IncompatiblePlan, match=reason):
        terms_with(per_tensor=shares).bounds(SPEC)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lane": "local"}, "per_tensor clips in the local lane.*set lane to central"),
        ({"lane": "distributed"}, "per_tensor clips in the distributed lane.*set lane to central"),
        ({"adaptive": {"count_noise": 5}}, "with an adaptive clip.*leave per_tensor out"),
        ({"per_tensor": [["*", 0]]}, "greater than or equal to 0.000001"),
        ({"per_tensor": [["", 1]]}, "at least 1 character"),
        ({"per_tensor": [["*", 1]] * 257}, "at most 256"),
    ],
)
def test_clips_of_tensors_that_cannot_be_kept_are_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        terms_with(**{"epsilon": 20.0, **changes})


def test_terms_without_clips_of_tensors_travel_as_before() -> None:
    plain = terms_with(per_tensor=())
    assert "per_tensor" not in plain.model_dump()
    assert "per_tensor" not in json.loads(plain.model_dump_json())
    again = PrivacyTerms.model_validate_json(terms_with().model_dump_json())
    assert again == terms_with()
    assert again.spent(5) == plain.spent(5)
