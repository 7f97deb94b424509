"""What dgc takes and what it stands beside; its recurrence is in tests/oracles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedpress.compressor_option import compressor_from_option
from fedpress_compression.compressor import Public, from_config
from fedpress_compression.compressors.dgc import SPARSITIES, Dgc
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.qsgd import Qsgd
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_ddp.exchange import Exchange
from fedpress_protocols.errors import IncompatiblePlan, InvalidUpdate
from fedpress_protocols.model import Model
from fedpress_protocols.plan import ClientTerms, ControlTerms, RoundPlan
from tests.client.fake_server import make_plan

MODEL = Model.from_tensors({"w": np.zeros((20, 50), np.float32)})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
        ({"momentum": -0.1}, r"momentum must lie in \[0, 1\)"),
        ({"max_norm": 0}, "max_norm must lie between"),
        ({"cohort": 0}, "cohort must be a whole number from 1"),
        ({"decay": 2}, r"decay must lie in \[0, 1\]"),
        ({"inner": {"id": "dgc"}}, "inner must be a compressor other than this"),
        ({"inner": {"id": "error_feedback"}}, "inner must be a compressor other than this"),
    ],
)
def test_a_configuration_that_cannot_work_says_why(config: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        from_config({"id": "dgc", **config})


@pytest.mark.parametrize("outer", ["cafe", "clip", "ef21", "per_tensor", "error_feedback"])
def test_dgc_goes_around_others_and_into_none(outer: str) -> None:
    inner = "large" if outer == "per_tensor" else "inner"
    with pytest.raises(IncompatiblePlan, match=r"goes around|other than this"):
        from_config({"id": outer, inner: {"id": "dgc"}})


def test_the_command_line_takes_it_bare() -> None:
    assert compressor_from_option("dgc:momentum=0.8") == Dgc(momentum=0.8)


def test_velocities_beyond_float32_are_refused() -> None:
    spec = ModelSpec((TensorSpec("w", (4,)),))
    edge = np.full(4, np.finfo(np.float32).max)
    made = Dgc(TopK(0.5))
    public = Public(spec, PublicRandomness(bytes(32)))
    state = made.init(spec)._replace(velocity=edge)
    with pytest.raises(InvalidUpdate, match="NaN or infinity"):
        made.compress(edge, state, public, np.random.default_rng(0))


def test_a_plan_with_control_variates_refuses_it() -> None:
    plan = make_plan(MODEL, Dgc())
    terms = ClientTerms(control=ControlTerms(scale=-1.0))
    with pytest.raises(ValueError, match="use topk without error feedback"):
        RoundPlan.model_validate({**dict(plan), "client_terms": terms})


def test_an_exchange_refuses_feedback_that_diverges() -> None:
    with pytest.raises(IncompatiblePlan, match="use qsgd without error_feedback"):
        Exchange(ErrorFeedback(Qsgd()))


def test_its_residual_is_that_of_plain_error_feedback() -> None:
    """So that a task may change between the two."""
    assert isinstance(Dgc(), ErrorFeedback)
    without = Dgc(TopK(0.1), momentum=0.0)
    plain = ErrorFeedback(TopK(0.1))
    public = Public(MODEL.spec, PublicRandomness(bytes(32)))
    update = np.random.default_rng(0).standard_normal(MODEL.spec.size).astype(np.float32)
    sent, moving = without.compress(
        update, without.init(MODEL.spec), public, np.random.default_rng(0)
    )
    same, still = plain.compress(update, plain.init(MODEL.spec), public, np.random.default_rng(0))
    assert all((a == b).all() for a, b in zip(sent, same, strict=True))
    np.testing.assert_array_equal(moving.residual, still.residual)


def test_the_published_sparsities_end_at_the_default() -> None:
    inner = Dgc().inner
    assert isinstance(inner, TopK)
    assert inner.fraction == pytest.approx(1 - SPARSITIES[-1])
