"""Control variates move with included uploads, and with no other; the server's is their mean."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from federation import Federation
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpress_client import Ledger
from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms
from fedpress_server.storage.files import optimizer_name
from tests.strategies.bowls import bowls

CLIENTS = 5
SHAPE = (8, 6)
SIZE = 48
COMPRESSORS: tuple[Compressor[Any], ...] = (
    Uncompressed(),
    TopK(0.1, magnitude_bits=2),
    Quantize(3),
    Quantize(8),
)
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"id": "scaffold", "clients": CLIENTS},
    {"id": "scaffold", "clients": CLIENTS, "damping": 0.5, "learning_rate": 0.7},
    {"id": "feddyn", "clients": CLIENTS, "alpha": 0.4},
)


def federation(folder: Path, strategy: dict[str, Any], **how: Any) -> Federation:
    model = Model.from_tensors({"w": np.ones(SHAPE, np.float32)})
    terms = TrainingTerms(local_steps=4, learning_rate=0.1)
    return Federation(folder, model, strategy, bowls(CLIENTS, SIZE), terms, **how)


def of_server(made: Federation) -> Any:
    """The server's vector, from the state that its next aggregation begins with."""
    assert made.state is not None
    arrays = safetensors.numpy.load(made.payloads.get(optimizer_name(made.state)))
    return next(array for name, array in arrays.items() if name.startswith("state."))


def of_clients(made: Federation) -> npt.NDArray[np.float32]:
    """[clients, size]"""
    kept = [ledger.control for ledger in made.ledgers]
    return np.array([np.zeros(SIZE, np.float32) if each is None else each for each in kept])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_servers_is_the_mean_of_the_clients(data: st.DataObject) -> None:
    """Uploads lost, attempts abandoned, devices restarted, another compressor every round."""
    strategy = data.draw(st.sampled_from(STRATEGIES))
    chosen = data.draw(st.lists(st.sampled_from(COMPRESSORS), min_size=6, max_size=6))
    everyone = st.lists(st.integers(0, CLIENTS - 1), unique=True)
    with tempfile.TemporaryDirectory() as folder:
        made = federation(
            Path(folder), strategy, compressor=lambda number: chosen[number % len(chosen)]
        )
        for _ in range(data.draw(st.integers(1, 6))):
            before = of_clients(made)
            who = data.draw(everyone.filter(bool))
            lost = data.draw(st.lists(st.sampled_from(who), unique=True))
            abandoned = data.draw(st.booleans())
            made.run(who, lost=lost, abandoned=abandoned, restarts=data.draw(everyone))
            moved = set() if abandoned else set(who) - set(lost)
            for index, control in enumerate(of_clients(made)):
                assert (control != before[index]).any() == (index in moved)
        if made.state is not None:
            assert of_server(made) == pytest.approx(of_clients(made).mean(axis=0), abs=2e-5)
        assert not any(ledger.pending for ledger in made.ledgers)


def test_a_control_variate_is_the_sum_of_what_was_included(tmp_path: Path) -> None:
    made = federation(
        tmp_path, {"id": "feddyn", "clients": CLIENTS}, compressor=lambda number: TopK(0.2)
    )
    total = np.zeros(SIZE)
    for number in range(6):
        ledger = made.ledgers[0]
        is_lost = number in (1, 4)
        made.run([0, 1], lost=[0] if is_lost else [], restarts=[0])
        after = made.ledgers[0].control
        assert after is not None
        if is_lost:
            assert ledger.control is not None
            assert np.array_equal(after, ledger.control)
        else:
            base = np.zeros(SIZE) if ledger.control is None else ledger.control
            total += after - base
    assert made.ledgers[0].control == pytest.approx(total, abs=1e-6)
    assert total.any()


def test_another_models_tensors_begin_anew(tmp_path: Path) -> None:
    """As the server's do; an upload for the old ones, settled late, moves nothing."""
    made = federation(tmp_path / "a", STRATEGIES[0])
    made.run(range(CLIENTS))
    first = made.ledgers[0]
    assert first.control is not None
    other = Model.from_tensors({"v": np.ones(7, np.float32)})
    again = Federation(tmp_path / "b", other, STRATEGIES[0], bowls(CLIENTS, 7), made.training)
    again.ledgers[0] = Ledger.from_bytes(first.to_bytes())
    again.number = 2
    again.run(range(CLIENTS))
    assert again.ledgers[0].control is not None
    assert again.ledgers[0].control.shape == (7,)
    kept = [each.control for each in again.ledgers if each.control is not None]
    assert len(kept) == CLIENTS
    assert of_server(again) == pytest.approx(np.mean(kept, axis=0), abs=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES[::2])
def test_error_feedback_around_a_control_variate_is_refused(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    made = federation(tmp_path, strategy, compressor=lambda number: ErrorFeedback(TopK()))
    with pytest.raises(ValueError, match="counted twice it diverges; use topk without"):
        made.run([0])


@pytest.mark.parametrize("strategy", STRATEGIES[::2])
def test_both_reach_the_common_minimum_through_top_k(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    """Of losses whose minima differ, where local steps without correction end elsewhere."""
    made = federation(tmp_path / "one", strategy, compressor=lambda number: TopK(0.2))
    plain = federation(tmp_path / "two", {"id": "fedavg"})
    for _ in range(100):
        made.run(range(CLIENTS))
    for _ in range(20):
        plain.run(range(CLIENTS))
    clients = bowls(CLIENTS, SIZE)
    weights = np.array([client.curvature for client in clients], np.float64)
    best = np.average([client.centre for client in clients], axis=0, weights=weights)
    error = np.linalg.norm(made.model.parameters - best)
    # fedavg weighs by examples as well: what counts is that it does not come near.
    assert error < 0.02 * np.linalg.norm(best)
    assert np.linalg.norm(plain.model.parameters - best) > 10 * error
