"""`fedpress demo --dp`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

pytest.importorskip("sklearn")
pytest.importorskip("torch")

from fedpress.cli import app
from fedpress.demo.private import OPEN, PRIVATE, Findings, Screen, Settings
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import PrivacyStatus, RoundStatus

SPENT = PrivacyStatus(
    participations=1,
    max_participations=8,
    epsilon=2.34,
    max_epsilon=8,
    delta=1e-5,
    clip=0.5,
    noise_multiplier=2.47,
    against="other devices",
)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--secure"], "--dp with --secure"),
        (["--compressor", "topk"], "--dp with --compressor"),
        (["--clients", "39"], "--clients must be a multiple of 4 in 40 to 400, not 39"),
        (["--rounds", "3"], "--rounds must lie in 4 to 1000, not 3"),
    ],
)
def test_what_the_private_demo_cannot_be_is_refused(options: list[str], says: str) -> None:
    answer = CliRunner().invoke(app, ["demo", "--dp", *options])
    assert isinstance(answer.exception, ConfigurationError)
    assert says in str(answer.exception)


def test_the_noise_is_what_the_epsilon_of_nine_rounds_a_device_needs() -> None:
    terms = Settings().privacy
    assert (terms.participations, terms.separation, terms.epsilon) == (9, 4, 8.0)
    assert terms.spent(9) == pytest.approx(8.0, rel=1e-3)


def test_the_table_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    findings = Findings()
    for name, privacy in ((PRIVATE, SPENT), (OPEN, None)):
        findings.accuracies[name].append(1.0)
        findings.rounds[name].append(status(privacy))
    console = Console(width=80, record=True, force_terminal=True)
    with Screen(findings, console):
        pass
    text = console.export_text()
    assert "2.34" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def status(privacy: PrivacyStatus | None) -> RoundStatus:
    fields: dict[str, Any] = {
        "task": "t",
        "round": 1000,
        "attempt": 1,
        "state": "committed",
        "base_model": "a" * 64,
        "assigned": 100,
        "received": 100,
        "included": 100,
        "minimum": 1,
        "size": 100,
        "opened_at": 0,
        "deadline": 0,
        "upload_bytes": 123_456_789,
        "wire_upload_bytes": 0,
        "download_bytes": 0,
        "num_examples": 0,
        "privacy": privacy,
    }
    return RoundStatus.model_validate(fields)


@pytest.mark.slow
def test_the_private_demo_runs_to_its_end(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["demo", "--dp", "--quick", "--out", str(tmp_path), "--json", str(figures)]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    for words in ("at delta 1e-05", "and not the server", "a device rests for 3"):
        assert words in answer.output
    tasks = json.loads(figures.read_text())["tasks"]
    assert [each["included"] for each in tasks[PRIVATE]["rounds"]] == [10] * 4
    assert [each["privacy"]["participations"] for each in tasks[PRIVATE]["rounds"]] == [1] * 4
    assert "privacy" not in tasks[OPEN]["rounds"][0]
    assert tasks[OPEN]["accuracies"][-1] > 0.6
