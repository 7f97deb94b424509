"""The session that a plan calls for, and no other."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.masking.agreement import agreed, check_agreed, chosen
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.masking.transcript import PhaseSeconds, SessionConfig, VectorSpec
from fedpress_protocols.model import Model
from fedpress_protocols.plan import (
    CohortRules,
    FixedPointTerms,
    MaskingTerms,
    Profile,
    RoundPlan,
)

MODEL = Model.from_tensors({"w": np.zeros(50, np.float32)})
KEY = bytes(range(32))


def config(**changes: Any) -> SessionConfig:
    plan = RoundPlan(
        task="digits",
        round=1,
        attempt=2,
        model=MODEL.digest,
        spec=MODEL.spec.digest,
        lane="masked",
        masking=MaskingTerms(corrupt=0.05, levels=7),
        profiles=(Profile(name="one", compressor=SharedSupport(fraction=0.2)),),
        cohort=CohortRules(size=9, minimum=4),
        deadline=1e9,
        fixed_point=FixedPointTerms(scale_bits=24, max_abs=64.0, max_examples=100),
        public_seed="ab" * 32,
        previous_model=MODEL.digest,
    ).model_copy(update=changes)
    public = plan.public(MODEL.spec, {"previous": np.zeros(50, np.float32)})
    return agreed(Payload(plan, public), population="kitchen", server_key=KEY)


def test_a_plan_gives_both_ends_one_configuration() -> None:
    due = config()
    assert due == config(deadline=2e9)  # which may move on while too few have come
    assert (due.minimum, due.maximum, due.corrupt) == (4, 9, 500)
    assert due.vectors[0] == VectorSpec("values", 10, 7)
    assert due.model == bytes.fromhex(MODEL.digest)
    assert config(public_seed="cd" * 32).support != due.support
    offered = chosen(due, nonce=b"n" * 32, expires=7)
    check_agreed(offered, due)
    assert offered.digest != due.digest


@pytest.mark.parametrize(
    "change",
    [
        {"population": "attic"},
        {"task": "other"},
        {"round": 2},
        {"attempt": 1},
        {"server_key": bytes(32)},
        {"model": bytes(32)},
        {"support": bytes(32)},
        {"plan": bytes(32)},
        {"vectors": (VectorSpec("values", 10, 8),)},
        {"minimum": 3},
        {"maximum": 10},
        {"adversary": "semi-honest"},
        {"corrupt": 0},
        {"dropout": 0},
        {"suite": "aes-128-ctr"},
        {"hybrid": True},
        {"seconds": PhaseSeconds(mask=1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_server_may_choose_the_nonce_and_the_time_alone(change: dict[str, Any]) -> None:
    due = config()
    with pytest.raises(IncompatiblePlan, match=f"the session's {next(iter(change))} differs"):
        check_agreed(replace(due, **change), due)


def test_nothing_of_a_configuration_is_left_unchecked() -> None:
    fixed = {"version", "rule", "server_nonce", "expires"}
    marks = test_a_server_may_choose_the_nonce_and_the_time_alone.pytestmark
    tried = {next(iter(change)) for change in marks[0].args[1]}
    assert {each.name for each in fields(config())} == tried | fixed
