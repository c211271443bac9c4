"""Count hard words in docstrings, comments and pages, and compare each package with its limit.

Four kinds of words make a sentence hard: a person without a name ("whoever"), a clause in the place of a noun ("what it
has"), a chain of relative clauses ("of which", "those that") and a dated adverb ("anew"). The measure is their number
per 1,000 words. Some uses are harmless, so limits are above zero.

    python3 tools/measure_english.py                    check every path of `LIMITS`; exit status 1 if one is above its limit
    python3 tools/measure_english.py PATH... [--worst N]    print the measure of files or folders, and their worst lines
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "src/windlass": 3.0,
    "tests": 4.0,
    "benchmarks": 4.0,
    "docs": 4.0,
    "tools": 4.0,
    "examples": 4.0,
}
"""Folder -> maximum of hard words per 1,000 in each of its rooms, see `rooms_of`."""
HARD = re.compile(
    r"""\b(
    # Persons without a name.
    whoever | whomever | nobody | somebody | whose | whom |
    # Clauses in the place of nouns.
    what\ (is|are|was|were|it|they|an?|the|has|had|have|comes|came|lies|lay|others|peers|this|that
        |can|may|must|could|does|did|goes|such) |
    # Chains of relatives.
    of\ (which|those|what|ours|its\ own) | that\ of | those\ (of|that) | one\ that | (from|in|with|by)\ which |
    # Dated adverbs and verbs.
    meanwhile | anew | in\ vain | all\ the\ same | beside | alike | so\ far | lies? | lay | as\ ever | be\ it
    | goe?s?\ on | gone | (is|are)\ (no|none)
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
Line = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Measure:
    """Hard words of a part of the tree.

    Attributes:
        num_words: number of all words.
        lines: number of hard words, and place and text, of each passage with hard words.
    """

    num_words: int
    lines: Sequence[Line]

    @property
    def per_thousand(self) -> float:
        """Return the hard words per 1,000 words."""
        return 1000 * sum(number for number, _ in self.lines) / max(1, self.num_words)


def python_prose(path: Path) -> Iterator[Line]:
    """Yield line number and text of every docstring and comment."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = (
            node.body
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            else ()
        )
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


def markdown_prose(path: Path) -> Iterator[Line]:
    """Yield number and text of every line outside code."""
    in_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "", line)


def measure(paths: Sequence[Path]) -> Measure:
    """Return the measure of files and of all Python and Markdown files in folders."""
    num_words, lines = 0, list[Line]()
    for path in paths:
        files = [path] if path.is_file() else sorted((*path.rglob("*.py"), *path.rglob("*.md")))
        for file in files:
            prose = python_prose if file.suffix == ".py" else markdown_prose
            for number, text in prose(file):
                num_words += len(WORD.findall(text))
                if found := len(HARD.findall(text)):
                    lines.append((found, f"{file}:{number}: {' '.join(text.split())[:160]}"))
    return Measure(num_words, lines)


def rooms_of(folder: Path) -> Iterator[list[Path]]:
    """Yield the rooms of a folder: each of its subfolders, and then its own files together."""
    inside = sorted(path for path in folder.iterdir() if path.name != "__pycache__")
    yield from ([path] for path in inside if path.is_dir())
    if files := [path for path in inside if path.suffix in {".py", ".md"}]:
        yield files


def main(words: Sequence[str]) -> int:
    """Print measures; return 1 if a path is above its limit."""
    parser = argparse.ArgumentParser(
        prog="measure_english.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files or folders; none for every path of LIMITS"
    )
    parser.add_argument("--worst", type=int, default=10, metavar="N", help="passages to print")
    known = parser.parse_args(words)
    if known.paths:
        rooms = [(list(known.paths), float("inf"))]
    else:
        rooms = [(room, limit) for part, limit in LIMITS.items() for room in rooms_of(ROOT / part)]
    failed = False
    for paths, limit in rooms:
        found = measure(paths)
        above = found.per_thousand > limit
        failed = failed or above
        if above or known.paths:
            for number, text in sorted(found.lines, key=lambda line: -line[0])[: known.worst]:
                print(f"{number}  {text}")
        if above:
            print(
                f"{paths[0]}{' and the files beside it' * (len(paths) > 1)}: hard words must be at most "
                f"{limit} per 1,000, got {found.per_thousand:.1f}"
            )
        elif known.paths:
            print(f"{found.per_thousand:.1f} hard words per 1,000 of {found.num_words}")
    if not known.paths and not failed:
        print(f"plain English: {len(rooms)} rooms within their limits")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
