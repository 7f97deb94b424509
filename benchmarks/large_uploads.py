"""The time saved by sending a large update while it is still being encoded, at several link speeds.

    python benchmarks/large_uploads.py [--parameters 10000000] [--mbit 10 100 1000] [--repeats 3]

The device's own code does all its work (compress, encode, decode, save the account, the outgoing
file with its syncs); the link alone is simulated: a part takes its bytes over the speed, and one
round trip for its answer. The least of the repeats, since whatever else a machine does only adds.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_client.ledger import Ledger
from fedpress_client.outgoing import Outgoing
from fedpress_client.parts import PARTS_ABOVE, Delivery, PartSizes
from fedpress_client.state import StateDirectory
from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.tensors import Vector
from fedpress_protocols.messages import (
    Assignment,
    PartialCompletion,
    PartialIntent,
    PartialUpload,
    UploadAck,
    UploadFigures,
)
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, FixedPointTerms, Profile, RoundPlan, TrainingTerms
from fedpress_protocols.upload import Upload, max_body_bytes

ROUND_TRIP = 0.05
PART_BYTES = 8 * 2**20


@dataclass
class Link:
    """A server that takes parts, behind a link of `rate` bytes a second."""

    rate: float
    parts_above: int = PARTS_ABOVE
    held: bytearray = field(default_factory=bytearray)
    sizes: PartSizes = field(default_factory=PartSizes)

    def _asked(self, num_bytes: int = 0) -> PartialUpload:
        time.sleep(num_bytes / self.rate + ROUND_TRIP)
        return PartialUpload(
            partial="u",
            offset=len(self.held),
            digest=hashlib.sha256(self.held).hexdigest(),
            part_bytes=PART_BYTES,
            expires_at=0.0,
        )

    def begin_parts(self, assignment: str, intent: PartialIntent) -> PartialUpload:
        return self._asked()

    def held_parts(self, assignment: str, partial: str) -> PartialUpload:
        return self._asked()

    def send_part(self, assignment: str, partial: str, offset: int, part: bytes) -> PartialUpload:
        self.held += part
        return self._asked(len(part))

    def complete_parts(
        self, assignment: str, partial: str, completion: PartialCompletion, query: str = ""
    ) -> UploadAck:
        self._asked()
        return UploadAck(assignment=assignment, upload=completion.upload, received_at=0.0)

    def drop_parts(self, assignment: str, partial: str) -> None:
        self.held.clear()

    def _delivery(self, assignment: str) -> Delivery:
        return Delivery(self, assignment, self.sizes, time.perf_counter)

    def ahead(
        self,
        assignment: str,
        max_bytes: int,
        source: Callable[[int, int], bytes],
        begun: Callable[[str], None],
    ) -> None:
        self._delivery(assignment).ahead(source, max_bytes, begun)

    def upload(
        self, assignment: str, body: bytes, figures: UploadFigures | None = None
    ) -> UploadAck:
        return self._delivery(assignment).whole(body)


@dataclass(frozen=True)
class Case:
    """One update under one compressor."""

    model: Model
    update: Vector
    compressor: Compressor[Any]

    @property
    def assignment(self) -> Assignment:
        model, seed = self.model, hashlib.sha256(b"large uploads").hexdigest()
        plan = RoundPlan(
            task="large",
            round=1,
            attempt=1,
            model=model.digest,
            spec=model.spec.digest,
            profiles=(Profile(name="only", compressor=ErrorFeedback(self.compressor)),),
            training=TrainingTerms(),
            cohort=CohortRules(size=1, minimum=1),
            fixed_cohort=True,
            deadline=1e9,
            fixed_point=FixedPointTerms(scale_bits=24, max_abs=64.0, max_examples=1000),
            public_seed=seed,
        )
        return Assignment(assignment="a", client_id="c", plan=plan, profile="only")

    def stages(self) -> tuple[int, dict[str, float]]:
        """Bytes of the body; seconds of each stage alone."""
        plan, spec = self.assignment.plan, self.model.spec
        public, layouts = plan.public(spec), plan.layouts(spec)
        seconds: dict[str, float] = {}
        began = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal began
            now = time.perf_counter()
            seconds[name], began = now - began, now

        rng = np.random.default_rng(1)
        symbols, _ = self.compressor.compress(self.update, self.compressor.init(spec), public, rng)
        lap("compress")
        body = Upload(0, 3, symbols).to_bytes(layouts[0])
        lap("encode")
        found = Upload.from_bytes(body, layouts, 0)
        self.compressor.decompress(found.symbols, public)
        lap("decode")
        return len(body), seconds

    def sent(self, rate: float, folder: Path, *, is_early: bool) -> tuple[float, float]:
        """Seconds from the trained update to the acknowledgement, and until the account was
        saved."""
        link = Link(rate)
        files = StateDirectory.open(folder).task("large")
        spec, assignment = self.model.spec, self.assignment
        began = time.perf_counter()
        with Outgoing(files, link if is_early else object(), "a") as outgoing:
            outgoing.expect(max_body_bytes(assignment.plan.layouts(spec)[0]))
            ledger, body = Ledger("large", "c").prepare(
                assignment, self.update, 3, spec, np.random.default_rng(1), sections=outgoing.add
            )
            files.save(ledger)
            saved = time.perf_counter() - began
            outgoing.finish()
        assert body is not None
        link.upload("a", body)
        ended = time.perf_counter() - began
        assert bytes(link.held) == body
        files.close()
        return ended, saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--mbit", type=float, nargs="+", default=[10.0, 100.0, 1000.0])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    size = given.parameters
    rng = np.random.default_rng(0)
    cases: tuple[tuple[Compressor[Any], int], ...] = (
        (Uncompressed(), size),
        (Quantize(bits=8, rounding="stochastic"), 2 * size),
    )
    for compressor, parameters in cases:
        model = Model.from_tensors({"w": np.zeros((parameters // 1000, 1000), np.float32)})
        update = (rng.standard_normal(model.spec.size) * 0.01).astype(np.float32)
        case = Case(model, update, compressor)
        num_bytes, _ = case.stages()
        laps = [case.stages()[1] for _ in range(given.repeats)]
        stages = {name: min(lap[name] for lap in laps) for name in laps[0]}
        print(f"{compressor}: {num_bytes} bytes; seconds alone: ", end="")
        print(", ".join(f"{name} {seconds:.3f}" for name, seconds in stages.items()))
        print("   Mbit/s  travel  encode/travel  saved at  in turn  ahead  gained")
        for mbit in given.mbit:
            rate = mbit * 1e6 / 8
            turns: list[float] = []
            aheads: list[float] = []
            saves = []
            for _ in range(given.repeats):
                for is_early, times in ((False, turns), (True, aheads)):
                    with tempfile.TemporaryDirectory() as folder:
                        ended, saved = case.sent(rate, Path(folder), is_early=is_early)
                    times.append(ended)
                    if not is_early:
                        saves.append(saved)
            travel = num_bytes / rate
            in_turn, ahead = min(turns), min(aheads)
            print(
                f"{mbit:9g} {travel:7.2f} {stages['encode'] / travel:13.1%} "
                f"{min(saves):9.2f} {in_turn:8.2f} {ahead:6.2f} "
                f"{1 - ahead / in_turn:6.1%}"
            )


if __name__ == "__main__":
    main()
