"""Registries that find parts by name: built-in parts, and entry points of other distributions.

Engines, families of models, commands, transports and update backends are found in this way. To add a built-in part,
add its file to this package. To add a part from another distribution, add an entry point to its `pyproject.toml`:

    [project.entry-points."windlass.engines"]
    mine = "my_package.engine:ENGINE"

Users of this machine give the names, and installed distributions define the objects. A message of a peer never
decides which module is imported.
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
    """Named objects of one class. `find` imports an object at its first use.

    Attributes:
        noun: noun for one of the objects in errors.
        kind: class of the objects.
        group: entry point group. Each entry point refers to one object.
        built_in: name of a built-in object -> its location, "module:attribute".
        package: dotted name of a package. Each of its modules (or subpackages) defines one built-in object, under
            the name of the module. Modules with a leading underscore are ignored.
        attribute: name of the object in each module of `package`.
        submodule: module of a subpackage that defines the object; empty if the modules of `package` define it.
            Subpackages without this module are ignored.
        unavailable: error class for an object that exists and cannot be imported.
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
        """Return the names of all objects, built-in objects first."""
        installed = entry_points(group=self.group).names
        return tuple(dict.fromkeys((*sorted(self._built_in()), *sorted(installed))))

    def find(self, name: str) -> T:
        """Return the object with this name.

        Raises:
            ConfigError: no object or more than one has this name, or the object is not an instance of `kind`. The
                error names the distributions.
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
                f"{self.noun} {name!r} must be of one distribution, got {' and '.join(owners)}: "
                f"uninstall all but one"
            )
        try:
            value: object = found[0].load()
        except Exception as error:
            raise self.unavailable(
                f"{self.noun} {name!r} of {owners[0]} must be importable: {found[0].value}: "
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
