"""Check command lines of scripts: `python parse_options.py`, argument lists as JSON on stdin.

Each script runs until it has parsed its command line. Print the errors as JSON, empty for a
command line that its script understands. Packages of `ABSENT` are mocked if they are not
installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import io
import json
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import MagicMock

ABSENT = {"checkpoint_engine", "vllm", "sglang", "areal", "trl", "datasets", "nccl", "cupy"}


parse_known_args = argparse.ArgumentParser.parse_known_args


class Parsed(BaseException):
    """Signal that a script understood its options; it ends the script."""


class StandIns:
    """Finder for packages that are not installed."""

    @staticmethod
    def find_spec(
        name: str, _path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, StandIns, is_package=True)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(_spec: object) -> types.ModuleType:
        module: types.ModuleType = MagicMock()
        return module

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        return


def only_parse(
    parser: argparse.ArgumentParser,
    args: Sequence[str] | None = None,
    namespace: argparse.Namespace | None = None,
) -> argparse.Namespace:
    """Parse the options, then raise `Parsed`; replaces `parse_args`."""
    _, rest = parser.parse_known_args(args, namespace)
    parser.error(f"unrecognized arguments: {rest}")


def only_parse_known(
    parser: argparse.ArgumentParser,
    args: Sequence[str] | None = None,
    namespace: argparse.Namespace | None = None,
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options, then raise `Parsed` if all are known; replaces `parse_known_args`."""
    # Parsers of sub-commands must return to their parser.
    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    try:
        found, rest = parse_known_args(parser, args, namespace)
    finally:
        argparse.ArgumentParser.parse_known_args = only_parse_known  # type: ignore[assignment, method-assign]
    if rest:
        return found, rest
    raise Parsed


def problem_of(argv: Sequence[str]) -> str:
    """Return the error of a script, or of `-m` and a module, with its arguments."""
    said, path = io.StringIO(), list(sys.path)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            if argv[0] == "-m":
                sys.argv = list(argv[1:])
                runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(argv)
                sys.path.insert(0, str(Path(argv[0]).resolve().parent))
                runpy.run_path(argv[0], run_name="__main__")
    except Parsed:
        return ""
    except SystemExit as error:
        if argv[-1] == "--help" and not error.code:
            return ""
        return f"ended with {error.code}: {said.getvalue()[-500:]}"
    except Exception as error:  # noqa: BLE001 - whatever a script raises is told of it
        return f"{type(error).__name__}: {error}"
    finally:
        sys.path[:] = path
    return "ran to its end, and parsed no options"


if __name__ == "__main__":
    sys.meta_path.append(StandIns)
    argparse.ArgumentParser.parse_args = only_parse  # type: ignore[assignment, method-assign]
    argparse.ArgumentParser.parse_known_args = only_parse_known  # type: ignore[assignment, method-assign]
    print(json.dumps([problem_of(argv) for argv in json.load(sys.stdin)]))
