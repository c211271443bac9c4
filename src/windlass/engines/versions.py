"""Features of engine releases, for launchers, `windlass doctor` and the docs.

`windlass.engines.vllm.spec` and `windlass.engines.sglang.spec` contain one table each. We took every release number
in a table from the engine's source code. Launchers use the tables to warn users before an engine starts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import ConfigError

Release = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of an engine that updates or rollouts use.

    Attributes:
        since: oldest release that is known to have the feature.
        missing_in: newest release that is known to lack the feature; empty if no such release is known.
        without: consequence for users if a release lacks the feature; empty if there is none.
        needed: whether to refuse a release that lacks the feature.
    """

    name: str
    since: Release
    missing_in: Release = ()
    without: str = ""
    needed: bool = False


@dataclass(frozen=True, slots=True)
class EngineReleases:
    """Known releases of an engine.

    Attributes:
        package: import name of the engine.
        distributions: names of the distributions that install the package.
        read: releases whose source code we have read for this table, the oldest first.
        run: release that our tests have updated in live servers -> kind of device of these tests ("CPUs" or "GPUs").
        features: features in the order of the docs.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    read: tuple[Release, ...]
    run: dict[Release, str]
    features: tuple[Feature, ...]

    @property
    def proven(self) -> tuple[str, ...]:
        """Releases in `run`, as text."""
        return tuple(map(_spelt, self.run))


def warnings_of(engine: EngineReleases, version: str, device: str = "") -> tuple[str, ...]:
    """Return warnings about a release of an engine, one line each.

    Args:
        engine: features and tested releases of the engine.
        version: version of the engine's installed package.
        device: "CPUs" or "GPUs", where the engine will run; empty if unknown.

    Raises:
        ConfigError: the release lacks a needed feature, or it is older than the oldest release in `engine.read`.
    """
    release = _parsed(version)
    if not any(release):
        return (f"{engine.name} {version!r} is no release: its features are not known",)
    for feature in engine.features:
        if feature.needed and release <= feature.missing_in:
            raise ConfigError(
                f"{engine.name} must be {_spelt(feature.since)} or later, got {version}, which has "
                f"no {feature.name}: {feature.without}"
            )
    if release < engine.read[0]:
        raise ConfigError(
            f"{engine.name} must be {_spelt(engine.read[0])} or later, got {version}: "
            f"older releases were not checked"
        )
    warnings = [
        f"{engine.name} {version} has no {feature.name}: {feature.without}"
        for feature in engine.features
        if feature.without and not has(feature, version)
    ]
    shown = {where for run, where in engine.run.items() if release[: len(run)] == run}
    if not shown:
        warnings.append(
            f"{engine.name} {version}: updates of this release were never tested; tested releases: "
            f"{', '.join(engine.proven)}"
        )
    elif device and device not in shown:
        others = [_spelt(run) for run, where in engine.run.items() if where == device]
        warnings.append(
            f"{engine.name} {version}: updates of this release were tested on {' and '.join(shown)}, never on "
            f"{device}; releases tested on {device}: {', '.join(others) or 'none'}"
        )
    return tuple(warnings)


def has(feature: Feature, version: str) -> bool:
    """Return False if a release is known to lack the feature, True if it has or may have the feature."""
    release = _parsed(version)
    # Releases between `missing_in` and `since` were not checked and may have the feature.
    unseen = release[: len(feature.missing_in)] > feature.missing_in
    return not any(release) or release >= feature.since or unseen


def device_of(engine: EngineReleases) -> str:
    """Return "CPUs" or "GPUs", the kind of device that the installed engine uses on this host."""
    for_cpus = [name for name in engine.distributions if name.endswith("-cpu")]
    if any(map(_version_of, for_cpus)) or not Path("/dev/nvidiactl").exists():
        return "CPUs"
    return "GPUs"


def _version_of(distribution: str) -> str:
    """Return the version of an installed distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed_version(engine: EngineReleases) -> str:
    """Return the engine's installed version: '' if not installed, 'unknown' for a package without metadata."""
    found = next(filter(None, map(_version_of, engine.distributions)), "")
    return found or ("" if importlib.util.find_spec(engine.package) is None else "unknown")


def check_installed(engine: EngineReleases) -> tuple[str, ...]:
    """Check the installed engine before a launcher starts it, and return warnings for the user, one line each.

    Raises:
        ConfigError: the engine is not installed, or its release is too old.
    """
    version = installed_version(engine)
    if not version:
        raise ConfigError(f"{engine.name} must be installed in the environment of {sys.executable}")
    return warnings_of(engine, version, device_of(engine))


def _parsed(version: str) -> Release:
    """Return the numbers at the start of a version, such as (0, 24) for `0.24rc1`; empty if there are none."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()


def _spelt(release: Release) -> str:
    """Return a release as text, for example "0.24.0"."""
    return ".".join(map(str, release))
