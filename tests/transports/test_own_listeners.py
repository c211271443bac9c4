"""The listening sockets of Mooncake's engine are found while other transports of the process start."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from windlass.transports.liveness import listen_on
from windlass.transports.mooncake import native as mooncake_native
from windlass.transports.mooncake.native import WITHOUT_CUDA, MooncakeProtocol
from windlass.transports.nixl import native as nixl_native
from windlass.transports.nixl.native import NixlWire

HOST = "127.0.0.1"
STARTS_S = 0.5


def agent_listens(_name: str, _wire: NixlWire, _device: str) -> socket.socket:
    """Replace NIXL's agent and the socket on which its library listens."""
    return socket.create_server((HOST, 0))


def only_without_cuda(distribution: str) -> str:
    """Replace the version of an installed package: one distribution of Mooncake is installed."""
    if distribution != WITHOUT_CUDA:
        raise PackageNotFoundError(distribution)
    return "0.3.12.post1"


@pytest.mark.parametrize(
    "start",
    [
        lambda: listen_on(HOST, "another"),
        lambda: nixl_native.start_agent("agent", NixlWire.AUTO, "", -1)[0],
    ],
    ids=["liveness", "nixl"],
)
def test_listeners_of_another_transport_do_not_belong_to_the_engine(
    start: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other transport starts with the engine, and has time to finish unless it is blocked."""
    own, others = list[socket.socket](), list[socket.socket]()
    other = threading.Thread(target=lambda: others.append(start()))

    def initialize(*_: str) -> int:
        own.append(socket.create_server((HOST, 0)))
        other.start()
        other.join(STARTS_S)
        return 0

    library = SimpleNamespace(TransferEngine=lambda: SimpleNamespace(initialize=initialize))
    monkeypatch.setitem(sys.modules, "mooncake.engine", library)
    monkeypatch.setattr(mooncake_native, "version", only_without_cuda)
    monkeypatch.setattr(nixl_native, "version", lambda _name: "a fake")
    monkeypatch.setattr(nixl_native, "native_agent", agent_listens)
    started = mooncake_native.start_engine(HOST, "", MooncakeProtocol.AUTO)
    other.join()
    assert started.ports == {own[0].getsockname()[1]}
    for each in (*own, *others):
        each.close()
