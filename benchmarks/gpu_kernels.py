"""Speed of Triton's kernels on a GPU, beside the speed of its memory.

    python benchmarks/gpu_kernels.py [--size 10000000]

Times are medians of `triton.testing.do_bench`, which leaves the caches cold. GB/s are of the bytes
that a case has to read and write; selections, and what follows one, count the gradient's float32
alone, 4 bytes a value. Nothing crosses the bus in these cases.

The last two are what a sender's GPU does with a gradient: the sum with the residual, the largest
1 %, these quantised to 15 levels, and their symbols packed or coded in lanes. Step and table are
chosen beforehand, as the host chooses them. Positions are coded on the host, in no case here.

A second table has the milliseconds of a data-parallel hook's exchange by top-k of 1 % under error
feedback, two processes in one without a network: to select, encode, decode and add, with the
gradient on the device, and through the host with the host's kernels. Needs fedpress[gpu], a GPU,
and FEDPRESS_KERNELS unset.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from fedpress_compression import kernels

Case = tuple[Callable[[], Any], int]
SEED, SHARE = 0, 0.01


def cases(size: int) -> dict[str, Case]:
    """The calls that are timed, and their bytes, for vectors of `size` float32."""
    from fedpress_compression.kernels import on_device as gpu

    torch.manual_seed(SEED)
    vector = torch.randn(size, device=gpu.DEVICE)
    residual, total = torch.randn_like(vector), torch.empty_like(vector)
    noise = torch.rand(size, dtype=torch.float64, device=gpu.DEVICE)
    k = max(1, int(SHARE * size))
    symbols = gpu.device_quantise(vector, 0.5, 7, None)
    tables = frequencies(symbols)
    zeros = torch.zeros(size, dtype=torch.uint8, device=gpu.DEVICE)
    memory = torch.zeros(15, dtype=torch.uint8, device=gpu.DEVICE)
    num_lanes = lanes(size)
    num_words, states, words = gpu.device_encode(symbols, zeros, tables, num_lanes)
    words = words.to(torch.int64)
    where = gpu.device_largest(vector, None, k, None)[0].long()
    sums = torch.zeros(size, dtype=torch.int64, device=gpu.DEVICE)
    table = torch.arange(15, dtype=torch.int64, device=gpu.DEVICE)
    decode = partial(gpu.device_decode, states, words, num_words, zeros, memory, tables)
    chosen = gpu.device_largest(vector, residual, k, total)[1]
    step = float(chosen.abs().max()) / 7
    sent_tables = frequencies(gpu.device_quantise(chosen, step, 7, None))

    def quantised() -> torch.Tensor:
        chosen = gpu.device_largest(vector, residual, k, total)[1]
        return gpu.device_quantise(chosen, step, 7, None)

    def coded() -> Any:
        return gpu.device_encode(quantised(), zeros[:k], sent_tables, lanes(k))

    return {
        "copy": (lambda: total.copy_(vector), 8 * size),
        "largest": (partial(gpu.device_largest, vector, None, k, None), 4 * size),
        "sum and largest": (partial(gpu.device_largest, vector, residual, k, total), 4 * size),
        "quantise": (partial(gpu.device_quantise, vector, 0.5, 7, None), 5 * size),
        "quantise at random": (partial(gpu.device_quantise, vector, 0.5, 7, noise), 13 * size),
        "pack": (partial(gpu.device_pack, symbols, 4), size + size // 2),
        "encode lanes": (partial(gpu.device_encode, symbols, zeros, tables, num_lanes), 2 * size),
        "decode lanes": (decode, 2 * size),
        "decode-add": (
            partial(gpu.device_add_table_at, sums, where, symbols[:k], table),
            25 * where.numel(),
        ),
        "select, quantise, pack": (lambda: gpu.device_pack(quantised(), 4), 4 * size),
        "select, quantise, encode": (coded, 4 * size),
    }


def exchanges(size: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The mean of a gradient of `size` float32 on the device, by the two ways of a hook."""
    from fedpress.compressors import ErrorFeedback, PublicRandomness, TopK
    from fedpress_compression.compressor import Public
    from fedpress_compression.kernels import on_device as gpu
    from fedpress_compression.tensors import ModelSpec, TensorSpec
    from fedpress_ddp import on_device
    from fedpress_ddp.collectives import Turns
    from fedpress_ddp.exchange import Exchange
    from fedpress_ddp.measuring import Loopback
    from fedpress_ddp.metrics import Measured

    torch.manual_seed(SEED)
    values = torch.randn(size, device=gpu.DEVICE)
    residual = torch.zeros_like(values)
    spec, lossy = ModelSpec((TensorSpec("gradient", (size,)),)), TopK(SHARE)
    public = Public(spec, PublicRandomness(bytes(32)))
    made = ErrorFeedback(lossy)

    def trip() -> Loopback:
        return Loopback(None, values.device, Measured(), Turns().take())

    return {
        "on the device": lambda: on_device.send(lossy, values, residual, public, trip()).mean,
        "through the host": lambda: Exchange(made).mean_over(made, spec, values, trip()),
    }


def lanes(num: int) -> int:
    """One for each 512 to 1,024 symbols, a power of 2; 2**15 at most."""
    return min(1 << 15, 1 << max(0, (num // 512).bit_length() - 1))


def frequencies(symbols: torch.Tensor) -> torch.Tensor:
    """One table of frequencies that sum to 4096, 1 or more for what occurs."""
    counts = torch.bincount(symbols.to(torch.int64), minlength=15).cpu().numpy()
    shares = np.where(counts > 0, 1 + counts * (4096 - len(counts)) // counts.sum(), 0)
    shares[counts.argmax()] += 4096 - shares.sum()
    return torch.from_numpy(shares.astype(np.int64)[np.newaxis]).to(symbols.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=10_000_000)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU that torch can use, and there is none")
    if kernels.CHOSEN == "triton":
        raise SystemExit("unset FEDPRESS_KERNELS: one exchange is by the host's kernels")
    from triton.testing import do_bench

    print(f"{torch.cuda.get_device_name()}, {asked.size:,} values")
    speeds = {
        name: num_bytes / do_bench(call, return_mode="median") / 1e6
        for name, (call, num_bytes) in cases(asked.size).items()
    }
    print("| case | GB/s | share of a copy's |\n|---|---|---|")
    for name, speed in speeds.items():
        print(f"| {name} | {speed:.0f} | {speed / speeds['copy']:.2f} |")
    print("\n| exchange | ms |\n|---|---|")
    for name, exchange in exchanges(asked.size).items():
        print(f"| {name} | {do_bench(exchange, return_mode='median'):.2f} |")


if __name__ == "__main__":
    main()
