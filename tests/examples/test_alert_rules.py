"""The alerts fire when they should, by Prometheus's own tool."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "monitoring" / "alerts.yml"
TOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(TOOL is None, reason="no promtool (Debian's package prometheus)")


def promtool(*arguments: str) -> str:
    assert TOOL is not None
    found = subprocess.run([TOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_rules_and_queries_are_prometheus_own_language(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))
    script = ROOT / "tests" / "compose" / "dashboard_queries.py"
    dashboards = (RULES.parent / "grafana" / "dashboards").glob("*.json")
    asked = subprocess.run(
        [sys.executable, str(script), *map(str, dashboards)], capture_output=True, check=True
    )
    queries = tmp_path / "queries.yml"
    queries.write_bytes(asked.stdout)
    assert "SUCCESS" in promtool("check", "rules", str(queries))


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    text = (ROOT / "tests" / "compose" / "alerts_test.yml").read_text()
    assert "[/etc/fedpress/alerts.yml]" in text
    cases = tmp_path / "alerts_test.yml"
    cases.write_text(text.replace("/etc/fedpress/alerts.yml", str(RULES)))
    assert "SUCCESS" in promtool("test", "rules", str(cases))
