"""Record of passed tests for the table of docs/capabilities.md.

WINDLASS_CAPABILITIES names a JSON file. Rows of passed tests are added to it and replace rows of the same key. All other
rows of the tests' matrix are `untested`. `tools/render_capabilities.py` makes the page from the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path

import pytest
from rows import MATRIX, Record

ROWS = pytest.StashKey[list[dict[str, object]]]()
PROPERTY = "capability"


@pytest.fixture
def shown(request: pytest.FixtureRequest) -> Record:
    """Provide a function that records a row; rows count only if the test passes."""
    properties: list[tuple[str, object]] = request.node.user_properties
    return lambda row: properties.append((PROPERTY, asdict(row)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.passed:
        rows = item.config.stash.setdefault(ROWS, [])
        rows += [v for k, v in item.user_properties if k == PROPERTY and isinstance(v, dict)]
        _write(item.config.stash.get(MATRIX, []), rows)
    return report


def _write(matrix: list[dict[str, object]], rows: list[dict[str, object]]) -> None:
    """Write the rows after every test, so that an interrupted run keeps its results."""
    name = os.environ.get("WINDLASS_CAPABILITIES", "")
    if not name or not rows:
        return
    path = Path(name)
    old = json.loads(path.read_text()) if path.exists() else []
    kept = {_key(row): row for row in [*matrix, *old, *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([kept[key] for key in sorted(kept)], indent=1) + "\n")


def _key(row: dict[str, object]) -> str:
    return json.dumps([v for k, v in row.items() if k not in ("outcome", "detail")])
