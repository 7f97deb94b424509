"""Validation errors in words: one sentence about the fields of a document, for its author.

Pydantic finds the errors; its own messages address programmers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

_WHOLE = "must be a whole number"
_NUMBER = "must be a number"
_TEXT = "must be text"
_YES_NO = "must be true or false"
_LIST = "must be a list"
_OBJECT = "must be an object with named fields"
_CLAUSES = {
    "missing": "is missing",
    "extra_forbidden": "there is no such field",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be {le} at most",
    "finite_number": "must be a finite number",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "string_type": _TEXT,
    "string_too_short": "must have {min_length} characters or more",
    "string_too_long": "must have {max_length} characters at most",
    "string_pattern_mismatch": "must match {pattern}",
    "bool_type": _YES_NO,
    "bool_parsing": _YES_NO,
    "literal_error": "must be {expected}",
    "tuple_type": _LIST,
    "list_type": _LIST,
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "too_short": "must have {min_length} items or more, not {actual_length}",
    "too_long": "must have {max_length} items at most, not {actual_length}",
    "union_tag_invalid": "{discriminator} must be one of {expected_tags}, not {tag!r}",
    "union_tag_not_found": "{discriminator} is missing",
    "json_invalid": "is not JSON: {error}",
    "value_error": "{error}",
}
"""By pydantic's error type."""
_WITHOUT_INPUT = frozenset(
    ("missing", "extra_forbidden", "string_too_short", "string_too_long", "too_short", "too_long",
     "union_tag_invalid", "union_tag_not_found", "json_invalid", "value_error")
)  # fmt: skip
"""Error types whose message leaves out the input: there is none, or it is long."""
_LENGTHS = frozenset(("too_short", "too_long"))
_SHOWN = 80
_MOST_LISTED = 1000
_MOST_CLAUSES = 20
_KIND = re.compile(r"int|float|str|bool|constrained-[a-z]+|(literal|tuple|list|dict)\[.*\]")


def format_validation_errors(exc: ValidationError, place: tuple[str, ...] = ()) -> str:
    """Format the errors, one clause for each field: where (after `place`), what was expected, what
    was found. Of a document with very many errors it says their number alone: to list them takes a
    hundred times the document's memory."""
    if exc.error_count() > _MOST_LISTED:
        return f"{exc.error_count()} values are not as expected"
    details = exc.errors(include_url=False)
    return format_error_details([{**each, "loc": (*place, *each["loc"])} for each in details])


def format_error_details(details: Iterable[Mapping[str, Any]]) -> str:
    """Like `format_validation_errors`, for a list of errors as pydantic returns it: the clauses of
    the first fields, and the number of the others."""
    by_place: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for detail in details:
        by_place.setdefault(_place(detail["loc"]), []).append(detail)
    clauses = []
    for place, errors in by_place.items():
        # Pydantic also calls a list too short when one of its items is wrong: report the item.
        if errors[0]["type"] == "too_short" and any(
            len(other) > len(place) and other[: len(place)] == place for other in by_place
        ):
            continue
        where = ".".join(str(part) for part in place)
        clauses.append(f"{where}: {_clause(errors)}" if where else _clause(errors))
        if len(clauses) == _MOST_CLAUSES and len(by_place) > _MOST_CLAUSES:
            clauses.append(f"and {len(by_place) - _MOST_CLAUSES} more")
            break
    return "; ".join(clauses)


def _place(location: Sequence[Any]) -> tuple[Any, ...]:
    """Drop the name of the type from `location`, as pydantic adds it to fields of union types."""
    is_kind = location and isinstance(location[-1], str) and _KIND.fullmatch(location[-1])
    return tuple(location[:-1] if is_kind and len(location) > 1 else location)


def _clause(errors: Sequence[Mapping[str, Any]]) -> str:
    """Format the errors of one field: its allowed values, joined by "or"."""
    clauses, without_input = [], False
    for error in errors:
        kind = error["type"]
        context = {name: _plain(value) for name, value in error.get("ctx", {}).items()}
        if kind in _LENGTHS and context.get("actual_length") is None:  # of mappings it is not told
            context["actual_length"] = len(error["input"])
        clauses.append(_CLAUSES[kind].format(**context) if kind in _CLAUSES else error["msg"])
        without_input |= kind in _WITHOUT_INPUT or kind not in _CLAUSES
    message = " or ".join(dict.fromkeys(clauses))
    return message if without_input else message + _found(errors[0].get("input"))


def _plain(value: Any) -> Any:
    return f"{value:g}" if isinstance(value, float) else value


def _found(value: Any) -> str:
    """Format the input if it is a number or a short text; larger values are left out."""
    if isinstance(value, str | bool | int | float):
        text = repr(value)
        if len(text) <= _SHOWN:
            return f", not {text}"
    return ""


__all__ = ["format_error_details", "format_validation_errors"]


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's fields, as `object_pairs_hook`; raises ValueError for a name that is there
    twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is there twice")
    return fields
