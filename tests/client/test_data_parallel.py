"""Gradients exchanged by four processes over gloo: torch's own hooks, conservation, sites."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpress_compression import coding
from fedpress_compression.compressor import Public
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_ddp.collectives import received
from fedpress_ddp.exchange import Exchange
from fedpress_ddp.hook import HookState, LocalSGD
from fedpress_ddp.sharded import CompressedReduceScatter
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from tests.client.data_parallel_process import (
    METHODS,
    MOMENTUM,
    PLAIN_STEPS,
    SPEC,
    STEPS,
    WORLD,
    stateless,
)

GLOO = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "FEDPRESS_KERNELS": "numpy"}
Found = list[Mapping[str, np.ndarray]]
EXCHANGED = stateless()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of the processes has to tell."""
    folder = tmp_path_factory.mktemp("exchange")
    here = {**os.environ, **GLOO, "PYTHONPATH": os.pathsep.join(sys.path)}
    outs = [folder / f"{rank}.npz" for rank in range(WORLD)]
    script = Path(__file__).with_name("data_parallel_process.py")
    subprocess.run(
        [sys.executable, script, folder / "store", *outs], env=here, check=True, timeout=240
    )
    return [dict(np.load(out)) for out in outs]


def test_half_precision_is_torch_s_hook(found: Found) -> None:
    for process in found[:2]:
        np.testing.assert_array_equal(process["hooks.half.ours"], process["hooks.half.torch"])
        np.testing.assert_array_equal(process["hooks.brain.ours"], process["hooks.brain.torch"])
        num_bytes, plain_bytes = process["hooks.brain.bytes"]
        assert 2 * num_bytes == plain_bytes  # plain steps, too


def test_powersgd_is_torch_s_hook(found: Found) -> None:
    """Every step of a whole training, from the same right factors."""
    for process in found[:2]:
        ours, torch_s = process["hooks.powersgd.ours"], process["hooks.powersgd.torch"]
        np.testing.assert_array_equal(ours[:PLAIN_STEPS], torch_s[:PLAIN_STEPS])
        for mine, theirs in zip(ours[PLAIN_STEPS:], torch_s[PLAIN_STEPS:], strict=True):
            assert np.linalg.norm(mine - theirs) <= 1e-4 * np.linalg.norm(theirs)
        num_bytes, plain_bytes = process["hooks.powersgd.bytes"]
        assert num_bytes < plain_bytes


@pytest.mark.parametrize("name", EXCHANGED)
def test_nothing_is_lost_and_all_end_alike(name: str, found: Found) -> None:
    means = [process[f"everything.{name}.means"] for process in found]
    for other in means[1:]:
        np.testing.assert_array_equal(means[0], other)
    inputs = np.mean([process[f"everything.{name}.inputs"] for process in found], axis=0)
    residuals = np.sum([process[f"everything.{name}.residual"] for process in found], axis=0)
    scale = np.abs(inputs).sum(axis=0) + np.abs(residuals)
    error = means[0].sum(axis=0) + residuals - inputs.sum(axis=0)
    assert np.all(np.abs(error) <= 1e-5 * scale.max())


def test_dgc_between_processes_is_dgc_in_each(found: Found) -> None:
    public = Public(SPEC, PublicRandomness(bytes(32)))
    rng = np.random.default_rng(0)
    total = np.zeros_like(found[0]["everything.dgc.means"])
    for process in found:
        state = MOMENTUM.init(SPEC)
        for step, vector in enumerate(process["everything.dgc.inputs"]):
            own = (vector / len(found)).astype(np.float32)
            symbols, state = MOMENTUM.compress(own, state, public, rng)
            total[step] += MOMENTUM.decompress(symbols, public).dense()
    for process in found:
        np.testing.assert_allclose(process["everything.dgc.means"], total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*EXCHANGED, "dgc"])
