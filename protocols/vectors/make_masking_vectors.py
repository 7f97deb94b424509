"""Write the golden vectors of masking's primitives: graphs, shares, keys, masks and packed words.

    python protocols/vectors/make_masking_vectors.py [folder]

Everything follows from fixed secrets. What ML-KEM encapsulates is random, so ciphertexts that are
in the folder already are kept. A vector never changes once it was released.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_compression.kernels import reference
from fedpress_protocols.masking import graph
from fedpress_protocols.masking.keys import ChannelKey, MaskKey, commitment, derive, self_mask
from fedpress_protocols.masking.keystream import SUITES, Suite, add_keystream
from fedpress_protocols.masking.ring import Bounded, Packing

SID = hashlib.sha256(b"fedpress vectors: session").digest()
CFG = hashlib.sha256(b"fedpress vectors: configuration").digest()
LOW, HIGH = 3, 8
MESSAGE = bytes(range(80))

Vector = dict[str, Any]


def secret(name: str) -> bytes:
    return hashlib.sha256(f"fedpress vectors: {name}".encode()).digest()


def graphs() -> list[Vector]:
    """The rows of a few slots, and the SHA-256 of all rows as little-endian 32-bit integers."""
    found = []
    for n, degree in ((2, 1), (10, 3), (10, 9), (100, 16), (1000, 52), (10_000, 62)):
        seed = secret(f"graph {n}")
        rows = graph.neighbours(n, degree, seed)
        found.append(
            {
                "n": n,
                "degree": degree,
                "seed": seed.hex(),
                "rows": {str(slot): rows[slot].tolist() for slot in (0, n // 2, n - 1)},
                "sha256": hashlib.sha256(rows.astype("<i4").tobytes()).hexdigest(),
            }
        )
    return found


def spread_graphs() -> list[Vector]:
    """Distances and parameters of spread rings, and rows as in `graphs`; 10 % corrupt, 5 % lost."""
    found = []
    for n in (129, 200, 1000, 10_000):
        seed = secret(f"graph {n}")
        due = graph.parameters(n, corrupt=0.1, dropout=0.05, adversary="malicious")
        rows = graph.neighbours(n, due.degree, seed, is_spread=True)
        found.append(
            {
                "n": n,
                "degree": due.degree,
                "threshold": due.threshold,
                "honest": due.honest,
                "second_eigenvalue": graph.second_eigenvalue(n, due.degree),
                "distances": graph.distances(n, due.degree).tolist(),
                "seed": seed.hex(),
                "rows": {str(slot): rows[slot].tolist() for slot in (0, n - 1)},
                "sha256": hashlib.sha256(rows.astype("<i4").tobytes()).hexdigest(),
            }
        )
    return found


def shares() -> list[Vector]:
    """Polynomials whose coefficients come from a key derivation, and their shares."""
    found = []
    for threshold, holders in ((1, [1]), (2, [1, 2, 3]), (3, [1, 7, 1000, 2**32 - 1]), (7, None)):
        xs = np.array(holders or range(1, 11), np.uint64)
        dealt = secret(f"shamir {threshold}")
        number = int.from_bytes(dealt, "little")
        limbs = [number >> 52 * limb & (2**52 - 1) for limb in range(5)]
        drawn = derive(dealt, salt=b"", info=b"coefficients", length=40 * (threshold - 1) or 1)
        words = np.frombuffer(drawn[: 40 * (threshold - 1)], "<u8") & np.uint64(2**61 - 1)
        coefficients = np.concatenate([np.array(limbs, np.uint64), words]).reshape(-1, 5)
        found.append(
            {
                "threshold": threshold,
                "holders": xs.tolist(),
                "secret": dealt.hex(),
                "coefficients": coefficients.tolist(),
                "shares": [
                    share.astype("<u8").tobytes().hex()
                    for share in reference.evaluate(coefficients, xs)
                ],
            }
        )
    return found


def keystreams() -> list[Vector]:
    def words(material: bytes, suite: Suite, offset: int) -> list[int]:
        found = np.zeros(5, np.uint64)
        add_keystream(found, material, suite, 1, offset)
        numbers: list[int] = found.tolist()
        return numbers

    return [
        {
            "suite": suite,
            "material": (material := derive(secret(suite), salt=b"", info=b"", length=48)).hex(),
            "offset": offset,
            "words": words(material, suite, offset),
        }
        for suite in SUITES
        for offset in (0, 1, 7, 8, 32_768, 2**32 + 3, 2**35 - 5)
    ]


def keys(hybrid: bool, kept: Vector) -> Vector:
    low, high = (MaskKey(secret(f"mask {slot}"), hybrid=hybrid) for slot in (LOW, HIGH))
    sender, receiver = (
        ChannelKey(secret(f"channel {slot}"), hybrid=hybrid) for slot in (LOW, HIGH)
    )
    context: dict[str, Any] = {"sid": SID, "own": LOW, "peer": HIGH}
    introduction = kept.get("introduction") or low.introduce(high.public, **context).hex()
    associated = bytes.fromhex(introduction)
    sealed = sender.seal(receiver.public, MESSAGE, associated=associated, **context).hex()
    return {
        "hybrid": hybrid,
        "sid": SID.hex(),
        "cfg_hash": CFG.hex(),
        "slots": [LOW, HIGH],
        "mask_secrets": [secret(f"mask {slot}").hex() for slot in (LOW, HIGH)],
        "mask_publics": [low.public.hex(), high.public.hex()],
        "introduction": introduction,
        "pair_mask": low.pair_mask(high.public, cfg_hash=CFG, **context).hex(),
        "seed": secret("seed").hex(),
        "self_mask": self_mask(secret("seed"), sid=SID, slot=LOW).hex(),
        "commitment": commitment(secret("seed"), sid=SID, slot=LOW).hex(),
        "channel_secrets": [secret(f"channel {slot}").hex() for slot in (LOW, HIGH)],
        "channel_publics": [sender.public.hex(), receiver.public.hex()],
        "message": MESSAGE.hex(),
        "sealed": (kept.get("sealed") or sealed) if hybrid else sealed,
    }


def packings() -> list[Vector]:
    found = []
    for n, *vectors in (
        (100, ("values", 9, 327)),
        (1000, ("values", 7, 1048), ("examples", 1, 65_535)),
        (10_000, ("values", 5, 200_000)),
        (100, ("values", 70, 40)),
        (1000, ("values", 50, 65)),
        (10, ("values", 33, 3), ("weight", 1, 1)),
        (3, ("values", 2, 2**60)),
    ):
        packing = Packing.of([Bounded(*vector) for vector in vectors], n)
        values = {
            name: np.array([(i * i * 7919 + 5 * i) % (2 * bound + 1) - bound for i in range(num)])
            for name, num, bound in vectors
        }
        words = packing.pack(values)
        found.append(
            {
                "n": n,
                "vectors": vectors,
                "segments": [
                    {"base": each.base, "digits": each.digits, "word_bits": each.word_bits}
                    for each in packing.segments
                ],
                "values": {name: integers.tolist() for name, integers in values.items()},
                "words": words.tolist(),
                "body": packing.to_bytes(words).hex(),
            }
        )
    return found


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    before = folder / "keys.json"
    kept = json.loads(before.read_text()) if before.exists() else [{}, {}]
    for name, found in (
        ("graph", graphs()),
        ("spread_graph", spread_graphs()),
        ("shamir", shares()),
        ("keystream", keystreams()),
        ("keys", [keys(hybrid, kept[hybrid]) for hybrid in (False, True)]),
        ("packing", packings()),
    ):
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    here = Path(__file__).parent / "masking"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else here)
