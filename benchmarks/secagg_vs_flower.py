"""Secure aggregation beside Flower's SecAgg+: CPU time of each party, bytes of a client.

    python benchmarks/secagg_vs_flower.py [--clients 100] [--coordinates 1000000]
        [--suite chacha20|aes-128-ctr] [--json FILE]

Both run in this process, with the same clients, coordinates, threshold and drop-outs (5 %, after
the secrets were shared) in a complete graph; needs fedpress[flower]. Ours is a whole session of the
machines that secagg.py plays, against the malicious profile. Of Flower's, one client
runs whole, through the functions of its client mod; what others would have sent it is made with
their keys from shares of the right lengths, as only their sizes matter to the time. Its server's
work is timed operation by operation, with Flower's functions and as its workflow calls them, and
multiplied by how often the workflow does each: the whole would take minutes of a core. Transport
and training are in neither.

Flower's masks come from 32 bits of seed, its messages are not signed, and its vectors are 8 bytes a
coordinate whatever they hold: so its one body is compared with ours of all coordinates in 655
levels, of all in its default 2**22 levels, and of a support of 5 %, which it does not know.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from flwr.client.mod.secure_aggregation.secaggplus_mod import (
    SecAggPlusState,
    _collect_masked_vectors,
    _setup,
    _share_keys,
    _unmask,
)
from flwr.common import ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    encrypt,
    generate_shared_key,
)
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import (
    pseudo_rand_gen,
    share_keys_plaintext_concat,
)
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key
from harness import parser, save
from secagg import COMPLETE, figures

from fedpress.planning.rehearsal import rehearse
from fedpress_protocols.masking.keystream import SUITES, Suite
from fedpress_protocols.masking.ring import Bounded, Packing

MOD_RANGE = 2**32  # Flower's default
SUPPORT = 0.05
SETUP: dict[str, Any] = {
    Key.CLIPPING_RANGE: 8.0,
    Key.TARGET_RANGE: 2**22,
    Key.MOD_RANGE: MOD_RANGE,
    Key.MAX_WEIGHT: 1000.0,
}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result and CPU seconds of all threads, since Flower shares out Shamir's work."""
    begun = time.process_time()
    found = call()
    return found, time.process_time() - begun


def flower(clients: int, coordinates: int, threshold: int, dropped: int) -> dict[str, Any]:
    setup = ConfigRecord(
        SETUP | {Key.SAMPLE_NUMBER: clients, Key.SHARE_NUMBER: clients, Key.THRESHOLD: threshold}
    )
    states = [SecAggPlusState(nid=number) for number in range(clients)]
    seconds: dict[str, float] = {}
    for state in states:
        _, seconds["setup"] = timed(lambda state=state: _setup(state, setup))  # type: ignore[misc]
    own = states[0]
    keys = ConfigRecord({str(state.nid): [state.pk1, state.pk2] for state in states})
    sent, seconds["share keys"] = timed(lambda: _share_keys(own, keys))

    # What the others send: their own shares have the lengths of these.
    b_share, key_share = own.rd_seed_share_dict[0], own.sk1_share_dict[0]
    received = [
        encrypt(
            generate_shared_key(bytes_to_private_key(other.sk2), bytes_to_public_key(own.pk2)),
            share_keys_plaintext_concat(other.nid, 0, b_share, key_share),
        )
        for other in states[1:]
    ]
    inbox = ConfigRecord({Key.CIPHERTEXT_LIST: received, Key.SOURCE_LIST: list(range(1, clients))})
    update = np.random.default_rng(0).normal(0, 0.1, coordinates).astype(np.float32)
    parameters = ndarrays_to_parameters([update])
    masked, seconds["mask"] = timed(lambda: _collect_masked_vectors(own, inbox, 100, parameters))
    active, dead = list(range(clients - dropped)), list(range(clients - dropped, clients))
    question = ConfigRecord({Key.ACTIVE_NODE_ID_LIST: active, Key.DEAD_NODE_ID_LIST: dead})
    answer, seconds["unmask"] = timed(lambda: _unmask(own, question))
    body = sum(len(array) for array in masked[Key.MASKED_PARAMETERS])
    messages = [own.pk1, own.pk2, *sent[Key.CIPHERTEXT_LIST], *answer[Key.SHARE_LIST]]

    # The server: what it does once, and how often.
    shapes = [(), (coordinates,)]
    holders = clients - dropped
    b_shares, key_shares = (
        create_shares(secret, threshold, clients)[:holders] for secret in (own.rd_seed, own.sk1)
    )
    shared = generate_shared_key(bytes_to_private_key(own.sk1), bytes_to_public_key(states[1].pk1))
    vector = pseudo_rand_gen(own.rd_seed, MOD_RANGE, shapes)
    # By name: an operation, how often it is timed, how often the workflow does it.
    work: dict[str, tuple[Callable[[], Any], int, int]] = {
        "add": (
            lambda: parameters_mod(parameters_addition(vector, vector), MOD_RANGE),
            5,
            holders,
        ),
        "combine shares of a seed": (lambda: combine_shares(b_shares), 1, holders),
        "combine shares of a key": (lambda: combine_shares(key_shares), 1, dropped),
        "agree on a key": (
            lambda: generate_shared_key(
                bytes_to_private_key(own.sk1), bytes_to_public_key(states[1].pk1)
            ),
            5,
            dropped * (clients - 1),
        ),
        "take off a mask": (
            lambda: parameters_subtraction(vector, pseudo_rand_gen(shared, MOD_RANGE, shapes)),
            5,
            holders + dropped * (clients - 1),
        ),
    }
    server = {
        name: timed(lambda: [call() for _ in range(times)])[1] / times * count  # noqa: B023
        for name, (call, times, count) in work.items()
    }
    return {
        "client_seconds": seconds,
        "client_total": sum(seconds.values()),
        "server_seconds": server,
        "server_total": sum(server.values()),
        "body_bytes": body,
        "sent_bytes": body + sum(len(message) for message in messages),
    }


