"""A run that diverges is flagged within five rounds, and one that learns is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from fedpress_protocols.errors import Unavailable
from fedpress_protocols.messages import (
    DivergenceSign,
    RoundFigures,
    RoundStatus,
    TaskConfig,
    UploadFigures,
)
from fedpress_protocols.model import Model
from fedpress_server.api import health
from fedpress_server.coordination.divergence import (
    WINDOW,
    current_warnings,
    judges_nmse,
    with_warnings,
)
from fedpress_strategies import from_config
from tests.devices import ADMIN, ADMIN_TOKEN, Device, Operator, checked
from tests.server.in_process import Clock, Server, ones
from tests.server.test_console import Browser

Measured = tuple[float, float, float, float | None]
"""NMSE, residual, norm, loss."""
# Four devices with the digits, top-k with error feedback, plain SGD for an epoch a round.
EXPLODING: Sequence[Measured] = (  # .01 %, rate 2; the third model is not finite
    (0.759, 0.870, 38.9, 2.328),
    (0.902, 1.565, 40.8, 2.449),
    (0.616, 0.796, 2.4e16, None),
)
UNSENT: Sequence[Measured] = (  # .01 %, rate .5
    (0.917, 0.957, 3.35, 2.311),
    (0.950, 1.720, 3.42, 2.307),
    (0.964, 2.455, 3.45, 2.305),
    (0.961, 3.237, 3.37, 2.279),
)
LEARNING: Sequence[Sequence[Measured]] = (
    (  # 1 %, rate .1
        (0.421, 0.648, 1.082, 2.294),
        (0.679, 1.224, 1.113, 2.258),
        (0.754, 1.713, 1.189, 2.193),
        (0.789, 2.199, 1.205, 2.055),
        (0.820, 2.703, 1.196, 1.880),
        (0.833, 3.160, 1.182, 1.621),
        (0.850, 3.811, 1.090, 1.415),
        (0.858, 4.551, 0.979, 1.195),
    ),
    (  # .1 %, rate .1
        (0.713, 0.844, 1.082, 2.302),
        (0.865, 1.629, 1.092, 2.298),
        (0.896, 2.339, 1.133, 2.287),
        (0.915, 3.094, 1.123, 2.273),
        (0.931, 3.799, 1.133, 2.245),
        (0.935, 4.359, 1.179, 2.221),
        (0.946, 4.891, 1.227, 2.170),
        (0.949, 5.598, 1.221, 2.095),
    ),
)


def rounds(measured: Sequence[Measured]) -> list[RoundStatus]:
    return [
        RoundStatus(
            task="digits",
            round=number,
            attempt=1,
            state="committed",
            base_model="0" * 64,
            assigned=4,
            received=4,
            included=4,
            minimum=4,
            size=4,
            opened_at=0.0,
            deadline=0.0,
            upload_bytes=0,
            wire_upload_bytes=0,
            download_bytes=0,
            num_examples=4,
            metrics={} if loss is None else {"loss": loss},
            figures=RoundFigures(
                num_uploads=4, nmse=nmse, residual=residual, norm=norm, train=0.0, compress=0.0
            ),
        )
        for number, (nmse, residual, norm, loss) in enumerate(measured, 1)
    ]


def of_losses(*losses: float | None) -> list[RoundStatus]:
    return rounds([(0.5, 1.0, 1.0, loss) for loss in losses])


def signs(statuses: Sequence[RoundStatus]) -> list[set[DivergenceSign]]:
    """Of each round."""
    return [set(each.warnings) for each in with_warnings(statuses)]


def test_a_bad_rate_with_few_coordinates_is_flagged_within_five_rounds() -> None:
    assert signs(rounds(EXPLODING)) == [set(), set(), {"norm"}]
    assert signs(rounds(UNSENT)) == [set(), set(), set(), {"residual"}]


@pytest.mark.parametrize("measured", LEARNING)
def test_a_run_that_learns_has_no_sign(measured: Sequence[Measured]) -> None:
    assert not any(signs(rounds(measured)))


@pytest.mark.parametrize(
    ("losses", "is_flagged"),
    [
        ((2.0, 2.5), False),  # once may be chance
        ((2.0, 2.5, 2.6), True),
        ((2.0, 2.5, None, 2.6), True),
        ((2.0, 2.5, 2.1), False),
        ((2.0, 4.1), True),
        ((2.3, 0.9, 0.31, 0.5, 0.77), False),  # a third of a fast descent, as by momentum
        ((2.3, 0.9, 0.31, 0.5, 1.5), True),
        ((-3.0, -2.0, -1.9), True),
        ((-3.0, -2.9, -3.1), False),
        ((None, 5.0), False),
        ((5.0, None), False),
        ((1.0, *([5.0] * (WINDOW + 1))), False),  # beyond the window
    ],
)
def test_a_loss_rises(losses: Sequence[float | None], is_flagged: bool) -> None:
    assert signs(of_losses(*losses))[-1] == ({"loss"} if is_flagged else set())


def test_the_last_loss_counts_until_the_newest_model_is_measured() -> None:
    assert "4.1, after 2" in current_warnings(with_warnings(of_losses(2.0, 4.1)))["loss"]
    assert "loss" in current_warnings(with_warnings(of_losses(2.0, 4.1, None)))
    assert not current_warnings(with_warnings(of_losses(2.0, 4.1, 2.0)))
    assert not current_warnings([])


def test_compression_that_loses_more_than_it_sends_is_flagged() -> None:
    assert signs(rounds([(1.2, 0.0, 1.0, None)])) == [{"nmse"}]


UNBIASED = {"id": "randomk", "unbiased": True}
SKETCH = {"id": "count_sketch"}


@pytest.mark.parametrize(
    ("compressor", "strategy", "is_judged"),
    [
        (SKETCH, "fedavg", False),
        ({"id": "clip", "inner": SKETCH}, "fedavg", False),
        ({**SKETCH, "recover": "median"}, "fedavg", True),
        ({**SKETCH, "recover": "median", "seed": 0}, "fetchsgd", False),
        (UNBIASED, "fedavg", False),
        ({"id": "error_feedback", "inner": UNBIASED}, "fedavg", True),  # of an earlier release
        ({"id": "qsgd", "levels": 1}, "fedavg", False),
        ({"id": "qsgd", "levels": 127, "bucket": 512}, "fedavg", True),
        ({"id": "topk"}, "fedavg", True),
        ({"id": "error_feedback", "inner": {"id": "topk"}}, "fedavg", True),
        ({"id": "shared_support"}, "fedavg", True),
        ({"id": "quantize", "rounding": "stochastic", "clip": 0.1}, "fedavg", True),
        ({"id": "cafe", "guard": None}, "fedavg", True),
    ],
)
def test_a_large_error_of_what_is_made_for_sums_is_none(
    compressor: dict[str, Any], strategy: str, is_judged: bool
) -> None:
    fields = {
        "task": "digits",
        "model": "0" * 64,
        "rounds": 1,
        "profiles": [{"name": "only", "compressor": compressor}],
        "strategy": {"id": strategy},
        "cohort": {"size": 4, "minimum": 4},
    }
    config = TaskConfig.model_validate(fields)
    judges = judges_nmse(config, from_config(config.strategy, config.training))
    assert judges == is_judged
    (status,) = with_warnings(rounds([(1.2, 0.0, 1.0, None)]), judges_nmse=judges)
    assert set(status.warnings) == ({"nmse"} if is_judged else set())


def test_a_large_residual_that_does_not_grow_is_none() -> None:
    assert not any(signs(rounds([(0.99, 9.0, 1.0, None)] * 6)))


def test_a_residual_that_grows_by_little_in_three_rounds_is_still_flagged() -> None:
    growing = [(0.97, 3.0 + 0.3 * step, 1.0, None) for step in range(10)]
    assert signs(rounds(growing))[3:] == [{"residual"}] * 7


def test_an_aggregated_update_tells_where_devices_do_not() -> None:
    before, newest = (
        each.model_copy(update={"figures": None, "update_norm": norm})
        for each, norm in zip(of_losses(2.0, 2.0), (0.5, 15.1), strict=True)
    )
    assert signs([before, newest]) == [set(), {"norm"}]
    agreeing = newest.model_copy(update={"update_norm": 14.9})
    assert signs([before, agreeing]) == [set(), set()]
    unknown = before.model_copy(update={"update_norm": None})  # of an earlier release
    assert signs([unknown, newest]) == [set(), set()]


def test_abandoned_attempts_count_for_nothing() -> None:
    statuses = of_losses(2.0, 9.0)
    abandoned = statuses[1].model_copy(update={"state": "abandoned"})
    assert signs([statuses[0], abandoned]) == [set(), set()]


def test_a_sign_is_in_console_record_log_and_metrics(
    http: Server,
    operator: Operator,
    clock: Clock,
    model: Model,
    caplog: pytest.LogCaptureFixture,
) -> None:
    operator.begin(model, cohort={"size": 1, "minimum": 1}, rounds=9)
    device = Device(http, clock)
    device.enrol(operator.token())
    browser = Browser(http)
    browser.log_in(ADMIN_TOKEN)
    line = 'fedpress_divergence{{sign="{}",task="digits"}} {}'
    for number, (nmse, residual, norm, loss) in enumerate(EXPLODING, 1):
        text = http.get("/metrics", headers=ADMIN).text
        assert line.format("norm", "0.0") in text
        assert "may diverge" not in browser.get("/console").text
        given = device.assignment("digits")
        figures = UploadFigures(nmse=nmse, residual=residual, norm=norm, train=1.0, compress=1.0)
        path = f"/v1/assignments/{given.assignment}/update?{figures.query}"
        checked(device.request("PUT", path, device.body_for(given, ones(model))))
        while operator.get("/v1/tasks/digits")["round"] < number:
            clock.advance(1)
            http.tick()
        if loss is not None:
            newest = operator.get("/v1/tasks/digits")["model"]
            report = {"model": newest, "num_examples": 50, "metrics": {"loss": loss}}
            device.json("POST", "/v1/tasks/digits/evaluations", json.dumps(report))
    text = http.get("/metrics", headers=ADMIN).text
    assert line.format("norm", "1.0") in text
    assert line.format("loss", "0.0") in text
    why = "updates explode: norm 2.4e+16, after 38.9"
    for page in ("", "/tasks/digits", "/tasks/digits/rounds/3"):
        assert why in browser.get(f"/console{page}").text
    assert why not in browser.get("/console/tasks/digits/rounds/2").text
    statuses = {each["round"]: each for each in operator.get("/v1/tasks/digits/rounds")}
    assert why in statuses[3]["warnings"]["norm"]
    assert "warnings" not in statuses[2]
    # A page of the history looks back beyond its first round.
    (alone,) = operator.get("/v1/tasks/digits/rounds?before=4&limit=1")
    assert alone["warnings"] == statuses[3]["warnings"]
    assert why in operator.get("/v1/tasks/digits/rounds/3")["warnings"]["norm"]
    while not any(why in each for each in caplog.messages):
        operator.get("/v1/tasks/digits")


PRIVATE = {
    "clip": 1.0, "lane": "central", "noise_multiplier": 60.0, "participations": 5, "epsilon": 20.0,
}  # fmt: skip


def test_signs_are_looked_for_without_a_task_s_uploads(http: Server, operator: Operator) -> None:
    floats = Model.from_tensors({"weight": np.ones(3, np.float32)})
    operator.begin(floats, cohort={"size": 20, "minimum": 20}, rounds=9, privacy=PRIVATE)
    statements = list[str]()

    def noted(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", noted)
    try:
        text = http.get("/metrics", headers=ADMIN).text
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", noted)
    assert 'fedpress_divergence{sign="norm",task="digits"} 0.0' in text
    assert any("FROM rounds" in each for each in statements)
    assert not [each for each in statements if "uploads ON" in each]


@pytest.mark.parametrize("how", ["slow", "away"])
def test_a_scrape_without_the_database_shows_the_last_signs(
    http: Server,
    operator: Operator,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    operator.begin(model, cohort={"size": 1, "minimum": 1}, rounds=9)
    queries = http.app.services.queries
    line = 'fedpress_divergence{sign="norm",task="digits"} 1.0'

    async def told() -> dict[str, dict[DivergenceSign, str]]:
        return {"digits": {"norm": "updates explode"}}

    async def unanswered() -> dict[str, dict[DivergenceSign, str]]:
        if how == "away":
            raise Unavailable("the database does not answer")
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(health, "_PATIENCE", 0.05)
    monkeypatch.setattr(queries, "all_warnings", unanswered)
    assert "fedpress_divergence{" not in http.get("/metrics", headers=ADMIN).text
    monkeypatch.setattr(queries, "all_warnings", told)
    assert line in http.get("/metrics", headers=ADMIN).text
    monkeypatch.setattr(queries, "all_warnings", unanswered)
    assert line in http.get("/metrics", headers=ADMIN).text
