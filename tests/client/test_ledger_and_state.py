"""The account is a value with a file of its own, and the file has an owner."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_client import Ledger, ResidualRules
from fedpress_client.state import Identity, StateDirectory
from fedpress_compression import compressor as registry
from fedpress_compression import sketches
from fedpress_compression.coding.fields import Layout, Symbols
from fedpress_compression.compressor import Knowledge, Public, state_name
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.randomk import RandomK
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    DigestMismatch,
    Forbidden,
    IncompatiblePlan,
    InvalidUpdate,
    StateCorrupt,
    StateLocked,
)
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.model import Model
from fedpress_protocols.plan import ClientTerms, ControlTerms
from tests.client.fake_server import make_plan
from tests.ledgers import residual, velocity
from tests.systems import posix_only

RNG = np.random.default_rng(0)


def model(size: int = 40) -> Model:
    return Model.from_tensors({"w": np.zeros(size, np.float32)})


def assignment(compressor: Any, round_: int = 1, size: int = 40, **options: Any) -> Assignment:
    plan = make_plan(model(size), compressor, round_=round_, **options)
    return Assignment(assignment=f"a{round_}", client_id="me", plan=plan, profile="p0")


def prepared(
    ledger: Ledger, compressor: Any, round_: int = 1, size: int = 40, **options: Any
) -> tuple[Ledger, Vector]:
    update = RNG.normal(size=size).astype(np.float32)
    given_ = assignment(compressor, round_, size, **options)
    ledger, _ = ledger.prepare(given_, update, 7, model(size).spec, RNG)
    return ledger, update


def receipt(ledger: Ledger, name: str, outcome: str = "included", **changes: Any) -> Receipt:
    held = ledger.pending[name]
    fields = {
        "assignment": name,
        "client_id": "me",
        "task": "task",
        "round": held.round,
        "attempt": held.attempt,
        "outcome": outcome,
        "reason": "included" if outcome == "included" else "missed-deadline",
        "upload": held.digest,
        "model": None,
        "issued_at": 1,
    }
    return Receipt.model_validate(fields | changes)


EMPTY = Ledger("task", "me")
FEEDBACK = ErrorFeedback(TopK(fraction=0.1))


def full_ledger() -> Ledger:
    """Something in every field."""
    ledger, _ = prepared(EMPTY, FEEDBACK, 1)
    ledger, _ = prepared(ledger, FEEDBACK, 2)
    ledger = ledger.settle(receipt(ledger, "a2"))
    ledger, _ = prepared(ledger, Quantize(bits=3), 3)
    ledger, _ = prepared(ledger, ErrorFeedback(Uncompressed()), 4)
    states = {"x": (3, {"m": [np.arange(3.0), None, 2, "t", 4], "n": np.zeros((0, 2))})}
    return replace(ledger, states=states)


def test_an_account_survives_the_disk() -> None:
    ledger = full_ledger()
    assert ledger.discards
    data = ledger.to_bytes()
    again = Ledger.from_bytes(data)
    assert again.to_bytes() == data
    assert list(again.pending) == ["a1", "a3", "a4"]
    np.testing.assert_array_equal(again.residual, ledger.residual)
    for name, held in ledger.pending.items():
        twin = again.pending[name]
        assert (twin.body, twin.digest, twin.feedback) == (held.body, held.digest, held.feedback)
        np.testing.assert_array_equal(twin.update.dense(), held.update.dense())
    assert again.settled == {"a2": "included"}
    array, *rest = again.states["x"][1]["m"]
    np.testing.assert_array_equal(array, np.arange(3.0))
    assert rest == [None, 2, "t", 4]
    assert again.states["x"][1]["n"].shape == (0, 2)


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_any_damage_to_the_file_is_noticed(where: float, bit: int, cut: bool) -> None:
    data = bytearray(full_ledger().to_bytes())
    place = int(where * len(data))
    if cut:
        del data[place:]
    else:
        data[place] ^= 1 << bit
    with pytest.raises(StateCorrupt):
        Ledger.from_bytes(bytes(data))


def test_a_file_of_a_later_format_says_who_can_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpress_client.ledger_file.FORMAT", 3)
    data = EMPTY.to_bytes()
    monkeypatch.undo()
    with pytest.raises(StateCorrupt, match=r"format is 3, this release reads 1 to 2.*newer one"):
        Ledger.from_bytes(data)


FORMAT_1 = Path(__file__).parents[1] / "golden" / "ledger-format-1.safetensors"
"""Of release 0.1: rounds 1 to 3 included, 4 to 7 pending; powersgd within error feedback, ef21 and
dgc in turn, then top-k alone; over one tensor of 6 x 5, with nothing but zeros before."""


def test_an_account_of_the_first_format_goes_on() -> None:
    ledger = Ledger.from_bytes(FORMAT_1.read_bytes())
    assert (list(ledger.pending), list(ledger.kept)) == (
        ["a4", "a5", "a6", "a7"],
        ["a1", "a2", "a3"],
    )
    assert Ledger.from_bytes(ledger.to_bytes()).to_bytes() == ledger.to_bytes()
    sent = {key: held.update.dense() for key, held in ledger.pending.items()}
    before = ledger.residual
    assert before is not None

    back = ledger
    for key in ("a4", "a6"):
        back = back.settle(receipt(back, key, "not-included"))
    np.testing.assert_allclose(residual(back), before + sent["a4"] + sent["a6"], atol=1e-6)
    bare = ledger.settle(receipt(ledger, "a7", "not-included"))
    assert [each.reason for each in bare.discards[-1:]] == ["not-included"]

    moved = ledger.settle(receipt(ledger, "a6"))
    assert not velocity(moved)[sent["a6"] != 0].any()
    np.testing.assert_array_equal(moved.residual, before)
    estimate, _ = ledger.states['"ef21"'][1]
    after, _ = ledger.settle(receipt(ledger, "a5")).states['"ef21"'][1]
    np.testing.assert_allclose(after, estimate + sent["a5"], atol=1e-6)
    name = state_name(PowerSGD(1))
    factors = ledger.settle(receipt(ledger, "a4")).states['"error_feedback"'][1][1]
    assert (factors[name][0][0] != ledger.states['"error_feedback"'][1][1][name][0][0]).any()

    spec = model(30).spec
    assert ledger._for_spec(spec).discards[-1].reason == "spec-changed"


def test_a_receipt_is_taken_once_and_only_if_it_is_ours() -> None:
    ledger, _ = prepared(EMPTY, FEEDBACK)
    with pytest.raises(Forbidden):
        ledger.settle(receipt(ledger, "a1", client_id="you"))
    with pytest.raises(Forbidden):
        ledger.settle(receipt(ledger, "a1", task="other"))
    with pytest.raises(DigestMismatch):
        ledger.settle(receipt(ledger, "a1", upload="0" * 64))
    with pytest.raises(DigestMismatch):
        ledger.settle(receipt(ledger, "a1", upload=None))
    with pytest.raises(DigestMismatch):
        ledger.settle(receipt(ledger, "a1", "not-included", upload="0" * 64))
    with pytest.raises(Conflict, match=r"round 2\.1"):
        ledger.settle(receipt(ledger, "a1", round=2))
    with pytest.raises(Conflict, match="because"):
        ledger.settle(receipt(ledger, "a1", reason="round-full"))
    assert ledger.settle(receipt(ledger, "a1", assignment="unknown")) is ledger
    after = ledger.settle(receipt(ledger, "a1"))
    assert after.settle(receipt(ledger, "a1")) is after
    with pytest.raises(Conflict, match="an earlier one said included"):
        after.settle(receipt(ledger, "a1", "not-included"))
    with pytest.raises(Conflict, match="has its receipt"):
        after.prepare(assignment(FEEDBACK), np.zeros(40, np.float32), 1, model().spec, RNG)


def test_what_was_not_included_goes_out_again() -> None:
    ledger, update = prepared(EMPTY, FEEDBACK)
    ledger = ledger.settle(receipt(ledger, "a1", "not-included", upload=None))
    np.testing.assert_allclose(residual(ledger), update, rtol=1e-6)
    everything = ErrorFeedback(Uncompressed())
    zero = np.zeros(40, np.float32)
    ledger, _ = ledger.prepare(assignment(everything, 2), zero, 1, model().spec, RNG)
    np.testing.assert_allclose(ledger.pending["a2"].update.dense(), update, rtol=1e-6)
    assert not residual(ledger).any()


def test_without_feedback_every_loss_is_told_and_the_residual_waits() -> None:
    ledger, _ = prepared(EMPTY, FEEDBACK)
    waiting = ledger.residual
    ledger, update = prepared(ledger, TopK(fraction=0.1), 2)
    assert ledger.residual is waiting
    (loss,) = ledger.discards
    assert (loss.reason, loss.assignment) == ("not-sent", "a2")
    sent = ledger.pending["a2"].update.dense()
    np.testing.assert_array_equal(loss.vector, update - sent)
    assert loss.norm == pytest.approx(np.linalg.norm(loss.vector))
    ledger = ledger.told().settle(receipt(ledger, "a2", "not-included"))
    (loss,) = ledger.discards
    assert loss.reason == "not-included"
    np.testing.assert_array_equal(loss.vector, sent)
    assert ledger.residual is waiting


def test_what_compression_leaves_out_under_control_variates_is_not_told_as_lost() -> None:
    terms = ClientTerms(control=ControlTerms(scale=-0.5))
    update = RNG.normal(size=40).astype(np.float32)
    plan = assignment(TopK(fraction=0.1), client_terms=terms)
    ledger, body = EMPTY.prepare(plan, update, 1, model().spec, RNG)
    assert body is not None
    assert (ledger.pending["a1"].update.dense() != update).any()
    assert ledger.discards == ()


def test_another_model_ends_the_residual_and_says_so() -> None:
    ledger, _ = prepared(EMPTY, FEEDBACK)
    waiting, y = residual(ledger), ledger.pending["a1"].update.dense()
    ledger, _ = prepared(ledger, FEEDBACK, 2, size=30)
    assert residual(ledger).shape == (30,)
    (loss,) = ledger.discards
    assert loss.reason == "spec-changed"
    np.testing.assert_array_equal(loss.vector, waiting)
    ledger = ledger.told().settle(receipt(ledger, "a1", "not-included"))
    assert [d.reason for d in ledger.discards] == ["spec-changed"]
    np.testing.assert_array_equal(ledger.discards[0].vector, y)
    with pytest.raises(IncompatiblePlan):
        ledger.prepare(assignment(FEEDBACK, 3), np.zeros(30, np.float32), 1, model(30).spec, RNG)


def test_decay_and_cap_tell_what_they_take() -> None:
    ledger, _ = prepared(EMPTY, FEEDBACK)
    before = residual(ledger)
    update = np.full(40, 1e-3, np.float32)
    rules = ResidualRules(decay=0.5, max_ratio=2.0)
    late = assignment(FEEDBACK, 4)
    ledger, _ = ledger.prepare(late, update, 1, model().spec, RNG, rules)
    decayed, capped = ledger.discards
    assert (decayed.reason, capped.reason) == ("decayed", "capped")
    assert 0 < decayed.number < capped.number
    np.testing.assert_array_equal(decayed.vector, before - before * np.float32(0.25))
    kept = residual(ledger) + ledger.pending["a4"].update.dense() - update
    assert np.linalg.norm(kept) == pytest.approx(2 * np.linalg.norm(update), rel=1e-3)
    for bad in ({"decay": 1.5}, {"max_ratio": -1.0}, {"decay": float("nan")}):
        with pytest.raises(ConfigurationError):
            ResidualRules(**bad)


def test_values_beyond_the_plans_bound_are_sent_in_parts() -> None:
    update = np.linspace(-3, 3, 40).astype(np.float32)
    given_ = assignment(ErrorFeedback(Uncompressed()), max_abs=1.0)
    ledger, _ = EMPTY.prepare(given_, update, 10**6, model().spec, RNG)
    assert np.abs(ledger.pending["a1"].update.dense()).max() == 1.0
    assert ledger.pending["a1"].num_examples == 1000
    np.testing.assert_array_equal(ledger.pending["a1"].update.dense() + residual(ledger), update)


@pytest.mark.parametrize("peak", [1.0, 200.0])
def test_a_probe_is_told_of_the_update_itself_without_what_was_left_before(peak: float) -> None:
    """Within the plan's bound, whatever the compressor sends; and nothing in any other round."""
    before, left = prepared(EMPTY, FEEDBACK, 1)
    before = before.settle(receipt(before, "a1", "not-included"))
    assert np.linalg.norm(residual(before)) == pytest.approx(np.linalg.norm(left))
    update = np.linspace(-peak, peak, 40).astype(np.float32)
    rngs = [np.random.default_rng(1) for _ in range(3)]
    plain, asks = assignment(FEEDBACK, 2), assignment(FEEDBACK, 2, sketch=64)
    _, without = before.prepare(plain, update, 7, model().spec, rngs[0])
    ledger, body = before.prepare(asks, update, 7, model().spec, rngs[1])
    sections = list[bytes]()
    before.prepare(asks, update, 7, model().spec, rngs[2], sections=sections.append)
    assert body == b"".join(sections)
    public = asks.plan.public(model().spec)
    bounded = np.clip(update, -64, 64)
    cells = sketches.sketch(bounded, 64, public.stream(sketches.LABEL))
    assert without is not None
    assert body == without[:3] + sketches.to_bytes(cells) + without[3:]
    assert ledger.prepare(asks, update + 1, 7, model().spec, RNG)[1] == body


