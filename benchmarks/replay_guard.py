"""The memory of nonces under load: CPU of a request, and whether honest requests get in.

    python benchmarks/replay_guard.py [--rate 5000] [--seconds 120]

The clock is the benchmark's own, so a figure of requests a second is one of CPU and not of waiting.
A third of the requests of a fleet change something. The saboteurs have as many keys as it says, and
each signs as much as it may, for as late as it may.
"""

from __future__ import annotations

import argparse
import itertools
import time
import tracemalloc
from contextlib import suppress

from fedpress_protocols.errors import ClockSkew, Unavailable
from fedpress_protocols.signatures import ParsedSignature, ReplayGuard

NOW = 1_790_000_000


def run(rate: int, seconds: int, saboteurs: int, devices: int = 50_000) -> str:
    guard, numbers = ReplayGuard(opened=NOW), itertools.count()

    def signed(key: str, created: int, lifetime: int) -> ParsedSignature:
        nonce = next(numbers).to_bytes(16, "big")
        return ParsedSignature(key, created, created + lifetime, nonce, bytes(64), "")

    refused = spent = longest = num_honest = 0
    for second in range(seconds):
        now = NOW + second
        for each in range(saboteurs * 20):
            with suppress(Unavailable, ClockSkew):
                guard.check(signed(f"saboteur {each % saboteurs}", now + 300, 300), now)
        some = [signed(f"device {next(numbers) % devices}", now, 60) for _ in range(rate)]
        for one in some:
            began = time.process_time_ns()
            try:
                guard.check(one, now)
            except (Unavailable, ClockSkew):
                refused += 1
            took = time.process_time_ns() - began
            spent, longest, num_honest = spent + took, max(longest, took), num_honest + 1
    return (
        f"| {rate} | {saboteurs} | {num_honest} | {refused} | {spent / num_honest / 1e3:.1f} "
        f"| {num_honest / spent * 1e9:,.0f} | {longest / 1e6:.0f} | {len(guard)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=int, default=5000, help="changing requests per second")
    parser.add_argument("--seconds", type=int, default=120)
    options = parser.parse_args()
    print(
        "| per second | saboteurs | requests | refused | µs each | a second | longest, ms | kept |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for saboteurs in (0, 49, 490):
        print(run(options.rate, options.seconds, saboteurs))
    tracemalloc.start()
    run(options.rate, 60, 0)
    print(f"memory at its peak: {tracemalloc.get_traced_memory()[1] / 2**20:.0f} MiB")


main()
