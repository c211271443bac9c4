"""Every test that a page of the documentation names exists, and is where the page says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def names_by_file() -> dict[str, set[str]]:
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        names = {node.name for node in nodes if isinstance(node, kinds)}
        found[str(path.relative_to(ROOT))] = {n for n in names if n.startswith("test_")}
    return found


def test_every_test_that_a_page_names_exists() -> None:
    known = names_by_file()
    there = set().union(*known.values()) | {Path(file).stem for file in known}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        files = set(re.findall(r"tests/[\w/]+\.py", text))
        assert not [file for file in files if not (ROOT / file).exists()], page
        named = set(re.findall(r"\btest_\w+", re.sub(r"tests/[\w/]+\.py", "", text)))
        assert not named - there, page


def test_a_test_that_is_named_with_its_file_is_in_that_file() -> None:
    known = names_by_file()
    text = (ROOT / "docs" / "failure-modes.md").read_text()
    pairs = re.findall(r"`(test_\w+)`[^`|;]*\(`(tests/[\w/]+\.py)`\)", text)
    assert len(pairs) > 30
    assert not [(name, file) for name, file in pairs if name not in known[file]]