@pytest.mark.parametrize("feedback", [True, False])
def test_what_compression_takes_beyond_the_bound_is_not_sent_and_not_lost(feedback: bool) -> None:
    scaled = RandomK(fraction=0.1, unbiased=True)
    update, more = np.full((2, 40), 0.5, np.float32)
    made = ErrorFeedback(scaled) if feedback else scaled
    ledger, _ = prepared(EMPTY, made, 1, max_abs=64.0)
    before = ledger
    given_ = assignment(made, 2, max_abs=1.0)
    ledger, body = ledger.prepare(given_, update, 1, model().spec, RNG)
    assert body is None
    assert (ledger.round, list(ledger.pending)) == (2, ["a1"])
    if feedback:
        np.testing.assert_array_equal(ledger.residual, residual(before) + update)
        assert not ledger.discards
    else:
        (discard,) = ledger.discards[len(before.discards) :]
        assert (discard.reason, discard.assignment) == ("not-sent", "a2")
        np.testing.assert_array_equal(discard.vector, update)
    ledger = Ledger.from_bytes(ledger.to_bytes())
    with pytest.raises(Conflict, match="has its receipt"):
        ledger.prepare(given_, more, 1, model().spec, RNG)
    about = {"assignment": "a2", "round": 2, "reason": "declined", "upload": None}
    declined = receipt(before, "a1", "not-included", **about)
    assert ledger.settle(declined) is ledger


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_update_that_is_no_number_is_refused(bad: float) -> None:
    update = np.zeros(40, np.float32)
    update[3] = bad
    with pytest.raises(InvalidUpdate, match="NaN or infinity"):
        EMPTY.prepare(assignment(FEEDBACK), update, 1, model().spec, RNG)
    (discard,) = EMPTY.refuse("a1", update).discards
    assert discard.reason == "invalid"


