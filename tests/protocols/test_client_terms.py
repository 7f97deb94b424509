"""Client terms and reports in plans: typed, refused where they cannot be honoured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedpress_compression.coding.fields import Reals
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.plan import ClientTerms, ControlTerms, RoundPlan
from tests.protocols.test_plan import make_plan

SPEC = ModelSpec(
    (
        TensorSpec("body.w", (3, 2)),
        TensorSpec("count", (), "int64"),
        TensorSpec("head.w", (2,)),
        TensorSpec("body.b", (2,), "float16"),
    )
)
PLAIN = [{"name": "plain", "compressor": {"id": "none"}}]


def plan(**terms: Any) -> RoundPlan:
    return make_plan(spec=SPEC.digest, profiles=PLAIN, client_terms=terms)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"client_terms": {"proximal": -0.1}}, "client_terms.proximal"),
        ({"client_terms": {"personal": [""]}}, "client_terms.personal"),
        ({"client_terms": {"control": {}}}, "client_terms.control.scale"),
        ({"client_terms": {"clip": 1.0}}, "client_terms.clip"),
        ({"client_terms": {"normalise": True}}, "add steps to report"),
        ({"report": ["steps", "steps"]}, "must not repeat a name: steps, steps"),
        ({"report": [f"n{index}" for index in range(17)]}, "report"),
        ({"report": ["no spaces"]}, "report"),
        ({"client_terms": {"control": {"scale": 1.0}}}, "counted twice it diverges"),
    ],
)
def test_terms_that_cannot_be_are_refused_with_a_sentence(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        make_plan(**changes)


def test_terms_survive_json_and_say_what_a_trainer_must_know() -> None:
    made = plan(proximal=0.5, control={"scale": -2.0, "offset": 0.5, "server": "a" * 64})
    assert RoundPlan.from_json(made.to_json()) == made
    assert made.client_terms.of_trainer == {"proximal", "control"}
    assert made.artefacts == {"a" * 64}
    assert plan(full_batch=True).client_terms.of_trainer == {"full_batch"}
    assert plan().client_terms.of_trainer == plan().artefacts == frozenset()


def test_the_servers_vector_is_named_where_clients_keep_one() -> None:
    kept = ClientTerms(control=ControlTerms(scale=-1.0)).with_control("b" * 64)
    assert kept.control == ControlTerms(scale=-1.0, server="b" * 64)
    assert ClientTerms(proximal=0.1).with_control("b" * 64) == ClientTerms(proximal=0.1)


def test_uploads_are_over_what_is_not_personal() -> None:
    made = plan(personal=["head.*"])
    shared = made.shared(SPEC)
    assert [tensor.name for tensor in shared.tensors] == ["body.w", "body.b"]
    assert made.public(SPEC).spec == shared
    (field,) = made.layouts(SPEC)[0]
    assert isinstance(field, Reals)
    assert field.count == 8
    assert plan().shared(SPEC) is SPEC
    flat = np.arange(10, dtype=np.float32)
    part = SPEC.part(flat, shared)
    assert part.tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert SPEC.with_part(flat, shared, -part).tolist() == [0, -1, -2, -3, -4, -5, 6, 7, -8, -9]
    assert SPEC.part(flat, SPEC) is flat
    assert SPEC.with_part(flat, SPEC, part) is part


@pytest.mark.parametrize("pattern", ["tail", "count"])
def test_a_pattern_must_match_a_trained_tensor(pattern: str) -> None:
    with pytest.raises(IncompatiblePlan, match=f"match no trained tensor: {pattern}"):
        plan(personal=["head.*", pattern]).layouts(SPEC)


def test_not_every_tensor_may_be_personal() -> None:
    with pytest.raises(IncompatiblePlan, match="every tensor is personal under \\*"):
        plan(personal=["*"]).public(SPEC)


def test_reported_numbers_have_their_place_in_the_largest_body() -> None:
    names = ["steps", "loss", "mine"]
    without = make_plan(profiles=PLAIN, spec=SPEC.digest)
    reporting = make_plan(profiles=PLAIN, spec=SPEC.digest, report=names)
    assert reporting.max_body_bytes(SPEC) == without.max_body_bytes(SPEC) + 12
