"""A policy that goes by losses, where uploads go under masks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedpress_client.masking_rules import MaskingRules
from fedpress_client.trainer import Evaluation
from fedpress_protocols.messages import RoundStatus
from fedpress_protocols.model import Model
from fedpress_protocols.registry import ModelLineage
from fedpress_server import Settings, create_app
from tests.devices import ADMIN_TOKEN, Operator
from tests.masked import SHARED, Numbered, Participant, Unread, drive, masked_task
from tests.server.in_process import Server, history, running

LOOP = {"id": "accuracy_driven", "window": 3, "settle": 0}


def profiles_of(rounds: list[RoundStatus]) -> list[int]:
    return [each.course.gentlest for each in rounds if each.course is not None]


class Improving(Numbered):
    """Says a loss that falls from model to model."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.models: list[str] = []

    def evaluate(self, model: Model) -> Evaluation:
        if model.digest not in self.models:
            self.models.append(model.digest)
        return Evaluation(10, {"loss": 2.0 / len(self.models)})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    settings = Settings(data_dir=tmp_path / "server", admin_token=ADMIN_TOKEN, tick_seconds=0.05)
    with running(create_app(settings)) as http:
        yield http


@pytest.mark.slow
@pytest.mark.parametrize("reports", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_masked_ladder_has_one_profile_a_round(
    reports: bool, server: Server, tmp_path: Path
) -> None:
    """It presses harder by what devices report, if they do, and residuals last from one to the
    next; with a downlink, whose models are what the supports are drawn from."""
    sparser = {**SHARED, "inner": {**SHARED["inner"], "fraction": 0.25}}
    model = Model.from_tensors({"w": np.linspace(-1, 1, 40, dtype=np.float32)})
    operator = Operator(server)
    masked_task(
        operator,
        model,
        3,
        rounds=10,
        cohort={"size": 3, "minimum": 3},
        profiles=[{"name": "half", "compressor": SHARED}, {"name": "less", "compressor": sparser}],
        policies=[LOOP],
        downlink={"bits": 10},
        retention={"last": 2},
        round_seconds=600.0,
    )
    token = operator.token(uses=3)
    people = [
        Participant(
            tmp_path,
            number,
            token,
            lambda: Unread(server),
            time.time,
            masking=MaskingRules(reports_evaluations=reports),
        )
        for number in range(3)
    ]
    for each in people:
        each.trainer = Improving(each.number)
    drive(people, lambda: time.sleep(0.01), turns=5000)
    rounds = history(operator)
    assert [each.state for each in rounds] == ["committed"] * 10
    assert profiles_of(rounds)[0] == 0
    assert max(profiles_of(rounds)) == (1 if reports else 0)
    down = [(each.coded_download_bytes, each.difference_download_bytes) for each in rounds]
    assert [sum(each) for each in down] == [each.download_bytes for each in rounds]
    assert down[0][0]
    assert down[1][1]
    for each in people:
        ledger = each.ledger
        assert not ledger.pending
        computed = sum(each.trainer.computed.values())
        included = sum(held.update.dense() for held in each.plain.values())
        assert set(ledger.settled.values()) == {"included"}
        assert ledger.residual is not None
        np.testing.assert_allclose(included + ledger.residual, computed, atol=1e-5)
    found = operator.get(f"/v1/admin/tasks/{rounds[0].task}/versions/10")
    made = ModelLineage.model_validate(found)
    bare = {
        hashlib.sha256(held.body).hexdigest() for each in people for held in each.plain.values()
    }
    assert made.num_updates == len(set(made.updates)) == 3
    assert not bare & set(made.updates), "the lineage names masked bodies"
