"""The Python of docs/flower.md runs as it is written."""

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

PAGE = Path(__file__).parents[2] / "docs" / "flower.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_first_blocks_of_the_page_need_nothing_that_is_not_in_them() -> None:
    """They are copied one by one."""
    for block in BLOCKS[:2]:
        exec(compile(block, str(PAGE), "exec"), {})


def test_the_blocks_of_the_page_run_one_after_another() -> None:
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(BLOCKS) == 6
    assert {"app", "strategy", "plan"} <= set(names)


def test_each_end_gains_two_lines() -> None:
    for block in BLOCKS[:2]:
        lines = [
            line for line in block.splitlines() if re.search("fedpress|compression|Fedp", line)
        ]
        assert len(lines) == 2
