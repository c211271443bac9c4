"""Check four house rules, because ruff and mypy cannot check them.

In `src`, a public signature must not have `**kwargs`, code must not guess with `getattr(x, "literal")`, and the docstring of
a function must name the errors that the function raises. In `tests`, code must not use private names of our other
modules. `make lint` runs this script.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from windlass import errors

HOME = Path(__file__).resolve().parent.parent
OUR_PACKAGES = frozenset({"windlass", "tools", "benchmarks"})
FOREIGN_NAMES = frozenset(
    {
        # collections.namedtuple: its documentation lists this name as public.
        "_replace",
        # asyncio: the simulation runs and measures the callbacks of a loop.
        *("_context", "_run", "_protocol"),
        # aiohttp: the connection below a WebSocket, which the tests make deaf or cut.
        "_response",
        # torch: parts of a module or a DTensor for which it has no public name, and a kernel that takes time.
        *("_buffers", "_local_tensor", "_modules", "_sleep", "_spec"),
        # transformers, mbridge, TRL, verl, AReaL: the part of a framework that a test compares with or watches.
        *("_model_mapping", "_build_config", "_weight_to_hf_format", "_streaming_iter", "_version"),
    }
)
"""Private names of other packages that tests need. A module of another package may be imported and used freely."""
PROGRAMMING_ERRORS = frozenset({"AssertionError", "NotImplementedError", "StopIteration"})
"""Errors that no caller handles, so docstrings need not name them."""
REFERENCE = re.compile(r"\ASee `|\berrors,?\s+see\s+`")
"""Reference of a docstring to the text that lists the errors: "See `x`." as its first words, or "For the errors, see `x`."."""
PATCHES = frozenset({"getattr", "setattr", "hasattr", "delattr"})


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _violations(path: Path) -> list[str]:
    source = path.read_text()
    found = [
        f"{path}:{line}: {function}() raises {error}: name it in the docstring, under `Raises:`"
        for line, function, error in unlisted_errors(source)
    ]
    for node in ast.walk(ast.parse(source)):
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


def unlisted_errors(source: str) -> list[tuple[int, str, str]]:
    """Return the line, the function and the error for each error that a function raises and does not document.

    The docstring must name the error or one of its base classes, or refer to the text that lists the errors (`REFERENCE`).
    Functions without a docstring are not checked. An error that a handler of the same function catches is not raised.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if not text or REFERENCE.search(text):
                continue
            found += [
                (line, node.name, name)
                for line, name in _raised(node.body)
                if not any(re.search(rf"\b{each}\b", text) for each in _with_bases(name))
            ]
    return found


def _raised(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Yield the line and the class of each error that these statements construct, raise and do not catch."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name)) | ast.Name(id=name)) if (
                name[0].isupper() and name not in PROGRAMMING_ERRORS
            ):
                yield node.lineno, name
            case ast.Try(handlers=handlers, orelse=orelse, finalbody=finalbody, body=tried):
                caught = {name for each in handlers for name in _caught(each)}
                for line, name in _raised(tried):
                    if caught.isdisjoint({*_with_bases(name), "Exception", "BaseException"}):
                        yield line, name
                for handler in handlers:
                    yield from _raised(handler.body)
                yield from _raised(orelse + finalbody)
            case ast.Match(cases=cases):
                for case in cases:
                    yield from _raised(case.body)
            case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
                yield from _raised(node.body + node.orelse)
            case ast.With() | ast.AsyncWith():
                yield from _raised(node.body)
            case _:
                pass


def _caught(handler: ast.ExceptHandler) -> Iterator[str]:
    """Yield the names of the classes that a handler catches."""
    if handler.type is None:
        yield "BaseException"
        return
    for node in ast.walk(handler.type):
        if isinstance(node, ast.Name):
            yield node.id


def _with_bases(name: str) -> Iterator[str]:
    """Yield the name of an error and the names of its base classes, except Exception."""
    known = vars(errors).get(name) or vars(builtins).get(name)
    yield name
    for base in known.__mro__ if isinstance(known, type) else ():
        if base not in {Exception, BaseException, object}:
            yield base.__name__


def private_uses(source: str) -> list[tuple[int, str]]:
    """Return the line and the name of each use of a private name of our other modules in the text of a test.

    Three kinds of private names are allowed: names that the text defines, names after `self` or `cls` (a test may derive
    from our classes), and names of other packages.
    """
    tree = ast.parse(source)
    allowed, foreign = set(FOREIGN_NAMES), set[str]()
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                allowed.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                allowed.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                allowed.add(name)
            case ast.Import(names=names):
                foreign |= {_bound(each) for each in names if not _is_ours(each.name)}
            case ast.ImportFrom(module=str(module), names=names) if not _is_ours(module):
                foreign |= {_bound(each) for each in names}
    return sorted(
        (line, name)
        for node in ast.walk(tree)
        for line, name in _uses(node, foreign)
        if _is_private(name) and name not in allowed
    )


def _uses(node: ast.AST, foreign: set[str]) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Attribute(attr=name, value=value) if _root(value) not in foreign | {
            "self",
            "cls",
            "super",
        }:
            yield node.lineno, name
        case ast.Attribute(attr=name, value=ast.Attribute() as value) if _root(value) in {
            "self",
            "cls",
        }:
            yield node.lineno, name
        case ast.ImportFrom(module=str(module), names=names) if _is_ours(module):
            for each in names:
                yield node.lineno, each.name
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=given) if (
            called in PATCHES
        ):
            for argument in given[:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    for name in argument.value.split("."):
                        yield node.lineno, name


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in OUR_PACKAGES


def _bound(name: ast.alias) -> str:
    """Return the name in the file to which an import gives the value."""
    return (name.asname or name.name).split(".")[0]


def _root(value: ast.expr) -> str:
    """Return the first name of an expression such as `a.b().c`; '' if it begins with something else."""
    while isinstance(value, ast.Attribute | ast.Call):
        value = value.value if isinstance(value, ast.Attribute) else value.func
    return value.id if isinstance(value, ast.Name) else ""


def _violations_of_test(path: Path) -> list[str]:
    why = "test what users or other modules call, or give the name a docstring and no underscore"
    return [
        f"{path}:{line}: private {used} of another module: {why}"
        for line, used in private_uses(path.read_text())
    ]


def main() -> int:
    """Print every violation; return 1 if there is any."""
    found = [line for path in sorted((HOME / "src").rglob("*.py")) for line in _violations(path)]
    tests = sorted((HOME / "tests").rglob("*.py"))
    found += [line for path in tests for line in _violations_of_test(path)]
    print("\n".join(found) if found else "house rules: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
