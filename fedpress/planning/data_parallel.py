"""`fedpress plan --ddp`: seconds and money of a step in DistributedDataParallel, by method.

    step = compute + what the exchange adds

An all-reduce of b bytes among n processes takes 2 (n - 1) / n * b / bandwidth and 2 (n - 1)
latencies on a ring, 2 b / bandwidth and 2 log2(n) latencies on a double binary tree; the faster one
counts. DistributedDataParallel runs it beside the backward pass, two thirds of the step, bucket by
bucket, but for the last one. A hook of fedpress agrees on lengths (16 bytes, all-reduced), gathers
the others' bodies and decodes each; no part of that is taken to overlap, which is so on a GPU, and
on two shared cores overlap has not made a step shorter. What a hook computes is measured in
training steps of one process: threads, collectives and cold caches cost as much as compression
where a model is small. Beside the backward passes of processes that share cores it takes `BESIDE`
times as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from fedpress.compressor_table import aligned
from fedpress.planning.choice import seconds
from fedpress.planning.costs import SAMPLE
from fedpress.planning.situation import sample
from fedpress.planning.updates import Drawn
from fedpress_compression import kernels
from fedpress_compression.coding.fields import Reals
from fedpress_compression.compressor import Compressor, from_config
from fedpress_compression.tensors import ModelSpec
from fedpress_ddp.methods import HALVES, LOSSES, MEASURED_ON, METHODS
from fedpress_protocols.errors import ConfigurationError, MissingExtra

WORTH = 0.1
"""A method pays if it makes a step shorter than simpler ones do by this part at least."""
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""DistributedDataParallel's defaults; the last bucket has no backward pass beside it."""
BACKWARD = 2 / 3
BESIDE = 2.0
"""Wall time that a hook of ours adds to a step over its CPU time alone, about: the median of the
cells of benchmarks/results/data_parallel_links.json is 2.3, two processes on two busy cores."""
_AGREEMENT_BYTES, _LENGTH_BYTES = 16, 8
_REPEATS = 4
"""The first warms the kernels and leaves a residual, and does not count."""
_WIDEST_LINK, _SLOWEST_LINK = 1e5, 1e-5


@dataclass(frozen=True, slots=True)
class Cluster:
    """`step_seconds` is one step without communication, `network` Gbit/s of each process in each
    direction, `latency` seconds of one message; `price_hour` is for one process, `price_gb` for a
    GB (1e9 bytes) that one sends."""

    parameters: int
    processes: int
    step_seconds: float
    network: float
    latency: float = 50e-6
    steps: int = 100_000
    price_hour: float = 0.0
    price_gb: float = 0.0
    most_loss: float = 1.0

    def __post_init__(self) -> None:
        for name, value in {"--step-time": self.step_seconds, "--network": self.network}.items():
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{name} must be a positive number, not {value:g}")
        for name, value in {
            "--latency": self.latency,
            "--price-hour": self.price_hour,
            "--price-gb": self.price_gb,
            "--most-loss": self.most_loss,
        }.items():
            if not 0 <= value < math.inf:
                raise ConfigurationError(f"{name} must be 0 or more, not {value:g}")
        if self.processes < 2:
            raise ConfigurationError(
                f"--processes must be at least 2, not {self.processes}: one process has nothing "
                "to exchange"
            )
        if self.steps < 1:
            raise ConfigurationError(f"--steps must be at least 1, not {self.steps}")

    def ring(self, num_bytes: float) -> float:
        """Seconds of a ring all-reduce."""
        n = self.processes
        return 2 * (n - 1) / n * self._sending(num_bytes) + 2 * (n - 1) * self.latency

    def tree(self, num_bytes: float) -> float:
        """Seconds of an all-reduce over a double binary tree."""
        return 2 * self._sending(num_bytes) + 2 * self._depth * self.latency

    def all_reduce(self, num_bytes: float) -> float:
        return min(self.ring(num_bytes), self.tree(num_bytes))

    def all_gather(self, num_bytes: float) -> float:
        """Seconds until each process has the `num_bytes` of every other."""
        return (self.processes - 1) * (self._sending(num_bytes) + self.latency)

    @property
    def _depth(self) -> int:
        return math.ceil(math.log2(self.processes))

    def _sending(self, num_bytes: float) -> float:
        return 8e-9 * num_bytes / self.network


