"""Measure the structure of Python source: sizes of files, classes, functions and constructors.

    python benchmarks/code_structure.py                       # fedpress, room by room
    python benchmarks/code_structure.py h11=PATH httpx=PATH   # other packages beside it

Every figure is read from the syntax tree; nothing is imported. A line is a physical line of a
`.py` file, blank lines and comments included; tests are left out. A function's length is that of
its `def`, from the signature to its last statement, without decorators. A constructor is an
`__init__` without `self`; a record is a dataclass without an `__init__` of its own, by the fields
that the generated one takes.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "compression",
    "protocols",
    "strategies",
    "client_sdk",
    "server",
    "integrations",
    "fedpress",
)
LONG_FUNCTION = 50
"""Lines above which a function counts as long."""
MANY_ARGUMENTS = 8
"""Arguments above which a constructor counts as wide."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Structure:
    """Sizes collected over the files of one package."""

    files: dict[str, int] = field(default_factory=dict)
    classes: list[tuple[int, int, str]] = field(default_factory=list)
    """(methods, lines, name) of each class."""
    functions: list[tuple[int, str]] = field(default_factory=list)
    constructors: list[tuple[int, str]] = field(default_factory=list)
    """(arguments, class) of each `__init__`."""
    records: list[tuple[int, str]] = field(default_factory=list)
    """(fields, class) of each dataclass without one."""

    def add_file(self, path: Path) -> None:
        source = path.read_text()
        self.files[str(path)] = source.count("\n")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Function):
                self.functions.append((_lines(node), node.name))
            elif isinstance(node, ast.ClassDef):
                methods = [entry for entry in node.body if isinstance(entry, Function)]
                self.classes.append((len(methods), _lines(node), node.name))
                has_own = any(method.name == "__init__" for method in methods)
                constructors = self.constructors if has_own else self.records
                constructors.append((_num_arguments(node, methods), node.name))

    def row(self, name: str) -> list[str]:
        lines = list(self.files.values())
        long = [entry for entry in self.functions if entry[0] > LONG_FUNCTION]
        wide, records = (
            [entry for entry in entries if entry[0] > MANY_ARGUMENTS]
            for entries in (self.constructors, self.records)
        )
        longest_function, function = max(self.functions, default=(0, "none"))
        largest = max(self.files, key=self.files.__getitem__)
        methods, _, most_methods = max(self.classes, default=(0, 0, "none"))
        _, most_lines, longest = max(self.classes, default=(0, 0, "none"), key=lambda c: c[1])
        return [
            name,
            f"{sum(lines):,}",
            f"{len(lines)}",
            f"{statistics.median(lines):.0f}",
            f"{Path(largest).name} {self.files[largest]}",
            f"{most_methods} {methods}",
            f"{longest} {most_lines}",
            f"{function} {longest_function}",
            f"{len(long)} ({1000 * len(long) / sum(lines):.2f})",
            f"{len(wide)} ({1000 * len(wide) / sum(lines):.2f})",
            f"{len(records)} ({1000 * len(records) / sum(lines):.2f})",
        ]


def _lines(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _num_arguments(node: ast.ClassDef, methods: list[Function]) -> int:
    """Arguments of the class's own constructor; 0 if it inherits one."""
    for method in methods:
        if method.name == "__init__":
            arguments = method.args
            return len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return sum(
            isinstance(entry, ast.AnnAssign)
            and "ClassVar" not in ast.unparse(entry.annotation)
            and not (entry.value is not None and "init=False" in ast.unparse(entry.value))
            for entry in node.body
        )
    return 0


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        is_test = path.stem.endswith("_test") or path.stem.startswith("test_")
        if not is_test and not {"tests", "test", "_tests", "vectors", "examples"} & set(path.parts):
            yield path


def measure(folders: list[Path]) -> Structure:
    structure = Structure()
    for folder in folders:
        for path in _files(folder):
            structure.add_file(path)
    return structure


def main(arguments: list[str]) -> None:
    packages = {room: [ROOT / room] for room in ROOMS}
    packages["fedpress, all rooms"] = [ROOT / room for room in ROOMS]
    for argument in arguments:
        name, separator, path = argument.partition("=")
        if not separator or not Path(path).is_dir():
            raise SystemExit(f"expected NAME=FOLDER with an existing folder, not {argument!r}")
        packages[name] = [Path(path)]
    print(
        "| package | lines | files | median file | largest file | class with most methods"
        f" | longest class | longest function | functions > {LONG_FUNCTION} lines (per 1,000 lines)"
        f" | constructors > {MANY_ARGUMENTS} arguments (per 1,000 lines)"
        f" | records > {MANY_ARGUMENTS} fields (per 1,000 lines) |"
    )
    print("|---|" + "---:|" * 10)
    for name, folders in packages.items():
        if any(folder.is_dir() for folder in folders):
            print("| " + " | ".join(measure(folders).row(name)) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