@dataclass(frozen=True)
class Memory:
    velocity: np.ndarray
    rounds: int


@pytest.fixture
def momentum(monkeypatch: pytest.MonkeyPatch) -> type:
    """A compressor that remembers something, known for one test."""
    monkeypatch.setattr(registry, "_by_id", dict(registry.compressors()))

    @registry.compressor("tests.momentum")
    @dataclass(frozen=True, slots=True)
    class Momentum(registry.Stateful):
        factor: float = 0.5

        commutes_with_sum = False
        needs: ClassVar[frozenset[Knowledge]] = frozenset()

        def layout(self, spec: ModelSpec) -> Layout:
            return Uncompressed().layout(spec)

        def init(self, spec: ModelSpec) -> Any:
            return (Memory(np.zeros(spec.size, np.float32), 0), None)

        def compress(
            self, update: Vector, state: Any, public: Public, rng: np.random.Generator
        ) -> tuple[Symbols, Any]:
            memory, _ = state
            velocity = np.float32(self.factor) * memory.velocity + update
            symbols, _ = Uncompressed().compress(velocity, None, public, rng)
            return symbols, (Memory(velocity, memory.rounds + 1), None)

        def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
            return Uncompressed().decompress(symbols, public)

    return Momentum


def test_a_compressors_state_moves_on_with_an_included_upload_only(momentum: type) -> None:
    one = np.ones(40, np.float32)

    def sent(
        ledger: Ledger, round_: int, factor: float = 0.5, times: float = 1.0
    ) -> tuple[Ledger, float]:
        given_ = assignment(momentum(factor), round_)
        ledger, _ = ledger.prepare(given_, np.float32(times) * one, 1, model().spec, RNG)
        ledger = Ledger.from_bytes(ledger.to_bytes())
        return ledger, float(ledger.pending[f"a{round_}"].update.dense()[0])

    ledger, first = sent(EMPTY, 1)
    ledger, second = sent(ledger, 2, times=2.0)
    assert (first, second) == (1.0, 2.0)
    ledger = ledger.settle(receipt(ledger, "a1", "not-included"))
    ledger, third = sent(ledger, 3)
    assert third == 1.0
    ledger = ledger.settle(receipt(ledger, "a3"))
    ledger = ledger.settle(receipt(ledger, "a2"))  # an older upload's receipt came later
    ledger, fourth = sent(ledger, 4)
    assert fourth == 1.5
    assert sent(ledger, 5, factor=0.25)[1] == 1.0, "another configuration begins anew"
    ledger = ledger.settle(receipt(ledger, "a4"))
    assert sent(ledger, 5)[1] == 1.75


