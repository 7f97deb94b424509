"""The hook alone, in a group of one process: refusals, metrics, warnings, order, errors."""

# No `from __future__ import annotations`: torch looks at a hook's annotations as objects.

import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from fedpress_compression.compressor import Compressor, Public, from_config, to_config
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.compressors.randomk import RandomK
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_ddp.collectives import Turns
from fedpress_ddp.hook import (
    BiasWarning,
    DivergenceWarning,
    Exchange,
    HookState,
    LocalSGD,
    StepMetrics,
    comm_hook,
)
from fedpress_ddp.measuring import Loopback, exchange_costs
from fedpress_ddp.metrics import DivergenceWatch, Measured
from fedpress_ddp.sharded import CompressedReduceScatter
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_protocols.schedule import Period, sparsity_warm_up

SPEC = ModelSpec((TensorSpec("w", (20, 20)),))


@dataclass(slots=True)
class Alike(Loopback):
    """`processes` that all send the same."""

    processes: int = 2

    @property
    def size(self) -> int:
        return self.processes

    def gathered(self, body: bytes, longest: int) -> Iterable[bytes]:
        return [body] * self.processes


FEW = ErrorFeedback(TopK(0.1))


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_with(state: HookState) -> DistributedDataParallel:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(30, 30) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.004)
    model.register_comm_hook(state, comm_hook)
    return model


def step(model: DistributedDataParallel, scale: float = 1.0) -> torch.Tensor:
    model.zero_grad()
    draw = torch.Generator().manual_seed(2)
    (scale * model(torch.randn(8, 30, generator=draw)).square().mean()).backward()
    return torch.cat([p.grad.ravel() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "made",
    [
        ErrorFeedback(RandomK(0.01)),
        ErrorFeedback(RandomK(0.1, shared=False)),
        ErrorFeedback(RandomK(count=5)),
        Dgc(RandomK(0.2)),
        from_config({"id": "error_feedback", "inner": {"id": "coded", "inner": {"id": "randomk"}}}),
    ],
)
def test_feedback_around_random_k_is_refused_with_what_to_do(made: Compressor[Any]) -> None:
    with pytest.raises(IncompatiblePlan, match=r"randomk, which sends .*use topk"):
        HookState(made)
    with pytest.raises(IncompatiblePlan, match="use topk"):
        LocalSGD([torch.nn.Parameter(torch.zeros(3))], made, every=2)
    HookState(made, allow_delays=True)


@pytest.mark.parametrize(
    "inner", [{"id": "randomk", "unbiased": True}, {"id": "qsgd"}, {"id": "terngrad"}]
)
def test_feedback_around_what_does_not_contract_is_refused(inner: dict[str, Any]) -> None:
    HookState(from_config(inner))
    with pytest.raises(IncompatiblePlan, match="does not contract"):
        HookState(from_config({"id": "error_feedback", "inner": inner}))
    period = Period(
        profiles=(
            {"name": "a", "compressor": {"id": "error_feedback", "inner": {"id": "randomk"}}},
        ),
        rounds=2,
    )
    with pytest.raises(IncompatiblePlan, match="randomk"):
        HookState(FEW, schedule=[period])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("made", "says"),
    [
        (TopK(0.001), r"by topk without error feedback, which never sends 80%.*put error_feedback"),
        (RandomK(0.01), r"by randomk without.* 98% .*set unbiased to true, with a lower learning"),
        (from_config({"id": "coded", "inner": {"id": "randomk"}}), "by coded.*set unbiased"),
        (from_config({"id": "sign"}), "by sign without error feedback, which never sends 85%"),
        (from_config({"id": "count_sketch", "fraction": 0.01}), "choose a higher rate"),
    ],
)
def test_a_biased_compressor_without_feedback_is_warned_of(
    made: Compressor[Any], says: str
) -> None:
    period = Period(profiles=({"name": "a", "compressor": to_config(made)},), rounds=2)
    uses = (
        lambda: HookState(made),
        lambda: HookState(FEW, schedule=[period]),
        lambda: LocalSGD([torch.nn.Parameter(torch.zeros(3))], made, every=2),
        lambda: CompressedReduceScatter(made),
    )
    for use in uses:
        with pytest.warns(BiasWarning, match=says) as seen:
            use()
        assert len(seen) == 1


