"""The base install is a device's: small on disk, small in memory, no server and no torch in it."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fedpress.cli.outcomes import WRONG_USE

pytestmark = [pytest.mark.install, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
INSTALLED_MB = 120
RSS_MB = 80

# Runs in the bare environment. The peak of memory, so that nothing hides by being freed again;
# from /proc, because getrusage still counts the parent's memory from before the exec.
PROBE = """
import json, sys, time
start = time.perf_counter()
import fedpress_client
seconds = time.perf_counter() - start
(line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
rss = int(line.split()[1]) * 1024
print(json.dumps({
    "file": fedpress_client.__file__,
    "seconds": seconds,
    "rss": rss,
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
}))
"""


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Without isolation: hatchling is here already, at the version that constraints.txt names.
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    run(sys.executable, "-m", *build, folder, ROOT)
    (path,) = folder.glob("fedpress-*.whl")
    return path


@pytest.fixture(scope="module")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare") / "venv"
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    return python


def installed_bytes(python: Path) -> int:
    """Everything in site-packages except what `python -m venv` itself puts there."""
    (site_packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    tools = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")
    return sum(
        file.stat().st_size
        for top in site_packages.iterdir()
        if not top.name.startswith(tools)
        for file in ([top] if top.is_file() else top.rglob("*"))
        if file.is_file()
    )


def test_wheel_carries_every_package_and_its_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        name = Path(package).name
        assert {f"{name}/__init__.py", f"{name}/py.typed"} <= names
    migrations = {n for n in names if n.startswith("fedpress_server/migrations/")}
    assert "fedpress_server/migrations/env.py" in migrations
    assert any(n.startswith("fedpress_server/migrations/versions/") for n in migrations)
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/", "docs/"))]


def test_device_needs_the_base_install_alone_and_stays_small(
    bare_python: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    # -P and an empty folder: nothing of this source tree may help.
    done = subprocess.run(
        [bare_python, "-P", "-W", "error", "-c", PROBE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert Path(seen["file"]).is_relative_to(bare_python.parents[1])

    installed = installed_bytes(bare_python)
    record_property(
        "figure",
        f"base install: {installed / 1e6:.1f} MB on disk; import fedpress_client: "
        f"{seen['seconds']:.2f} s, {seen['rss'] / 1e6:.1f} MB of memory",
    )
    heavy = {"torch", "numba", "flwr", "fastapi", "uvicorn", "sqlalchemy", "fedpress_server"}
    assert heavy.isdisjoint(seen["modules"])
    assert installed <= INSTALLED_MB * 1e6
    assert seen["rss"] <= RSS_MB * 1e6


def test_command_answers_from_the_base_install(bare_python: Path, tmp_path: Path) -> None:
    fedpress = bare_python.parent / "fedpress"
    done = subprocess.run([fedpress, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "client" in done.stdout


@pytest.mark.parametrize(
    ("command", "extra"),
    [("server run", "server"), ("demo", "demo,torch"), ("simulate", "flower,demo")],
)
def test_a_command_of_an_extra_says_which(
    command: str, extra: str, bare_python: Path, tmp_path: Path
) -> None:
    fedpress = bare_python.parent / "fedpress"
    done = subprocess.run(
        [fedpress, *command.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == WRONG_USE
    assert done.stderr.splitlines()[1:] == ["  see `fedpress explain missing-extra`"]
    assert f"pip install 'fedpress[{extra}]'" in done.stderr


def test_a_message_names_a_command_that_explains_it(bare_python: Path, tmp_path: Path) -> None:
    fedpress = bare_python.parent / "fedpress"
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, check=False)
    failed = run([fedpress, "client", "join", "nowhere", "--app", "absent:trainer"])
    (words,) = re.findall(r"see `fedpress (.+)`$", failed.stderr, re.MULTILINE)
    explained = run([fedpress, *words.split()])
    assert explained.returncode == 0, explained.stderr
    assert "Read the detail: it names the setting" in explained.stdout
