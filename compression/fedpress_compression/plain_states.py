"""A compressor's state in plain form, which can be stored, and in its own types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedpress_compression.errors import ConfigurationError

State = Any
"""In plain form: None, numbers, text, arrays, lists and dicts of them."""


def plain(state: Any) -> State:
    """Tuples and dataclasses as lists; None if nothing is in it to remember."""
    match state:
        case None | bool() | int() | float() | str():
            made: State = state
        case np.ndarray():
            made = state
        case np.generic():
            made = state.item()
        case Mapping():
            made = {str(name): plain(item) for name, item in state.items()}
        case tuple() | list():
            made = [plain(item) for item in state]
        case _ if dataclasses.is_dataclass(state):
            made = [plain(item) for item in _fields(state)]
        case _:
            raise ConfigurationError(
                f"a compressor's state holds a {type(state).__name__}, which cannot be stored"
            )
    return made if any(True for _ in _leaves(made)) else None


def _leaves(made: State) -> Iterator[Any]:
    match made:
        case None:
            return
        case dict():
            for item in made.values():
                yield from _leaves(item)
        case list():
            for item in made:
                yield from _leaves(item)
        case _:
            yield made


def _fields(state: Any) -> Iterator[Any]:
    return (getattr(state, field.name) for field in dataclasses.fields(state))


def restored(stored: State, like: Any) -> Any:
    """`stored` in the types of `like`, the state of a client that has sent nothing yet; what is in
    a mapping under other names stays as it is."""
    if stored is None or like is None:
        return like if stored is None else stored
    if isinstance(like, Mapping):
        return {**stored, **{name: restored(stored.get(name), like[name]) for name in like}}
    is_dataclass = dataclasses.is_dataclass(like)
    if is_dataclass or isinstance(like, tuple | list):
        before = list(_fields(like) if is_dataclass else like)
        items = [restored(p, item) for p, item in zip(stored, before, strict=True)]
        by_position = is_dataclass or hasattr(like, "_fields")
        return type(like)(*items) if by_position else type(like)(items)
    return stored
