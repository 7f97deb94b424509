"""The golden vectors of coded fields, as the tests read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_compression.coding import (
    Alphabet,
    Contexts,
    Field,
    Grid,
    Integers,
    Layout,
    Positions,
    Reals,
)

FOLDER = Path(__file__).parents[2] / "protocols" / "vectors"
_KINDS = {"positions": Positions, "alphabet": Alphabet, "integers": Integers, "reals": Reals}


def names(folder: str) -> list[str]:
    paths = (FOLDER / folder).glob("*.json")
    return sorted(path.stem for path in paths if path.stem != "malformed")


def vector(folder: str, name: str) -> Any:
    return json.loads((FOLDER / folder / f"{name}.json").read_text())


def layout_of(fields: list[dict[str, Any]]) -> Layout:
    return tuple(_field(kind, dict(given)) for field in fields for kind, given in field.items())


def _field(kind: str, given: dict[str, Any]) -> Field:
    grid = given.pop("grid", None)
    if grid is not None:
        matrices = tuple((height, width) for height, width in grid["matrices"])
        given["grid"] = Grid(tuple(map(str, range(len(matrices)))), matrices, grid["known"])
    made: Field = _KINDS[kind](**given)
    return made


def contexts_of(listed: list[Any]) -> Contexts:
    return tuple(None if known is None else np.array(known, np.uint8) for known in listed)
