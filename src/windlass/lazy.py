"""Public names that are imported when they are first used.

A process that only moves bytes then needs no web server, and one that describes a layout no torch.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Callable
from importlib import import_module

_IMPORT = re.compile(r"^    from ([\w.]+) import (\w+) as \2$", re.MULTILINE)


def public(package: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Make a package's `__all__`, `__getattr__` and `__dir__` (PEP 562) from what it imports for type checkers.

    That is every `from MODULE import NAME as NAME` in its own file, under `if TYPE_CHECKING:`. So does
    scientific-python/lazy-loader (`attach_stub`) with a stub file.

    Args:
        package: `__name__` of the package, whose file is there as source.
    """
    source = pkgutil.get_data(package, "__init__.py") or b""
    homes = {name: module for module, name in _IMPORT.findall(source.decode())}

    def find(name: str) -> object:
        """Import a public name.

        Raises:
            AttributeError: there is no such name.
        """
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = vars(import_module(homes[name]))[name]
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        """With the names that are not imported yet."""
        return sorted({*vars(sys.modules[package]), *homes})

    return sorted(homes), find, names
