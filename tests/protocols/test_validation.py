"""What is wrong with a document is told in one sentence, and none of it is pydantic's."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from fedpress_protocols.plan import Name, Term
from fedpress_protocols.policies import Policies
from fedpress_protocols.validation import format_validation_errors

PYDANTIC = ("Input ", "Value error", "Field required", "Extra inputs", "Tuple ", "Unable")


class Inner(Term):
    size: Annotated[int, Field(ge=1, le=9)] = 1


class Document(Term):
    """A field of every kind that plans and messages have."""

    name: Name = "a"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    lane: Literal["clear", "masked"] = "clear"
    is_on: bool = False
    inner: Inner = Inner()
    text: Annotated[str, Field(min_length=2, max_length=3)] = "ab"
    several: Annotated[tuple[Inner, ...], Field(min_length=1, max_length=2)] = (Inner(),)
    named: Annotated[dict[str, float], Field(max_length=2)] = Field(default_factory=dict)
    policies: Policies = ()
    expect: Annotated[int, Field(ge=0)] | Literal["none", "any"] = "any"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"surprise": 1}, "surprise: there is no such field"),
        ({"name": "../x"}, "name: must match ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$, not '../x'"),
        ({"name": 3}, "name: must be text, not 3"),
        ({"name": "x" * 100}, "name: must match ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
        ({"named": {"a": 1, "b": 2, "c": 3}}, "named: must have 2 items at most, not 3"),
        ({"share": 0}, "share: must be more than 0, not 0"),
        ({"share": 1.5}, "share: must be less than 1, not 1.5"),
        ({"share": math.nan}, "share: must be a finite number, not nan"),
        ({"share": [1]}, "share: must be a number"),
        ({"share": "half"}, "share: must be a number, not 'half'"),
        ({"lane": "plain"}, "lane: must be 'clear' or 'masked', not 'plain'"),
        ({"is_on": "perhaps"}, "is_on: must be true or false, not 'perhaps'"),
        ({"inner": 3}, "inner: must be an object with named fields, not 3"),
        ({"inner": {"size": 0}}, "inner.size: must be 1 or more, not 0"),
        ({"inner": {"size": 10}}, "inner.size: must be 9 at most, not 10"),
        ({"inner": {"size": 1.5}}, "inner.size: must be a whole number, not 1.5"),
        ({"inner": {"size": None}}, "inner.size: must be a whole number"),
        ({"inner": {"size": "9" * 5000}}, "inner.size: must be a whole number"),
        ({"text": "a"}, "text: must have 2 characters or more"),
        ({"text": "abcd"}, "text: must have 3 characters at most"),
        ({"several": []}, "several: must have 1 items or more, not 0"),
        ({"several": [{}] * 3}, "several: must have 2 items at most, not 3"),
        ({"several": {}}, "several: must be a list"),
        ({"several": [{"size": 0}]}, "several.0.size: must be 1 or more, not 0"),
        (
            {"expect": "many"},
            "expect: must be a whole number or must be 'none' or 'any', not 'many'",
        ),
        ({"named": []}, "named: must be an object with named fields"),
        ({"policies": [{}]}, "policies.0: 'id' is missing"),
        (
            {"policies": [{"id": "bandwith_aware"}]},
            "policies.0: 'id' must be one of 'bandwidth_aware', 'accuracy_driven', "
            "'divergence_guard', 'auto', not 'bandwith_aware'",
        ),
        ({"share": 0, "lane": 1}, "share: must be more than 0, not 0; lane: must be 'clear' or "
        "'masked', not 1"),
    ],
)  # fmt: skip
def test_every_fault_is_told_in_plain_words(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Document.model_validate(fields, strict=False)
    assert format_validation_errors(caught.value) == says
    assert not any(word in says for word in PYDANTIC)


def test_text_that_is_no_json_says_so() -> None:
    with pytest.raises(ValidationError) as caught:
        Document.model_validate_json("{")
    assert format_validation_errors(caught.value).startswith("is not JSON: ")
    with pytest.raises(ValidationError) as caught:
        Document.model_validate_json("[" * 100_000)
    assert "is not JSON: recursion limit" in format_validation_errors(caught.value)


def test_a_kind_of_fault_that_nobody_thought_of_keeps_its_message() -> None:
    class Odd(BaseModel):
        data: bytes

    with pytest.raises(ValidationError) as caught:
        Odd.model_validate_json(json.dumps({"data": 3}))
    assert format_validation_errors(caught.value) == "data: Input should be a valid bytes"


def test_of_many_faults_the_first_are_told_and_of_very_many_their_number() -> None:
    for count, says in ((25, "; and 6 more"), (1001, "1002 values are not as expected")):
        with pytest.raises(ValidationError) as caught:
            Document.model_validate({"share": 1} | {f"f{index}": 0 for index in range(count)})
        assert format_validation_errors(caught.value).endswith(says)
        assert len(format_validation_errors(caught.value)) < 1000
