"""Four processes that exchange gradients, scenario by scenario; what happened lies in their OUTs.

    python data_parallel_process.py STORE OUT OUT OUT OUT

Where a scenario takes two, the processes 0 and 1 are meant.
"""

# No `from __future__ import annotations`: torch looks at a hook's annotations as objects.

import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fedpress_compression.compressor import (
    Compressor,
    compressors,
    properties,
    state_name,
    to_config,
)
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.compressors.qsgd import Qsgd
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_compression.compressors.sign import Sign
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_ddp.hook import Exchange, HookState, LocalSGD, Sites, StepMetrics, comm_hook
from fedpress_ddp.optimizers import OneBitAdam, OneBitLamb
from fedpress_ddp.sharded import CompressedReduceScatter
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.schedule import Period

WORLD = 4
AVERAGE = dist.ReduceOp.AVG
STEPS = 4
RANK = 2
MIN_RATE = 1.5
PLAIN_STEPS = 2
TORCH_SEED = 5
SPEC = ModelSpec((TensorSpec("weight", (40, 30)), TensorSpec("bias", (40,))))
FACTORED = PowerSGD(rank=RANK, min_compression_rate=MIN_RATE)
FACTORS = state_name(FACTORED)
MOMENTUM = Dgc(TopK(0.1))
METHODS: dict[str, Compressor[Any]] = {
    "topk": ErrorFeedback(TopK(0.05)),
    "dgc": Dgc(TopK(0.05), max_norm=1.0),
    "sign": ErrorFeedback(Sign()),
    "powersgd": ErrorFeedback(PowerSGD(rank=1)),
    "quantize": ErrorFeedback(Quantize()),
    "qsgd": Qsgd(),
    "shared_support": ErrorFeedback(SharedSupport(fraction=0.1)),
}
Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def network(seed: int = 1) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 12, 3),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(12 * 16, 20),
        torch.nn.Tanh(),
        torch.nn.Linear(20, 3),
    )


def batches(rank: int, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(10 + rank)
    for _ in range(steps):
        inputs = torch.randn(16, 2, 6, 6, generator=draw)
        yield inputs, torch.randint(0, 3, (16,), generator=draw)


def trained(
    rank: int,
    group: dist.ProcessGroup | None,
    state: Any,
    hook: Hook,
    steps: int,
    bucket_mb: float = 25,
) -> np.ndarray:
    """Every step's mean gradient [steps, d]."""
    model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=bucket_mb)
    model.register_comm_hook(state, hook)
    found = []
    for inputs, labels in batches(rank, steps):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append(torch.cat([gradient.ravel() for gradient in gradients]).numpy())
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.2 * gradient)
    return np.stack(found)


def vectors(rank: int, steps: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(SPEC.size, generator=draw) ** 3 for _ in range(steps)]


