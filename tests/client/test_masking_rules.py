"""The fields of a device's masking rules: what could not work is refused when it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedpress_client import MaskingRules
from fedpress_protocols.errors import ConfigurationError, PlanDeclined
from fedpress_protocols.plan import RoundPlan
from tests.protocols.test_masked_payload import plan_fields

SUPPORT = {"id": "shared_support", "fraction": 0.5, "bits": 8}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adversary", "Malicious"),
        ("adversary", "none"),
        ("adversary", ["malicious"]),
        ("minimum", 1),
        ("minimum", 3.5),
        ("corrupt", 2),
        ("corrupt", 1),
        ("corrupt", float("nan")),
        ("suites", ("x",)),
        ("suites", ()),
        ("suites", "chacha20"),
        ("authority", "zz"),
        ("authority", 3),
        ("hybrid", "no"),
        ("required", 1),
        ("reports_evaluations", None),
        ("max_rounds", True),
        ("max_rounds", 0),
        ("max_weight", 1.5),
        ("min_support", None),
        ("compressors", "quantize"),
        ("compressors", ()),
        ("compressors", []),
        ("compressors", ("no_such_one",)),
        ("compressors", (3,)),
        ("certificate", "no/such/file"),
        ("certificate", 3),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_its_name(name: str, value: Any) -> None:
    fields: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError, match=f"^{name}\\b"):
        MaskingRules(**fields)


def test_the_path_of_a_certificate_may_be_a_text(tmp_path: Path) -> None:
    file = tmp_path / "device.cert"
    file.write_bytes(b"certificate")
    text: Any = str(file)
    assert MaskingRules(certificate=text).certificate == file


def test_rules_that_work_are_taken() -> None:
    rules = MaskingRules(
        adversary="semi-honest", minimum=20, corrupt=0.0, suites=("chacha20",), max_rounds=1
    )
    assert rules.minimum == 20
    listed: Any = ["quantize", "topk"]
    assert MaskingRules(compressors=listed).compressors is listed


@pytest.mark.parametrize(
    ("compressor", "declined"),
    [
        ({"id": "error_feedback", "inner": SUPPORT}, None),
        ({"id": "dgc", "inner": SUPPORT}, "dgc"),
        ({"id": "error_feedback", "inner": {"id": "randomk", "bits": 8}}, "randomk"),
    ],
)
def test_every_compressor_but_error_feedback_has_to_be_allowed(
    compressor: dict[str, Any], declined: str | None
) -> None:
    plan = RoundPlan.model_validate(plan_fields(compressor))
    rules = MaskingRules(compressors=("shared_support",))
    if declined is None:
        rules.check(plan, 0, is_pinned=False)
    else:
        with pytest.raises(PlanDeclined, match=f"compresses by .*{declined}"):
            rules.check(plan, 0, is_pinned=False)
