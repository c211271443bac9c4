"""A transport is found by its name, its configuration and its installed packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import ClassVar

import pytest

from windlass import plugins
from windlass.errors import ConfigError, TransportUnavailable
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import (
    TRANSPORTS,
    TransportConfig,
    config_type,
    parse_transport,
    transport_names,
)


class NotItsName(TransportConfig, frozen=True, tag="other"):
    """A configuration with another tag than its entry point."""


class Named(TransportConfig, frozen=True, tag="named"):
    """A correct configuration."""

    speed: int = 1
    is_automatic: ClassVar[bool] = False


def install(monkeypatch: pytest.MonkeyPatch, **places: str) -> None:
    points = [EntryPoint(name, place, TRANSPORTS.group) for name, place in places.items()]
    found = EntryPoints(points)
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: found.select(**wanted))


def test_every_name_leads_to_the_configuration_of_that_name() -> None:
    assert {"auto", "cma", "shm", "mooncake", "cuda_ipc", "nixl"} <= set(transport_names())
    for name in transport_names():
        assert parse_transport(name).name == name
    with pytest.raises(ConfigError, match=r"must be one of auto, cma, .* got 'tcp'"):
        parse_transport("tcp")


def test_a_transport_may_be_given_with_its_settings() -> None:
    assert parse_transport('{"type": "cma", "num_threads": 3}') == CmaConfig(num_threads=3)
    for wrong in ('{"type": "tcp"}', '{"type": "cma", "threads": 3}', "{", '{"num_threads": 3}'):
        with pytest.raises(ConfigError):
            parse_transport(wrong)


def test_an_entry_point_adds_a_name_and_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, named=f"{__name__}:Named")
    assert "named" in transport_names()
    assert parse_transport('{"type": "named", "speed": 3}') == Named(speed=3)


def test_a_wrong_entry_point_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = __name__
    install(monkeypatch, wrong=f"{here}:NotItsName", cma=f"{here}:Named", number=f"{here}:install")
    with pytest.raises(ConfigError, match="its tag must be 'wrong', got 'other'"):
        config_type("wrong")
    with pytest.raises(ConfigError, match="must be a TransportConfig"):
        config_type("number")
    with pytest.raises(ConfigError, match="'cma' must be defined by one distribution"):
        config_type("cma")


def test_a_package_that_cannot_be_imported_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken="no_such_module_anywhere:Config")
    with pytest.raises(TransportUnavailable, match=r"'broken' .*must be importable"):
        config_type("broken")
