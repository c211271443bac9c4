"""What goes wrong on a verbs fabric: each a named error within its deadline, or a recovery."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from nics import Nic, tell
from test_conformance import VerbsConfig

from windlass.errors import (
    PeerUnreachable,
    TransferError,
    TransferFailed,
    TransferOutcomeUnknown,
)
from windlass.memory.arena import Arena
from windlass.testing.peer_process import PeerProcess
from windlass.testing.transport_conformance import NBYTES, Rig
from windlass.transports.configs import (
    MooncakeConfig,
    MooncakeProtocol,
)
from windlass.transports.registry import create_transport

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(400)]

DEADLINE_S = 5.0
SLACK_S = 3.0
RECOVERY_S = 150.0
KINDS: dict[str, Callable[[Nic], VerbsConfig]] = {
    "mooncake": lambda nic: MooncakeConfig(
        host=nic.host, protocol=MooncakeProtocol.RDMA, device=nic.name
    ),
}


@dataclass(frozen=True, slots=True)
class Link:
    """The wire of the guest; a real one is not touched."""

    ends: tuple[Nic, Nic]

    def run(self, *command: str) -> None:
        subprocess.run(command, check=True, timeout=60, capture_output=True)

    def down(self) -> None:
        self.run("ip", "link", "set", self.ends[1].netdev, "down")

    def up(self) -> None:
        here, there = self.ends
        self.run("ip", "link", "set", there.netdev, "up")
        route = ("ip", "route", "replace", here.host, "dev", there.netdev, "src", there.host)
        self.run(*route, "table", "100")  # the kernel drops routes with the link

    @contextmanager
    def losing(self, percent: float) -> Iterator[None]:
        device = self.ends[0].netdev
        self.run(*("tc", "qdisc", "add", "dev", device, "root", "netem", "loss", f"{percent}%"))
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


@pytest.fixture(params=list(KINDS))
def rig(request: pytest.FixtureRequest, nics: tuple[Nic, Nic]) -> Iterator[Rig]:
    make = KINDS[request.param]
    with ExitStack() as stack:
        transport = create_transport(make(nics[0]))
        stack.callback(transport.close)
        arena = Arena(transport, NBYTES)
        arena.bytes.view(np.uint64)[:] = np.arange(NBYTES // 8, dtype=np.uint64) * 2654435761
        stack.callback(lambda: arena.close() if arena.nbytes else None)
        peer = stack.enter_context(PeerProcess(make(nics[1]), NBYTES))
        yield Rig(transport, arena, peer)


def whole(rig: Rig) -> None:
    rig.write(rig.batch([0], [0], [NBYTES]), DEADLINE_S)


def until_an_error(rig: Rig) -> TransferError:
    """Write until that fails; each attempt keeps its deadline."""
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


def until_it_works(rig: Rig) -> float:
    """Write until that works; how long it took."""
    start = time.monotonic()
    last = ""
    while time.monotonic() - start < RECOVERY_S:
        try:
            whole(rig)
        except TransferError as error:
            last = str(error)
            rig.peer.digest()  # a round trip: the write that is open goes on meanwhile
        else:
            return time.monotonic() - start
    raise AssertionError(f"no recovery: {last}")


def test_a_link_down_in_mid_write_is_unknown_and_it_goes_on_when_the_link_is_back(
    rig: Rig, link: Link
) -> None:
    whole(rig)
    rig.peer.fill(0)
    link.down()
    error = until_an_error(rig)
    tell(f"link down: {type(error).__name__}: {error}")
    assert isinstance(error, TransferOutcomeUnknown | PeerUnreachable)
    again = until_an_error(rig)
    tell(f"  next write: {type(again).__name__}: {again}")
    link.up()
    seconds = until_it_works(rig)
    tell(f"  link up: written again after {seconds:.1f} s")
    rig.check_peer(rig.arena.bytes, "after the link came back")


def test_lost_packets_are_sent_again(rig: Rig, link: Link) -> None:
    whole(rig)
    rig.peer.fill(0)
    with link.losing(0.5):
        until_it_works(rig)
    rig.check_peer(rig.arena.bytes, "over a wire that loses packets")


def test_a_peer_that_is_killed_in_mid_write_is_gone_at_once(rig: Rig) -> None:
    whole(rig)
    assert isinstance(rig.peer, PeerProcess)
    rig.peer.stop()  # reads on queue pairs go on; nothing else does
    start = time.monotonic()
    rig.peer.kill()
    error = until_an_error(rig)
    tell(f"peer killed: {type(error).__name__} after {time.monotonic() - start:.1f} s: {error}")
    assert isinstance(error, PeerUnreachable)


def test_a_queue_pair_in_error_is_a_named_error_and_a_new_transport_gets_through(
    nics: tuple[Nic, Nic],
) -> None:
    # A write into withdrawn memory is answered with an access error, which ends the queue pair.
    make = KINDS["mooncake"]
    with ExitStack() as stack:
        peer = stack.enter_context(PeerProcess(make(nics[1]), NBYTES))
        for attempt in range(2):
            transport = create_transport(make(nics[0]))
            stack.callback(transport.close)
            arena = Arena(transport, NBYTES)
            stack.callback(arena.close)
            arena.bytes[:] = attempt + 1
            rig = Rig(transport, arena, peer)
            whole(rig)
            rig.check_peer(arena.bytes, f"attempt {attempt}")
            if attempt == 0:
                peer.unregister()
                error = until_an_error(rig)
                tell(f"queue pair in error: {type(error).__name__}: {error}")
                assert isinstance(error, TransferFailed | TransferOutcomeUnknown)
                peer.register()


@pytest.mark.parametrize("kind", list(KINDS))
def test_too_little_lockable_memory_is_a_named_error(nics: tuple[Nic, Nic], kind: str) -> None:
    script = (
        "import msgspec, os, sys\n"
        "from windlass.errors import WindlassError\n"
        "from windlass.memory.arena import Arena\n"
        "from windlass.transports.configs import parse_transport\n"
        "from windlass.transports.registry import create_transport\n"
        "try:\n"
        "    Arena(create_transport(parse_transport(sys.argv[1])), 8 << 20)\n"
        "except WindlassError as error:\n"
        "    print(type(error).__name__, error, flush=True)\n"
        "    os._exit(0)\n"
        "os._exit(1)\n"
    )
    config = msgspec.json.encode(KINDS[kind](nics[0])).decode()
    limited = ("prlimit", "--memlock=1048576", "setpriv", "--bounding-set=-ipc_lock")
    command = (*limited, "--inh-caps=-ipc_lock", sys.executable, "-c", script, config)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    tell(f"memlock 1 MiB: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("RegionError", "TransportUnavailable"))
    assert "ulimit -l" in done.stdout
