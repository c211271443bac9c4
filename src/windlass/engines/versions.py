"""Which release of an engine has what: for launchers, `windlass doctor` and the docs.

The tables are with the engines (`windlass.engines.vllm.spec`, `windlass.engines.sglang.spec`). Every bound
was read in the engine's own source. The adapters go on asking the server where an answer tells more than a
number does (a route that is not there); the table says beforehand, in words, what a release will do.
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
    """Something of an engine that updates or rollouts use.

    Attributes:
        since: the oldest release in which it was found.
        missing_in: the newest release in which it was looked for and not found; empty for none.
        without: what a release without it cannot do; empty if nothing is lost.
        needed: no release without it is started.
    """

    name: str
    since: Release
    missing_in: Release = ()
    without: str = ""
    needed: bool = False


@dataclass(frozen=True, slots=True)
class EngineReleases:
    """What is known of an engine.

    Attributes:
        package: its import name. distributions: under which it is installed.
        read: releases whose source was looked at.
        run: releases that were updated while they served -> where.
        features: in the order of the docs.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    read: tuple[Release, ...]
    run: dict[Release, str]
    features: tuple[Feature, ...]

    @property
    def proven(self) -> tuple[str, ...]:
        """Releases that were updated while they served, as they are written."""
        return tuple(map(_spelt, self.run))


def warnings_of(engine: EngineReleases, version: str, device: str = "") -> tuple[str, ...]:
    """Return what the table says of a release, a line each.

    `version`: as its package tells it. `device`: where it is to run, as `EngineReleases.run` says it; empty if that
    is not known.

    Raises:
        ConfigError: it lacks what updates need, or is older than all that were looked at.
    """
    release = _parsed(version)
    if not any(release):
        return (f"{engine.name} {version!r} is no release: what it has is not known",)
    for feature in engine.features:
        if feature.needed and release <= feature.missing_in:
            raise ConfigError(
                f"{engine.name} must be {_spelt(feature.since)} or later, got {version}, which has "
                f"no {feature.name}: {feature.without}"
            )
    if release < engine.read[0]:
        raise ConfigError(
            f"{engine.name} must be {_spelt(engine.read[0])} or later, got {version}: "
            f"nothing older was looked at"
        )
    warnings = [
        f"{engine.name} {version} has no {feature.name}: {feature.without}"
        for feature in engine.features
        if feature.without and not has(feature, version)
    ]
    shown = {where for run, where in engine.run.items() if release[: len(run)] == run}
    if not shown:
        warnings.append(
            f"{engine.name} {version} was never updated while it served; "
            f"{', '.join(engine.proven)} were"
        )
    elif device and device not in shown:
        others = [_spelt(run) for run, where in engine.run.items() if where == device]
        warnings.append(
            f"{engine.name} {version} was updated while it served on {' and '.join(shown)}, never on "
            f"{device}; there {', '.join(others) or 'none'} was"
        )
    return tuple(warnings)


def has(feature: Feature, version: str) -> bool:
    """Whether a release has it, or is not known not to."""
    release = _parsed(version)
    # Nobody looked at what is newer than the newest that is known not to have it.
    unseen = release[: len(feature.missing_in)] > feature.missing_in
    return not any(release) or release >= feature.since or unseen


def device_of(engine: EngineReleases) -> str:
    """Return what this environment's engine runs on here, as `EngineReleases.run` says it."""
    for_cpus = [name for name in engine.distributions if name.endswith("-cpu")]
    if any(map(_version_of, for_cpus)) or not Path("/dev/nvidiactl").exists():
        return "CPUs"
    return "GPUs"


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed_version(engine: EngineReleases) -> str:
    """Return this environment's; '' where it is not installed, 'unknown' for a package without metadata."""
    found = next(filter(None, map(_version_of, engine.distributions)), "")
    return found or ("" if importlib.util.find_spec(engine.package) is None else "unknown")


def check_installed(engine: EngineReleases) -> tuple[str, ...]:
    """Check what is installed, for a launcher, before anything starts; return what its user should know, a line each.

    Raises:
        ConfigError: it is not installed, or too old.
    """
    version = installed_version(engine)
    if not version:
        raise ConfigError(f"{engine.name} must be installed in the environment of {sys.executable}")
    return warnings_of(engine, version, device_of(engine))


def _parsed(version: str) -> Release:
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()


def _spelt(release: Release) -> str:
    return ".".join(map(str, release))
