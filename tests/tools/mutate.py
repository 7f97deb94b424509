"""Change lines of the product one at a time, and see whether the tests notice.

    python tests/tools/mutate.py --json short.json                         # by `FILES`
    FEDPRESS_SLOW=1 python tests/tools/mutate.py --again short.json        # with what is slow

    MEASURED='--cov --cov-config=tests/tools/all.coveragerc --cov-context=test --cov-report='
    python -m pytest -n 2 -m "$SHORT" $MEASURED   # who runs which line; SHORT as in the Makefile
    python tests/tools/mutate.py --contexts .coverage --json short.json
    FEDPRESS_SLOW=1 python -m pytest -n 2 -m slow $MEASURED   # of the longer tests
    FEDPRESS_SLOW=1 python tests/tools/mutate.py --contexts .coverage --again short.json

Lines are drawn with a seed from the areas below, as many from each; each is changed in one way, in
a copy of the tree, and the tests that run the line follow, those that run the least first, until
one fails. `--again` takes only what survived before, which is what longer tests may yet catch. A
test that runs in processes of its own is not seen to run a line: `--also` names such files.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatch
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).parents[2]
SLOW = os.environ.get("FEDPRESS_SLOW") == "1"
AREAS = {
    "protocols": ["protocols/fedpress_protocols/**/*.py"],
    "compression": [
        "compression/fedpress_compression/*.py",
        "compression/fedpress_compression/coding/*.py",
        "compression/fedpress_compression/compressors/*.py",
    ],
    "ledger": [
        "client_sdk/fedpress_client/ledger.py",
        "client_sdk/fedpress_client/state.py",
        "client_sdk/fedpress_client/outgoing.py",
    ],
    "privacy": [
        "protocols/fedpress_protocols/privacy/*.py",
        "strategies/fedpress_strategies/private.py",
        "server/fedpress_server/storage/privacy.py",
        "client_sdk/fedpress_client/privacy_budget.py",
        "fedpress/planning/privacy.py",
    ],
    "rounds": ["server/fedpress_server/rounds/*.py"],
    "store": ["server/fedpress_server/storage/*.py", "server/fedpress_server/coordination/*.py"],
}
FILES = {
    "protocols/fedpress_protocols/privacy/*": [
        "tests/protocols/test_privacy.py",
        "tests/protocols/test_gaussian_noise.py",
        "tests/protocols/test_correlated_noise.py",
        "tests/protocols/test_adaptive_clip.py",
        "tests/protocols/test_tensor_clips.py",
    ],
    "strategies/fedpress_strategies/private.py": ["tests/server/test_private_sums.py"],
    "server/fedpress_server/storage/privacy.py": ["tests/server/test_participations.py"],
    "client_sdk/fedpress_client/privacy_budget.py": ["tests/client/test_privacy_budget.py"],
    "fedpress/planning/privacy.py": ["tests/face/test_privacy_plan.py"],
    "protocols/fedpress_protocols/masking/*": ["tests/protocols/masking"],
    "protocols/fedpress_protocols/policies*": [
        "tests/protocols/test_policies.py",
        "tests/server/test_policies.py",
    ],
    "protocols/*": ["tests/protocols", "--ignore=tests/protocols/masking"],
    "compression/fedpress_compression/coding/*": [
        "tests/compression/test_coding.py",
        "tests/compression/test_huffman.py",
        "tests/compression/test_range.py",
        "tests/compression/test_fuzz_decode.py",
        "tests/compression/test_kernels.py",
    ],
    "compression/*": [
        "tests/compression",
        "--ignore=tests/compression/test_kernels.py",
        "--ignore=tests/compression/test_kernel_library.py",
    ],
    "client_sdk/fedpress_client/outgoing.py": [
        "tests/client/test_outgoing.py",
        "tests/client/test_parts.py",
        "tests/client/test_conservation.py",
    ],
    "client_sdk/*": ["tests/client", "--ignore=tests/client/test_data_parallel.py"],
    "server/fedpress_server/rounds/*": [
        "tests/server/test_rounds.py",
        "tests/server/test_asynchronous_rounds.py",
        "tests/server/test_masked_rounds.py",
        "tests/server/test_selection.py",
        "tests/server/test_task_rounds.py",
        "tests/server/test_any_order.py",
    ],
    "server/*": ["tests/server"],
}
"""The tests of a file, where no `--contexts` say which run a line; the first that fits."""
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one line; `file` from the root of the tree, `line` from 1."""

    area: str
    file: str
    line: int
    how: str
    before: str
    after: str
    start: int
    end: int
    """Where `before` stands in the file, in bytes."""


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """How a node may be changed: in which way, what is replaced, by which text."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in _COMPARED:
            other = ast.Compare(left, [_COMPARED[type(op)]()], [right])
            yield "comparison", node, f"({ast.unparse(other)})"
        case ast.BinOp(left, op, right) if type(op) in _COMPUTED and not _is_text(node):
            other_op = _COMPUTED[type(op)]()
            yield "operator", node, f"({ast.unparse(ast.BinOp(left, other_op, right))})"
        case ast.BoolOp(op, values):
            other_bool = ast.And() if isinstance(op, ast.Or) else ast.Or()
            yield "operator", node, f"({ast.unparse(ast.BoolOp(other_bool, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield "condition", node, f"({ast.unparse(operand)})"
        case ast.Constant(bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(int(number)):
            yield "constant", node, str(number + 1)
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield "condition", test, f"(not ({ast.unparse(test)}))"
        case ast.Return(ast.expr() as value) if not _is_none(value):
            yield "return", value, "None"
        case ast.Expr(ast.Call(function)) if "_log." not in ast.unparse(function):
            yield "call left out", node, "pass"


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_text(node: ast.BinOp) -> bool:
    """Of strings or of types, where arithmetic means something else."""
    inside = ast.walk(node)
    return any(isinstance(n, ast.JoinedStr | ast.Constant) and not _number(n) for n in inside)


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def mutants(area: str, file: Path) -> Iterator[Mutant]:
    """Every change of every line of the functions of a file."""
    data = file.read_bytes()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _executed(ast.parse(data)):
        for how, what, text in changes(node):
            assert what.end_lineno is not None
            assert what.end_col_offset is not None
            start = starts[what.lineno - 1] + what.col_offset
            end = starts[what.end_lineno - 1] + what.end_col_offset
            before = data[start:end].decode()
            if before != text:
                name = str(file.relative_to(ROOT))
                yield Mutant(area, name, what.lineno, how, before, text, start, end)


def _executed(node: ast.AST, *, inside: bool = False) -> Iterator[ast.AST]:
    """What runs when a function is called: no annotations, defaults or messages of errors."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if not any("overload" in ast.unparse(each) for each in child.decorator_list):
                for statement in child.body:
                    yield statement
                    yield from _executed(statement, inside=True)
        elif isinstance(child, ast.AnnAssign):
            if inside and child.value is not None:
                yield child.value
                yield from _executed(child.value, inside=True)
        elif isinstance(child, ast.Raise | ast.JoinedStr):
            continue
        else:
            if inside:
                yield child
            yield from _executed(child, inside=inside)


