"""Commands on the pages parse, code compiles, and all names in it exist."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import PAGES, blocks, tree_of

import windlass
from windlass.cli import COMMANDS, Command
from windlass.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"accelerate", "areal", "trl", "vllm"}
"""Frameworks in separate environments: `make test-integrations` runs the code of their pages."""
PLACEHOLDERS = re.compile(r"\s*\[(?:SUITE \.\.\.|[^\[\]]*options)\]|\.\.\.$")


def check_imports(tree: ast.Module) -> dict[str, object]:
    found: dict[str, object] = {"windlass": windlass}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("windlass"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                # This import takes seconds and prints warnings.
                if "megatron" in alias.name:
                    continue
                assert alias.name in dir(module), f"{node.module} has no {alias.name}"
                try:
                    found[alias.asname or alias.name] = getattr(module, alias.name)
                except ModuleNotFoundError as error:
                    if error.name not in FRAMEWORKS:
                        raise
    return found


def target(node: ast.expr, known: dict[str, object]) -> object | None:
    """Return the object of Windlass that an expression names, or None."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "windlass":
        return None
    assert hasattr(windlass, node.attr), f"windlass has no {node.attr}"
    value: object = vars(windlass)[node.attr]
    return value


def check_calls(tree: ast.Module, known: dict[str, object]) -> int:
    """Check that calls of names of Windlass fit their signatures, and return the number of calls."""
    count = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (called := target(node.func, known)) is None:
            continue
        if not callable(called):
            continue
        keywords = {k.arg: None for k in node.keywords if k.arg is not None}
        inspect.signature(called).bind(*node.args, **keywords)
        count += 1
    return count


def test_no_row_of_a_table_is_a_paragraph_and_the_readme_is_short() -> None:
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 250
    ]
    assert not long
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_a_page_names_existing_objects(page: Path) -> None:
    for code in blocks(page):
        tree = tree_of(code)
        check_calls(tree, check_imports(tree))


def test_pages_name_existing_public_names_and_files() -> None:
    """Check running text and the examples' own descriptions as well."""
    names = 0
    for text in [*PAGES, *ROOT.glob("examples/**/*.py")]:
        for name in re.findall(r"\bwindlass\.([A-Z]\w+)", text.read_text()):
            assert hasattr(windlass, name), f"{text.name}: windlass.{name}"
            names += 1
    assert names >= 20
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "docs/architecture.md"):
        for path in re.findall(r"`([\w/]+/[\w*]+\.py)`", page.read_text()):
            places = (ROOT, ROOT / "src/windlass")
            assert any(list(place.glob(path)) for place in places), f"{page.name}: {path}"


def test_pages_contain_code_blocks_to_check() -> None:
    found = [(tree, check_imports(tree)) for page in PAGES for tree in map(tree_of, blocks(page))]
    assert len(found) >= 15
    assert sum(check_calls(tree, known) for tree, known in found) >= 20


def commands(program: str) -> Iterator[tuple[Path, str]]:
    """Yield the command lines that begin with `program`, from blocks and running text."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        inline = re.findall(rf"(?<!`)`({program} [^`]+)`", text)
        blocked = re.findall(rf"^    ({program} .+)$", text, re.MULTILINE)
        for line in [*inline, *blocked]:
            yield page, PLACEHOLDERS.sub("", re.split(r"  +#|  {3,}", line)[0].replace("\n", " "))


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=command, exit_on_error=False)
    COMMANDS.find(command).add_arguments(parser)
    return parser


def test_every_command_and_option_on_a_page_exists() -> None:
    count = 0
    for page, line in commands("windlass"):
        words = shlex.split(line.replace("|", "_"))[1:]
        if not re.fullmatch(r"[a-z]+", words[0]):
            continue
        assert words[0] in COMMANDS.names(), f"{page.name}: {line}"
        # Words after `--` are options of an engine.
        own = words[1 : words.index("--")] if "--" in words else words[1:]
        given = {w.split("=")[0] for w in own if w.startswith("--")}
        there = set(re.findall(r"--[\w-]+", parser_of(words[0]).format_help()))
        assert given <= there, f"{page.name}: {line}: {given - there}"
        count += 1
    assert count >= 10


def test_every_target_and_file_that_a_page_starts_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [(page, line.split()[1]) for page, line in commands("make")]
    assert len(named) >= 10
    for page, name in named:
        assert re.sub(r"\W+$", "", name) in targets, f"{page.name}: make {name}"
    for page in PAGES:
        for file in re.findall(
            r"(?<!tests/)(?:examples|benchmarks|tools)/[\w/.-]+\.(?:py|toml|sh)", page.read_text()
        ):
            assert (ROOT / file).exists(), f"{page.name}: {file}"
        for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize(("name", "extra"), [("doctor", "embedded"), ("demo", "demo")])
def test_a_command_names_the_missing_package_and_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, extra: str
) -> None:
    def missing(_args: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'torch'", name="torch.distributed")

    command = Command("", lambda _parser: None, missing)
    monkeypatch.setattr(f"windlass.cli.commands.{name}.COMMAND", command)
    assert cli.main([name]) == 2
    assert "needs torch.distributed, " in (said := capsys.readouterr().err)
    assert said.endswith(
        f"\nnext: `pip install '.[{extra}]'` in the folder of Windlass's sources\n"
    )
    assert said.count("\n") == 2