def with_torch_s_start(state: HookState, hook: Hook) -> Hook:
    """`hook`, given the right factors that torch's own draws before the first compressed step."""
    seen: list[bool] = []

    def wrapped(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if len(seen) == PLAIN_STEPS:
            shapes = [tuple(p.shape) for p in bucket.parameters()]
            names = [state._names[id(p)] for p in bucket.parameters()]
            spec = ModelSpec(tuple(TensorSpec(n, s) for n, s in zip(names, shapes, strict=True)))
            torch.manual_seed(int(np.random.RandomState(TORCH_SEED).randint(1_000_000_000)))
            rights = []
            for shape in shapes:
                rows, columns = shape[0], int(np.prod(shape[1:]))
                rank = min(RANK, rows, columns)
                if len(shape) > 1 and (rows + columns) * rank * MIN_RATE < rows * columns:
                    rights.append(torch.randn(1, columns, rank)[0].to(torch.float64))
            feedback = [None, {FACTORS: [rights, None]}, 0, None, None]
            kept = {"round": 1, "previous": None, "state": feedback}
            state.exchange.load_state_dict({"kept": {spec.digest: kept}, "residuals": {}})
        seen.append(bucket.is_last())
        return hook(state, bucket)

    return wrapped


def brain_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What torch's bf16_compress_hook computes, which refuses gloo."""
    there = bucket.buffer().to(torch.bfloat16).div_(group.size())
    dist.all_reduce(there, group=group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(there.to(bucket.buffer().dtype))
    return done


def hooks(rank: int, pair: dist.ProcessGroup) -> dict[str, np.ndarray]:
    brain = HookState(Uncompressed(), group=pair, dtype=torch.bfloat16)
    ours = HookState(Uncompressed(), group=pair, dtype=torch.float16, plain_steps=1)
    feedback = ErrorFeedback(FACTORED)
    low_rank = HookState(feedback, group=pair, plain_steps=PLAIN_STEPS)
    torch_s = PowerSGDState(
        pair,
        matrix_approximation_rank=RANK,
        start_powerSGD_iter=PLAIN_STEPS,
        min_compression_rate=MIN_RATE,
        random_seed=TORCH_SEED,
    )
    return {
        "half.ours": trained(rank, pair, ours, comm_hook, STEPS),
        "half.torch": trained(rank, pair, pair, fp16_compress_hook, STEPS),
        "brain.ours": trained(rank, pair, brain, comm_hook, STEPS),
        "brain.torch": trained(rank, pair, pair, brain_hook, STEPS),
        "brain.bytes": np.array([brain.sent.num_bytes, brain.sent.plain_bytes]),
        "powersgd.ours": trained(
            rank, pair, low_rank, with_torch_s_start(low_rank, comm_hook), STEPS
        ),
        "powersgd.torch": trained(rank, pair, torch_s, powerSGD_hook, STEPS),
        "powersgd.bytes": np.array([low_rank.sent.num_bytes, low_rank.sent.plain_bytes]),
    }


def exchanged(rank: int, made: Compressor[Any]) -> dict[str, np.ndarray]:
    """Means, inputs and the last residual, with a stop and a restart from a checkpoint between."""
    exchange = Exchange(made, seed=3)
    inputs = vectors(rank, STEPS)
    means = [exchange.mean(SPEC, vector).numpy() for vector in inputs[: STEPS // 2]]
    file = BytesIO()
    torch.save(exchange.state_dict(), file)
    file.seek(0)
    again = Exchange(made, seed=3)
    again.load_state_dict(torch.load(file, weights_only=True))
    resumed = [again.mean(SPEC, vector).numpy() for vector in inputs[STEPS // 2 :]]
    means += [exchange.mean(SPEC, vector).numpy() for vector in inputs[STEPS // 2 :]]
    return {
        "means": np.stack(means),
        "resumed": np.stack(resumed),
        "inputs": np.stack([vector.numpy() for vector in inputs]),
        "residual": exchange.residual(SPEC),
        "bytes": np.array([exchange.sent.num_bytes, exchange.sent.plain_bytes]),
    }


def stateless() -> list[str]:
    """Every compressor that suits feedback, reads no more than the last mean and keeps nothing, and
    powersgd."""
    found = {"powersgd"}
    for name, cls in compressors().items():
        state = cls().init(SPEC)
        keeps = state if isinstance(state, tuple) else (state,)
        if not properties(cls()).suits_feedback:
            continue
        if cls().needs <= {"previous"} and all(item is None for item in keeps):
            found.add(name)
    return sorted(found)


def everything(rank: int) -> dict[str, np.ndarray]:
    """Each of the stateless under error feedback, and dgc."""
    found = {f"dgc.{key}": value for key, value in exchanged(rank, MOMENTUM).items()}
    for name in stateless():
        made = ErrorFeedback(compressors()[name]())
        found |= {f"{name}.{key}": value for key, value in exchanged(rank, made).items()}
    return found


def adasum(rank: int) -> dict[str, np.ndarray]:
    """Adasum of vectors that are partly orthogonal, whole, halved, compressed, and in a hook."""
    inputs = vectors(rank, 2)
    inputs[0][:1200] = torch.eye(WORLD)[rank].repeat(300) * inputs[0][:1200]
    inputs[0][1200:] = vectors(0, 1)[0][1200:]
    found = {"inputs": np.stack([vector.numpy() for vector in inputs])}
    dtypes = {"whole": torch.float32, "half": torch.float16, "brain": torch.bfloat16}
    for name, dtype in dtypes.items():
        exchange = Exchange(Uncompressed(), reduction="adasum", dtype=dtype)
        found[name] = np.stack([exchange.mean(SPEC, vector).numpy() for vector in inputs])
    sparse = Exchange(ErrorFeedback(TopK(0.1)), reduction="adasum")
    for step, vector in enumerate(inputs):
        before = sparse.residual(SPEC)
        found[f"sparse.{step}"] = sparse.mean(SPEC, vector).numpy()
        found[f"sent.{step}"] = vector.numpy() / WORLD + before - sparse.residual(SPEC)
    for buckets, bucket_mb in enumerate((25, 0.005)):
        state = HookState(Uncompressed(), reduction="adasum")
        found[f"buckets.{buckets}"] = trained(rank, None, state, comm_hook, 3, bucket_mb)
    return found


def not_finite(rank: int) -> dict[str, np.ndarray]:
    exchange = Exchange(ErrorFeedback(TopK(fraction=0.01)))
    exchange.mean(SPEC, vectors(rank, 1)[0])
    before = exchange.residual(SPEC)
    bad = torch.ones(SPEC.size)
    bad[7] = torch.inf if rank == 2 else 1
    mean = exchange.mean(SPEC, bad).numpy()
    return {"mean": mean, "before": before, "after": exchange.residual(SPEC)}


def sited(rank: int, sites: Sites) -> dict[str, np.ndarray]:
    vector = vectors(rank, 1)[0]
    plain = Exchange(Uncompressed(), sites=sites)
    sparse = Exchange(ErrorFeedback(TopK(fraction=0.01)), sites=sites)
    return {
        "input": vector.numpy(),
        "plain": plain.mean(SPEC, vector).numpy(),
        "sparse": sparse.mean(SPEC, vector).numpy(),
        "residual": sparse.residual(SPEC),
        "bytes": np.array([sparse.sent.num_bytes, sparse.sent.whole_bytes]),
    }


def failing(rank: int) -> dict[str, np.ndarray]:
    """One process fails before it has sent; then all exchange again."""
    exchange = Exchange(ErrorFeedback(TopK(fraction=0.01)))
    before = ErrorFeedback(TopK(fraction=0.01))
    says = ""
    try:
        exchange.mean(
            SPEC, vectors(rank, 1)[0], compressor=ErrorFeedback(Broken()) if rank == 2 else before
        )
    except Exception as exc:
        says = f"{type(exc).__name__}: {exc}"
    after = exchange.mean(SPEC, vectors(rank, 1)[0]).numpy()
    return {"says": np.array(says), "after": after}


@dataclass(frozen=True, slots=True)
class Broken(TopK):
    def compress_sum(self, *args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("broken here")


def overlapped(rank: int) -> dict[str, np.ndarray]:
    """A training of several buckets by each method, synchronous and with threads."""
    found = {}
    for name, made in METHODS.items():
        for workers in (0, 3):
            metrics: list[StepMetrics] = []
            state = HookState(made, workers=workers, on_step=metrics.append, plain_steps=1)
            means = trained(rank, None, state, comm_hook, 4, bucket_mb=0.005)
            found[f"{name}.{workers}"] = means
            assert state.metrics == metrics[-1]
            assert sum(each.num_bytes for each in metrics) == state.sent.num_bytes
            found[f"{name}.{workers}.nmse"] = np.array([each.nmse or 0 for each in metrics])
            found[f"{name}.{workers}.ratio"] = np.array(
                [each.residual_ratio or 0 for each in metrics]
            )
    return found


def one_bit(rank: int) -> dict[str, np.ndarray]:
    """Losses, parameters and bytes of both optimizers, each process with batches of its own."""
    found = {}
    for name, cls in (("adam", OneBitAdam), ("lamb", OneBitLamb)):
        net = network()
        optimizer = cls(net.parameters(), 0.01, warm_up_steps=10)
        losses = []
        for inputs, _ in batches(rank, 40):
            optimizer.zero_grad()
            labels = inputs.mean(dim=(1, 2, 3)).gt(0).long()
            loss = torch.nn.functional.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        whole = torch.cat([p.detach().ravel() for p in net.parameters()])
        sent = optimizer.sent
        found[f"{name}.parameters"] = whole.numpy()
        found[f"{name}.losses"] = np.array(losses)
        found[f"{name}.bytes"] = np.array([sent.num_bytes, sent.plain_bytes])
    return found


def local_sgd(rank: int) -> dict[str, np.ndarray]:
    """Two outer steps of two local ones each, from one start to four directions."""
    weight = torch.nn.Parameter(torch.zeros(50))
    inner = torch.optim.SGD([weight], lr=1.0)
    outer = LocalSGD([weight], Uncompressed(), every=2, learning_rate=0.5, momentum=0.9)
    ways, points, moved = [], [], []
    for gradient in vectors(rank, 6):
        weight.grad = gradient[:50].clone()
        inner.step()
        ways.append(gradient[:50].numpy())
        moved.append(outer.step())
        points.append(weight.detach().numpy().copy())
    return {"ways": np.stack(ways), "points": np.stack(points), "moved": np.array(moved)}


def sharded(rank: int) -> dict[str, np.ndarray]:
    """FSDP inside two sites of two, local SGD with sparse outer steps between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "shards"))
    model = network()
    for layer in (model[0], model[3], model[5]):
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = LocalSGD(
        model.parameters(),
        ErrorFeedback(TopK(fraction=0.05, magnitude_bits=1)),
        every=5,
        learning_rate=1.0,
        momentum=0.0,
        group=mesh["sites"].get_group(),
    )
    losses = []
    inputs, labels = next(batches(rank // 2, 1))
    labels = inputs.mean(dim=(1, 2, 3)).gt(0).long()
    for _ in range(30):
        inner.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        inner.step()
        outer.step()
        losses.append(loss.item())
    pieces = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p.full_tensor().detach().ravel() for p in pieces]
    sent = outer.sent
    return {
        "losses": np.array(losses),
        "parameters": torch.cat(whole).numpy(),
        "bytes": np.array([sent.num_bytes, sent.plain_bytes]),
    }


def scattered(rank: int) -> dict[str, np.ndarray]:
    """Reduce-scatters of vectors, with a restart from a checkpoint and infinity in the middle; then
    a training under FSDP."""
    group = dist.group.WORLD
    assert group is not None
    made = CompressedReduceScatter(ErrorFeedback(TopK(0.1)))
    inputs = [vector[: WORLD * 300] for vector in vectors(rank, 4)]
    outs = []
    for step, vector in enumerate(inputs):
        if step == 2:
            bad = torch.full_like(vector, torch.inf if rank == 1 else 1.0)
            made(made.allocate((300,), dtype=bad.dtype, device=bad.device), bad, group, AVERAGE)
            file = BytesIO()
            torch.save(made.state_dict(), file)
            file.seek(0)
            made = CompressedReduceScatter(ErrorFeedback(TopK(0.1)))
            made.load_state_dict(torch.load(file, weights_only=True))
        out = torch.empty(300)
        made(out, vector, group, AVERAGE)
        outs.append(out.numpy())
    whole = torch.empty(300)
    CompressedReduceScatter(Uncompressed())(whole, inputs[0], group, dist.ReduceOp.SUM)
    refused = ""
    try:
        made(whole, inputs[0], group, dist.ReduceOp.MAX)
    except ConfigurationError as exc:
        refused = str(exc)

    model = network()
    modules = [model[0], model[3], model[5], model]
    scatters = []
    for module in modules:
        sharded = fully_shard(module)
        scatters.append(CompressedReduceScatter(ErrorFeedback(TopK(0.1))))
        sharded.set_custom_reduce_scatter(scatters[-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    inputs_, _ = next(batches(rank, 1))
    labels = inputs_.mean(dim=(1, 2, 3)).gt(0).long()
    for _ in range(12):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs_), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sent = sum(each.sent.num_bytes for each in scatters)
    plain = sum(each.sent.plain_bytes for each in scatters)
    residuals = [state[0].numpy() for state in made.state_dict()["states"]]
    return {
        "inputs": np.stack([vector.numpy() for vector in inputs]),
        "outs": np.stack(outs),
        "whole": whole.numpy(),
        "residual": np.concatenate(residuals),
        "refused": np.array(refused),
        "losses": np.array(losses),
        "bytes": np.array([sent, plain]),
    }


def says(act: Callable[[], object]) -> np.ndarray:
    """What it raises."""
    try:
        act()
    except Exception as exc:
        return np.array(f"{type(exc).__name__}: {exc}")
    return np.array("nothing")


def unlike(rank: int, sites: Sites) -> dict[str, np.ndarray]:
    """What each process says where one, or every one, has something of its own."""
    made, is_last = ErrorFeedback(SharedSupport(0.1)), rank == WORLD - 1
    schedule = [Period(profiles=({"name": "a", "compressor": to_config(made)},), rounds=1 + rank)]
    later = HookState(made)
    trained(rank, None, later, comm_hook, 1)
    fresh = HookState(made)
    if is_last:
        fresh.load_state_dict(later.state_dict())
    states = {
        "compressor": HookState(ErrorFeedback(TopK(0.1 * (1 + rank)))),
        "seed": HookState(made, seed=rank),
        "seed in sites": HookState(made, seed=int(is_last), sites=sites),
        "dtype": HookState(made, dtype=torch.float16 if is_last else torch.float32),
        "reduction": HookState(Uncompressed(), reduction="adasum" if is_last else "mean"),
        "plain_steps": HookState(made, plain_steps=rank),
        "schedule": HookState(made, schedule=schedule),
        "workers > 0": HookState(made, workers=0 if is_last else 2),
        "steps so far": fresh,
    }
    found = {
        name: says(lambda state=state: trained(rank, None, state, comm_hook, 1))  # type: ignore[misc]
        for name, state in states.items()
    }
    found["more workers"] = says(
        lambda: trained(rank, None, HookState(made, workers=1 + rank), comm_hook, 1)
    )
    found["exchange"] = says(lambda: Exchange(made, seed=rank).mean(SPEC, torch.ones(SPEC.size)))
    scatter = CompressedReduceScatter(Uncompressed(), seed=rank)
    found["scatter"] = says(
        lambda: scatter(
            torch.ones(1), torch.ones(WORLD), dist.distributed_c10d._get_default_group(), AVERAGE
        )
    )
    point = [torch.nn.Parameter(torch.full((8,), float(rank)))]
    point[0].grad = torch.ones(8)
    found["local"] = says(LocalSGD(point, made, every=2).step)
    found["local in sites"] = says(LocalSGD(point, made, every=2, sites=sites).step)
    for name, cls in (("adam", OneBitAdam), ("lamb", OneBitLamb)):
        found[name] = says(cls(point, warm_up_steps=2).step)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        same = [torch.nn.Parameter(torch.ones(8))]
        for gradient in (torch.ones(8), torch.full((8,), float(rank))):
            same[0].grad = gradient
            OneBitAdam(same, warm_up_steps=2).step()
    found["warnings"] = np.array([str(each.message) for each in seen])
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, later.state_dict())
    found["state"] = says(lambda: HookState(made).load_state_dict(everyone[0]))
    return found


def joined(rank: int) -> dict[str, np.ndarray]:
    """Parameters after a training in which each process has another number of batches."""
    found = {}
    for name, state in {
        "no hook": None,
        "none": HookState(Uncompressed()),
        "topk.0": HookState(METHODS["topk"], workers=0, plain_steps=1),
        "topk.2": HookState(METHODS["topk"], workers=2, plain_steps=1),
    }.items():
        model = DistributedDataParallel(network(), bucket_cap_mb=0.005)
        if state is not None:
            model.register_comm_hook(state, comm_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for inputs, labels in batches(rank, 2 * rank):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        parameters = torch.cat([p.detach().ravel() for p in model.parameters()])
        found[name] = parameters.numpy()
        if state is not None and state.metrics is not None:
            found[f"{name}.steps"] = np.array(state.metrics.step)
    return found


def main(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    pair, sites = dist.new_group([0, 1]), Sites.of(2)
    scenarios = {
        "everything": everything(rank),
        "shared": exchanged(rank, SharedSupport(fraction=0.1)),
        "adasum": adasum(rank),
        "bad": not_finite(rank),
        "sited": sited(rank, sites),
        "failing": failing(rank),
        "overlapped": overlapped(rank),
        "one_bit": one_bit(rank),
        "local": local_sgd(rank),
        "sharded": sharded(rank),
        "scattered": scattered(rank),
        "unlike": unlike(rank, sites),
        "joined": joined(rank),
    }
    if rank < 2:
        scenarios["hooks"] = hooks(rank, pair)
    found: dict[str, Any] = {
        f"{name}.{key}": v for name, all_ in scenarios.items() for key, v in all_.items()
    }
    np.savez(Path(out), **found)
    dist.barrier()
    dist.destroy_process_group()


def run_together(target: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
    """A process for each of the arguments; exit if one fails."""
    torch_is_here = multiprocessing.get_context("fork")  # imported once for all of them
    running = [torch_is_here.Process(target=target, args=own, daemon=True) for own in arguments]
    for process in running:
        process.start()
    while running:
        wait([process.sentinel for process in running])
        for process in [process for process in running if not process.is_alive()]:
            if process.exitcode:  # the others wait for it in vain, and end with this process
                sys.exit(f"a process ended with {process.exitcode}")
            running.remove(process)


if __name__ == "__main__":
    store, *outs = sys.argv[1:]
    run_together(main, [(rank, store, out) for rank, out in enumerate(outs)])
