"""Precompiled statements for the hot path, passed directly to the driver.

SQLAlchemy's cache lookup, type conversion and result wrapping take several times as long as the
statement. Here values are passed by position, so they must be types of the driver: text, numbers,
bytes and None. Errors are still SQLAlchemy's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.engine import Connection, CursorResult, Dialect
from sqlalchemy.sql.base import Executable

_BY_PLACE: Dialect = psycopg.dialect(paramstyle="format")  # type: ignore[no-untyped-call]


class _Compiled(NamedTuple):
    text: str
    order: list[str]
    """The parameter names by position."""
    constants: dict[str, Any]
    """Constant values of the statement."""


class Prepared:
    """A statement, or one for each dialect by its name."""

    def __init__(self, statement: Executable | Callable[[str], Executable]) -> None:
        self._statement = statement
        self._known: dict[str, _Compiled] = {}

    def run(self, connection: Connection, **values: Any) -> CursorResult[Any]:
        """Execute with a value for each parameter."""
        name = connection.dialect.name
        text, order, constants = self._known.get(name) or self._compiled(connection)
        parameters = [values[each] if each in values else constants[each] for each in order]
        return connection.exec_driver_sql(text, tuple(parameters))

    def _compiled(self, connection: Connection) -> _Compiled:
        name, statement = connection.dialect.name, self._statement
        if not isinstance(statement, Executable):
            statement = statement(name)
        compiled = statement.compile(dialect=_dialect(connection))  # type: ignore[attr-defined]
        order = list(compiled.positiontup or ())
        self._known[name] = _Compiled(str(compiled), order, dict(compiled.params))
        return self._known[name]


class Rows:
    """Bulk insert of complete rows with a single statement."""

    def __init__(self, table: sa.Table) -> None:
        self._table = table
        self._names = table.columns.keys()
        columns = enumerate(table.columns)
        self._json = [place for place, column in columns if isinstance(column.type, sa.JSON)]
        self._known: dict[str, str] = {}

    def add(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows with values in column order; JSON columns take values for `json`, where None
        is JSON's null."""
        if connection.dialect.name == "postgresql":
            document = json.dumps([dict(zip(self._names, row, strict=True)) for row in rows])
            connection.exec_driver_sql(self._text(connection), (document,))
            return
        for place in self._json:
            rows = [(*row[:place], json.dumps(row[place]), *row[place + 1 :]) for row in rows]
        connection.exec_driver_sql(self._text(connection), list(rows))

    def _text(self, connection: Connection) -> str:
        name = connection.dialect.name
        if name not in self._known:
            build = self._records if name == "postgresql" else self._places
            self._known[name] = build(_dialect(connection))
        return self._known[name]

    def _places(self, dialect: Dialect) -> str:
        return str(sa.insert(self._table).compile(dialect=dialect))

    def _records(self, dialect: Dialect) -> str:
        """All rows as one JSON value: a message per row takes longer than the insert."""
        columns = self._table.columns
        typed = ", ".join(f"{each.name} {each.type.compile(dialect)}" for each in columns)
        names = ", ".join(self._names)
        return (
            f"INSERT INTO {self._table.name} ({names}) "  # noqa: S608
            f"SELECT {names} FROM json_to_recordset(%s::JSON) AS found ({typed})"
        )


def each_of(dialect: str, name: str) -> sa.Select[Any]:
    """The texts in the parameter `name`, a JSON array, as rows."""
    parameter = sa.bindparam(name, type_=sa.Text)
    if dialect == "postgresql":
        items = sa.func.json_array_elements_text(sa.cast(parameter, sa.JSON))
        return sa.select(items.table_valued("value").c.value)
    return sa.select(sa.func.json_each(parameter).table_valued("value").c.value)


def _dialect(connection: Connection) -> Dialect:
    return _BY_PLACE if connection.dialect.name == "postgresql" else connection.dialect
