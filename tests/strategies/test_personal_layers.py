"""Personal tensors are trained, kept, and in no upload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import Federation

from fedpress_client import Ledger
from fedpress_client.client_terms import personalised
from fedpress_compression.compressors.eden import Eden
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.model import Model
from tests.strategies.bowls import Bowl

SHARED, OWN = 12, 5
FEDPER = {"id": "fedper", "personal": ["head.*"]}


def bowls_of(heads: list[float]) -> list[Bowl]:
    """Losses with one minimum for the body and another for each head."""
    return [
        Bowl(
            np.concatenate([np.full(SHARED, 2.0), np.full(OWN, head)]).astype(np.float32),
            np.ones(SHARED + OWN, np.float32),
        )
        for head in heads
    ]


def federation(folder: Path, strategy: dict[str, Any] = FEDPER) -> Federation:
    model = Model.from_tensors(
        {
            "body": np.zeros(SHARED, np.float32),
            "head.weight": np.zeros((2, 2), np.float32),
            "head.bias": np.zeros(1, np.float32),
        }
    )
    return Federation(
        folder, model, strategy, bowls_of([-1.0, 1.0, 5.0]), compressor=lambda _: Uncompressed()
    )


@pytest.mark.parametrize("inner", [{"id": "fedavg"}, {"id": "feddyn", "clients": 3}])
def test_heads_stay_at_home_and_reach_their_own_minimum(
    tmp_path: Path, inner: dict[str, Any]
) -> None:
    made = federation(tmp_path, {**FEDPER, "inner": inner})
    first = made.model
    for _ in range(40):
        made.run([0, 1, 2], restarts=[0, 1, 2])
    tensors = made.model.tensors()
    assert tensors["body"] == pytest.approx(2, abs=0.01)
    for name in ("head.weight", "head.bias"):
        assert (tensors[name] == first.tensors()[name]).all()
    for ledger, head in zip(made.ledgers, (-1, 1, 5), strict=True):
        own = personalised(made.model, ledger).tensors()
        assert own["head.weight"] == pytest.approx(head, abs=0.01)
        assert own["head.weight"].shape == (2, 2)
        assert own["body"] == pytest.approx(2, abs=0.01)


def test_an_upload_has_no_room_for_a_head(tmp_path: Path) -> None:
    made = federation(tmp_path)
    made.run([0])
    assert made.uploaded == 3 + 4 * SHARED
    assert made.plan.max_body_bytes(made.model.spec) < 4 * (SHARED + OWN)


def test_heads_wait_for_no_receipt_and_outlive_other_tensors(tmp_path: Path) -> None:
    made = federation(tmp_path)
    made.run([0], abandoned=True)
    kept = made.ledgers[0].personal
    assert kept["head.weight"].any()
    ledger = Ledger.from_bytes(made.ledgers[0].to_bytes())
    assert (ledger.personal["head.bias"] == kept["head.bias"]).all()
    wider = Model.from_tensors(
        {
            "body": np.zeros(SHARED + 1, np.float32),
            "head.weight": np.zeros((2, 2), np.float32),
            "head.bias": np.zeros(3, np.float32),
        }
    )
    own = personalised(wider, ledger).tensors()
    assert (own["head.weight"] == kept["head.weight"]).all()
    assert not own["head.bias"].any()


@pytest.mark.parametrize(
    ("patterns", "says"), [(["tail"], "match no trained tensor: tail"), (["*"], "every")]
)
def test_patterns_must_take_some_and_leave_some(
    tmp_path: Path, patterns: list[str], says: str
) -> None:
    made = federation(tmp_path, {"id": "fedper", "personal": patterns})
    with pytest.raises(IncompatiblePlan, match=says):
        made.run([0])


def test_frozen_tensors_are_neither_shared_nor_personal(tmp_path: Path) -> None:
    names = {"body": (SHARED,), "head.weight": (2, 2), "head.bias": (1,), "table": (3,)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in names.items()}
    model = Model.from_tensors(arrays, frozen=["table"])
    trainers = bowls_of([-1.0, 1.0])
    made = Federation(tmp_path, model, FEDPER, trainers, compressor=lambda _: ErrorFeedback(Eden()))
    for _ in range(5):
        made.run([0, 1], restarts=[0, 1])
    for tensors in (made.model.tensors(), personalised(made.model, made.ledgers[0]).tensors()):
        assert (tensors["table"] == 1).all()
        assert (tensors["body"] != 1).any()
    assert set(made.ledgers[0].personal) == {"head.weight", "head.bias"}
    with pytest.raises(IncompatiblePlan, match="match no trained tensor: table"):
        Federation(tmp_path, model, {"id": "fedper", "personal": ["table"]}, trainers).run([0])
