"""Requirements on what devices measured of a model."""

from __future__ import annotations

from typing import Any

import pytest

from fedpress_protocols.errors import ConfigurationError, Conflict
from fedpress_protocols.messages import Measured, RoundStatus
from fedpress_protocols.promotion_gate import Requirement, checked, examined
from fedpress_protocols.registry import ModelVersion


def measured(devices: int, **metrics: float) -> Measured:
    return Measured(num_clients=devices, num_examples=10 * devices, metrics=metrics)


def _round(**fields: Any) -> RoundStatus:
    return RoundStatus(
        task="digits",
        round=1,
        attempt=1,
        state="committed",
        base_model="0" * 64,
        model="1" * 64,
        assigned=5,
        received=5,
        included=5,
        minimum=5,
        size=5,
        opened_at=0,
        deadline=1,
        upload_bytes=0,
        wire_upload_bytes=0,
        download_bytes=0,
        num_examples=50,
        **fields,
    )


def version(number: int, model: str) -> ModelVersion:
    return ModelVersion(
        task="digits",
        version=number,
        model=model * 64,
        parent=None,
        attempt=1,
        published={},
        num_updates=5,
        num_bytes=100,
        config="0" * 64,
        code="",
        created_at=0,
    )


def test_every_form_of_a_requirement() -> None:
    status = _round(
        measured=measured(5, accuracy=0.9, loss=0.5),
        groups={"north": measured(2, accuracy=0.95), "south": measured(3, accuracy=0.85)},
        classes={"7": measured(4, accuracy=0.6)},
    )

    def holds(text: str) -> bool:
        return all(each.holds for each in examined([Requirement.parsed(text)], status))

    for text in ("accuracy>=0.9", "accuracy <= .9", "loss<0.6", "loss>-1e0", "devices>=5",
                 "examples>=50", "groups.accuracy>=0.85", "groups[north].accuracy>0.9",
                 "groups.devices>=2", "classes[7].accuracy>=0.6"):  # fmt: skip
        assert holds(text), text
    for text in ("accuracy>0.9", "accuracy<.9", "loss<=0.4", "devices>=6", "groups.accuracy>=0.9",
                 "groups[south].accuracy>0.9", "groups.devices>2", "classes.accuracy>0.6",
                 "classes[8].accuracy>=0"):  # fmt: skip
        assert not holds(text), text
    for text in ("", "accuracy", "accuracy=1", "accuracy>=", ">=1", "accuracy>=nan",
                 "accuracy>=inf", "accuracy>=1 and loss<1", "groups[].accuracy>1", "a b>1",
                 ):  # fmt: skip
        with pytest.raises(ConfigurationError, match="is no requirement"):
            Requirement.parsed(text)


def test_what_was_not_measured_is_said() -> None:
    for text, says in (
        ("accuracy>0", "accuracy>0: no device has measured the model"),
        ("groups.accuracy>0", "groups.accuracy>0: no group was measured"),
        ("groups[west].accuracy>0", "groups[west].accuracy>0: no group 'west'"),
        ("classes.accuracy>0", "classes.accuracy>0: no class was measured"),
    ):
        (finding,) = examined([Requirement.parsed(text)], _round())
        assert (str(finding), finding.holds) == (says, False)


def test_a_version_is_held_to_the_round_that_made_it() -> None:
    status = _round(measured=measured(5, accuracy=0.9), groups={"north": measured(1_000, loss=2)})
    required = [Requirement.parsed(text) for text in ("accuracy>0.8", "groups.devices>=9")]
    found = checked(required, version(1, "1"), status)
    assert [str(each) for each in found] == [
        "accuracy>0.8: found 0.9", "groups.devices>=9: found 1,000, group north",
    ]  # fmt: skip
    with pytest.raises(Conflict, match=r"not promoted: loss<1: was not measured"):
        checked([*required, Requirement.parsed("loss<1")], version(1, "1"), status)
    with pytest.raises(Conflict, match="round 1 has made another model than version 1"):
        checked(required, version(1, "2"), status)
    with pytest.raises(Conflict, match="the one that the task began with"):
        checked(required, version(0, "1"), None)
