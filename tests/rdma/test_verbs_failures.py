"""Every fault on a verbs fabric is a named error within its deadline, or is recovered."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerContext

import msgspec
import numpy as np
import pytest
from forks import memory_limited
from nics import Nic, tell
from test_verbs_conformance import VerbsConfig
from verbs_launch import first_error

from windlass.errors import (
    PeerUnreachable,
    ProtocolError,
    TransferError,
    TransferFailed,
    TransferOutcomeUnknown,
)
from windlass.testing.peer_process import PeerProcess
from windlass.testing.transport_conformance import NBYTES, Peer, Rig
from windlass.transfer.arena import Arena
from windlass.transports.mooncake.native import MooncakeProtocol
from windlass.transports.mooncake.transport import MooncakeConfig
from windlass.transports.nixl.native import NixlWire
from windlass.transports.nixl.transport import NixlConfig
from windlass.transports.registry import create_transport

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

DEADLINE_S = 5.0
FIRST_S = 60.0
"""Deadline for writes that must succeed, on an emulated processor."""
SLACK_S = 3.0
RECOVERY_S = 150.0
KINDS: dict[str, Callable[[Nic], VerbsConfig]] = {
    "nixl-rc": lambda nic: NixlConfig(host=nic.host, wire=NixlWire.RC, device=f"{nic.name}:1"),
    "nixl-ud": lambda nic: NixlConfig(host=nic.host, wire=NixlWire.UD, device=f"{nic.name}:1"),
    "mooncake": lambda nic: MooncakeConfig(
        host=nic.host, protocol=MooncakeProtocol.RDMA, device=nic.name
    ),
}
"""Mooncake is last, because after an error its busy threads slow an emulated processor down."""


@dataclass(frozen=True, slots=True)
class Link:
    """The wire of the guest. A real wire is not changed."""

    ends: tuple[Nic, Nic]

    def run(self, *command: str) -> None:
        subprocess.run(command, check=True, timeout=60, capture_output=True)

    def down(self) -> None:
        self.run("ip", "link", "set", self.ends[1].netdev, "down")

    def up(self) -> None:
        here, there = self.ends
        self.run("ip", "link", "set", there.netdev, "up")
        route = ("ip", "route", "replace", here.host, "dev", there.netdev, "src", there.host)
        # The kernel drops routes with the link.
        self.run(*route, "table", "100")

    @contextmanager
    def shaped(self, *rule: str) -> Iterator[None]:
        """Apply a netem rule to packets that this side sends."""
        device = self.ends[0].netdev
        self.run("tc", "qdisc", "add", "dev", device, "root", "netem", *rule)
        try:
            yield
        finally:
            self.run("tc", "qdisc", "del", "dev", device, "root")


@pytest.fixture
def link(nics: tuple[Nic, Nic]) -> Iterator[Link]:
    if any(nic.driver != "rdma_rxe" for nic in nics) or nics[0] == nics[1]:
        pytest.skip("only the wire of the guest is cut")
    link = Link(nics)
    yield link
    link.up()


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def rig(kind: str, nics: tuple[Nic, Nic]) -> Iterator[Rig]:
    with ExitStack() as stack:
        peer = stack.enter_context(PeerProcess(KINDS[kind](nics[1]), NBYTES))
        rig = stack.enter_context(sender(kind, nics[0], peer))
        whole(rig, FIRST_S)
        rig.check_peer(rig.arena.bytes, "before anything goes wrong")
        rig.peer.fill(0)
        yield rig


@contextmanager
def sender(kind: str, nic: Nic, peer: Peer) -> Iterator[Rig]:
    """Yield a transport of this side, with an arena of distinct words."""
    transport = create_transport(KINDS[kind](nic))
    with ExitStack() as stack:
        stack.callback(transport.close)
        arena = Arena(transport, NBYTES)
        arena.bytes.view(np.uint64)[:] = np.arange(NBYTES // 8, dtype=np.uint64) * 2654435761
        stack.callback(arena.close)
        yield Rig(transport, arena, peer)


def whole(rig: Rig, deadline_s: float = DEADLINE_S) -> None:
    rig.write(rig.batch([0], [0], [NBYTES]), deadline_s)


def until_an_error(rig: Rig) -> TransferError:
    """Write until a write fails. Check that each attempt keeps its deadline."""
    end = time.monotonic() + RECOVERY_S
    while time.monotonic() < end:
        start = time.monotonic()
        try:
            whole(rig)
        except TransferError as error:
            found = error
        else:
            continue
        assert time.monotonic() - start < DEADLINE_S + SLACK_S, f"too late: {found}"
        return found
    raise AssertionError("no write failed")


def until_it_works(rig: Rig, limit_s: float = RECOVERY_S) -> float:
    """Write until a write succeeds, and return the seconds that it took.

    Raises:
        TransferError: no write succeeded within the limit.
    """
    start = time.monotonic()
    while True:
        try:
            whole(rig, FIRST_S)
        except TransferError:
            if time.monotonic() - start > limit_s:
                raise
            # The open write continues during this round trip.
            rig.peer.digest()
        else:
            return time.monotonic() - start


def ended(peer: Peer) -> bool:
    """Return whether the process has ended."""
    try:
        peer.digest()
    except (ProtocolError, OSError):
        return True
    return False


def test_a_link_down_during_a_write_is_unknown_and_works_again_when_it_is_up(
    rig: Rig, link: Link, kind: str
) -> None:
    here = link.ends[0]
    failed: list[TransferError] = []

    def write() -> None:
        with pytest.raises(TransferError) as caught:
            whole(rig)
        failed.append(caught.value)

    # 8 MiB take 3.5 s at this rate.
    with link.shaped("rate", "20mbit"):
        before = here.packets_sent()
        writer = threading.Thread(target=write)
        start = time.monotonic()
        writer.start()
        pause = threading.Event()
        # Poll a counter for 200 of the 2048 packets.
        while here.packets_sent() < before + 200:
            assert time.monotonic() < start + DEADLINE_S
            pause.wait(0.01)
        link.down()
        writer.join(DEADLINE_S + SLACK_S)
        seconds = time.monotonic() - start
    assert not writer.is_alive(), "the deadline did not hold"
    (error,) = failed
    tell(f"link down in mid-write: {type(error).__name__} after {seconds:.1f} s: {error}")
    assert isinstance(error, TransferOutcomeUnknown | PeerUnreachable)
    again = until_an_error(rig)
    tell(f"  next write: {type(again).__name__}: {again}")
    assert isinstance(again, TransferOutcomeUnknown | PeerUnreachable)
    link.up()
    if ended(rig.peer):
        # UCX ends a process if its datagram queue pair is flushed. With `rc` there is one as well.
        assert kind != "mooncake"
        with PeerProcess(KINDS[kind](link.ends[1]), NBYTES) as successor:
            rig = Rig(rig.transport, rig.arena, successor)
            tell(f"  link up: a new peer written after {until_it_works(rig):.1f} s")
            rig.check_peer(rig.arena.bytes, "after the link came back")
        return
    assert isinstance(error, TransferOutcomeUnknown), "reported as gone, but the peer lives"
    try:
        seconds = until_it_works(rig, 15.0 if kind == "mooncake" else RECOVERY_S)
        tell(f"  link up: written again after {seconds:.1f} s")
    except TransferOutcomeUnknown:
        assert kind == "mooncake", "only errors of Mooncake are permanent"
        with sender(kind, here, rig.peer) as another:
            seconds = until_it_works(another)
        tell(f"  link up: unknown for good; a new transport wrote after {seconds:.1f} s")
    rig.check_peer(rig.arena.bytes, "after the link came back")


def test_lost_packets_are_sent_again(rig: Rig, link: Link) -> None:
    with link.shaped("loss", "0.5%"):
        until_it_works(rig)
    rig.check_peer(rig.arena.bytes, "over a wire that loses packets")


def test_a_peer_killed_during_a_write_is_unreachable_at_once(rig: Rig) -> None:
    start = time.monotonic()
    rig.peer.kill()
    error = until_an_error(rig)
    tell(f"peer killed: {type(error).__name__} after {time.monotonic() - start:.1f} s: {error}")
    assert isinstance(error, PeerUnreachable)


@pytest.mark.parametrize("enforcing", ["nixl-rc", "mooncake"])
def test_a_queue_pair_in_error_is_a_named_error_and_a_new_transport_works(
    nics: tuple[Nic, Nic], enforcing: str
) -> None:
    # Writing into withdrawn memory causes an access error, which ends the queue pair. UCX keeps
    # withdrawn memory registered unless its registration cache is off.
    settings = {"UCX_RCACHE_ENABLE": "n"}
    with PeerProcess(KINDS[enforcing](nics[1]), NBYTES, settings) as peer:
        with sender(enforcing, nics[0], peer) as rig:
            whole(rig, FIRST_S)
            peer.unregister()
            error = until_an_error(rig)
            tell(f"{enforcing}, queue pair in error: {type(error).__name__}: {error}")
            assert isinstance(error, TransferFailed | TransferOutcomeUnknown)
            peer.register()
        with sender(enforcing, nics[0], peer) as another:
            peer.fill(0)
            until_it_works(another)
            another.check_peer(another.arena.bytes, "by a new transport")


def test_too_little_lockable_memory_is_a_named_error(
    nics: tuple[Nic, Nic], kind: str, forks: ForkServerContext
) -> None:
    config = msgspec.json.encode(KINDS[kind](nics[0])).decode()
    error = memory_limited(forks, partial(first_error, config), 4 << 20)
    tell(f"memlock 4 MiB: {error}")
    assert error.startswith(("RegionError", "TransportUnavailable"))
    assert "ulimit -l" in error
