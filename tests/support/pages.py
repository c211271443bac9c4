"""The Python that pages of the documentation show."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PAGES", "blocks", "tree_of"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "benchmarks/README.md",
    ]
)


def blocks(page: Path) -> Iterator[str]:
    """Fenced Python, and indented paragraphs whose first line is Python."""
    text = page.read_text()
    for fenced in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        yield textwrap.dedent(fenced)
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for indented in re.findall(r"(?<=\n\n)((?:    .*\n|\n(?=    ))+)", outside):
        code = textwrap.dedent(indented).strip("\n")
        if re.match(r"(from|import|async with|with|class) |windlass\.|\w+ = |\w+\(", code):
            yield code


def tree_of(code: str) -> ast.Module:
    """The block, as the body of a coroutine: pages await."""
    code = code.replace("(model, ..., name_map", "(model, controller=url, token=token, name_map")
    if code.rstrip().endswith(":"):  # the first line of something
        code += "\n    pass"
    return ast.parse("async def page():\n" + textwrap.indent(code, "    "))