def ours(clients: int, coordinates: int, dropped: int, suite: Suite) -> dict[str, Any]:
    shape = {"n": clients, "coordinates": coordinates, "dropped": dropped}
    load = replace(COMPLETE, suite=suite, **shape)
    rehearse(replace(load, n=4, coordinates=1000, dropped=0, corrupt=0))  # compile
    found = figures(load)
    return {
        "threshold": found["threshold"],
        "client_seconds": found["client"]["seconds"],
        "client_total": found["client"]["total_seconds"],
        "server_seconds": found["server"]["seconds"],
        "server_total": found["server"]["total_seconds"],
        "body_bytes": found["client"]["body_bytes"],
        "sent_bytes": found["client"]["sent_bytes"],
        "sparse_body_bytes": body_bytes(round(SUPPORT * coordinates), load.bound, clients),
        "fine_body_bytes": body_bytes(coordinates, SETUP[Key.TARGET_RANGE] // 2, clients),
    }


def body_bytes(coordinates: int, bound: int, clients: int) -> int:
    return Packing.of([Bounded("update", coordinates, bound)], clients).num_bytes


def compared(clients: int, coordinates: int, suite: Suite) -> dict[str, Any]:
    dropped = max(1, round(0.05 * clients))
    mine = ours(clients, coordinates, dropped, suite)
    theirs = flower(clients, coordinates, mine["threshold"], dropped)
    return {
        "clients": clients,
        "coordinates": coordinates,
        "dropped": dropped,
        "threshold": mine["threshold"],
        "suite": suite,
        "ours": mine,
        "flower": theirs,
        "ratios": {
            "client CPU": theirs["client_total"] / mine["client_total"],
            "server CPU": theirs["server_total"] / mine["server_total"],
            "dense body": theirs["body_bytes"] / mine["body_bytes"],
            "dense body, 2**22 levels": theirs["body_bytes"] / mine["fine_body_bytes"],
            f"body with a support of {SUPPORT:.0%}": theirs["body_bytes"]
            / mine["sparse_body_bytes"],
        },
    }


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--clients", type=int, default=100, help="up to 128")
    command.add_argument("--coordinates", type=int, default=1_000_000)
    command.add_argument("--suite", choices=SUITES, default=SUITES[0], help="of our masks")
    asked = command.parse_args()
    found = compared(asked.clients, asked.coordinates, asked.suite)
    save(found, asked.json)
    print(
        f"{found['clients']} clients, {found['coordinates']:,} coordinates, threshold "
        f"{found['threshold']}, {found['dropped']} dropped"
    )
    for name in ("ours", "flower"):
        row = found[name]
        for party in ("client", "server"):
            parts = ", ".join(
                f"{step} {seconds:.3f}" for step, seconds in row[f"{party}_seconds"].items()
            )
            print(f"{name:8}{party:8}{row[f'{party}_total']:10.3f} s CPU: {parts}")
        print(f"{name:8}{'body':8}{row['body_bytes']:10,} bytes, {row['sent_bytes']:,.0f} sent")
    print(f"ours with a support of {SUPPORT:.0%}: {found['ours']['sparse_body_bytes']:,} bytes")
    for name, ratio in found["ratios"].items():
        print(f"{name:28}{ratio:10.1f} x less")


if __name__ == "__main__":
    main()
