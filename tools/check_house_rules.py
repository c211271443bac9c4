"""House rules that ruff and mypy do not know.

In `src`: no `**kwargs` in a public signature, no `getattr(x, "literal")` guessing, no
module over 500 lines, no function over 80. Run by `make lint`.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MAX_LINES = 500
MAX_FUNCTION_LINES = 80
ROOT = Path(__file__).resolve().parent.parent / "src"


def _violations(path: Path) -> list[str]:
    source = path.read_text()
    found: list[str] = []
    num_lines = source.count("\n")
    if num_lines > MAX_LINES:
        found.append(
            f"{path}: {num_lines} lines, at most {MAX_LINES}: split it by reason to change"
        )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(
                    f"{path}:{node.lineno}: {node.name}() has {length} lines, at most "
                    f"{MAX_FUNCTION_LINES}"
                )
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
    """Print every violation; non-zero when there is one."""
    found = [line for path in sorted(ROOT.rglob("*.py")) for line in _violations(path)]
    print("\n".join(found) if found else "house rules: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
