"""Draw error over bytes of this compressor beside fedpress's own, from measurements in a file.

fedpress bench rate-distortion --json rates.json
python draw.py rates.json result.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedpress.plotting import log_bytes, save

OURS = "fedpress_example_sign.tensor_sign"
BESIDE = ("sign", "eden", "quantize", "topk", "ecsq")
CODER = "auto"
"""The rows of this coder are drawn: the shorter of static codes and the range coder."""


def points(rows: list[dict[str, Any]], wire_id: str) -> list[tuple[float, float]]:
    """Bytes and NMSE of each setting of a method, the smallest uploads first."""
    return sorted(
        (row["bytes"], row["nmse"])
        for row in rows
        if row["config"]["id"] == wire_id and row["coder"] == CODER
    )


def draw(document: dict[str, Any], picture: Path) -> None:
    """Draw NMSE over the bytes of an upload; raises SystemExit where the plug-in is missing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ours = points(document["rows"], OURS)
    if not ours:
        raise SystemExit(f"the file has no row of {OURS}; install this folder and measure again")
    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    for wire_id in BESIDE:
        axes.plot(*zip(*points(document["rows"], wire_id), strict=True), ".-", label=wire_id)
    axes.plot(*zip(*ours, strict=True), "k*", ms=14, label="tensor_sign, this plug-in")
    axes.set(
        xlabel=f"bytes of an upload of {document['values']:,} values (log scale)",
        ylabel="NMSE (0: nothing lost, 1: nothing received)",
    )
    log_bytes(axes)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save(figure, picture)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw error over bytes of compressors.")
    parser.add_argument("rates", type=Path, help="of `fedpress bench rate-distortion --json`")
    parser.add_argument("picture", type=Path, help="a name in .png, .svg or .pdf")
    asked = parser.parse_args()
    draw(json.loads(asked.rates.read_text()), asked.picture)


if __name__ == "__main__":
    main()
