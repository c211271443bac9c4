"""Import of a package's public names at their first use.

A process that uses no name that needs torch, for example, then does not import torch.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Callable
from importlib import import_module

_IMPORT = re.compile(r"^    from ([\w.]+) import (\w+) as \2$", re.MULTILINE)


def public(package: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` (PEP 562) of a package.

    Each line `from MODULE import NAME as NAME` under `if TYPE_CHECKING:` in the package's `__init__.py` defines a public
    name. `attach_stub` of scientific-python/lazy-loader reads a stub file in the same way.

    Args:
        package: `__name__` of the package. The source of its `__init__.py` must be installed.
    """
    source = pkgutil.get_data(package, "__init__.py") or b""
    homes = {name: module for module, name in _IMPORT.findall(source.decode())}

    def find(name: str) -> object:
        """Import a public name.

        Raises:
            AttributeError: the package has no public name `name`.
        """
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = vars(import_module(homes[name]))[name]
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        """Return the names in the package, including public names that are not imported yet."""
        return sorted({*vars(sys.modules[package]), *homes})

    return sorted(homes), find, names