@pytest.mark.parametrize(
    "made", [FEW, Uncompressed(), RandomK(0.01, unbiased=True), TopK(0.1), Dgc(TopK(0.001))]
)
def test_what_sends_most_of_a_gradient_in_time_is_not_warned_of(made: Compressor[Any]) -> None:
    HookState(made)  # warnings are errors


@pytest.mark.parametrize("lossy", ["powersgd", "shared_support"])
def test_adasum_of_what_the_network_sums_up_is_refused(lossy: str) -> None:
    made = from_config({"id": "error_feedback", "inner": {"id": lossy}})
    HookState(made)
    for refuses in (HookState, Exchange):
        with pytest.raises(IncompatiblePlan, match="Adasum needs each process's vector"):
            refuses(made, reduction="adasum")


def test_an_unknown_reduction_is_refused() -> None:
    strange: Any = "sum"
    with pytest.raises(ConfigurationError, match='"mean" or "adasum", not "sum"'):
        HookState(FEW, reduction=strange)


@pytest.mark.usefixtures("alone")
def test_plain_steps_of_adasum_have_no_norms() -> None:
    state = HookState(FEW, reduction="adasum", plain_steps=1)
    model = model_with(state)
    step(model)
    assert state.metrics is not None
    assert state.metrics.nmse is None
    step(model)
    assert state.metrics.nmse is not None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("workers", [0, 2])
def test_metrics_are_those_of_the_gradients(workers: int) -> None:
    seen: list[StepMetrics] = []
    state = HookState(FEW, plain_steps=1, workers=workers, on_step=seen.append)
    model = model_with(state)
    plain = step(model).double()
    sent = step(model).double()
    residual = plain - sent
    assert [each.step for each in seen] == [1, 2]
    assert seen[0].nmse is None
    assert seen[0].num_bytes == 4 * plain.numel() == seen[0].plain_bytes
    assert seen[1] is state.metrics
    share = float(residual.square().sum() / plain.square().sum())
    assert seen[1].nmse == pytest.approx(share, rel=1e-5)
    assert seen[1].residual_ratio == pytest.approx(math.sqrt(share), rel=1e-5)
    assert seen[1].gradient_norm == pytest.approx(float(plain.norm()), rel=1e-5)
    assert 0 < seen[1].num_bytes < seen[1].plain_bytes / 4
    assert seen[1].compress_seconds > 0
    step(model, math.inf)
    assert (seen[2].nmse, seen[2].residual_ratio) == (None, None)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_feedback_in_one_pass_has_the_bits_of_division_sum_and_selection(size: int) -> None:
    """A power of two is divided by in the pass that adds the residual, 3 before it."""
    spec, made = ModelSpec((TensorSpec("w", (300, 300)),)), TopK(0.01)
    exchange, rng = Exchange(ErrorFeedback(made)), np.random.default_rng(size)
    public = Public(spec, PublicRandomness(bytes(32)))
    residual = np.zeros(spec.size, np.float32)
    for _ in range(3):
        gradient = rng.standard_normal(spec.size, dtype=np.float32)
        trip = Alike(None, torch.device("cpu"), Measured(), Turns().take(), processes=size)
        mean = exchange.mean_over(ErrorFeedback(made), spec, torch.from_numpy(gradient), trip)
        divided = gradient / np.float32(size)
        total = divided + residual
        sent = made.decompress(made.compress(total, None, public, rng)[0], public)
        residual = total - sent.dense()
        assert exchange.residual(spec).tobytes() == residual.tobytes()
        assert mean.numpy().tobytes() == sum([sent.dense()] * size, np.float32(0)).tobytes()
        due = [np.square(each, dtype=np.float64).sum() for each in (divided, total, residual)]
        measured = trip.measured
        assert [measured.gradient, measured.brought, measured.lost] == pytest.approx(due, rel=1e-5)


