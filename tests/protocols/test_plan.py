"""Plans, messages, uploads, errors: parsed once, refused with a sentence, one at both ends."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.compressor import from_config
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols import errors
from fedpress_protocols.errors import (
    DecodingError,
    FedpressError,
    IncompatiblePlan,
    InvalidUpdate,
    WireVersionMismatch,
    error_classes,
)
from fedpress_protocols.messages import CheckInResponse, TaskConfig
from fedpress_protocols.plan import RoundPlan, agreed_version, parsed
from fedpress_protocols.upload import Upload, max_body_bytes

SPEC = ModelSpec((TensorSpec("w", (50, 40)), TensorSpec("b", (40,))))
PRESSED = {"id": "error_feedback", "inner": {"id": "per_tensor"}}


def plan_fields(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "task": "digits",
        "round": 3,
        "attempt": 1,
        "model": "a" * 64,
        "spec": SPEC.digest,
        "profiles": [
            {"name": "pressed", "compressor": PRESSED},
            {"name": "plain", "compressor": {"id": "none"}},
        ],
        "training": {"local_epochs": 2, "learning_rate": 0.1},
        "cohort": {"size": 10, "minimum": 5, "over_selection": 1.3},
        "deadline": 1_800_000_000.5,
        "fixed_point": {"scale_bits": 30, "max_abs": 64.0, "max_examples": 10_000},
        "public_seed": "0" * 64,
    }
    return {**fields, **changes}


def make_plan(**changes: Any) -> RoundPlan:
    return RoundPlan.from_json(json.dumps(plan_fields(**changes)))


def test_a_plan_survives_json() -> None:
    plan = make_plan()
    assert RoundPlan.from_json(plan.to_json()) == plan
    assert plan.cohort.assigned == 13
    assert plan.compressor("pressed") == from_config(PRESSED)
    assert plan.profile_index("plain") == 1


def test_a_plan_implies_layouts_bounds_and_randomness() -> None:
    plan = make_plan()
    assert [len(layout) for layout in plan.layouts(SPEC)] == [7, 1]
    assert plan.max_body_bytes(SPEC) >= 4 * SPEC.size
    assert plan.sum_bounds().max_weight == 100_000
    public = plan.public(SPEC)
    assert public.spec is SPEC
    assert public.randomness.seed == bytes(32)
    with pytest.raises(IncompatiblePlan, match="is for a model spec"):
        plan.public(ModelSpec((TensorSpec("w", (3,)),)))
    with pytest.raises(IncompatiblePlan, match="no profile 'fast'"):
        plan.compressor("fast")


def test_powersgd_in_two_exchanges_is_a_plan_s_only_profile() -> None:
    two = {"name": "two", "compressor": {"id": "powersgd", "trips": 2}}
    model = "b" * 64
    assert make_plan(profiles=[two], previous_model=model).first_trip is not None
    plain = {"name": "plain", "compressor": {"id": "none"}}
    with pytest.raises(IncompatiblePlan, match="give the plan this profile alone"):
        make_plan(profiles=[two, plain], previous_model=model)


@pytest.mark.parametrize("given", [None, 3, "topk", [PRESSED]])
def test_a_compressor_is_told_by_its_id(given: Any) -> None:
    profiles = [{"name": "pressed", "compressor": given}]
    with pytest.raises(FedpressError, match="a compressor is an object with an id, not"):
        RoundPlan.from_json(json.dumps(plan_fields(profiles=profiles)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"surprise": 1}, "surprise: there is no such field"),
        ({"round": 0}, "round: must be 1 or more, not 0"),
        ({"task": "../etc"}, "task: must match .*, not '../etc'"),
        ({"model": "xyz"}, "model: must match .*, not 'xyz'"),
        ({"lane": "plain"}, "lane: must be 'clear' or 'masked', not 'plain'"),
        ({"deadline": "soon"}, "deadline"),
        ({"profiles": []}, "profiles"),
        (
            {"profiles": [{"name": "a", "compressor": {"id": "none"}}] * 2},
            "profile names must be unique",
        ),
        (
            {"profiles": [{"name": "a", "compressor": {"id": "zip"}}]},
            "no compressor has the id 'zip'",
        ),
        ({"cohort": {"size": 3, "minimum": 4}}, "minimum 4 is larger than size 3"),
        (
            {"training": {"local_epochs": 1, "local_steps": 1}},
            "local_epochs or local_steps, not both",
        ),
        (
            {"fixed_point": {"scale_bits": 40, "max_abs": 1e6, "max_examples": 10_000}},
            "can overflow 63 bits",
        ),
    ],
)
def test_a_plan_that_cannot_work_says_why(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        make_plan(**changes)


def test_text_that_is_no_plan_is_refused() -> None:
    for text in ("", "[]", "{", "null", '{"deadline": NaN}'):
        with pytest.raises(IncompatiblePlan):
            RoundPlan.from_json(text)
    with pytest.raises(IncompatiblePlan, match="task: is missing"):
        parsed(TaskConfig, "{}")


def test_messages_refuse_what_they_do_not_know() -> None:
    with pytest.raises(IncompatiblePlan, match="extra"):
        parsed(CheckInResponse, '{"extra": 1}')


def test_the_newest_common_wire_version_is_spoken() -> None:
    assert agreed_version((9, 1)) == 1
    with pytest.raises(WireVersionMismatch, match=r"\[2, 3\], the other \[1\]"):
        agreed_version((2, 3))


def make_upload(num_examples: int = 300) -> tuple[Upload, bytes]:
    plan = make_plan()
    compressor = plan.compressor("pressed")
    update = np.random.default_rng(1).standard_normal(SPEC.size).astype(np.float32)
    symbols, _ = compressor.compress(
        update, compressor.init(SPEC), plan.public(SPEC), np.random.default_rng(2)
    )
    upload = Upload(0, num_examples, symbols)
    return upload, upload.to_bytes(plan.layouts(SPEC)[0])


@given(st.integers(1, 2**32 - 1))
def test_an_upload_survives_its_bytes(num_examples: int) -> None:
    upload, body = make_upload(num_examples)
    layouts = make_plan().layouts(SPEC)
    again = Upload.from_bytes(body, layouts, 0)
    assert again.num_examples == num_examples
    assert all((a == b).all() for a, b in zip(upload.symbols, again.symbols, strict=True))
    assert len(body) <= max_body_bytes(layouts[0])


@pytest.mark.parametrize("num_examples", [0, -1, 2**32])
def test_an_upload_without_a_weight_is_not_made(num_examples: int) -> None:
    with pytest.raises(InvalidUpdate, match="outside"):
        make_upload(num_examples)


@pytest.mark.parametrize(
    ("head", "error", "says"),
    [
        (b"", DecodingError, "0 bytes; an upload has at least 3"),
        (b"\x02\x00\x05", WireVersionMismatch, "wire version 2, expected 1"),
        (b"\x01\x01\x05", DecodingError, "profile 1, but 0 was assigned"),
        (b"\x01\x00\x00", DecodingError, "num_examples must be at least 1"),
        (b"\x01\x00\x80\x00", DecodingError, "shortest LEB128"),
        (b"\x01\x00\xff\xff\xff\xff\x1f", DecodingError, "shortest LEB128"),
        (b"\x01\x00\xff\xff\xff\xff\xff", DecodingError, "shortest LEB128"),
        (b"\x01\x00\x80", DecodingError, "shortest LEB128"),
        (b"\x01\x00\x05", DecodingError, "bits left, expected"),
    ],
)
def test_a_body_with_a_wrong_head_is_refused(
    head: bytes, error: type[FedpressError], says: str
) -> None:
    with pytest.raises(error, match=says):
        Upload.from_bytes(head, make_plan().layouts(SPEC), 0)


@pytest.mark.parametrize("cls", list(error_classes()))
def test_every_error_comes_out_as_itself_at_the_other_end(cls: type[FedpressError]) -> None:
    sent = cls("found 3, expected 4", hint="try 4", retry_after=2.5, server_time=17)
    problem = json.loads(json.dumps(sent.to_problem()))
    received = FedpressError.from_problem(problem, status=500)
    assert type(received) is cls
    assert (received.detail, received.hint) == ("found 3, expected 4", "try 4")
    assert received.members == {"retry_after": 2.5, "server_time": 17}
    assert str(received) == "found 3, expected 4 (try 4)"
    assert cls().detail == cls.title


def test_what_the_other_end_says_moves_no_cursor() -> None:
    problem = {"detail": "\x1b]0;title\x07fine\r\n\u202etxt", "hint": "\x9b2J" + "x" * 9000}
    received = FedpressError.from_problem(problem, 401)
    assert received.detail == r"\x1b]0;title\x07fine\r\n\u202etxt"
    assert received.hint.startswith(r"\x9b2Jx")
    assert len(received.hint) < 8200


def test_error_slugs_are_unique_and_the_tree_is_the_documented_one() -> None:
    slugs = [cls.slug for cls in error_classes()]
    assert len(set(slugs)) == len(slugs)
    assert errors.__doc__ is not None
    for cls in error_classes():
        assert cls.__name__ in errors.__doc__


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (404, "NotFound"),
        (409, "Conflict"),
        (401, "Unauthorized"),
        (503, "Unavailable"),
        (418, "MalformedRequest"),
        (502, "ServerError"),
    ],
)
def test_an_unknown_problem_is_taken_for_the_nearest(status: int, name: str) -> None:
    received = FedpressError.from_problem({"type": "about:blank", "detail": "x"}, status)
    assert type(received).__name__ == name


def test_compressors_within_one_another_are_bounded() -> None:
    nested: dict[str, Any] = {"id": "topk"}
    for _ in range(300):
        nested = {"id": "clip", "inner": nested, "max_norm": 1.0}
    with pytest.raises(IncompatiblePlan, match="within more than 16 others"):
        from_config(nested)
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(IncompatiblePlan, match="lists within lists"):
        from_config({"id": "per_tensor", "rules": deep})


@pytest.mark.parametrize(
    ("compressor", "says"),
    [
        ({"id": "topk", "fraction": "much"}, "a setting is of the wrong kind"),
        ({"id": "topk", "fraction": 2}, "fraction must lie in"),
    ],
)
def test_settings_of_a_compressor_are_refused_in_plain_words(
    compressor: dict[str, Any], says: str
) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        make_plan(profiles=[{"name": "a", "compressor": compressor}])
