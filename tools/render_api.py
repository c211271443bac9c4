"""Write docs/api.md, the list of public names, from the docstrings, and the site's pages with the full docstrings.

The script reads the sources as text and imports none of them.

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
    "windlass.transfer",
    "windlass.backends",
    "windlass.training",
    "windlass.jobs",
    "windlass.integrations.vllm",
    "windlass.integrations.trl",
    "windlass.integrations.areal",
    "windlass.layout",
    "windlass.planning",
    "windlass.cli",
    "windlass.testing",
)
INTRODUCTION = """# Public names

Import only names of these packages; all other modules are internal. Names are imported at their first use: `import windlass` loads
neither numpy nor a web server. The site of the documentation (`make docs`) and `help(NAME)` show arguments, units, ownership and
errors in full. `python tools/render_api.py` makes this page from the docstrings, and a test compares it with them.
"""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


def path_of(module: str) -> Path:
    """Return the file of a module or package."""
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(path_of(module).read_text())


def public_names(package: str) -> dict[str, str]:
    """Return the public names of a package and the modules that define them."""
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
    """Return the definition of a name in a module, and its docstring.

    Raises:
        KeyError: the module does not define the name.
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
    """Return the first paragraph in one line."""
    return " ".join(text.split("\n\n")[0].split())


def page() -> str:
    """Return docs/api.md: a section per package and a line per name."""
    lines = [INTRODUCTION]
    shown: dict[tuple[str, str], str] = {}
    for package in PACKAGES:
        said = paragraph((ast.get_docstring(tree_of(package)) or "").removeprefix("Windlass: "))
        lines += [f"## {package}", "", said[:1].upper() + said[1:], ""]
        known: list[str] = []
        rows: list[str] = []
        for name, module in public_names(package).items():
            if (module, name) in shown:
                known.append(f"`{name}` ({shown[module, name]})")
                continue
            shown[module, name] = package
            _, text = definition(module, name)
            if not text:
                raise ValueError(f"{module}.{name} has no docstring")
            rows.append(f"| `{name}` | {paragraph(text).replace('|', chr(92) + '|')} |")
        if rows:
            lines += ["| name | description |", "|---|---|", *rows, ""]
        if known:
            lines += [f"Also here: {', '.join(known)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def reference(package: str) -> str:
    """Return the site's page of a package. It shows names in full that no earlier package has."""
    before = PACKAGES[: PACKAGES.index(package)]
    seen = {(m, n) for each in before for n, m in public_names(each).items()}
    names = [f"::: {m}.{n}" for n, m in public_names(package).items() if (m, n) not in seen]
    return "\n\n".join([f"# {package}", *names]) + "\n"


def main() -> int:
    """Write the page, or with --check return 1 if it is outdated."""
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
