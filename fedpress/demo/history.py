"""Measurements of the demo by round and task, from the server's counts and the test images."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedpress_protocols.local_files import replace_file
from fedpress_protocols.messages import RoundStatus


@dataclass(frozen=True, slots=True)
class Point:
    """A committed round: bytes are of this round alone, aborted attempts at it included."""

    round: int
    accuracy: float
    participants: int
    upload_bytes: int
    wire_upload_bytes: int
    download_bytes: int


@dataclass
class Curve:
    """One task's rounds."""

    name: str
    compressor: dict[str, Any]
    points: list[Point] = field(default_factory=list)

    def add(self, attempts: Iterable[RoundStatus], accuracy: float) -> None:
        """Take in a round's attempts, the last of them committed."""
        statuses = list(attempts)
        self.points.append(
            Point(
                round=statuses[-1].round,
                accuracy=accuracy,
                participants=statuses[-1].included,
                upload_bytes=sum(status.upload_bytes for status in statuses),
                wire_upload_bytes=sum(status.wire_upload_bytes for status in statuses),
                download_bytes=sum(status.download_bytes for status in statuses),
            )
        )

    @property
    def final_accuracy(self) -> float:
        return self.points[-1].accuracy if self.points else float("nan")

    @property
    def upload_bytes(self) -> int:
        return sum(point.upload_bytes for point in self.points)

    @property
    def wire_upload_bytes(self) -> int:
        return sum(point.wire_upload_bytes for point in self.points)

    @property
    def download_bytes(self) -> int:
        return sum(point.download_bytes for point in self.points)

    def megabytes_so_far(self) -> list[float]:
        """Uploaded bodies up to and with each round, in MB (10**6 bytes)."""
        total, sums = 0, []
        for point in self.points:
            total += point.upload_bytes
            sums.append(total / 1e6)
        return sums


@dataclass
class History:
    """Both curves and how they were made."""

    plain: Curve
    compressed: Curve
    clients: int
    seed: int
    seconds: float = 0.0
    complete: bool = False

    def summary(self) -> dict[str, Any]:
        """The figures that the demo stands for; ratios are of body bytes."""
        compressed, plain = self.compressed, self.plain
        return {
            "final_accuracy": compressed.final_accuracy,
            "final_accuracy_uncompressed": plain.final_accuracy,
            "upload_bytes": compressed.upload_bytes,
            "upload_bytes_uncompressed": plain.upload_bytes,
            "upload_ratio": _ratio(plain.upload_bytes, compressed.upload_bytes),
            "wire_upload_bytes": compressed.wire_upload_bytes,
            "wire_upload_bytes_uncompressed": plain.wire_upload_bytes,
            "wire_upload_ratio": _ratio(plain.wire_upload_bytes, compressed.wire_upload_bytes),
            "download_bytes": compressed.download_bytes,
            "download_bytes_uncompressed": plain.download_bytes,
            "rounds": len(compressed.points),
            "clients": self.clients,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "complete": self.complete,
        }

    def to_json(self) -> str:
        curves = {
            curve.name: {
                "compressor": curve.compressor,
                "rounds": [asdict(point) for point in curve.points],
            }
            for curve in (self.plain, self.compressed)
        }
        return json.dumps({**self.summary(), "tasks": curves}, indent=2, allow_nan=True) + "\n"

    def write(self, path: Path) -> None:
        """Replace `path` in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(self.to_json(), encoding="utf-8")
        replace_file(fresh, path)


def _ratio(plain: int, compressed: int) -> float:
    return round(plain / compressed, 2) if compressed else 0.0
