"""A library of kernels: without numba, it passes the tests of the kernels that numba compiles.

It takes half a minute to build, so that one worker runs this file: see tests/conftest.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedpress_compression import kernels
from fedpress_compression.kernels import prebuilt
from tests.compression.test_kernels import LOADS, run

pytestmark = pytest.mark.slow
TESTS = str(Path(__file__).with_name("test_kernels.py"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the Dockerfile makes it: for any processor of this kind."""
    if kernels.CHOSEN == "prebuilt" or shutil.which("ld") is None:
        pytest.skip("needs numba and a linker, Debian's binutils")
    folder = tmp_path_factory.mktemp("library")
    code = f"""
from pathlib import Path
from fedpress_compression import kernels
kernels.build_library(Path({str(folder)!r}))
"""
    done = run(code, FEDPRESS_KERNELS="numba", NUMBA_CPU_NAME="generic")
    assert done.returncode == 0, done.stderr
    return folder


WITHOUT_NUMBA = "import sys; sys.modules['numba'] = sys.modules['llvmlite'] = None\n"


@pytest.mark.timeout(900)
def test_prebuilt_kernels_pass_the_tests_of_compiled_ones_without_numba(library: Path) -> None:
    code = f"""{WITHOUT_NUMBA}
import pytest
from fedpress_compression import kernels
assert kernels.CHOSEN == "prebuilt"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", {TESTS!r}]))
"""
    done = run(code, FEDPRESS_KERNELS="", FEDPRESS_PREBUILT_KERNELS=str(library))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_a_library_takes_only_what_it_was_built_for(library: Path) -> None:
    code = f"""{WITHOUT_NUMBA}
import numpy as np
from fedpress_compression.kernels import field_compiled, numbers_compiled
def refusal(function, *arguments):
    try:
        function(*arguments)
    except (TypeError, ValueError) as exc:
        return type(exc).__name__ + ": " + str(exc)
words = np.ones(4, "u8")
print(refusal(field_compiled._lagrange, words, words, np.ones(4)))
print(refusal(field_compiled._lagrange, words, words, np.ones((2, 2), "u8")))
print(refusal(field_compiled._lagrange, words, words, np.ones(8, "u8")[::2]))
print(refusal(field_compiled._lagrange, words, words))
print(refusal(numbers_compiled._pack_lanes, np.ones(4, "i2"), 21, words))
"""
    done = run(code, FEDPRESS_KERNELS="", FEDPRESS_PREBUILT_KERNELS=str(library))
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert first == (
        "TypeError: field_compiled._lagrange was built for contiguous arrays of 1 axes of uint64, "
        "not 1 of float64"
    )
    assert [each.partition(":")[0] for each in others] == ["TypeError"] * 2 + [
        "ValueError",
        "TypeError",
    ]
    assert "numbers_compiled._pack_lanes was not built for arrays of ('<i2', '<u8')" in others[-1]


def test_a_library_of_another_release_is_refused(library: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(library, tmp_path / "other")
    table = folder / prebuilt.TABLE
    table.write_text(table.read_text().replace(prebuilt.source_digest(), "0" * 64))
    done = run(LOADS, FEDPRESS_KERNELS="", FEDPRESS_PREBUILT_KERNELS=str(folder))
    assert f"ConfigurationError: {folder} has kernels of another release" in done.stderr
