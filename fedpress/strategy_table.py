"""`fedpress strategies`: each one, what it keeps, and whether its rounds may be masked."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator

from fedpress.compressor_table import aligned, yes
from fedpress_protocols.errors import ConfigurationError
from fedpress_strategies.strategy import (
    EXAMPLE_TERMS,
    Strategy,
    example_of,
    from_config,
    strategies,
)

_HEADINGS = (
    *("id", "linear", "server state", "client state"),
    *("memory of an aggregation", "reports", "source"),
)


def table() -> str:
    """A line for every strategy, as its example has it."""
    return "\n".join(aligned([_HEADINGS, *_rows()]))


def described(name: str) -> str:
    """The strategy `name`: its description, settings with their defaults, claims and an example."""
    known = strategies()
    if name not in known:
        raise ConfigurationError(
            f"no strategy has the id {name!r}; known are {', '.join(known)}",
            hint="fedpress strategies lists what they are",
        )
    config = example_of(name)
    made = from_config(config, EXAMPLE_TERMS)
    settings = [(f"  {key}", json.dumps(value)) for key, value in config.items() if key != "id"]
    terms = made.client_terms.model_dump_json(exclude_defaults=True)
    claims = [
        ("  linear", yes(made.linear)),
        ("  server state", made.properties.server_state),
        ("  client state", made.properties.client_state),
        ("  memory of an aggregation", made.properties.memory),
        ("  reports", ", ".join(made.report) or "-"),
        ("  client terms", "-" if terms == "{}" else terms),
        ("  source", made.properties.source),
    ]
    lines = [f"{name}: {inspect.getdoc(known[name])}"]
    if settings:
        lines += ["", "settings", *aligned(settings)]
    lines += ["", "properties", *aligned(claims), "", "example", f"  {json.dumps(config)}"]
    return "\n".join(lines)


def _rows() -> Iterator[tuple[str, ...]]:
    for name in strategies():
        yield _row(name, from_config(example_of(name), EXAMPLE_TERMS))


def _row(name: str, made: Strategy) -> tuple[str, ...]:
    about = made.properties
    return (
        name,
        yes(made.linear),
        about.server_state,
        about.client_state,
        about.memory,
        ", ".join(made.report) or "-",
        about.source,
    )