def test_a_state_that_cannot_be_stored_is_refused(momentum: type) -> None:
    given_ = assignment(momentum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(momentum, "compress", lambda *args: ((np.zeros(40, "<f4"),), object()))
        with pytest.raises(ConfigurationError, match="cannot be stored"):
            EMPTY.prepare(given_, np.zeros(40, np.float32), 1, model().spec, RNG)


class Fate(NamedTuple):
    included: int
    rolled_back: int


def test_a_compressor_of_others_says_what_a_receipt_does_to_its_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bare and within error feedback, through the disk, with two uploads under way."""
    monkeypatch.setattr(registry, "_by_id", dict(registry.compressors()))

    @registry.compressor("tests.counting")
    @dataclass(frozen=True, slots=True)
    class Counting(registry.Stateful):
        commutes_with_sum = False
        needs: ClassVar[frozenset[Knowledge]] = frozenset()

        def layout(self, spec: ModelSpec) -> Layout:
            return Uncompressed().layout(spec)

        def init(self, spec: ModelSpec) -> Fate:
            return Fate(0, 0)

        def compress(
            self, update: Vector, state: Any, public: Public, rng: np.random.Generator
        ) -> tuple[Symbols, Any]:
            symbols, _ = Uncompressed().compress(update, None, public, rng)
            return symbols, state

        def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
            return Uncompressed().decompress(symbols, public)

        def commit(self, state: Fate, mark: Any, sent: Update) -> Fate:
            return state._replace(included=state.included + 1)

        def roll_back(self, state: Fate, sent: Update) -> Fate:
            return state._replace(rolled_back=state.rolled_back + 1)

    def fate(ledger: Ledger) -> list[int]:
        """Wherever it lies."""
        ((_, stored),) = ledger.states.values()
        return next(iter(stored[1].values())) if isinstance(stored[1], dict) else stored

    for made in (Counting(), ErrorFeedback(Counting())):
        ledger = EMPTY
        for number in (1, 2, 3):
            ledger, _ = prepared(ledger, made, number)
        for name, outcome in (("a1", "included"), ("a3", "not-included"), ("a2", "included")):
            ledger = Ledger.from_bytes(ledger.to_bytes())
            ledger = ledger.settle(receipt(ledger, name, outcome))
        assert fate(ledger) == [2, 1]


def test_a_compressor_without_the_hooks_is_refused_by_name() -> None:
    class Bare:
        pass

    with pytest.raises(TypeError, match=r"'tests.bare' lacks keeps_residual.*derive .*Bare from"):
        registry.compressor("tests.bare")(Bare)


# The folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@posix_only
def test_the_folder_and_all_in_it_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        directory = StateDirectory.open(tmp_path / "a" / "b")
        key = directory.key()
        directory.enrolled(Identity(url="http://x", client_id="c", server_key="k"))
        with directory.alone():
            pass
        files = directory.task("task")
        files.save(EMPTY)
        files.keep_model("0" * 64, b"x")
        files.close()
    finally:
        os.umask(old)
    for path in (tmp_path / "a").rglob("*"):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path
    assert StateDirectory.open(tmp_path / "a" / "b").key().to_bytes() == key.to_bytes()
    identity = directory.identity()
    assert identity is not None
    assert identity.client_id == "c"


@pytest.mark.parametrize(
    ("platform", "task", "folder"),
    [("win32", "CON", "CON+"), ("win32", "digits", "digits"), ("linux", "CON", "CON")],
)
def test_a_task_may_have_the_name_of_a_device_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, task: str, folder: str
) -> None:
    directory = StateDirectory.open(tmp_path)
    monkeypatch.setattr("fedpress_client.state.sys.platform", platform)
    assert directory.task_path(task).name == folder


@posix_only
def test_a_folder_open_to_others_is_closed_and_a_strangers_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    StateDirectory.open(folder).key()
    assert mode(folder) == 0o700
    (folder / "key.pem").chmod(0o644)
    StateDirectory.open(folder).key()
    assert mode(folder / "key.pem") == 0o600
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigurationError, match="is a link"):
        StateDirectory.open(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ConfigurationError, match="belongs to user"):
        StateDirectory.open(folder)


def test_one_task_has_one_process_and_two_tasks_can_share(tmp_path: Path) -> None:
    directory = StateDirectory.open(tmp_path)
    held = directory.task("one")
    other = StateDirectory.open(tmp_path).task("two")
    with pytest.raises(StateLocked, match="in use"):
        StateDirectory.open(tmp_path).task("one")
    held.close()
    held.close()
    directory.task("one").close()
    other.close()


def test_a_broken_state_file_says_what_to_do(tmp_path: Path) -> None:
    directory = StateDirectory.open(tmp_path)
    files = directory.task("task")
    files.save(EMPTY)
    assert files.load("me").task == "task"
    with pytest.raises(StateCorrupt, match="belongs to client me"):
        files.load("you")
    path = files.folder / "ledger.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StateCorrupt, match=r"ledger\.safetensors: .*move it away"):
        files.load("me")
    files.close()
    directory.key()
    (tmp_path / "identity.json").write_text("{}")
    with pytest.raises(StateCorrupt, match=r"identity\.json.*enrol again"):
        directory.identity()
    (tmp_path / "key.pem").write_text("nonsense")
    with pytest.raises(StateCorrupt, match=r"key\.pem.*move all of .* away and enrol anew"):
        directory.key()


def test_no_new_key_is_made_for_a_device_that_is_enrolled(tmp_path: Path) -> None:
    directory = StateDirectory.open(tmp_path)
    directory.key()
    (tmp_path / "identity.json").write_text("{}")
    (tmp_path / "key.pem").unlink()
    with pytest.raises(StateCorrupt, match=r"key\.pem is missing beside identity\.json.*move all"):
        directory.key()
    assert not (tmp_path / "key.pem").exists()


@posix_only
def test_a_ledger_is_synced_before_it_takes_the_old_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = StateDirectory.open(tmp_path).task("task")
    files.save(EMPTY)
    seen: list[str] = []
    for name in ("write", "fsync", "replace"):
        real = getattr(os, name)

        def note(*args: Any, name: str = name, real: Callable[..., Any] = real) -> Any:
            kind = name
            if name == "fsync":
                is_folder = stat.S_ISDIR(os.fstat(args[0]).st_mode)
                kind = "fsync folder" if is_folder else "fsync file"
            seen.append(kind)
            return real(*args)

        monkeypatch.setattr(os, name, note)
    (files.folder / "ledger.safetensors.tmp").write_bytes(b"left by a crash")
    files.save(full_ledger())
    steps = [step for step, _ in groupby(seen)]
    assert steps == ["write", "fsync file", "replace", "fsync folder"]
    files.close()


def test_models_are_kept_by_digest_and_only_those_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, data = model().digest, model().to_bytes()
    files = StateDirectory.open(tmp_path).task("task")
    files.keep_model(digest, data)
    assert files.model(digest) == data
    path = files.folder / "models" / f"{digest}.safetensors"
    path.write_bytes(data[:-1])
    assert files.model(digest) is None
    assert not path.exists()
    for index in range(5):
        files.keep_model(f"{index:064x}", b"x")
    files.drop_models(besides=(f"{3:064x}", None))
    assert [kept.stem for kept in (files.folder / "models").iterdir()] == [f"{3:064x}"]

    def full(*args: Any) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "open", full)
    files.keep_model(digest, data)
    monkeypatch.undo()
    assert len(list((files.folder / "models").iterdir())) == 1
    files.close()
