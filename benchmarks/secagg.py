"""The costs of a masked session for each party, against those of its masks alone.

    python benchmarks/secagg.py [--quick] [--json FILE]

Whole sessions of the real machines run in this process (fedpress.planning.rehearsal). The floor is
the key stream of a mask and its addition to the words, and nothing else, measured between the
clients of the same run; only ratios to it are worth comparing between machines.
docs/bench-secagg.md explains each key.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES, ChaCha20
from cryptography.hazmat.primitives.ciphers.modes import CTR
from harness import machine, parser, report

from fedpress.planning.rehearsal import Workload, rehearse
from fedpress_protocols.masking.keystream import SUITES, Suite

_FLOOR_MASKS = 20
_CHUNK = 2**15

# Sums of 16 bits in a complete graph; of 21 bits in a graph of degree 140.
COMPLETE = Workload(100, 1_000_000, 327, 5, 1_000, 500)
SPARSE = Workload(1_000, 1_000_000, 1_048, 50, 500, 500)

# By the kind of session, the ratio and what it may be.
TARGETS = {
    "complete": {"client / floor": 1.5, "server / floor": 1.5, "bytes / bound": 1.0},
    "sparse": {
        "client / floor": 1.6,
        "server less reconstruction / floor": 1.6,
        "bytes / bound": 1.0,
    },
}


def measure(quick: bool = False) -> dict[str, Any]:
    """All figures; `quick` leaves the session of 1,000 clients out."""
    loads = [replace(COMPLETE, suite=suite) for suite in SUITES]
    if not quick:
        loads.append(SPARSE)
    for load in loads:  # compile, and fill caches that outlast a session
        rehearse(replace(load, n=4, coordinates=1000, dropped=0, corrupt=0))
    sessions = {f"n={load.n:,} {load.suite}": figures(load) for load in loads}
    return {"machine": machine(), "sessions": sessions, "targets": _targets(sessions)}


def figures(load: Workload) -> dict[str, Any]:
    """Play one session of `load`, the floor measured between its steps."""
    config, floors = load.config, list[float]()
    num_words = config.packing.num_words
    played = rehearse(load, lambda: floors.append(_floor(num_words, load.suite)))
    parameters = config.parameters(load.n)
    floor = median(floors)
    steps, server = played.client_seconds, played.server_seconds
    client_masks = 1 + parameters.degree
    sum_bits = math.log2(2 * load.n * load.bound + 1)
    bound = 1.03 * load.coordinates * sum_bits / 8 + 144 * parameters.degree
    client_floor, server_floor = client_masks * floor, played.server_masks * floor
    unmask = server["reconstruction"] + server["unmasking"] + server["unpacking"]
    return {
        "clients": load.n,
        "dropped": load.dropped,
        "degree": parameters.degree,
        "threshold": parameters.threshold,
        "coordinates": load.coordinates,
        "sum_bits": sum_bits,
        "suite": load.suite,
        "timed_clients": played.timed_clients,
        "floor_seconds_per_mask": floor,
        "client": {
            "masks": client_masks,
            "floor_seconds": client_floor,
            "seconds": steps,
            "total_seconds": sum(steps.values()),
            "sent_bytes": played.sent_bytes,
            "body_bytes": played.body_bytes,
            "received_bytes": played.received_bytes,
        },
        "server": {
            "masks": played.server_masks,
            "floor_seconds": server_floor,
            "seconds": server,
            "total_seconds": sum(server.values()),
        },
        "ratios": {
            "client / floor": (steps["open"] + steps["mask"]) / client_floor,
            "client's masking alone / floor": steps["mask"] / client_floor,
            "client in all / floor": sum(steps.values()) / client_floor,
            "server / floor": unmask / server_floor,
            "server less reconstruction / floor": (unmask - server["reconstruction"])
            / server_floor,
            "server in all / floor": sum(server.values()) / server_floor,
            "bytes / bound": played.sent_bytes / bound,
            "body / entropy": 8 * played.body_bytes / (load.coordinates * sum_bits),
        },
    }


def _floor(num_words: int, suite: Suite) -> float:
    """CPU seconds of one mask: a key stream made in chunks and added to the words, and no more."""
    words, buffer = np.zeros(num_words, np.uint64), np.empty(_CHUNK, np.uint64)
    octets, zeros = buffer.data.cast("B"), memoryview(bytes(8 * _CHUNK))
    begun = time.thread_time()
    for number in range(_FLOOR_MASKS):
        key = bytes([number]) * 32
        cipher: Cipher[Any] = (
            Cipher(ChaCha20(key, key[:16]), mode=None)
            if suite == "chacha20"
            else Cipher(AES(key[:16]), CTR(key[:16]))
        )
        stream = cipher.encryptor()
        for at in range(0, num_words, _CHUNK):
            chunk = words[at : at + _CHUNK]
            stream.update_into(zeros[: chunk.nbytes], octets[: chunk.nbytes])
            np.add(chunk, buffer[: chunk.size], out=chunk)
    return (time.thread_time() - begun) / _FLOOR_MASKS


def _targets(sessions: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, session in sessions.items():
        kind = "complete" if session["degree"] == session["clients"] - 1 else "sparse"
        for ratio, due in TARGETS[kind].items():
            value = session["ratios"][ratio]
            rows.append(
                {"name": f"{name}: {ratio}", "value": value, "due": due, "met": value <= due}
            )
    return rows


def _tables(found: dict[str, Any]) -> str:
    lines = ["  ".join(f"{key} {value}" for key, value in found["machine"].items())]
    for name, session in found["sessions"].items():
        lines += [
            "",
            f"{name}: degree {session['degree']}, threshold {session['threshold']}, "
            f"{session['dropped']} dropped, {session['coordinates']:,} coordinates, sums of "
            f"{session['sum_bits']:.2f} bits",
            f"a mask {1e3 * session['floor_seconds_per_mask']:.3f} ms",
        ]
        for party in ("client", "server"):
            costs = session[party]
            parts = ", ".join(
                f"{label} {1e3 * seconds:.1f}" for label, seconds in costs["seconds"].items()
            )
            lines.append(
                f"{party}: {costs['masks']} masks, floor {1e3 * costs['floor_seconds']:.1f} ms, "
                f"in all {1e3 * costs['total_seconds']:.1f} ms: {parts}"
            )
        client = session["client"]
        lines.append(
            f"client sends {client['sent_bytes']:,.0f} bytes (body {client['body_bytes']:,}), "
            f"receives {client['received_bytes']:,.0f}"
        )
        lines += [f"    {key:40}{value:8.3f}" for key, value in session["ratios"].items()]
    lines += ["", f"{'target':64}{'found':>8}{'due':>8}"]
    for row in found["targets"]:
        verdict = "" if row["met"] else "  missed"
        lines.append(f"{row['name']:64}{row['value']:8.3f}{row['due']:8.3f}{verdict}")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__, quick="sessions of 100 clients alone").parse_args()
    result = measure(options.quick)
    report(_tables(result), result, options.json)


if __name__ == "__main__":
    main()
