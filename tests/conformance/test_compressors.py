"""A compressor is complete with a golden vector, a SPEC entry, a second decoder and a public name.

Each failure names the file to edit; CONTRIBUTING.md has the recipe. Plug-ins (docs/plugins.md) keep
vectors of their own.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

import fedpress.compressors
from fedpress_compression.compressor import compressors
from tests.protocols.spec_compressors import METHODS

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "protocols" / "vectors" / "compressors"
SPEC = "".join(path.read_text() for path in sorted((ROOT / "protocols").glob("SPEC-*.md")))
WITH_VECTOR = {json.loads(path.read_text())["config"]["id"] for path in VECTORS.glob("*.json")}
OWN = {
    wire_id: made
    for wire_id, made in compressors().items()
    if made.__module__.startswith("fedpress_compression.")
}


@pytest.mark.parametrize("wire_id", OWN)
def test_it_has_a_golden_vector(wire_id: str) -> None:
    assert wire_id in WITH_VECTOR, (
        f"add a configuration of {wire_id!r} to configs() in "
        "protocols/vectors/make_compressor_vectors.py and run that script"
    )


@pytest.mark.parametrize("wire_id", OWN)
def test_it_has_a_spec_entry(wire_id: str) -> None:
    entry = rf"^\*\*`{wire_id}`\*\*|^### {wire_id}$"
    assert re.search(entry, SPEC, re.MULTILINE), (
        f"describe {wire_id!r} in protocols/SPEC-compressors.md, in a paragraph that begins with "
        f"**`{wire_id}`**: settings with ranges and defaults, layout, meaning of symbols"
    )


@pytest.mark.parametrize("wire_id", OWN)
def test_a_second_decoder_reads_it(wire_id: str) -> None:
    assert wire_id in METHODS, (
        f"write {wire_id!r} from its SPEC entry alone in tests/protocols/spec_compressors.py and "
        "add it to METHODS there; test_compressor_vectors.py then holds it to the golden vector"
    )


@pytest.mark.parametrize("wire_id", OWN)
def test_users_import_it_from_the_public_name(wire_id: str) -> None:
    name = OWN[wire_id].__name__
    assert name in fedpress.compressors.__all__, (
        f"import {name} in fedpress/compressors.py and add it to __all__ there"
    )


@pytest.mark.parametrize("wire_id", OWN)
def test_it_names_its_source(wire_id: str) -> None:
    made = OWN[wire_id]
    at = inspect.getsourcefile(made)
    assert made.__doc__, f"say in {at} what {made.__name__} does"
    assert hasattr(made, "properties") or wire_id in ("none",), (
        f"give {made.__name__} in {at} `properties`: rate, claims, states, source"
    )
