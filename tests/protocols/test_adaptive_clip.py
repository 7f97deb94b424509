"""Terms of an adaptive clip: what a participation costs, how the clip moves, what is refused."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fedpress_client.ledger import Ledger
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.plan import AdaptiveClip, PrivacyTerms, clip_range
from fedpress_protocols.upload import WITHIN_CLIP, Upload
from tests.protocols.test_masked_payload import KNOWN, SPEC, made_plan

ADAPTIVE = {"count_noise": 5.0}
TERMS: dict[str, Any] = {
    "lane": "central", "clip": 0.3, "noise_multiplier": 2.1, "participations": 5, "epsilon": 6.0,
    "adaptive": ADAPTIVE,
}  # fmt: skip


def terms_with(**changes: Any) -> PrivacyTerms:
    return PrivacyTerms.model_validate({**TERMS, **changes})


def test_update_and_count_together_cost_what_the_terms_claim() -> None:
    """As two Gaussian mechanisms, of the clip and of a half, one after the other."""
    terms = terms_with()
    update, count = 1 / terms.update_multiplier, 0.5 / 5.0
    assert math.hypot(update, count) == pytest.approx(1 / terms.noise_multiplier, rel=1e-9)
    assert math.hypot(update, count) <= 1 / terms.noise_multiplier
    assert terms.cost(1).mu == 1 / 2.1
    assert terms_with(adaptive=None).update_multiplier == 2.1


def test_a_round_s_clip_changes_nothing_else() -> None:
    terms = terms_with()
    narrow = terms.with_clip(0.1)
    assert narrow == terms_with(clip=0.1)
    assert narrow.update_multiplier == terms.update_multiplier


def test_a_fixed_clip_travels_as_before() -> None:
    assert "adaptive" not in terms_with(adaptive=None).model_dump()
    again = PrivacyTerms.model_validate_json(terms_with().model_dump_json())
    assert again == terms_with()
    assert again.adaptive == AdaptiveClip(quantile=0.5, learning_rate=0.2, count_noise=5.0)


def test_the_clip_comes_to_the_quantile_of_the_norms() -> None:
    norms = np.random.default_rng(1).lognormal(0, 0.5, 1000)
    for quantile in (0.2, 0.5, 0.9):
        adaptive, clip = AdaptiveClip(quantile=quantile, count_noise=1), 0.05
        for _ in range(200):
            clip = adaptive.next_clip(clip, float(np.mean(norms <= clip)), 0.05)
        assert np.mean(norms <= clip) == pytest.approx(quantile, abs=0.02)


def test_the_clip_stays_in_its_range_and_has_six_digits() -> None:
    adaptive = AdaptiveClip(learning_rate=2, count_noise=1)
    low, high = clip_range(0.3)
    assert (low, high) == (0.3 / 1024, 0.3 * 1024)
    assert adaptive.next_clip(low, 1.0, 0.3) == low
    assert adaptive.next_clip(high, 0.0, 0.3) == high
    assert adaptive.next_clip(0.3, 7.0, 0.3) == adaptive.next_clip(0.3, 1.0, 0.3) == 0.110364
    assert clip_range(1e-9)[0] == 1e-9
    assert clip_range(2.0**20)[1] == 2.0**20


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"adaptive": {}}, "has no noise, .* set adaptive.count_noise to a twentieth"),
        ({"adaptive": {"count_noise": 0}}, "each round's clip would tell of single devices"),
        ({"adaptive": {"count_noise": 1.05}}, "set adaptive.count_noise to more than 1.05"),
        ({"adaptive": {"count_noise": 5, "quantile": 1}}, "less than 1"),
        ({"lane": "local"}, "an adaptive clip in the local lane.*set lane to central"),
        ({"lane": "distributed"}, "an adaptive clip in the distributed lane"),
        (
            {"correlation": {"separation": 2, "rounds": 3, "weight": 1.0, "decay": 1.0}},
            "was drawn for other clips, so that it would neither",
        ),
    ],
)
def test_an_adaptive_clip_that_is_not_private_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        terms_with(epsilon=20.0, **changes)


def test_a_plan_has_the_bit_if_and_only_if_the_clip_is_adaptive() -> None:
    def planned(report: tuple[str, ...], adaptive: dict[str, Any] | None) -> Any:
        plan = made_plan(
            {"id": "quantize", "clip": 0.1},
            lane="clear",
            masking=None,
            report=report,
            privacy=json.loads(json.dumps({**TERMS, "adaptive": adaptive})),
            fixed_point={"scale_bits": 30, "max_abs": 0.3, "max_examples": 1},
        )
        return plan

    plan = planned((WITHIN_CLIP,), ADAPTIVE)
    assert plan.trainer_report == ()
    with pytest.raises(IncompatiblePlan, match="without within-clip in report"):
        planned((), ADAPTIVE)
    with pytest.raises(IncompatiblePlan, match="and the plan has none; leave it out"):
        made_plan({"id": "quantize", "clip": 0.1}, lane="clear", masking=None, report=[WITHIN_CLIP])
    for report, adaptive in (((WITHIN_CLIP,), None), ((WITHIN_CLIP, "loss"), ADAPTIVE)):
        with pytest.raises(IncompatiblePlan, match="without noise"):
            planned(report, adaptive)


@pytest.mark.parametrize(("clip", "bit"), [(0.00078, 0.0), (0.04, 0.0), (0.3, 1.0)])
def test_an_update_that_cannot_be_sent_within_the_clip_asks_for_a_larger_one(
    clip: float, bit: float
) -> None:
    """Just below the compressor's step, .1 / 127, nothing is sent, and nothing is lost."""
    inner = {"id": "shared_support", "fraction": 1.0}
    plan = made_plan(
        {"id": "error_feedback", "inner": inner},
        lane="clear",
        masking=None,
        report=[WITHIN_CLIP],
        privacy={**TERMS, "clip": clip},
        fixed_point={"scale_bits": 30, "max_abs": clip, "max_examples": 1},
    )
    assignment: Any = SimpleNamespace(assignment="a", plan=plan, profile="only")
    update = np.zeros(SPEC.size, np.float32)
    update[0] = 0.05
    rng = np.random.default_rng(3)
    ledger, body = Ledger("digits", "me").prepare(
        assignment, update, 5, SPEC, rng, knowledge={"previous": KNOWN}
    )
    assert body is not None
    upload = Upload.from_bytes(body, plan.layouts(SPEC), 0, report=plan.report)
    assert upload.report == (bit,)
    sent = ledger.pending["a"].update
    assert sent.norm <= clip
    assert ledger.residual is not None
    np.testing.assert_allclose(sent.dense() + ledger.residual, update, atol=1e-6)
