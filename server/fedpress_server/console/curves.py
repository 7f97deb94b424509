"""The curves of a task's page: what devices measured, what was sent, and what compression did."""

from __future__ import annotations

from collections.abc import Sequence

from fedpress_protocols.messages import RoundStatus
from fedpress_server.console import charts
from fedpress_server.console.rendering import sent_up, size, span

MAX_METRICS = 6
_FIGURES = (
    ("nmse", "Error of compression (NMSE)"),
    ("residual", "Residual relative to an update"),
    ("norm", "Norm of an update"),
)
"""Names in RoundFigures of what is drawn, and the titles."""


def learning(attempts: Sequence[RoundStatus]) -> list[charts.Chart]:
    """What devices measured, over rounds, over bytes and over time; `attempts` oldest first."""
    by_metric: dict[str, list[tuple[int, int, float, float]]] = {"loss": [], "accuracy": []}
    num_bytes = 0
    for each in attempts:
        num_bytes += sent_up(each) + each.download_bytes
        at = (each.closed_at or each.opened_at) - attempts[0].opened_at
        for name, value in each.metrics.items():
            by_metric.setdefault(name, []).append((each.round, num_bytes, at, value))
    drawn = list[charts.Chart | None]()
    for name, points in list(by_metric.items())[:MAX_METRICS]:
        title = name.replace("_", " ").capitalize()
        drawn.append(charts.line(title, "rounds", [(x, y) for x, _, _, y in points]))
        drawn.append(charts.line(title, "bytes sent", [(x, y) for _, x, _, y in points], size))
        drawn.append(charts.line(title, "time", [(x, y) for _, _, x, y in points], span))
    return [each for each in drawn if each is not None]


def sending(attempts: Sequence[RoundStatus], model_bytes: int) -> list[charts.Chart]:
    """How many times fewer bytes were sent than whole models of `model_bytes`, who took part, what
    compression did to the devices' updates, and the privacy spent; `attempts` oldest first."""
    drawn = [
        charts.line(f"Times smaller than float32, {name}", "rounds", ratios)
        for name, ratios in _ratios(attempts, model_bytes).items()
    ]
    ended = [each for each in attempts if each.closed_at is not None and each.assigned]
    shares = [(each.round, each.included / each.assigned) for each in ended]
    drawn.append(charts.line("Share of assigned devices included", "rounds", shares))
    told = [(each.round, each.figures) for each in attempts if each.figures is not None]
    for name, title in _FIGURES:
        drawn.append(charts.line(title, "rounds", [(at, getattr(f, name)) for at, f in told]))
    norms = [(each.round, each.update_norm) for each in attempts if each.update_norm is not None]
    drawn.append(charts.line("Norm of the aggregated update", "rounds", norms))
    spent = [(each.round, each.privacy.epsilon) for each in attempts if each.privacy is not None]
    drawn.append(charts.line("Privacy spent, epsilon", "rounds", spent))
    return [each for each in drawn if each is not None]


def _ratios(attempts: Sequence[RoundStatus], model_bytes: int) -> dict[str, charts.Points]:
    """Of each committed round: a whole model for each upload received, divided by the bytes up;
    and two of them, divided by the bytes up and down."""
    over = [each for each in attempts if each.state == "committed" and each.upload_bytes]
    whole = [(each, model_bytes * each.received) for each in over]
    return {
        "up": [(each.round, plain / sent_up(each)) for each, plain in whole],
        "up and down": [
            (each.round, 2 * plain / (sent_up(each) + each.download_bytes)) for each, plain in whole
        ],
    }
