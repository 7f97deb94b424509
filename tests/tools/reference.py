"""Write the pages of docs/reference that the code itself determines.

    python -m tests.tools.reference            # write them
    python -m tests.tools.reference --check    # exit code 1 and the names of those not current

`make reference` runs the first; tests/face/test_reference.py does the second.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click
from click.testing import CliRunner
from prometheus_client import Metric

from fedpress.cli import app
from fedpress.cli.outcomes import documented_errors
from fedpress_protocols.errors import FedpressError, RoundClosed
from fedpress_server.api.permissions import PERMISSIONS
from fedpress_server.app import create_app
from fedpress_server.command import SECTIONS
from fedpress_server.metrics import Metrics
from fedpress_server.settings import Settings, secret_settings

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
_NOTE = "<!-- Written by `make reference`; edit the code, not this page. -->"
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_TYPES: Mapping[object, str] = {
    int: "integer",
    float: "number",
    bool: "true or false",
    Path: "path",
}


def settings() -> Iterator[str]:
    yield "# Settings of the server"
    yield (
        "An option of `fedpress server run` goes before its `FEDPRESS_*` variable, and a\n"
        "variable before the key of the TOML file that `--config` or `FEDPRESS_CONFIG` names.\n"
        "`port` is the option `--port`, the variable `FEDPRESS_PORT` and the key `port`.\n"
        "Secrets are no options, as other users of the machine could read them. A value out\n"
        "of its range ends the start with one line that names the setting. A key of the TOML\n"
        "file that is no setting ends it, too; a `FEDPRESS_*` variable that nothing reads is a\n"
        "warning in the log, and a fault for `fedpress server doctor`."
    )
    secrets = set(secret_settings()) - {"database_url"}
    listed = {name for names in SECTIONS.values() for name in names}
    sections = {**SECTIONS, "Secrets": [name for name in Settings.model_fields if name in secrets]}
    others = [name for name in Settings.model_fields if name not in listed | secrets]
    for title, names in {**sections, "Other settings": others}.items():
        if not names:
            continue
        yield f"## {title}"
        yield "\n".join(
            ["| setting | value | default | meaning |", "|---|---|---|---|", *map(_setting, names)]
        )


def _setting(name: str) -> str:
    field = Settings.model_fields[name]
    kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    kind = field.annotation if get_origin(field.annotation) is None else kinds[0]
    value = _TYPES.get(kind, "text")
    if get_origin(field.annotation) is Literal:
        value = ", ".join(f"`{each}`" for each in kinds)
    for each in field.metadata:
        value += "".join(
            f", {word} {limit:,}"
            for key, word in _LIMITS.items()
            if (limit := getattr(each, key, None)) is not None
        )
    default = "" if field.default in (None, "") else f"`{str(field.default).lower()}`"
    if field.default_factory is not None or isinstance(field.default, Path):
        default = f"`{field.get_default(call_default_factory=True, validated_data={})}`"
    return f"| `{name}` | {value} | {default} | {_cell(field.description or '')} |"


def metrics() -> Iterator[str]:
    yield "# Metrics of the server"
    yield (
        "`GET /metrics` of every role, for Prometheus, with the metrics token or an\n"
        "operator's. No label names a device. Histograms have the series `_bucket`, `_sum`\n"
        "and `_count`. Counters and histograms count where the work was done: add them up\n"
        "over servers. Gauges of a task every server reports: take `max by (task)`. [Logs,\n"
        "metrics, traces](../operations/observability.md) groups them by their use, and names\n"
        "the alerts."
    )
    shown = Metrics()
    labels = {
        about: names
        for each in vars(shown).values()
        if isinstance(about := getattr(each, "_name", None), str)
        and (names := getattr(each, "_labelnames", None)) is not None
    }
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    rows += sorted(
        _metric(family, labels)
        for family in shown.registry.collect()
        if family.name.startswith("fedpress_")
    )
    yield "\n".join(rows)
    yield (
        "Besides, the series `process_*` of Python's Prometheus client: CPU seconds, resident\n"
        "memory, open files, start."
    )


def _metric(family: Metric, labels: Mapping[str, tuple[str, ...]]) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    names = getattr(family, "_labelnames", None) or labels.get(family.name, ())
    shown = ", ".join(f"`{each}`" for each in names)
    return f"| `{name}` | {family.type} | {shown} | {_cell(family.documentation)} |"


def errors() -> Iterator[str]:
    yield "# Errors"
    yield (
        "Every error of fedpress is a class under `fedpress.errors.FedpressError`. Over HTTP\n"
        "it is a problem of RFC 9457, and the same class is raised at the other end. The\n"
        "`type` of a problem is `urn:fedpress:problem:` and a name; each name is a heading of\n"
        "this page. So the problem"
    )
    yield f"```json\n{json.dumps(RoundClosed('round 7 is folding').to_problem(), indent=2)}\n```"
    yield (
        "is explained under [round-closed](#round-closed). A type never changes its meaning.\n"
        "An error has a `detail`, what was found and what was expected; a `hint`, what to do,\n"
        "where one is known; and `members`, further fields of the problem such as\n"
        "`retry_after`. Catch a parent to catch all errors below it. `fedpress explain\n"
        "round-closed` prints what this page says under that name."
    )
    for cls in documented_errors():
        yield f"## {cls.slug}"
        parent = next(each for each in cls.__mro__[1:] if issubclass(each, FedpressError))
        above = "" if parent is FedpressError else f", a kind of [{parent.slug}](#{parent.slug})"
        yield f"`{cls.__name__}`{above}, HTTP status {cls.status}: *{cls.title}.*"
        yield inspect.cleandoc(cls.__doc__ or "")
        if cls.default_hint:
            yield f"Hint, where the message has no other: {cls.default_hint}."


def commands() -> Iterator[str]:
    yield "# Commands"
    yield (
        "The `--help` of every command. [The command line](../operations/command-line.md) has\n"
        "exit codes, `--json`, completion, and which variables name server and token. The\n"
        "options of `fedpress server run` and `server migrate` are the [settings of the\n"
        "server](settings.md)."
    )
    for path, command in _below(app, ()):
        name = " ".join(("fedpress", *path))
        yield f"## {name}"
        if path in (("server", "run"), ("server", "migrate")):
            yield f"{command.help} Its options: [settings of the server](settings.md)."
            continue
        shown = CliRunner().invoke(app, [*path, "--help"], prog_name="fedpress", terminal_width=80)
        yield f"```text\n{shown.output.strip()}\n```"


def _below(
    command: click.Command, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            if not each.hidden:
                yield from _below(each, (*path, name))


def http_api() -> Iterator[str]:
    schema = _description()
    yield "# HTTP API"
    yield schema["info"]["description"].strip()
    yield (
        "A running server has the same description as `GET /openapi.json`, and as a page at\n"
        "`/docs`, for operators. The signature of devices is described in\n"
        "`protocols/SPEC-signatures.md`; operators send their token as `Authorization:\n"
        "Bearer`. The permission of a route is that of an operator's role\n"
        "([operators](../operations/operators.md)). [Errors](errors.md) explains the\n"
        "problems."
    )
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["others"])[0]
            by_tag.setdefault(tag, []).append((method.upper(), path, operation))
    for tag, routes in by_tag.items():
        yield f"## {tag[:1].upper()}{tag[1:]}"
        for method, path, operation in routes:
            yield f"### {method} {path}"
            yield from _route(method, path, operation)
    yield "## Schemas"
    yield "Fields in **bold** are required. Unknown fields of a request are refused."
    for name, each in sorted(schema["components"]["schemas"].items()):
        if name in ("HTTPValidationError", "ValidationError"):
            continue  # FastAPI's, never sent
        yield f"### {name}"
        if about := each.get("description", "").partition("\n\n")[0]:
            yield about
        if properties := each.get("properties"):
            required = each.get("required", [])
            yield "\n".join(
                ["| field | type | default | meaning |", "|---|---|---|---|"]
                + [_field(field, of, field in required) for field, of in properties.items()]
            )
        elif "enum" in each:
            yield f"One of {', '.join(f'`{value}`' for value in each['enum'])}."
        else:
            yield f"{_type(each)}."


def _description() -> dict[str, Any]:
    token = "q7x9-abcdefghijkl0123456789-mnopqrs"
    with tempfile.TemporaryDirectory() as folder:
        return create_app(Settings(data_dir=Path(folder), admin_token=token)).openapi()


def _route(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    if about := operation.get("description"):
        yield about
    rows = []
    if permission := PERMISSIONS.get((method, path)):
        rows.append(f"* Permission: `{permission}`")
    for each in operation.get("parameters", []):
        need = "" if each.get("required") else ", optional"
        text = f": {_line(each['description'])}" if each.get("description") else ""
        kind = _type(each.get("schema", {}))
        rows.append(f"* `{each['name']}` in the {each['in']}, {kind}{need}{text}")
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        shown = _type(content.get("schema", {})) if kind == "application/json" else "bytes"
        rows.append(f"* Body: `{kind}`, {shown}")
    problems = []
    for status, answer in operation["responses"].items():
        content = answer.get("content", {})
        if "application/problem+json" in content:
            problems.append(str(status))
            continue
        types = [_type(each["schema"]) for each in content.values() if each.get("schema")]
        meaning = answer.get("description", "")
        words = [*types, *([] if meaning == "Successful Response" else [_line(meaning)])]
        rows.append(f"* {status}: {', '.join(filter(None, words)) or 'done'}")
    if problems:
        rows.append(f"* Problems: {', '.join(sorted(problems))}")
    yield "\n".join(rows)


def _field(name: str, schema: dict[str, Any], required: bool) -> str:
    shown = f"**`{name}`**" if required else f"`{name}`"
    default = "" if required or schema.get("default") in (None, "") else f"`{schema['default']}`"
    return (
        f"| {shown} | {_type(schema)} | {_cell(default)} | {_cell(schema.get('description', ''))} |"
    )


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    if kinds := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, kinds)))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if isinstance(of := schema.get("additionalProperties"), dict):
        return f"object of {_type(of)}"
    return {"null": "null", "string": "text"}.get(schema.get("type", ""), schema.get("type", "any"))


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {
    "settings.md": settings,
    "metrics.md": metrics,
    "errors.md": errors,
    "commands.md": commands,
    "http-api.md": http_api,
}


def page(name: str) -> str:
    return "\n\n".join([_NOTE, *PAGES[name]()]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    checks = parser.parse_args().check
    old = [
        name
        for name in PAGES
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text() != page(name)
    ]
    if checks:
        sys.exit(f"not current: {', '.join(old)}; run `make reference`" if old else 0)
    for name in old:
        (FOLDER / name).write_text(page(name))
        print(f"wrote {FOLDER / name}")


if __name__ == "__main__":
    main()