@dataclass(frozen=True, slots=True)
class MethodCost:
    """Of one step of one process. `num_bytes` is what it contributes: a body that all others
    receive, or, if `is_reduced`, numbers that are all-reduced in `passes`."""

    num_bytes: float
    compress_seconds: float
    decode_seconds: float = 0.0
    """For the body of one other process."""
    is_reduced: bool = False
    passes: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One method on a cluster."""

    name: str
    sent_bytes: float
    """By one process, in one step."""
    compute_seconds: float
    """Of compressing and decoding, beside the backward pass."""
    exchange_seconds: float
    step_seconds: float
    hours: float
    money: float
    loss: float | None
    """Points of accuracy on the task of `MEASURED_ON`; None if not measured."""
    pays_below: float | None
    """Gbit/s below which a step is shorter than without a method; None: never."""


# Prediction


def predict(cluster: Cluster, costs: Mapping[str, MethodCost]) -> list[Row]:
    """A row for "none" and for each method of `costs`."""
    return [
        _row(cluster, name, cost, costs)
        for name, cost in {"none": _plain(cluster), **costs}.items()
    ]


def choose(rows: Sequence[Row], cluster: Cluster) -> tuple[str, str]:
    """The first of `rows`, which are in order of simplicity, whose step is within `WORTH` of the
    shortest of "none" and those known to lose at most `most_loss` points; a sentence says why."""
    plain = rows[0]
    known = [r for r in rows[1:] if r.loss is not None and r.loss <= cluster.most_loss]
    if not known:
        return "none", f"no method is known to lose {cluster.most_loss:g} points or less"
    fastest = min(known, key=lambda row: row.step_seconds)
    enough = fastest.step_seconds / (1 - WORTH)
    best = next(row for row in (plain, *known) if row.step_seconds < enough)
    if best is plain:
        return "none", (
            f"{fastest.name} would take {seconds(fastest.step_seconds)} a step, without a method "
            f"it takes {seconds(plain.step_seconds)}; less than {WORTH:.0%} saved is within the "
            "error of this prediction"
        )
    return best.name, (
        f"a step takes {seconds(best.step_seconds)} instead of {seconds(plain.step_seconds)}: "
        f"{seconds(plain.exchange_seconds)} of exchange become {seconds(best.exchange_seconds)}, "
        f"for {seconds(best.compute_seconds)} of compressing and decoding"
    )


def _plain(cluster: Cluster) -> MethodCost:
    return MethodCost(4 * cluster.parameters, 0.0, is_reduced=True)


def _row(cluster: Cluster, name: str, cost: MethodCost, costs: Mapping[str, MethodCost]) -> Row:
    sent, computing, exchange, step = _step(cluster, name, cost)
    hours = cluster.steps * step / 3600
    gigabytes = 1e-9 * sent * cluster.steps
    money = cluster.processes * (hours * cluster.price_hour + gigabytes * cluster.price_gb)
    return Row(
        name=name,
        sent_bytes=sent,
        compute_seconds=computing,
        exchange_seconds=exchange,
        step_seconds=step,
        hours=hours,
        money=money,
        loss=0.0 if name == "none" else LOSSES.get(name),
        pays_below=None if name == "none" else _pays_below(cluster, name, cost),
    )


def _step(cluster: Cluster, name: str, cost: MethodCost) -> tuple[float, float, float, float]:
    """Bytes sent, seconds of computing, of the exchange, of the step."""
    n = cluster.processes
    if not cost.is_reduced:
        gathered = cost.num_bytes + _LENGTH_BYTES
        exchange = cluster.all_reduce(_AGREEMENT_BYTES) + cluster.all_gather(gathered)
        computing = BESIDE * (cost.compress_seconds + (n - 1) * cost.decode_seconds)
        sent = (n - 1) * gathered + _AGREEMENT_BYTES
        return sent, computing, exchange, cluster.step_seconds + computing + exchange
    latencies = (cost.passes - 1) * cluster.all_reduce(0)
    exchange = cluster.all_reduce(cost.num_bytes) + latencies
    hidden = 0.0
    if name == "none" or name in HALVES:
        hidden = exchange - _exposed(4 * cluster.parameters, exchange, cluster.step_seconds)
    sent = 2 * (n - 1) / n * cost.num_bytes
    computing = BESIDE * cost.compress_seconds
    step = cluster.step_seconds + computing + exchange - hidden
    return sent, computing, exchange, step


def _exposed(num_bytes: int, exchange: float, step_seconds: float) -> float:
    """Seconds that an exchange goes on after the backward pass: buckets are exchanged one after
    the other, each once its gradients are there."""
    backward, ready, end = BACKWARD * step_seconds, 0, 0.0
    while ready < num_bytes:
        size = min(BUCKET_BYTES if ready else FIRST_BUCKET_BYTES, num_bytes - ready)
        ready += size
        end = max(end, backward * ready / num_bytes) + exchange * size / num_bytes
    return end - backward


def _pays_below(cluster: Cluster, name: str, cost: MethodCost) -> float | None:
    """By bisection: the difference to no method falls as the network gets faster."""

    def gain(network: float) -> float:
        there = Cluster(
            cluster.parameters, cluster.processes, cluster.step_seconds, network, cluster.latency
        )
        return _step(there, "none", _plain(there))[3] - _step(there, name, cost)[3]

    low, high = _SLOWEST_LINK, _WIDEST_LINK
    if gain(low) <= 0:
        return None
    if gain(high) > 0:
        return math.inf
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


# Measurement


def measure(spec: ModelSpec) -> dict[str, MethodCost]:
    """Cost of each method on this machine, on synthetic gradients of `spec`.

    Seconds of compression are what a hook adds to a step, see `hook_seconds`; above 4 * SAMPLE
    values those of a smaller model, and for each value more what they grow by from SAMPLE values
    on. Bytes, and seconds for the body of another process, are those of SAMPLE values, multiplied.
    """
    smaller, factor = sample(spec, SAMPLE)
    drawn = Drawn.of(smaller, _REPEATS)
    larger, rest = sample(spec, 4 * SAMPLE)
    steps = [drawn, Drawn.of(larger, 1)] if rest > 1 else [Drawn.of(larger, 1)]
    before = kernels.limit_threads(1)
    try:
        costs = {name: _half(spec, name, steps) for name in HALVES}
        for name, config in METHODS.items():
            costs[name] = _compressed(from_config(dict(config)), spec, steps, drawn, factor)
    finally:
        kernels.limit_threads(before)
    return costs


def _hook_seconds(size: int, steps: Sequence[Drawn], register: Any) -> float:
    """Seconds that a hook adds to a step of a model of `size` values, by those of the last of
    `steps` and what they grow by from the first on."""
    from fedpress_ddp.measuring import hook_seconds

    taken = [hook_seconds(each.spec, each.updates[0], register) for each in steps]
    first, last = steps[0].spec.size, steps[-1].spec.size
    growth = max(0.0, taken[-1] - taken[0]) / (last - first) if last > first else 0.0
    return taken[-1] + growth * (size - last)


def _half(spec: ModelSpec, name: str, steps: Sequence[Drawn]) -> MethodCost:
    """torch's own hook."""
    try:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    except ModuleNotFoundError as exc:
        raise MissingExtra(
            "fedpress plan --ddp measures with PyTorch", hint="pip install fedpress[torch]"
        ) from exc
    hook = getattr(default_hooks, HALVES[name])

    def register(model: Any, group: Any) -> None:
        model.register_comm_hook(group, hook)

    taken = _hook_seconds(spec.size, steps, register)
    return MethodCost(2 * spec.size, taken, is_reduced=True)


