"""Requirements of tests: a test is skipped, with the reason, on a machine that lacks one."""

from __future__ import annotations

import importlib.util

import pytest

from windlass.errors import TransportUnavailable
from windlass.transports.registry import create_transport, parse_transport

__all__ = ["need_package", "need_transport"]


def need_package(name: str) -> None:
    """Skip the collected module if the package is not installed; do not import the package, which
    may take seconds."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)


def need_transport(name: str) -> None:
    """Skip the running test if the transport of this name does not start here."""
    try:
        create_transport(parse_transport(name)).close()
    except TransportUnavailable as error:
        pytest.skip(str(error))
