"""docs/api.md from the docstrings of every public name. Reads sources and imports nothing of them.

python tools/render_api.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "api.md"
PACKAGES = (
    "windlass",
    "windlass.trainers",
    "windlass.rollout",
    "windlass.engines",
    "windlass.transports",
    "windlass.jobs",
    "windlass.integrations.vllm",
    "windlass.integrations.trl",
    "windlass.layout",
    "windlass.planning",
    "windlass.cli",
    "windlass.testing",
)
INTRODUCTION = """# Public names

Everything that a script imports comes from one of these packages; every other module is internal. Names are imported when they
are first used: `import windlass` loads neither numpy nor a web server. `help(NAME)` has arguments, units, ownership
and errors in full. This page is made by `python tools/render_api.py` from the docstrings, and a test compares it with them.
"""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


def path_of(module: str) -> Path:
    """The file of a module or package."""
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree_of(module: str) -> ast.Module:
    """Its syntax."""
    return ast.parse(path_of(module).read_text())


def public_names(package: str) -> dict[str, str]:
    """The names that a package makes public, and the modules that define them."""
    homes: dict[str, str] = {}
    for node in tree_of(package).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                if isinstance(each, ast.ImportFrom) and each.module:
                    homes |= {alias.asname: each.module for alias in each.names if alias.asname}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            homes = {name: homes.get(name, package) for name in ast.literal_eval(node.value)}
    return dict(sorted(homes.items(), key=lambda item: item[0].lower()))


def definition(module: str, name: str) -> tuple[Definition, str]:
    """Where a name of a module is defined, and its docstring.

    Raises:
        KeyError: it is not defined there.
    """
    body = tree_of(module).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                return node, ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == name:
                said = after.value if isinstance(after, ast.Expr) else None
                text = said.value if isinstance(said, ast.Constant) else ""
                return node, inspect.cleandoc(text) if isinstance(text, str) else ""
    raise KeyError(f"{module}.{name}")


def paragraph(text: str) -> str:
    """The first one, in one line."""
    return " ".join(text.split("\n\n")[0].split())


def call(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool = False) -> str:
    """Arguments and result, as they are written."""
    arguments = ast.arguments(**{field: getattr(node.args, field) for field in node.args._fields})
    if bound and not any(ast.unparse(each) == "staticmethod" for each in node.decorator_list):
        arguments.args = arguments.args[1:]
    returned = (
        "" if node.name == "__init__" or not node.returns else f" -> {ast.unparse(node.returns)}"
    )
    return f"({ast.unparse(arguments)}){returned}"


def fields(module: str, node: ast.ClassDef) -> list[str]:
    """Of a dataclass or struct, with those of its bases."""
    found: list[str] = []
    imported = {
        alias.asname or alias.name: each.module
        for each in ast.walk(tree_of(module))
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("windlass")
        for alias in each.names
    }
    for base in map(ast.unparse, node.bases):
        home = imported.get(base) or module
        try:
            above, _ = definition(home, base)
        except KeyError:
            continue
        if isinstance(above, ast.ClassDef):
            found += fields(home, above)
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or ast.unparse(each.target).startswith("_"):
            continue
        if not ast.unparse(each.annotation).startswith("ClassVar"):
            found.append(ast.unparse(each))
    return found


def entry(module: str, name: str) -> list[str]:
    """One name: how it is written, its first paragraph, and what can be called on it."""
    node, text = definition(module, name)
    if not text:
        raise ValueError(f"{module}.{name} has no docstring")
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return [f"### `{name}`", "", paragraph(text), ""]
    if not isinstance(node, ast.ClassDef):
        prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        return [
            f"### `{name}`",
            "",
            "```text",
            f"{prefix}{name}{call(node)}",
            "```",
            "",
            paragraph(text),
            "",
        ]
    methods = {
        each.name: each
        for each in node.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    bases = [base for base in map(ast.unparse, node.bases) if not base.startswith("msgspec.")]
    if any(base.endswith("Enum") for base in bases):
        values = [ast.unparse(each) for each in node.body if isinstance(each, ast.Assign)]
        written = f"{name}: {', '.join(values)}"
    elif "__init__" in methods:
        written = name + call(methods["__init__"], bound=True)
    elif found := fields(module, node):
        written = f"{name}({', '.join(found)})"
    else:
        written = f"class {name}({', '.join(bases)})" if bases else f"class {name}"
    lines = [f"### `{name}`", "", "```text", written, "```", "", paragraph(text), ""]
    for called, method in methods.items():
        if called.startswith(("_", "test_")):
            continue
        shown = (
            called
            if any(ast.unparse(d) == "property" for d in method.decorator_list)
            else (called + call(method, bound=True))
        )
        said = paragraph(ast.get_docstring(method) or "")
        lines.append(f"- `{shown}`" + (f": {said}" if said else ""))
    return [*lines, ""] if lines[-1] else lines


def page() -> str:
    """All of it."""
    lines = [INTRODUCTION]
    shown: dict[tuple[str, str], str] = {}
    for package in PACKAGES:
        said = paragraph((ast.get_docstring(tree_of(package)) or "").removeprefix("Windlass: "))
        lines += [f"## {package}", "", said[:1].upper() + said[1:], ""]
        known: list[str] = []
        for name, module in public_names(package).items():
            if (module, name) in shown:
                known.append(f"`{name}` ({shown[module, name]})")
            else:
                shown[module, name] = package
                lines += entry(module, name)
        if known:
            lines += [f"Also here: {', '.join(known)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page, or say that it is not what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        print(f"{PAGE}: not what the docstrings give; run tools/render_api.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