def chosen(num: int, seed: int) -> list[Mutant]:
    """As many from each area, at most one of a line."""
    rng, found = random.Random(seed), list[Mutant]()
    for index, (area, globs) in enumerate(AREAS.items()):
        files = sorted({file for glob in globs for file in ROOT.glob(glob)})
        by_line: dict[tuple[str, int], list[Mutant]] = {}
        for file in files:
            for mutant in mutants(area, file):
                by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
        share = num // len(AREAS) + (index < num % len(AREAS))
        lines = rng.sample(sorted(by_line), min(share, len(by_line)))
        found += [rng.choice(by_line[line]) for line in lines]
    return found


def survivors(file: Path) -> list[Mutant]:
    """The lines of a run before that no test was seen to notice; raises SystemExit where the tree
    is another one."""
    names = [field.name for field in fields(Mutant)]
    found = []
    for row in json.loads(file.read_text()):
        if row["outcome"] == "killed":
            continue
        mutant = Mutant(**{name: row[name] for name in names})
        data = (ROOT / mutant.file).read_bytes()
        if data[mutant.start : mutant.end].decode() != mutant.before:
            raise SystemExit(f"{mutant.file} is not what it was when {file} was written")
        found.append(mutant)
    return found


class Contexts:
    """Which tests run which line, and how much else each of them runs."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._of: dict[str, dict[int, set[str]]] = {}
        self._lines: Counter[str] = Counter()
        for file in files:
            data = CoverageData(str(file))
            data.read()
            for measured in data.measured_files():
                marker = next((top for top in TOPS if f"/{top}/" in measured), None)
                if marker is None:
                    continue
                name = measured[measured.rindex(f"/{marker}/") + 1 :]
                lines = self._of.setdefault(name, {})
                for line, contexts in data.contexts_by_lineno(measured).items():
                    tests = {context.partition("|")[0] for context in contexts} - {""}
                    lines.setdefault(line, set()).update(tests)
                    self._lines.update(tests)

    def tests(self, mutant: Mutant, at_most: int) -> list[str]:
        """Those that run the line, the most particular first."""
        found = self._of.get(mutant.file, {}).get(mutant.line, set())
        return sorted(found, key=lambda test: (self._lines[test], test))[:at_most]


TOPS = tuple(sorted({glob.partition("/")[0] for globs in AREAS.values() for glob in globs}))


def outcome(tree: Path, mutant: Mutant, tests: list[str], seconds: float) -> tuple[str, float]:
    """killed, survived or unreached; and the CPU seconds that it took."""
    if not tests:
        return "unreached", 0.0
    file = tree / mutant.file
    data = file.read_bytes()
    file.write_bytes(data[: mutant.start] + mutant.after.encode() + data[mutant.end :])
    environment = {**os.environ, "CI": "1", "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    if not SLOW:
        command += ["-m", "not slow or slow(short=True) and not slow(short=False)"]
    before = os.times()
    try:
        process = subprocess.Popen(
            [*command, *tests],
            cwd=tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = -1
    finally:
        file.write_bytes(data)
    after = os.times()
    spent = after.children_user + after.children_system
    spent -= before.children_user + before.children_system
    return {0: "survived", -1: "ran too long"}.get(code, "killed"), spent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--lines", type=int, default=60, help="how many; 60")
    parser.add_argument("--contexts", type=Path, nargs="*", default=[], help="coverage's data")
    parser.add_argument("--show", action="store_true", help="print the lines, and run nothing")
    parser.add_argument("--areas", nargs="*", default=[*AREAS], help="only the lines of these")
    parser.add_argument("--again", type=Path, help="only those that survived there")
    parser.add_argument("--also", nargs="*", default=[], help="tests to run for every line")
    parser.add_argument("--at-most", type=int, default=300, help="tests of a line; 300")
    parser.add_argument("--seconds", type=float, default=300.0, help="of a line's tests; 300")
    parser.add_argument("--begin", type=int, default=0, help="skip so many lines")
    parser.add_argument("--json", type=Path, help="where outcomes are kept, one by one")
    asked = parser.parse_args()
    drawn = survivors(asked.again) if asked.again else chosen(asked.lines, asked.seed)
    drawn = [each for each in drawn if each.area in asked.areas]
    if asked.show:
        for mutant in drawn:
            print(f"{mutant.area:12} {mutant.file}:{mutant.line} {mutant.how}: {mutant.before!r}")
        return
    contexts, rows = Contexts(asked.contexts), []
    with tempfile.TemporaryDirectory(prefix="fedpress-mutants-") as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", ".mypy_cache", ".hypothesis", ".cov*")
        shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
        for mutant in drawn[asked.begin :]:
            if asked.contexts:
                tests = [*contexts.tests(mutant, asked.at_most), *asked.also]
            else:
                fits = next(glob for glob in FILES if fnmatch(mutant.file, glob))
                tests = [*FILES[fits], *asked.also]
            begun = time.monotonic()
            how, cpu = outcome(tree, mutant, tests, asked.seconds)
            rows.append({**asdict(mutant), "outcome": how, "tests": len(tests), "cpu": cpu})
            print(
                f"{how:12} {mutant.file}:{mutant.line} {mutant.how}: "
                f"{mutant.before!r} -> {mutant.after!r} ({len(tests)} tests, {cpu:.0f} s of CPU, "
                f"{time.monotonic() - begun:.0f} s)",
                flush=True,
            )
            if asked.json:
                asked.json.write_text(json.dumps(rows, indent=1))
    totals = Counter((str(row["area"]), str(row["outcome"])) for row in rows)
    for (area, how), number in sorted(totals.items()):
        print(f"{area:12} {how:12} {number}")


if __name__ == "__main__":
    main()
