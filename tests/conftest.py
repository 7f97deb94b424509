"""What every test shares: how hypothesis draws, what is slow and what soaks, figures at the end."""

import gc
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

# Products as small as those here cost many times as much when threads share them, the more so
# where as many processes as cores run tests. NumPy and PyTorch read it when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.lengths import SLOW, SOAK

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController

# A busy machine's pauses are no bug of the code under test, so no example has a deadline.
# CI draws the same examples every time; `make soak` draws many more, and new ones.
_calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
_repeats = {"derandomize": True, "database": None} if os.environ.get("CI") else {}
settings.register_profile("quick", _calm, max_examples=25, **_repeats)
settings.register_profile("slow", _calm, max_examples=100, **_repeats)
settings.register_profile("soak", _calm, max_examples=2_000, print_blob=True)
settings.load_profile("soak" if SOAK else "slow" if SLOW else "quick")

# Triton reads this when it is imported, which an optimizer of torch does as well.
if find_spec("triton") is not None:
    import torch

    os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

gc.disable()  # until all is collected, of which nothing is garbage


@pytest.fixture(scope="session")
def soak() -> bool:
    """Whether to run the long form: `make soak` runs the tests marked `soak` with True."""
    return SOAK


@pytest.fixture(scope="session")
def slow() -> bool:
    """Whether `make test-slow` runs: tests marked `slow(short=True)` are then longer."""
    return SLOW


# On a device's base install the SDK's tests run without these files, which need more.
NEEDS = {
    "torch": (
        "client/test_client_terms.py",
        "client/test_data_parallel.py",
        "client/test_evaluation_reports.py",
        "client/test_restricted_training.py",
        "client/test_torch_trainer.py",
        "compression/test_dgc.py",
    ),
    "scipy": ("protocols/test_privacy.py",),
    "yaml": ("conformance/test_workflows.py",),
}
collect_ignore = [
    file for library, files in NEEDS.items() if find_spec(library) is None for file in files
]


def pytest_report_header() -> list[str]:
    return [f"left out, as libraries are missing: {', '.join(collect_ignore)}"][
        : len(collect_ignore)
    ]


# What the tests of these files share is dear, so that one worker runs each of them.
TOGETHER = {
    "tests/client/test_data_parallel.py",
    "tests/client/test_data_parallel_device.py",
    "tests/compression/test_kernel_library.py",
    "tests/install/test_base_install.py",
}

# Every line of compression/ and protocols/ is reached from here. Tracing makes tests half as slow
# again, so the others go without where that is asked for.
COVERING = (
    "tests/client/",
    "tests/compression/",
    "tests/conformance/",
    "tests/face/test_privacy_plan.py",
    "tests/face/test_task_file.py",
    "tests/oracles/",
    "tests/protocols/",
    "tests/server/test_auto.py",
    "tests/system/test_correlated_noise.py",
    "tests/system/test_noise_in_clear_lane.py",
    "tests/system/test_private_tasks.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "Scheduling":
    """As `--dist load`, but for `TOGETHER`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByDearness(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in TOGETHER else nodeid

        def mark_test_complete(
            self, node: "WorkerController", item_index: int, duration: float = 0
        ) -> None:
            """Forget what is complete: with each test, xdist counts all that a worker was given."""
            super().mark_test_complete(node, item_index, duration)
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(self.assigned_work[node][scope].values()):
                del self.assigned_work[node][scope]

    return ByDearness(config, log)


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("cov_fail_under", None):
        for item in items:
            if not item.nodeid.startswith(COVERING):
                item.add_marker("no_cover")
    if SOAK:
        return
    for item in items:
        if SLOW and is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("slow")  # with more examples than `make test` has time for
        mark = item.get_closest_marker("soak")
        if mark and mark.kwargs.get("only"):
            item.add_marker(pytest.mark.skip(reason="has only a long form: make soak"))


def pytest_collection_finish() -> None:
    """Leave what is there by now, modules and tests, out of every later search for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


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
