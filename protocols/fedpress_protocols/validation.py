"""What is wrong with a document's fields, in one sentence for whoever wrote it.

Pydantic finds the faults; its words are for those who program with it.
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
"""By pydantic's type of fault."""
_SAYS_IT_ALL = frozenset(
    ("missing", "extra_forbidden", "string_too_short", "string_too_long", "too_short", "too_long",
     "union_tag_invalid", "union_tag_not_found", "json_invalid", "value_error")
)  # fmt: skip
"""Of these the value that was found is not told besides: there is none, or it is long."""
_SHOWN = 80
_KIND = re.compile(r"int|float|str|bool|constrained-[a-z]+|(literal|tuple|list|dict)\[.*\]")


def format_validation_errors(exc: ValidationError) -> str:
    """What pydantic found, one clause a field: where, what was expected, what was found."""
    return format_error_details(exc.errors(include_url=False))


def format_error_details(faults: Iterable[Mapping[str, Any]]) -> str:
    """`explained`, of faults in the form that pydantic lists them in."""
    by_place: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for fault in faults:
        by_place.setdefault(_place(fault["loc"]), []).append(fault)
    clauses = []
    for place, found in by_place.items():
        # A list is found too short when one of its items is wrong: that item is told.
        if found[0]["type"] == "too_short" and any(
            len(other) > len(place) and other[: len(place)] == place for other in by_place
        ):
            continue
        where = ".".join(str(part) for part in place)
        clauses.append(f"{where}: {_clause(found)}" if where else _clause(found))
    return "; ".join(clauses)


def _place(found: Sequence[Any]) -> tuple[Any, ...]:
    """Without the name of the kind, where a field may be of several."""
    is_kind = found and isinstance(found[-1], str) and _KIND.fullmatch(found[-1])
    return tuple(found[:-1] if is_kind and len(found) > 1 else found)


def _clause(faults: Sequence[Mapping[str, Any]]) -> str:
    """Of one place: what it must be, or may be instead."""
    clauses, says_it_all = [], False
    for fault in faults:
        kind = fault["type"]
        context = {name: _plain(value) for name, value in fault.get("ctx", {}).items()}
        clauses.append(_CLAUSES[kind].format(**context) if kind in _CLAUSES else fault["msg"])
        says_it_all |= kind in _SAYS_IT_ALL or kind not in _CLAUSES
    told = " or ".join(dict.fromkeys(clauses))
    return told if says_it_all else told + _found(faults[0].get("input"))


def _plain(value: Any) -> Any:
    return f"{value:g}" if isinstance(value, float) else value


def _found(value: Any) -> str:
    """Numbers and short texts alone; no more is told of what may be large."""
    if isinstance(value, str | bool | int | float):
        shown = repr(value)
        if len(shown) <= _SHOWN:
            return f", not {shown}"
    return ""


__all__ = ["format_error_details", "format_validation_errors"]
