"""What a machine may lack: the test that needs it is skipped, and says what is missing."""

from __future__ import annotations

import importlib.util

import pytest

from windlass.errors import TransportUnavailable
from windlass.transports.registry import create_transport, parse_transport

__all__ = ["need_package", "need_transport"]


def need_package(name: str) -> None:
    """Skip the module that is collected if the package is not installed; it is not imported, which may take seconds."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)


def need_transport(name: str) -> None:
    """Skip the test that runs if the transport of this name does not start here."""
    try:
        create_transport(parse_transport(name)).close()
    except TransportUnavailable as error:
        pytest.skip(str(error))
