"""What every test shares: how hypothesis draws, what `make soak` means, figures at the end."""

import os

import pytest
from hypothesis import HealthCheck, settings

SOAK = os.environ.get("FEDPRESS_SOAK") == "1"

# A busy machine's pauses are no bug of the code under test, so no example has a deadline.
# CI draws the same examples every time; `make soak` draws many more, and new ones.
_calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("here", _calm)
settings.register_profile("ci", _calm, derandomize=True, database=None)
settings.register_profile("soak", _calm, max_examples=2_000, print_blob=True)
settings.load_profile("soak" if SOAK else "ci" if os.environ.get("CI") else "here")


@pytest.fixture(scope="session")
def soak() -> bool:
    """Whether to run the long form: `make soak` runs the tests marked `soak` with True."""
    return SOAK


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SOAK:
        return
    for item in items:
        mark = item.get_closest_marker("soak")
        if mark and mark.kwargs.get("only"):
            item.add_marker(pytest.mark.skip(reason="has only a long form: make soak"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests measured: `record_property("figure", "...")` reaches here through xdist."""
    figures = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == "figure" and report.when == "call"
    ]
    if figures:
        terminalreporter.section("figures")
        for figure in figures:
            terminalreporter.write_line(figure)
