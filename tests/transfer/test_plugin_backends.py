"""Backends of other packages are found by name, described by traits and carried by messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints
from typing import cast

import pytest

from windlass import plugins
from windlass.config import (
    BACKENDS,
    BackendTraits,
    ControlConfig,
    DiskBackend,
    P2pBackend,
    PluginBackend,
    UpdateMode,
    XcclBackend,
    find_backend,
)
from windlass.control.connect_messages import ConnectEngine
from windlass.control.messages import CONTROLLER_FRAMES
from windlass.errors import ConfigError
from windlass.net.messages import Envelope, encode
from windlass.transfer.backends import Backend, receiver_for, sender_for
from windlass.transfer.base import ReceiverBackend, SenderBackend
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender

TRAITS = BackendTraits(collective=True, lands_live=False)
HALF = object()
asked: list[object] = []


def send(options: Mapping[str, object], sender: Sender, host: str) -> SenderBackend:
    asked.append(("send", options, sender, host))
    return cast("SenderBackend", HALF)


def receive(options: Mapping[str, object], receiver: Receiver, host: str) -> ReceiverBackend:
    asked.append(("receive", options, receiver, host))
    return cast("ReceiverBackend", HALF)


PIGEONS = Backend(traits=TRAITS, sender=send, receiver=receive)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = EntryPoints(
        EntryPoint(name, f"{__name__}:{what}", BACKENDS.group)
        for name, what in {"pigeons": "PIGEONS", "wrong": "HALF", "torn": "NOTHING"}.items()
    )
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: found.select(**wanted))
    find_backend.cache_clear()
    asked.clear()
    yield
    find_backend.cache_clear()


def test_a_registered_backend_states_its_traits_and_travels_to_both_halves() -> None:
    backend = PluginBackend("pigeons", {"lofts": 3})
    assert ControlConfig(backend=backend).backend.traits == TRAITS
    command = ConnectEngine(b"plan", "digest", UpdateMode.STAGED, backend)
    frame = CONTROLLER_FRAMES.decode(encode(Envelope(1, 2, 3, command)))
    assert isinstance(frame, Envelope)
    assert frame.command == command
    sender, receiver = cast("Sender", object()), cast("Receiver", object())
    halves: list[object] = [
        sender_for(backend, sender, "host"),
        receiver_for(backend, receiver, "host"),
    ]
    assert halves == [HALF, HALF]
    assert asked == [
        ("send", {"lofts": 3}, sender, "host"),
        ("receive", {"lofts": 3}, receiver, "host"),
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ravens", "must be one of pigeons, torn, wrong, or be added by"),
        ("wrong", "must be a windlass.config.RegisteredBackend"),
        ("torn", "NOTHING"),
    ],
)
def test_an_invalid_backend_is_refused_by_its_settings(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ControlConfig(backend=PluginBackend(name))


def test_built_in_backends_state_their_traits() -> None:
    assert P2pBackend().traits == BackendTraits(one_sided=True, catches_up=True, relays=True)
    assert XcclBackend().traits == BackendTraits(collective=True)
    assert DiskBackend(folder="/w").traits == BackendTraits(lands_live=False)
