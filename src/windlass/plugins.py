"""Parts that are found by name: built in, or an entry point of another distribution.

Engines, families of models, commands, transports and update backends are found so. Adding one to this
package is adding its file; adding one from outside is an entry point in the `pyproject.toml` of its
distribution:

    [project.entry-points."windlass.engines"]
    mine = "my_package.engine:ENGINE"

Names come from users of this machine, and what they stand for from distributions that are installed
on it: a peer's message never says what to import.
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
    """Named objects of one class. Nothing is imported before it is asked for.

    Attributes:
        noun: what errors call one of them.
        kind: their class.
        group: of entry points; each refers to an object.
        built_in: names of built-in ones, and where they are: "module:attribute".
        package: dotted name of a package whose modules (or subpackages) are built-in ones, each under
            its own name; names that begin with an underscore are left out.
        attribute: name of the object in a module of `package`.
        submodule: module of a built-in subpackage that holds it; empty where the module itself does.
            Subpackages without it are left out.
        unavailable: raised where one that there is cannot be imported.
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
        """Return the names of all, built-in ones first."""
        installed = entry_points(group=self.group).names
        return tuple(dict.fromkeys((*sorted(self._built_in()), *sorted(installed))))

    def find(self, name: str) -> T:
        """Return the object of a name.

        Raises:
            ConfigError: there is none of that name; or more than one; or a distribution's is of another
                class. Every distribution that is at fault is named.
            ConfigError, TransportUnavailable: it cannot be imported; see `unavailable`.
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
    """Return the distribution, as pip would list it."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
