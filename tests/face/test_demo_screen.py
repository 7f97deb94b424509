"""The demo's lines where its output is a file or a pipe."""

from __future__ import annotations

import pytest

from fedpress.command_line import console
from fedpress.demo.history import Curve, History, Point
from fedpress.demo.show import Screen


def test_a_round_stays_on_one_line_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    point = Point(30, 0.9667, 10, 2_033_074, 2_050_000, 2_038_480)
    small = Point(30, 0.9667, 10, 13_467, 20_000, 2_038_480)
    history = History(Curve("plain", {}, [point]), Curve("compressed", {}, [small]), 10, 0)
    with Screen(history, 1, console()) as screen:
        screen.update()
    assert capsys.readouterr().out.splitlines() == [
        "round   1  accuracy  96.7% plain  96.7% compressed  up 2,033.1 / 13.5 kB  ratio 151x"
    ]
