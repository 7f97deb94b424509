"""The device, the simulator and the command line do without what other systems lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.platforms.rounds import ROUNDS, TASKS, digests

ROOT = Path(__file__).parents[2]
DEVICE = ROOT / "tests" / "platforms" / "device.py"
AS_ON_WINDOWS = (sys.executable, "-m", "tests.as_on_windows")


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        errors="replace",
    )


def suite(folder: Path, *tests: str) -> None:
    arguments = ("-q", "-m", "not slow", "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}")
    done = run(*AS_ON_WINDOWS, "pytest", *arguments, *tests)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_a_device_keeps_its_files_without_posix(tmp_path: Path) -> None:
    names = ("test_ledger_and_state", "test_outgoing", "test_published")
    files = [f"tests/client/{name}.py" for name in names]
    suite(tmp_path, "tests/protocols/test_local_files.py", *files)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_sdk_passes_its_tests_without_posix(tmp_path: Path) -> None:
    suite(
        tmp_path, "tests/client", "tests/protocols", "--ignore=tests/client/test_data_parallel.py"
    )


@pytest.mark.slow
def test_rounds_end_with_the_same_models_on_every_system(tmp_path: Path) -> None:
    """The models in the two lanes; the kernels are numba's here and numpy's there."""
    here = digests((sys.executable, str(DEVICE)), tmp_path / "here")
    there = digests((*AS_ON_WINDOWS, "tests.platforms.device"), tmp_path / "there")
    assert there == here
    assert len(set(here.values())) == len(TASKS)
    assert ROUNDS > 1


def test_a_task_may_be_called_what_windows_calls_a_device(tmp_path: Path) -> None:
    code = (
        "from fedpress_client.state import StateDirectory\n"
        "import sys\n"
        "state = StateDirectory.open(sys.argv[1])\n"
        "print(*(state.task_folder(name).name for name in sys.argv[2:]))\n"
    )
    script = tmp_path / "fedpress_folders.py"
    script.write_text(code)
    path = os.pathsep.join((str(tmp_path), *sys.path))
    names = ("nul", "COM1", "digits", "console")
    done = run(*AS_ON_WINDOWS, script.stem, tmp_path / "state", *names, PYTHONPATH=path)
    assert done.stdout.split() == ["nul+", "COM1+", "digits", "console"], done.stderr


def test_a_server_says_that_it_does_not_run_on_windows() -> None:
    done = run(*AS_ON_WINDOWS, "fedpress", "server", "run")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the server does not run on Windows (run it under WSL 2" in done.stderr
    done = run(*AS_ON_WINDOWS, "fedpress", "server", "doctor")
    assert done.returncode == 1
    assert done.stdout.startswith("FAULT  system: the server does not run on Windows\n")


def test_output_survives_an_encoding_that_lacks_letters() -> None:
    """As of a command whose output Windows redirects to a file."""
    command = ("fedpress", "compressors", "show", "randomk")
    done = run(sys.executable, "-m", *command, PYTHONIOENCODING="cp1252")
    assert done.returncode == 0, done.stderr
    assert "Kone" in done.stdout  # and a letter that the encoding lacks


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_no_name_is_used_that_another_system_lacks(system: str, tmp_path: Path) -> None:
    """mypy knows which these are; the server is for Linux and macOS."""
    packages = [
        "compression/fedpress_compression",
        "protocols/fedpress_protocols",
        "strategies/fedpress_strategies",
        "client_sdk/fedpress_client",
        "integrations/fedpress_flower",
        "fedpress",
        *(["server/fedpress_server"] if system == "darwin" else []),
    ]
    options = (f"--platform={system}", "--follow-imports=silent", f"--cache-dir={tmp_path}")
    done = run(sys.executable, "-m", "mypy", *options, *packages)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("library", "command", "works"),
    [
        ("fastapi", ("server", "run"), "fedpress[server]'; devices, and the commands that talk"),
        ("flwr", ("simulate",), "fedpress[flower,demo]'; devices and servers work without it"),
        ("torch", ("demo",), "fedpress[demo,torch]'; servers, and devices whose trainer"),
    ],
)
def test_a_missing_library_is_named_with_what_works_without_it(
    library: str, command: tuple[str, ...], works: str
) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; from fedpress.cli import main; main()"
    done = run(sys.executable, "-c", code, *command)
    assert done.returncode == 2
    assert f"{library} is not installed (pip install '{works}" in done.stderr


def test_an_interpreter_without_its_lock_is_refused_with_what_to_do() -> None:
    code = "import sys; sys._is_gil_enabled = lambda: False; import fedpress"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 1
    assert "start this build of Python with PYTHON_GIL=1" in done.stderr