def test_a_checkpoint_goes_on_where_it_was(name: str, found: Found) -> None:
    for process in found:
        np.testing.assert_array_equal(
            process[f"everything.{name}.means"][STEPS // 2 :],
            process[f"everything.{name}.resumed"],
        )


def test_a_sparse_exchange_sends_what_it_says(found: Found) -> None:
    """All-gathered: as long as the longest body, and the lengths; far below the plain bytes."""
    for process in found:
        num_bytes, plain_bytes = process["everything.topk.bytes"]
        assert plain_bytes == STEPS * 4 * SPEC.size
        assert 0 < num_bytes < plain_bytes / 15


def paired(vectors: list[np.ndarray]) -> np.ndarray:
    """Adasum of four, as in the paper's equation."""

    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b

    return pair(pair(vectors[0], vectors[1]), pair(vectors[2], vectors[3]))


@pytest.mark.parametrize(
    ("way", "error"), [("whole", 1e-5), ("half", 2e-2), ("brain", 0.2), ("sparse", 1e-4)]
)
def test_adasum_combines_each_tensor_in_pairs(way: str, error: float, found: Found) -> None:
    cuts = [slice(0, 1200), slice(1200, 1240)]
    for step in range(2):
        if way == "sparse":
            sent = [WORLD * p[f"adasum.sent.{step}"].astype(np.float64) for p in found]
            combined = [process[f"adasum.sparse.{step}"] for process in found]
        else:
            sent = [process["adasum.inputs"][step].astype(np.float64) for process in found]
            combined = [process[f"adasum.{way}"][step] for process in found]
        expected = np.concatenate([paired([vector[cut] for vector in sent]) for cut in cuts])
        np.testing.assert_allclose(combined[0], expected, atol=error * np.abs(expected).max())
        for other in combined[1:]:
            np.testing.assert_array_equal(combined[0], other)


def test_adasum_adds_orthogonal_gradients_and_averages_equal_ones(found: Found) -> None:
    inputs = [process["adasum.inputs"][0] for process in found]
    whole = found[0]["adasum.whole"][0]
    np.testing.assert_allclose(whole[:1200], np.sum(inputs, axis=0)[:1200], rtol=1e-5)
    np.testing.assert_allclose(whole[1200:], inputs[0][1200:], rtol=1e-5)


def test_adasum_does_not_depend_on_buckets(found: Found) -> None:
    for process in found:
        np.testing.assert_array_equal(process["adasum.buckets.0"], process["adasum.buckets.1"])


def test_symbols_that_commute_are_summed(found: Found) -> None:
    """Without feedback, where the support lies, within half a step of each of the four."""
    means = found[0]["shared.means"]
    assert np.count_nonzero(means[0]) > 0.05 * SPEC.size
    for process in found[1:]:
        np.testing.assert_array_equal(means, process["shared.means"])
    exact = np.clip([p["shared.inputs"][0] / WORLD for p in found], -0.1, 0.1).sum(axis=0)
    moved = means[0] != 0
    assert np.abs(means[0] - exact)[moved].max() <= WORLD * 0.1 / 127


def test_infinity_anywhere_is_nan_everywhere_and_changes_nothing(found: Found) -> None:
    for process in found:
        assert np.isnan(process["bad.mean"]).all()
        assert process["bad.before"].any()
        np.testing.assert_array_equal(process["bad.before"], process["bad.after"])


def test_a_failure_is_known_to_all_and_leaves_the_order_as_it_was(found: Found) -> None:
    says = [str(process["failing.says"]) for process in found]
    assert says[2] == "ZeroDivisionError: broken here"
    for rank in (0, 1, 3):
        assert says[rank].startswith("InvalidUpdate: process 2 of the group could not compress")
    for process in found[1:]:
        np.testing.assert_array_equal(process["failing.after"], found[0]["failing.after"])
    assert found[0]["failing.after"].any()


@pytest.mark.parametrize("name", METHODS)
def test_threads_give_the_bits_of_the_synchronous_hook(name: str, found: Found) -> None:
    for process in found:
        steps = process[f"overlapped.{name}.3"]
        np.testing.assert_array_equal(steps, process[f"overlapped.{name}.0"])
        np.testing.assert_array_equal(steps, found[0][f"overlapped.{name}.3"])
        nmse, ratio = (process[f"overlapped.{name}.3.{each}"] for each in ("nmse", "ratio"))
        assert nmse[0] == 0  # a plain step
        assert np.all(nmse[1:] > 0)
        assert np.all(ratio[1:] > 0) == (name != "qsgd")
        if name not in ("qsgd", "powersgd"):  # of the group's mean, or without feedback
            assert np.all(nmse < 1)


@pytest.mark.slow
def test_a_killed_process_is_named_and_all_resume_with_the_same_bits(tmp_path: Path) -> None:
    here = {**os.environ, **GLOO, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("data_parallel_resume.py")
    subprocess.run([sys.executable, script, tmp_path], env=here, check=True, timeout=240)
    for rank in (0, 1, 3):
        says = (tmp_path / f"killed.{rank}.txt").read_text()
        assert says.startswith("ProcessLost: process 2 of the group is gone")
    for name in ("topk", "powersgd", "dgc"):
        whole = np.load(tmp_path / f"whole.{name}.0.npy")
        for rank in range(WORLD):
            resumed = np.load(tmp_path / f"resumed.{name}.{rank}.npy")
            np.testing.assert_array_equal(resumed, whole)


def test_sites_agree_and_only_their_first_compress(found: Found) -> None:
    exact = np.mean([process["sited.input"] for process in found], axis=0)
    for process in found:
        np.testing.assert_allclose(process["sited.plain"], exact, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(process["sited.sparse"], found[0]["sited.sparse"])
        assert process["sited.bytes"][1] == 4 * SPEC.size
    assert [bool(process["sited.residual"].any()) for process in found] == [1, 0, 1, 0]
    assert [bool(process["sited.bytes"][0]) for process in found] == [1, 0, 1, 0]
    left = found[0]["sited.residual"] + found[2]["sited.residual"]
    np.testing.assert_allclose(found[0]["sited.sparse"] + left, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_one_bit_optimizers_end_alike_and_learn(name: str, found: Found) -> None:
    for process in found:
        np.testing.assert_array_equal(
            process[f"one_bit.{name}.parameters"], found[0][f"one_bit.{name}.parameters"]
        )
        num_bytes, plain_bytes = process[f"one_bit.{name}.bytes"]
        compressed = num_bytes - plain_bytes / 4  # a quarter of the steps is the warm-up
        assert 0 < compressed < 0.75 * plain_bytes / 20
    losses = np.mean([process[f"one_bit.{name}.losses"] for process in found], axis=0)
    assert losses[-1] < 0.6 * losses[0]


def test_local_sgd_is_diloco_s_recurrence(found: Found) -> None:
    """Nesterov's momentum on the mean way, written out."""
    anchor, velocity = np.zeros(50), np.zeros(50)
    ways = np.mean([process["local.ways"] for process in found], axis=0)
    for outer in range(3):
        gradient = ways[2 * outer : 2 * outer + 2].sum(axis=0)
        velocity = 0.9 * velocity + gradient if outer else gradient
        anchor = anchor - 0.5 * (gradient + 0.9 * velocity)
        for process in found:
            np.testing.assert_allclose(process["local.points"][2 * outer + 1], anchor, atol=1e-4)
    for process in found:
        assert process["local.moved"].tolist() == [False, True] * 3


def test_local_sgd_between_sites_of_fsdp_learns(found: Found) -> None:
    for process in found:
        np.testing.assert_array_equal(process["sharded.parameters"], found[0]["sharded.parameters"])
        losses = process["sharded.losses"]
        assert losses[-1] < 0.5 * losses[0]
        num_bytes, plain_bytes = process["sharded.bytes"]
        assert num_bytes < plain_bytes / 10


def test_a_compressed_reduce_scatter_loses_nothing(found: Found) -> None:
    """Over a restart, and a step of infinity that changes nothing."""
    means = np.concatenate([process["scattered.outs"] for process in found], axis=1)
    inputs = np.mean([process["scattered.inputs"] for process in found], axis=0)
    left = np.sum([process["scattered.residual"] for process in found], axis=0)
    assert left.any()
    np.testing.assert_allclose(means.sum(axis=0) + left, inputs.sum(axis=0), rtol=1e-4, atol=1e-4)
    whole = np.concatenate([process["scattered.whole"] for process in found])
    np.testing.assert_allclose(whole, WORLD * inputs[0], rtol=1e-5, atol=1e-5)
    assert "cannot do" in str(found[0]["scattered.refused"])


def test_fsdp_learns_with_a_compressed_reduce_scatter(found: Found) -> None:
    losses = np.mean([process["scattered.losses"] for process in found], axis=0)
    assert losses[-1] < 0.6 * losses[0]
    for process in found:
        num_bytes, plain_bytes = process["scattered.bytes"]
        assert num_bytes < plain_bytes / 5
    with pytest.raises(IncompatiblePlan, match="sums factors"):
        CompressedReduceScatter(ErrorFeedback(PowerSGD()))


COMPARED = [
    "compressor",
    "seed",
    "dtype",
    "reduction",
    "plain_steps",
    "schedule",
    "workers > 0",
    "steps so far",
]


@pytest.mark.parametrize("name", COMPARED)
def test_a_setting_that_differs_is_named_in_all_processes(name: str, found: Found) -> None:
    for process in found:
        says = str(process[f"unlike.{name}"])
        assert says.startswith("ConfigurationError: settings differ between the processes")
        assert [each for each in COMPARED if f" {each} (here " in says] == [name]
        assert process["unlike.more workers"] == "nothing"


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("seed in sites", "seed"),
        ("exchange", "seed"),
        ("scatter", "seed"),
        ("local", "parameters"),
        ("local in sites", "parameters"),
        ("adam", "parameters"),
        ("lamb", "parameters"),
    ],
)
def test_processes_that_start_apart_are_refused(where: str, name: str, found: Found) -> None:
    says = [str(process[f"unlike.{where}"]) for process in found]
    assert all(f"settings differ between the processes of the group: {name}" in s for s in says)
    assert says[0] != says[-1]


def test_one_bit_of_gradients_that_are_averaged_already_is_warned_of(found: Found) -> None:
    for process in found:
        (says,) = process["unlike.warnings"]
        assert "same gradient to OneBitAdam" in says


def test_a_state_of_another_process_is_refused(found: Found) -> None:
    first, *others = [str(process["unlike.state"]) for process in found]
    assert first == "nothing"
    for rank, says in enumerate(others, 1):
        assert "saved by process 0 of 4" in says
        assert f"this is process {rank} of 4" in says


def test_processes_without_batches_join(found: Found) -> None:
    """They bring zeros, and their residuals."""
    for process in found:
        np.testing.assert_allclose(process["joined.none"], process["joined.no hook"], atol=1e-6)
        np.testing.assert_array_equal(process["joined.topk.0"], process["joined.topk.2"])
        np.testing.assert_array_equal(process["joined.topk.2"], found[0]["joined.topk.2"])
        assert process["joined.topk.2.steps"] == 2 * (WORLD - 1)


def test_what_a_group_cannot_know_is_refused() -> None:
    anything: Any = object()
    with pytest.raises(IncompatiblePlan, match="drift"):
        Exchange(Coded(contexts="drift"))
    with pytest.raises(ConfigurationError, match="a group or sites"):
        Exchange(Uncompressed(), group=anything, sites=anything)
    with pytest.raises(ConfigurationError, match="float16 or float32"):
        Exchange(Uncompressed(), dtype=torch.int8)
    with pytest.raises(ConfigurationError, match="plain_steps"):
        HookState(Uncompressed(), plain_steps=-1)
    with pytest.raises(ConfigurationError, match="every"):
        LocalSGD([], Uncompressed(), every=0)
    with pytest.raises(ConfigurationError, match="no parameter"):
        LocalSGD([], Uncompressed(), every=1)


def test_a_process_with_another_compressor_is_named_beside_one_s_own() -> None:
    theirs, mine = TopK(fraction=0.02), TopK(fraction=0.01)
    rng = np.random.default_rng(0)
    public = Public(ModelSpec((TensorSpec("w", (5000,)),)), PublicRandomness(bytes(32)))
    update = rng.standard_normal(5000).astype(np.float32)
    symbols, _ = theirs.compress(update, None, public, rng)
    body = coding.encode(symbols, theirs.layout(public.spec))
    same = received(body, 3, theirs, public, ())
    np.testing.assert_array_equal(same.dense(), theirs.decompress(symbols, public).dense())
    with pytest.raises(
        ConfigurationError, match=r"process 3 does not fit .*0\.01.*100 coord"
    ) as why:
        received(body, 3, mine, public, ())
    assert "the same compressor" in str(why.value)