def test_a_sum_with_the_residual_that_overflows_gives_nan_and_keeps_the_residual() -> None:
    spec, most = ModelSpec((TensorSpec("w", (4, 4)),)), np.float32(3e38)
    exchange = Exchange(ErrorFeedback(TopK(0.1)))
    exchange.load_state_dict({"kept": {}, "residuals": {"w": torch.full((16,), float(most))}})
    trip = Alike(None, torch.device("cpu"), Measured(), Turns().take(), processes=2)
    mean = exchange.mean_over(ErrorFeedback(TopK(0.1)), spec, torch.full((16,), float(most)), trip)
    assert torch.isnan(mean).all()
    assert not trip.measured.is_finite
    assert (exchange.residual(spec) == most).all()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_an_exchange_is_raised_by_its_backward(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = HookState(FEW, workers=workers)
    model = model_with(state)
    for _ in range(3):
        step(model)

    def fail(*args: Any) -> Any:
        raise InvalidUpdate("the third section is bad")

    monkeypatch.setattr(TopK, "compress_sum", fail)
    with pytest.raises(InvalidUpdate, match="the third section is bad"):
        step(model)


@pytest.mark.usefixtures("alone")
def test_a_profiler_s_trace_shows_compression_beside_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first bucket, the last layer's, is compressed while the first layer's gradient is
    computed: each waits for the other to have begun, so that without overlap neither would end."""
    model = model_with(HookState(FEW, plain_steps=1))
    step(model)
    compresses, has_gradient = threading.Event(), threading.Event()
    compress = TopK.compress_sum

    def compress_beside(*args: Any, **options: Any) -> Any:
        is_first = not compresses.is_set()
        compresses.set()
        assert not is_first or has_gradient.wait(60), "the backward pass waits for compression"
        return compress(*args, **options)

    def wait_for_compression(*_: Any) -> None:
        assert compresses.wait(60), "compression waits for the backward pass"

    def watch_output(_layer: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(wait_for_compression)

    monkeypatch.setattr(TopK, "compress_sum", compress_beside)
    first_layer = next(model.module.children())
    first_layer.register_forward_hook(watch_output)
    first_layer.weight.register_hook(lambda _: has_gradient.set())  # after it was computed
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, experimental_config=threads) as profiler:
        step(model)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    def spans(name: str) -> list[tuple[float, float, int]]:
        named = [each for each in trace if each.get("name") == name and each["ph"] == "X"]
        return sorted((each["ts"], each["ts"] + each["dur"], each["tid"]) for each in named)

    begun, ended, thread = spans("fedpress exchange")[0]
    computed_from, computed_to, main_thread = spans("AddmmBackward0")[-1]
    assert thread != main_thread
    assert begun < computed_from < computed_to < ended
    assert len(spans("fedpress collectives")) == len(spans("fedpress exchange")) > 1


@pytest.mark.usefixtures("alone")
def test_a_hook_continues_from_its_checkpoint() -> None:
    state = HookState(FEW, plain_steps=1)
    model = model_with(state)
    for _ in range(3):
        step(model)
    again = HookState(FEW, plain_steps=1)
    again.load_state_dict(state.state_dict())
    resumed = model_with(again)
    sent, before = step(resumed), state.exchange.residuals()
    after = again.exchange.residuals()
    assert before.keys() == after.keys()
    total = sum(part.sum() for part in after.values()) + float(sent.sum())
    gradient = float(step(model_with(HookState(Uncompressed()))).sum())
    assert total == pytest.approx(sum(p.sum() for p in before.values()) + gradient, abs=1e-4)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("num", [1, 3])
def test_gradients_come_back_in_their_places_from_restored_buckets(num: int) -> None:
    state = HookState(Uncompressed(), plain_steps=0)
    due = step(model_with(state))
    saved = state.state_dict()
    names = [name for bucket in saved["buckets"] for name in bucket][::-1]
    saved["buckets"] = [names[first::num] for first in range(num)]
    again = HookState(Uncompressed(), plain_steps=0)
    again.load_state_dict(saved)
    torch.testing.assert_close(step(model_with(again)), due)


@pytest.mark.usefixtures("alone")
def test_dgc_refuses_an_optimizer_with_momentum_of_its_own() -> None:
    model = model_with(HookState(Dgc(TopK(0.1))))
    step(model)
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other], lr=0.1, momentum=0.9).step()
    with pytest.raises(ConfigurationError, match=r"SGD has momentum 0\.9 of its own"):
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
    model = model_with(HookState(Dgc(TopK(0.1))))
    step(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.usefixtures("alone")
def test_dgc_clips_a_part_of_a_model_by_its_share() -> None:
    exchange = Exchange(Dgc(Uncompressed(), momentum=0.0, max_norm=2.0))
    exchange.model_size = 4 * SPEC.size
    mean = exchange.mean(SPEC, torch.full((SPEC.size,), 5.0))
    assert float(mean.norm()) == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(ConfigurationError, match="plain_steps to 1"):
        HookState(Dgc(max_norm=1.0), plain_steps=0)


@pytest.mark.usefixtures("alone")
def test_a_schedule_warms_the_sparsity_up() -> None:
    made = Dgc(TopK(0.01))
    state = HookState(made, plain_steps=1, schedule=sparsity_warm_up(made, rounds=2))
    model = model_with(state)
    sizes = []
    for _ in range(9):
        step(model)
        assert state.metrics is not None
        sizes.append(state.metrics.num_bytes)
    plain, *rest = sizes
    stages = [rest[0:2], rest[2:4], rest[4:6], rest[6:]]
    assert plain > max(stages[0])
    for sparse, sparser in pairwise(stages):
        assert min(sparse) > max(sparser)
    with pytest.raises(ConfigurationError, match="needs rounds"):
        HookState(made, schedule=sparsity_warm_up(made, budget=0.1))


def test_turns_end_in_the_order_in_which_they_were_taken() -> None:
    turns, order = Turns(), list[int]()
    taken = [turns.take() for _ in range(4)]

    def run(number: int) -> None:
        if number == 1:
            taken[number].finish()
            return
        with taken[number]:
            order.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in (3, 1, 2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == [0, 2, 3]
    with pytest.raises(RuntimeError, match="after its turn"), taken[0]:
        pass


def measured(gradient: float, lost: float, has_feedback: bool = True) -> Measured:
    made = Measured(is_compressed=True)
    made.gradient, made.brought, made.lost = gradient**2, 1.0, lost
    made.waiting = lost if has_feedback else 0.0
    return made


def saw_window(watch: DivergenceWatch, each: Measured, name: str) -> None:
    for _ in range(watch.WINDOW):
        watch.saw(each, name)


def test_a_watch_warns_once_of_what_does_not_converge(recwarn: pytest.WarningsRecorder) -> None:
    watch = DivergenceWatch()
    for _ in range(4):
        saw_window(watch, measured(1.0, 0.99), "topk")
        saw_window(watch, Measured(), "none")
        saw_window(watch, measured(1.0, 3.0, has_feedback=False), "qsgd")
    assert not recwarn.list
    with pytest.warns(DivergenceWarning, match="randomk lost 3 times the square"):
        saw_window(watch, measured(1.0, 3.0), "randomk")
    with pytest.warns(DivergenceWarning, match="sign have grown to 11 times"):
        saw_window(watch, measured(11.0, 0.5), "sign")
    saw_window(watch, measured(40.0, 3.0), "sign")
    bad = measured(1.0, 3.0)
    bad.is_finite = False
    DivergenceWatch().saw(bad, "sign")
    assert not recwarn.list


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compressor": "topk"}, "'topk' is no compressor"),
        ({"compressor": type(FEW)}, "is no compressor"),
        ({"compressor": FEW, "sites": 8}, "sites must be Sites, not 8"),
        ({"compressor": FEW, "plain_steps": 1.5}, r"plain_steps must be .* from 0 on, not 1\.5"),
        ({"compressor": FEW, "workers": 1.5}, r"workers must be .* from 0 to 64, not 1\.5"),
        ({"compressor": FEW, "workers": 65}, "workers must be .* from 0 to 64, not 65"),
        ({"compressor": FEW, "seed": "x"}, "seed must be a whole number from 0 on, not 'x'"),
        ({"compressor": FEW, "seed": -1}, "seed must be a whole number from 0 on, not -1"),
        (
            {"compressor": FEW, "dtype": torch.float16, "plain_steps": 0},
            r"float16 has no effect: .*error_feedback .*leave dtype out",
        ),
    ],
)
def test_arguments_of_another_kind_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HookState(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compressor": "topk"}, "'topk' is no compressor"),
        ({"every": 2.5}, r"every must be a whole number from 1 on, not 2\.5"),
        ({"momentum": 2}, r"momentum must lie in \[0, 1\), not 2"),
        ({"learning_rate": -1}, "learning_rate must be positive, not -1"),
        ({"parameters": torch.nn.Linear(2, 2)}, r"must be tensors, not Linear .*parameters\(\)"),
    ],
)
def test_arguments_of_local_sgd_are_named(arguments: dict[str, Any], message: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    given: dict[str, Any] = {"parameters": [weight], "compressor": FEW, "every": 2}
    with pytest.raises(ConfigurationError, match=message):
        LocalSGD(**(given | arguments))


@pytest.mark.usefixtures("alone")
def test_local_sgd_of_a_coarse_type_adds_up_what_it_rounds_off() -> None:
    """Anchors move by half a step of bfloat16 each time, which the parameter cannot hold."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    made = LocalSGD([weight], Uncompressed(), every=1, learning_rate=0.5, momentum=0.0)
    anchors = []
    for _ in range(8):
        with torch.no_grad():
            weight.add_(2.0**-7)
        made.step()
        anchors.append(float(made.state_dict()["anchors"][0].detach()))
    assert anchors == [1 + step * 2.0**-8 for step in range(1, 9)]


@pytest.mark.usefixtures("alone")
def test_a_state_of_local_sgd_stays_as_it_was() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    made = LocalSGD([weight], Uncompressed(), every=1)

    def steps(num: int) -> float:
        for _ in range(num):
            with torch.no_grad():
                weight.add_(1.0)
            made.step()
        return float(weight.detach())

    steps(2)
    state, before = made.state_dict(), weight.detach().clone()
    expected = steps(2)
    for _ in range(2):
        made.load_state_dict(state)
        with torch.no_grad():
            weight.copy_(before)
        assert steps(2) == expected


@pytest.mark.usefixtures("alone")
def test_a_residual_may_have_a_limit() -> None:
    limited = ErrorFeedback(TopK(0.05), max_ratio=0.5)
    exchange, scatter = Exchange(limited), CompressedReduceScatter(limited)
    group = dist.group.WORLD
    assert group is not None
    for number in range(4):
        gradient = torch.randn(SPEC.size, generator=torch.Generator().manual_seed(number))
        exchange.mean(SPEC, gradient)
        scatter(torch.empty(SPEC.size), gradient, group, dist.ReduceOp.SUM)
    # Of half a gradient's norm at most before the last gradient came on top.
    assert 0 < np.linalg.norm(exchange.residual(SPEC)) < 1.2 * SPEC.size**0.5


@pytest.mark.usefixtures("alone")
def test_dtype_is_that_of_plain_steps_too() -> None:
    state = HookState(FEW, plain_steps=1, dtype=torch.float16)
    step(model_with(state))
    assert 2 * state.sent.num_bytes == state.sent.plain_bytes


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("width", [10, 30])
@pytest.mark.parametrize("layers", [3, 4, 5])
def test_a_state_of_another_model_is_refused(width: int, layers: int) -> None:
    state = HookState(FEW)
    step(model_with(state))
    again = HookState(FEW)
    again.load_state_dict(state.state_dict())
    assert again.state_dict()["shapes"] == state.state_dict()["shapes"]
    wide = [torch.nn.Linear(30, 30) for _ in range(layers - 1)]
    other = DistributedDataParallel(torch.nn.Sequential(*wide, torch.nn.Linear(30, width)))
    other.register_comm_hook(again, comm_hook)
    if (width, layers) == (30, 4):
        step(other)
        return
    with pytest.raises(ConfigurationError, match="the loaded state is of another model: its param"):
        step(other)


@pytest.mark.usefixtures("alone")
def test_a_state_of_an_earlier_release_loads_and_what_is_none_does_not() -> None:
    state = HookState(FEW, plain_steps=0)
    step(model_with(state))
    saved = state.state_dict()
    earlier = {name: saved[name] for name in ("steps", "kept", "residuals")}
    again = HookState(FEW, plain_steps=0)
    again.load_state_dict(earlier)
    step(model_with(again))
    assert again.state_dict()["steps"] == 2
    for missing in ({}, None, {"steps": 1}, torch.nn.Linear(2, 2).state_dict()):
        strange: Any = missing
        with pytest.raises(ConfigurationError, match=r"without .* is no such state"):
            HookState(FEW).load_state_dict(strange)
    weight = [torch.nn.Parameter(torch.zeros(1))]
    local = LocalSGD([torch.nn.Parameter(torch.zeros(3))], FEW, every=2)
    with pytest.raises(ConfigurationError, match=r"parameter 0 is \[1\], and this one's is \[3\]"):
        local.load_state_dict(LocalSGD(weight, FEW, every=2).state_dict())
    with pytest.raises(ConfigurationError, match="saved by process 0 of 4"):
        HookState(FEW).load_state_dict({**saved, "world_size": 4})


def test_what_a_state_cannot_do_is_refused() -> None:
    profile = {"compressor": {"id": "topk"}}
    two = Period(profiles=({"name": "a"} | profile, {"name": "b"} | profile), rounds=2)
    with pytest.raises(ConfigurationError, match="one profile, not 2"):
        HookState(FEW, schedule=[two])
    residual = np.zeros(SPEC.size, np.float32)
    np.testing.assert_array_equal(Exchange(FEW).residual(SPEC), residual)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("inner", [{"id": "topk", "fraction": 0.1}, {"id": "powersgd", "rank": 2}])
def test_costs_without_a_network_are_those_of_the_exchange(inner: dict[str, Any]) -> None:
    made = from_config({"id": "error_feedback", "inner": inner})
    gradient = np.random.default_rng(0).standard_normal(SPEC.size).astype(np.float32)
    exchange = Exchange(made)
    exchange.mean(SPEC, torch.from_numpy(gradient))
    exchange.mean(SPEC, torch.from_numpy(gradient))
    first, second, nothing = exchange_costs(made, SPEC, [gradient, gradient, gradient * np.inf])
    headers = 2 * (16 if second.passes else 16 + 8)  # agreement, and a gathered body's length
    assert exchange.sent.num_bytes == first.num_bytes + second.num_bytes + headers
    assert second.passes == (2 if inner["id"] == "powersgd" else 0)
    assert second.compress_seconds > 0
    assert (second.decode_seconds > 0) == (second.passes == 0)
    assert nothing.num_bytes == 0


def test_powersgd_exchanges_a_model_without_a_matrix_to_factor() -> None:
    spec = ModelSpec((TensorSpec("bias", (12,)),))
    gradient = np.arange(12, dtype=np.float32)
    (cost,) = exchange_costs(ErrorFeedback(PowerSGD(2)), spec, [gradient])
    assert (cost.num_bytes, cost.passes) == (48, 1)


@pytest.mark.slow
def test_the_example_compares_torch_s_hooks_with_ours() -> None:
    script = Path(__file__).parents[2] / "examples/data-parallel/hooks.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    small = ["--width", "40", "--layers", "3", "--steps", "2"]
    printed = subprocess.run(
        [*launcher, "--nproc-per-node", "2", script, *small],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=240,
        capture_output=True,
        text=True,
    ).stdout
    rows = re.findall(r"^(\S.*?) {2,}[\d.]+ ms +([\d,]+) bytes$", printed, re.MULTILINE)
    sizes = {name: int(size.replace(",", "")) for name, size in rows}
    plain = 4 * 3 * (40 * 40 + 40)
    assert sizes["torch, no hook"] == plain
    assert len(sizes) == 6
    assert all(0 < size < plain for name, size in sizes.items() if name != "torch, no hook")


class Silent(TopK):
    """Sends zeros, to be told from what it inherits."""

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Any, None]:
        return super().compress(np.zeros_like(update), state, public, rng)


@pytest.mark.usefixtures("alone")
def test_a_subclass_s_own_compress_is_what_the_hook_exchanges() -> None:
    model = model_with(HookState(ErrorFeedback(Silent(0.1)), plain_steps=0))
    assert not step(model).any()
