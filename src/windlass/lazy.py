"""Public names that are imported when they are first used.

A process that only moves bytes then needs no web server, and one that describes a layout no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def public(
    package: str, modules: Mapping[str, str]
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Make a package's `__all__`, `__getattr__` and `__dir__` (PEP 562) from one table.

    Args:
        package: `__name__` of the package.
        modules: by dotted name of a module, the names that it defines, with spaces between them.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

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
