"""Output of operators' commands: a table for people, or one JSON document for scripts."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from fedpress_compression.errors import printable

if TYPE_CHECKING:
    from pydantic import BaseModel

_GAP = "  "
_LEAST_WRAPPED = 16
"""Columns that the last one of a table has at least, however narrow the terminal."""
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def echo(answer: BaseModel | Sequence[BaseModel], lines: Iterable[str], *, as_json: bool) -> None:
    """Print `answer` as JSON by the API's own fields, or the `lines` that stand for it."""
    if as_json:
        click.echo(document(answer))
        return
    for line in lines:
        click.echo(printable(line))


def document(answer: BaseModel | Sequence[BaseModel]) -> str:
    """One JSON document: an object, or a list of them. Nothing in it is shortened."""
    if isinstance(answer, Sequence):
        return json.dumps([each.model_dump(mode="json") for each in answer], indent=2)
    return answer.model_dump_json(indent=2)


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None
) -> Iterator[str]:
    """Lines of aligned columns; where all cells of one are numbers, to the right.

    The last column is wrapped below itself to stay within `width`; None: a row is one line,
    for `grep` and its like. See `terminal_width`.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns[:-1]]
    to_right = [all(map(_is_number, column[1:])) and bool(rows) for column in columns[:-1]]
    before = sum(widths) + len(_GAP) * len(widths)
    room = None if width is None else max(width - before, _LEAST_WRAPPED)
    for row in (headings, *rows):
        cells = [
            f"{cell:>{size}}" if right else f"{cell:<{size}}"
            for cell, size, right in zip(row[:-1], widths, to_right, strict=True)
        ]
        last = [row[-1]] if room is None else textwrap.wrap(row[-1], room) or [""]
        yield _GAP.join((*cells, last[0])).rstrip()
        for more in last[1:]:
            yield " " * before + more


def fields(pairs: Iterable[tuple[str, str]], *, width: int | None = None) -> Iterator[str]:
    """A line for each name with its value; none for a value that is empty."""
    shown = [(printable(name), printable(value)) for name, value in pairs if value]
    size = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        room = None if width is None else max(width - size - len(_GAP), _LEAST_WRAPPED)
        first, *more = [value] if room is None else textwrap.wrap(value, room)
        yield f"{name:<{size}}{_GAP}{first}"
        for line in more:
            yield " " * size + _GAP + line


def terminal_width() -> int | None:
    """Columns of the terminal that is printed to; None for a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def moment(seconds: float | None) -> str:
    """Unix seconds as a time of day in UTC."""
    return (
        "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) + " UTC"
    )


def size(num_bytes: float) -> str:
    """Three digits and a unit of a thousand: 15.4 MB."""
    for unit in _UNITS:
        if num_bytes < 999.5 or unit == _UNITS[-1]:
            break
        num_bytes /= 1000
    digits = 0 if unit == "B" or num_bytes >= 99.95 else 1
    return f"{num_bytes:.{digits}f} {unit}"


def lasting(seconds: float) -> str:
    """As people say it: 12.3 s, 4:05 min, 3:07 h, 2.5 d."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h" if minutes < 2880 else f"{minutes / 1440:.1f} d"


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("", "-")
