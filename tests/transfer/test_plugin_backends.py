"""Backends are found by name, made from their options, and named by messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints
from typing import cast

import pytest
from memory_transport import MemoryFabric, MemoryTransport

from windlass import plugins
from windlass.backends.disk import Disk
from windlass.backends.p2p import P2p
from windlass.backends.relay import RelayingReceiver, RelayingSender
from windlass.backends.xccl import Xccl
from windlass.config import (
    BACKENDS,
    BackendEntry,
    ControlConfig,
    DiskBackend,
    P2pBackend,
    PluginBackend,
    RelayShape,
    UpdateMode,
    XcclBackend,
    find_backend,
)
from windlass.control.backend import Backend, backend_of, carry_out
from windlass.control.connect_messages import ConnectEngine
from windlass.control.messages import (
    AGENT_FRAMES,
    CONTROLLER_FRAMES,
    Command,
    PluginCommand,
    PluginResult,
    Result,
)
from windlass.errors import ConfigError, ProtocolError
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.net.messages import Envelope, Reply, RoundId, encode
from windlass.transfer.base import RankReceiver, RankSender, SenderBackend
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender

ROUND = RoundId(1, 2)


class Loft:
    """Half of a backend that has a command of its own."""

    def carry_out(self, command: Command, round_id: RoundId) -> Result | None:
        assert isinstance(command, PluginCommand)
        return PluginResult(command.body[::-1])


class Pigeons(Backend):
    """Backend with a sender half of its own."""

    def __init__(self, options: Mapping[str, object]) -> None:
        if set(options) != {"lofts"}:
            raise ConfigError(f"pigeons: options must be lofts, got {sorted(options)}")
        self.lofts = options["lofts"]

    def sender(self, sender: RankSender, host: str) -> SenderBackend:
        return cast("SenderBackend", Loft())


PIGEONS = BackendEntry(Pigeons)
HALF = object()
EMPTY = BackendEntry(lambda _: HALF)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    objects = {"pigeons": "PIGEONS", "wrong": "HALF", "torn": "NOTHING", "empty": "EMPTY"}
    found = EntryPoints(
        EntryPoint(name, f"{__name__}:{what}", BACKENDS.group) for name, what in objects.items()
    )
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: found.select(**wanted))
    find_backend.cache_clear()
    yield
    find_backend.cache_clear()


def test_a_backend_of_another_package_travels_by_name_and_makes_its_halves() -> None:
    config = ControlConfig(backend=PluginBackend("pigeons", {"lofts": 3})).backend
    command = ConnectEngine(b"plan", "digest", UpdateMode.STAGED, config)
    frame = CONTROLLER_FRAMES.decode(encode(Envelope(1, 2, 3, command)))
    assert isinstance(frame, Envelope)
    assert frame.command == command
    backend = backend_of(config)
    assert isinstance(backend, Pigeons)
    assert backend.lofts == 3
    assert isinstance(backend.sender(cast("RankSender", HALF), "host"), Loft)
    receiver = cast("RankReceiver", HALF)
    assert backend.receiver(receiver, "host") is receiver


def test_a_backend_of_another_package_has_commands_of_its_own() -> None:
    command = PluginCommand(b"coo")
    frame = CONTROLLER_FRAMES.decode(encode(Envelope(1, 2, 3, command)))
    assert isinstance(frame, Envelope)
    assert frame.command == command
    result = carry_out(Loft(), command, ROUND)
    assert result == PluginResult(b"ooc")
    assert result is not None
    reply = Reply(1, 2, 3, result)
    assert AGENT_FRAMES.decode(encode(reply)) == reply
    with pytest.raises(ProtocolError, match="object cannot carry out PluginCommand"):
        carry_out(HALF, command, ROUND)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "ravens",
            "must be one of disk, p2p, push, xccl, empty, pigeons, torn, wrong, or be added by",
        ),
        ("wrong", "must be a windlass.config.BackendEntry"),
        ("torn", "NOTHING"),
        ("pigeons", "options must be lofts"),
    ],
)
def test_an_invalid_backend_is_refused_by_its_settings(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ControlConfig(backend=PluginBackend(name))


def test_an_entry_must_make_a_backend() -> None:
    with pytest.raises(ConfigError, match="backend 'empty' must make a Backend, got <object"):
        backend_of(PluginBackend("empty"))


def test_built_in_backends_are_entries_of_the_registry() -> None:
    assert isinstance(backend_of(P2pBackend()), P2p)
    assert isinstance(backend_of(XcclBackend()), Xccl)
    assert isinstance(backend_of(DiskBackend(folder="/w")), Disk)
    assert [
        bool(backend_of(b).refuse_replica())
        for b in (P2pBackend(), XcclBackend(), DiskBackend(folder="/w"))
    ] == [False, True, True]


def test_ranks_relay_only_if_the_setting_says_so() -> None:
    manifest = ManifestBuilder("a/0", Role.ENGINE).build()
    transport = MemoryTransport(MemoryFabric())
    sender, receiver = Sender(transport, manifest, tuple), Receiver(transport, manifest, (), ())
    plain, chain = backend_of(P2pBackend()), backend_of(P2pBackend(relay=RelayShape.CHAIN))
    assert plain.sender(sender, "") is sender
    assert plain.receiver(receiver, "") is receiver
    assert isinstance(chain.receiver(receiver, ""), RelayingReceiver)
    assert isinstance(chain.sender(sender, ""), RelayingSender)
    sender.close()
