"""Registries of objects by name: objects of Windlass, and objects that other distributions add by entry points.

There are registries of engines, model families, commands, transports and update backends. Another distribution adds an
object by an entry point in its `pyproject.toml`:

    [project.entry-points."windlass.engines"]
    mine = "my_package.engine:ENGINE"

Names come from this machine's users and configuration. A message of a peer never causes the import of a module.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Generic, TypeVar

from windlass.errors import ConfigError, TransportUnavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry(Generic[T]):
    """Named objects of one class. `find` imports an object when it is first used.

    Attributes:
        noun: noun for one object in error messages.
        kind: class of the objects.
        group: entry point group; each entry point refers to one object.
        built_in: name of an object of Windlass -> its location, "module:attribute".
        package: dotted name of a package. Each of its modules (or subpackages) defines one object with the module's
            name. Modules with a leading underscore are ignored. Empty to use `built_in`.
        attribute: name of the variable that contains the object in each module of `package`.
        submodule: name of the module in each subpackage of `package` that defines the object. Subpackages without such
            a module are ignored. Empty if the modules of `package` themselves define the objects.
        unavailable: class of the error if an object cannot be imported.
    """

    noun: str
    kind: type[T]
    group: str
    built_in: Mapping[str, str] = field(default_factory=dict)
    package: str = ""
    attribute: str = ""
    submodule: str = ""
    unavailable: type[ConfigError | TransportUnavailable] = ConfigError

    def names(self) -> tuple[str, ...]:
        """Return the names of all objects, Windlass's own first."""
        installed = entry_points(group=self.group).names
        return tuple(dict.fromkeys((*sorted(self._built_in()), *sorted(installed))))

    def find(self, name: str) -> T:
        """Return the object with this name.

        Raises:
            ConfigError: no object has this name, several distributions define it, or the object is not an instance of
                `kind`.
            ConfigError, TransportUnavailable: the object cannot be imported; see `unavailable`.
        """
        built_in = self._built_in().get(name, "")
        found = [EntryPoint(name, built_in, self.group)] if built_in else []
        owners = ["windlass"] if built_in else []
        for point in entry_points(group=self.group, name=name):
            found.append(point)
            owners.append(_owner(point))
        if not found:
            raise ConfigError(
                f"{self.noun} must be one of {', '.join(self.names()) or 'none'}, or be added by the "
                f"entry point group {self.group}, got {name!r}"
            )
        if len(owners) > 1:
            raise ConfigError(
                f"{self.noun} {name!r} must be defined by one distribution, got {' and '.join(owners)}: "
                f"uninstall all but one"
            )
        try:
            value: object = found[0].load()
        except Exception as error:
            raise self.unavailable(
                f"{self.noun} {name!r} of {owners[0]} must be importable, but {found[0].value} raised "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(value, self.kind):
            raise ConfigError(
                f"{self.noun} {name!r} of {owners[0]} must be a {self.kind.__module__}."
                f"{self.kind.__qualname__}, got {type(value).__name__}"
            )
        return value

    def _built_in(self) -> Mapping[str, str]:
        if not self.package:
            return self.built_in
        found = {}
        for module in pkgutil.iter_modules(importlib.import_module(self.package).__path__):
            place = ".".join(filter(None, (self.package, module.name, self.submodule)))
            is_one = not self.submodule or (module.ispkg and find_spec(place) is not None)
            if is_one and not module.name.startswith("_"):
                found[module.name] = f"{place}:{self.attribute}"
        return found


def _owner(point: EntryPoint) -> str:
    """Return name and version of the distribution that defines an entry point."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
