"""Every test named on a documentation page exists in the file that the page names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

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
    for page in (ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        files = set(re.findall(r"tests/[\w/]+\.py", text))
        assert not [file for file in files if not (ROOT / file).exists()], page
        named = set(re.findall(r"\btest_\w+", re.sub(r"tests/[\w/]+\.py", "", text)))
        assert not named - there, page


@pytest.mark.parametrize(("page", "num_tests"), [("SECURITY.md", 30), ("docs/attacks.md", 20)])
def test_every_line_of_a_threat_model_names_an_existing_test(page: str, num_tests: int) -> None:
    """`make test-security` runs the tests named on these pages."""
    known = names_by_file()
    text = (ROOT / page).read_text()
    named = re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", text)
    assert len(named) >= num_tests
    assert not [(file, name) for file, name in named if name not in known[file]]
    items = re.findall(
        r"^- .*\n(?:  .*\n)*", text.partition("# Threat model\n")[2] or text, re.MULTILINE
    )
    assert len(items) >= 13
    for item in items:
        assert re.search(r"`tests/[\w/]+\.py|That stays:", item), item


@pytest.mark.parametrize(
    ("page", "num_pairs"),
    [
        ("failure-modes.md", 10),
        ("known-faults.md", 20),
        ("features.md", 17),
        ("compare-rollouts.md", 18),
    ],
)
def test_every_test_named_with_a_file_is_in_that_file(page: str, num_pairs: int) -> None:
    known = names_by_file()
    text = (ROOT / "docs" / page).read_text()
    pairs = re.findall(r"`(test_\w+)`[^`|;]*\(`(tests/[\w/]+\.py)`\)", text)
    assert len(pairs) >= num_pairs
    assert not [(name, file) for name, file in pairs if name not in known[file]]


def test_the_features_page_names_a_test_for_every_feature_and_memory() -> None:
    text = (ROOT / "docs" / "features.md").read_text()
    table = text.partition("| feature | memory | passed | test |\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    memories: dict[str, list[str]] = {}
    for feature, memory, passed, test in rows:
        memories.setdefault(feature, []).append(memory)
        assert re.match(r"`test_\w+` \(`tests/", test) or passed == "no test", (feature, test)
    assert set(map(tuple, memories.values())) == {("host", "GPU")}
    for feature in (
        "p2p",
        "gloo",
        "NCCL",
        "disk",
        "driven by the trainer",
        "relay",
        "catch-up",
        "replica",
    ):
        assert feature in " ".join(memories)


def test_the_comparison_of_rollouts_names_a_test_or_a_source_in_each_row() -> None:
    """Every table has a row for each system. A row of Windlass names a test, and a row of another one a file."""
    text = (ROOT / "docs" / "compare-rollouts.md").read_text()
    tables = text.split("| system | what it does | test or source |\n")[1:]
    assert len(re.findall(r"^## [1-8]\. ", text, re.MULTILINE)) == 8
    assert len(tables) >= 12
    for table in tables:
        lines = table.partition("\n\n")[0].splitlines()[1:]
        rows = [line.strip("| ").split(" | ") for line in lines]
        systems = [row[0].partition(":")[0] for row in rows]
        assert list(dict.fromkeys(systems)) == ["Windlass", "AReaL", "slime", "verl", "TRL"], (
            systems
        )
        for system, row in zip(systems, rows, strict=True):
            _, _, source = row
            wanted = (
                r"`test_\w+` \(`tests/"
                if system == "Windlass"
                else r"`[\w./-]+/[\w./-]+`|`[\w-]+\.py`"
            )
            assert re.search(wanted, source), row
