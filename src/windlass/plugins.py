"""Parts that are found by name: a file of this package each, or an entry point of another distribution.

Engines, families of models and commands are found so. Adding one of them to this package is adding
its file; adding one from outside is an entry point in the `pyproject.toml` of its distribution:

    [project.entry-points."windlass.engines"]
    mine = "my_package.engine:ENGINE"
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Generic, TypeVar

from windlass.errors import ConfigError

__all__ = ["Registry"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Registry(Generic[T]):
    """Named objects of one class. Nothing is imported before it is asked for.

    Attributes:
        noun: what errors call one of them.
        kind: their class.
        package: dotted name of the package whose modules (or subpackages) are the built-in ones,
            each under its own name; names that begin with an underscore are left out.
        attribute: name of the object in a built-in module.
        submodule: module of a built-in subpackage that holds it; empty where the module itself does.
            Subpackages without it are left out.
        group: of entry points; each refers to an object.
    """

    noun: str
    kind: type[T]
    package: str
    attribute: str
    group: str
    submodule: str = ""

    def names(self) -> tuple[str, ...]:
        """Return the names of all, built-in ones first."""
        return tuple(
            dict.fromkeys((*self._built_in(), *sorted(entry_points(group=self.group).names)))
        )

    def find(self, name: str) -> T:
        """Return the object of a name.

        Raises:
            ConfigError: there is none of that name; or more than one; or a distribution's cannot be
                imported or is of another class. Every distribution that is at fault is named.
        """
        found = tuple(entry_points(group=self.group, name=name))
        built_in = self._module(name) if name in self._built_in() else ""
        owners = [*(["windlass"] if built_in else []), *map(_owner, found)]
        if not owners:
            raise ConfigError(
                f"{self.noun} must be one of {', '.join(self.names())}, or be added by the entry point "
                f"group {self.group}, got {name!r}"
            )
        if len(owners) > 1:
            raise ConfigError(
                f"{self.noun} {name!r} must be of one distribution, got {' and '.join(owners)}: "
                f"uninstall all but one"
            )
        if built_in:
            value: object = vars(importlib.import_module(built_in))[self.attribute]
        else:
            value = self._loaded(found[0])
        if not isinstance(value, self.kind):
            raise ConfigError(
                f"{self.noun} {name!r} of {owners[0]} must be a {self.kind.__module__}."
                f"{self.kind.__qualname__}, got {type(value).__name__}"
            )
        return value

    def _built_in(self) -> list[str]:
        modules = pkgutil.iter_modules(importlib.import_module(self.package).__path__)
        return sorted(
            module.name
            for module in modules
            if not module.name.startswith("_")
            and (not self.submodule or (module.ispkg and self._has(module.name)))
        )

    def _has(self, name: str) -> bool:
        return find_spec(self._module(name)) is not None

    def _module(self, name: str) -> str:
        return ".".join(filter(None, (self.package, name, self.submodule)))

    def _loaded(self, point: EntryPoint) -> object:
        try:
            loaded: object = point.load()
        except Exception as error:
            raise ConfigError(
                f"{self.noun} {point.name!r} of {_owner(point)} must be importable: {point.value}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return loaded


def _owner(point: EntryPoint) -> str:
    """The distribution, as pip would list it."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
