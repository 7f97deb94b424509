"""The plan's limits on the residual, beside the device's own."""

from __future__ import annotations

import numpy as np
import pytest

from fedpress_client import Ledger, ResidualRules
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.messages import Assignment
from fedpress_protocols.model import Model
from tests.client.fake_server import make_plan

MODEL = Model.from_tensors({"w": np.zeros((20, 12), np.float32)})


@pytest.mark.parametrize(
    ("own", "decay", "max_ratio", "expected"),
    [
        (ResidualRules(), 1.0, None, (1.0, None)),
        (ResidualRules(0.5, 3.0), 1.0, None, (0.5, 3.0)),
        (ResidualRules(), 0.9, 2.0, (0.9, 2.0)),
        (ResidualRules(0.5, 3.0), 0.9, 2.0, (0.5, 2.0)),
    ],
)
def test_the_stricter_limit_counts(
    own: ResidualRules, decay: float, max_ratio: float | None, expected: tuple[float, float | None]
) -> None:
    made = ErrorFeedback(TopK(), decay, max_ratio).stricter(own.decay, own.max_ratio)
    assert (made.decay, made.max_ratio) == expected
    assert TopK().stricter(own.decay, own.max_ratio) == TopK()


def test_a_ledger_keeps_the_plan_s_limits_and_reports_as_the_compressor_does() -> None:
    """Rounds 1, 2 and 5 through the ledger and through the plain compressor: equal residuals."""
    made = ErrorFeedback(TopK(0.05), decay=0.5, max_ratio=0.5)
    ledger, state = Ledger("task", "client"), made.init(MODEL.spec)
    lost = np.zeros(MODEL.spec.size)
    for number in (1, 2, 5):
        update = np.random.default_rng(number).normal(size=MODEL.spec.size).astype(np.float32)
        plan = make_plan(MODEL, made, round_=number)
        assignment = Assignment(
            assignment=f"a{number}", client_id="client", plan=plan, profile="p0"
        )
        rng = np.random.default_rng(0)
        ledger, _ = ledger.prepare(assignment, update, 1, MODEL.spec, rng)
        _, state = made.compress(update, state, plan.public(MODEL.spec), rng)
        assert ledger.residual is not None
        assert state.residual is not None
        np.testing.assert_allclose(ledger.residual, state.residual, atol=1e-6)
        lost += np.sum([each for _, each in state.lost], axis=0)
    assert {discard.reason for discard in ledger.discards} == {"decayed", "capped"}
    told = np.sum([discard.vector for discard in ledger.discards], axis=0)
    np.testing.assert_allclose(told, lost, atol=1e-5)