def _compressed(
    made: Compressor[Any], spec: ModelSpec, steps: Sequence[Drawn], drawn: Drawn, factor: float
) -> MethodCost:
    """The computing half of an exchange of a model `spec` which is `factor` times as large as the
    gradients `drawn`."""
    from fedpress_ddp.hook import HookState, comm_hook  # needs torch
    from fedpress_ddp.measuring import exchange_costs

    def register(model: Any, group: Any) -> None:
        model.register_comm_hook(HookState(made, plain_steps=1, group=group), comm_hook)

    _, *costs = exchange_costs(made, drawn.spec, drawn.updates)
    num_bytes, passes = factor * costs[-1].num_bytes, costs[-1].passes
    if passes:  # factors do not grow like the model, and their size is known
        layout = made.lossy.layout(spec)
        num_bytes = float(sum(part.count * part.width for part in layout if type(part) is Reals))
    return MethodCost(
        num_bytes=num_bytes,
        compress_seconds=_hook_seconds(spec.size, steps, register),
        decode_seconds=factor * median(each.decode_seconds for each in costs),
        is_reduced=passes > 0,
        passes=max(1, passes),
    )


# The report


@dataclass(frozen=True)
class Report:
    """`to_json` and `to_text` of a prediction."""

    model: str
    cluster: Cluster
    costs: Mapping[str, MethodCost]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; docs/planning.md lists the keys."""
        rows = predict(self.cluster, self.costs)
        name, reason = choose(rows, self.cluster)
        plain = 4 * self.cluster.parameters
        return {
            "model": self.model,
            "cluster": asdict(self.cluster),
            "kernels": kernels.CHOSEN,
            "all_reduce_seconds": {
                "ring": self.cluster.ring(plain),
                "tree": self.cluster.tree(plain),
            },
            "costs": {each: asdict(cost) for each, cost in self.costs.items()},
            "methods": [_finite(asdict(row)) for row in rows],
            "recommended": name,
            "reason": reason,
            "loss_measured_on": MEASURED_ON,
        }

    def to_text(self) -> str:
        """The table, the recommendation, and its limits."""
        asked = self.cluster
        rows = predict(asked, self.costs)
        name, reason = choose(rows, asked)
        plain = 4 * asked.parameters
        has_money = asked.price_hour or asked.price_gb
        headings = ("method", "sent MB", "compute", "exchange", "step", "pays below", "hours")
        cells = [
            (
                row.name,
                f"{1e-6 * row.sent_bytes:,.3g}",
                seconds(row.compute_seconds),
                seconds(row.exchange_seconds),
                seconds(row.step_seconds),
                _link(row),
                f"{row.hours:,.1f}",
                *([f"{row.money:,.2f}"] if has_money else []),
                "unknown" if row.loss is None else f"{row.loss:.1f}",
            )
            for row in rows
        ]
        money = ["money"] if has_money else []
        lines = [
            f"{self.model}: {asked.parameters:,} parameters, {asked.processes} processes, "
            f"{asked.network:g} Gbit/s, {seconds(asked.step_seconds)} of computing a step, "
            f"{asked.steps:,} steps",
            f"all-reduce of float32: {seconds(asked.ring(plain))} on a ring, "
            f"{seconds(asked.tree(plain))} on a tree; compression in one thread of this machine "
            f"({kernels.CHOSEN})",
            "",
            *aligned([(*headings, *money, "loss on digits"), *cells]),
            "",
            f"recommended: {name}",
            f"  {reason}",
        ]
        if name in METHODS:
            lines.append(f"  compressor: {dict(METHODS[name])}")
        elif name in HALVES:
            lines.append("  hook: fp16_compress_hook, or HookState(..., dtype=torch.float16)")
        lines += ["", f"loss: points of accuracy, {MEASURED_ON}; unknown for your model"]
        return "\n".join(lines)


def _link(row: Row) -> str:
    if row.name == "none":
        return ""
    if row.pays_below is None:
        return "never"
    return "any link" if math.isinf(row.pays_below) else f"{row.pays_below:.3g} Gbit/s"


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a method that pays on any link has `pays_below` of 1e5."""
    if row["pays_below"] is not None:
        row["pays_below"] = min(row["pays_below"], _WIDEST_LINK)
    return row
