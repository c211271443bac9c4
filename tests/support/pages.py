"""Contents of the documentation's pages: Python, commands, settings, and drawings."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

__all__ = ["PAGES", "Block", "all_blocks", "blocks", "commands_of", "tree_of"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "benchmarks/README.md",
    ]
)
PROGRAMS = re.compile(
    r"(?:\w+=\S+ )*(?:(?:\S*/)?python|curl|docker|export|git|install|kill|make|openssl|pip|pytest|ray|torchrun|vllm|windlass"
    r"|\S+\.(?:py|sh)) "
)


class Block(NamedTuple):
    """A fenced or indented block of code. The language of an indented block is guessed; it may be empty."""

    page: Path
    line: int
    language: str
    text: str


def all_blocks(page: Path) -> list[Block]:
    """Return every block of code of a page, as Markdown parses it."""
    found = []
    for token in MarkdownIt().parse(page.read_text()):
        if token.type in ("fence", "code_block") and token.map is not None:
            text = textwrap.dedent(token.content).strip("\n")
            language = token.info or _language(text)
            found.append(Block(page, token.map[0] + 1, language, text))
    return found


def _language(text: str) -> str:
    if PROGRAMS.match(re.sub(r"\A(#.*\n)+", "", text) + " "):
        return "bash"
    if text.startswith("["):
        tomllib.loads(text)
        return "toml"
    try:
        tree_of(text)
    except SyntaxError:
        return ""
    return "python"


def blocks(page: Path) -> Iterator[str]:
    """Return the Python blocks of a page."""
    return (block.text for block in all_blocks(page) if block.language == "python")


def commands_of(block: Block) -> Iterator[str]:
    """Yield the commands of a shell block, one per line, without comments and placeholders for options."""
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
        # A redirection to a log and the & for the background are not part of the command.
        line = re.sub(r" > \S+\.log 2>&1 &$", "", line)
        without = re.sub(r"(?:^|\s{2,})#.*|\s*\[[^\[\]]*options\]", "", line)
        if command := re.sub(r"\s+", " ", without).strip():
            yield command


def tree_of(code: str) -> ast.Module:
    """Parse a block as the body of a coroutine, because pages use await."""
    code = code.replace("(model, ..., name_map", "(model, controller=url, token=token, name_map")
    # The code is only the first line of a compound statement.
    if code.rstrip().endswith(":"):
        code += "\n    pass"
    return ast.parse("async def page():\n" + textwrap.indent(code, "    "))
