"""Check house rules that ruff and mypy cannot check.

In `src`, a public signature must not have `**kwargs`, and code must not guess with `getattr(x, "literal")`. `make lint`
runs this script.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src"


def _violations(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.args.kwarg is not None and not node.name.startswith("_"):
                found.append(f"{path}:{node.lineno}: **kwargs in public {node.name}()")
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"getattr", "hasattr"}
            and len(node.args) >= 2
            and isinstance(node.args[1], ast.Constant)
        ):
            found.append(
                f"{path}:{node.lineno}: {node.func.id} with a literal name: type the object"
            )
    return found


def main() -> int:
    """Print every violation; return 1 if there is any."""
    found = [line for path in sorted(ROOT.rglob("*.py")) for line in _violations(path)]
    print("\n".join(found) if found else "house rules: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
