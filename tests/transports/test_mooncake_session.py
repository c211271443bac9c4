"""Memory that another process registered with a Mooncake engine of its own, proxied for by this one."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from windlass.errors import (
    PeerUnreachable,
    RegionError,
    TransferFailed,
    TransferOutcomeUnknown,
    TransportUnavailable,
)
from windlass.testing.peer_process import PeerProcess, digest_of
from windlass.transfer.arena import Arena
from windlass.transports.base import RemoteRegion, WriteBatch
from windlass.transports.mooncake.config import MooncakeConfig, MooncakeProtocol
from windlass.transports.mooncake.session import MooncakeSession, owner_of
from windlass.transports.mooncake.transport import MooncakeTransport
from windlass.transports.registry import create_transport

TCP = MooncakeConfig(host="127.0.0.1", protocol=MooncakeProtocol.TCP)
NBYTES = 1 << 16
DEADLINE_S = 20.0

try:
    create_transport(TCP).close()
except TransportUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

SENDER = """
import sys
import msgspec
import numpy as np
from windlass.transfer.arena import Arena
from windlass.transports.base import RemoteRegion, WriteBatch
from windlass.transports.mooncake.config import MooncakeConfig, MooncakeProtocol
from windlass.transports.registry import create_transport
region = msgspec.json.decode(sys.argv[1], type=RemoteRegion)
config = MooncakeConfig(host="127.0.0.1", protocol=MooncakeProtocol.TCP)
transport = create_transport(config)
arena = Arena(transport, region.nbytes)
arena.bytes[:] = 7
one = lambda value: np.array([value], np.uint64)
batch = WriteBatch(endpoint=region.endpoint, local_addresses=one(arena.address),
    remote_addresses=one(region.address), nbytes=one(region.nbytes), regions=(region,))
transport.write(batch, deadline_s=20.0)
print("written", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def owner() -> Iterator[PeerProcess]:
    """A process that registers memory and knows nothing of who stands in for it."""
    with PeerProcess(TCP, NBYTES) as peer:
        yield peer


@pytest.fixture
def session(owner: PeerProcess) -> Iterator[MooncakeSession]:
    region = owner.region
    found = MooncakeSession(TCP, region.endpoint.address, [(region.address, region.nbytes)])
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def writer() -> Iterator[MooncakeTransport]:
    transport = MooncakeTransport(TCP)
    try:
        yield transport
    finally:
        transport.close()


def batch(arena: Arena, region: RemoteRegion) -> WriteBatch:
    return WriteBatch(
        endpoint=region.endpoint,
        local_addresses=np.array([arena.address], np.uint64),
        remote_addresses=np.array([region.address], np.uint64),
        nbytes=np.array([region.nbytes], np.uint64),
        regions=(region,),
    )


def test_what_a_peer_writes_to_a_session_that_another_process_stands_in_for_is_read_back(
    owner: PeerProcess, session: MooncakeSession, writer: MooncakeTransport
) -> None:
    (region,) = session.regions
    values = np.random.default_rng(1).permutation(np.arange(NBYTES) % 251).astype(np.uint8)
    with Arena(writer, NBYTES) as source, Arena(session, NBYTES) as copy:
        source.bytes[:] = values
        writer.write(batch(source, region), deadline_s=DEADLINE_S)
        assert owner.digest() == digest_of(values.tobytes())
        session.read(batch(copy, region), deadline_s=DEADLINE_S)
        assert np.array_equal(copy.bytes, values)


def test_nothing_outside_what_the_owner_registered_is_read_or_written(
    owner: PeerProcess, session: MooncakeSession, writer: MooncakeTransport
) -> None:
    (region,) = session.regions
    before = owner.digest()
    beyond = msgspec.structs.replace(region, address=region.address + NBYTES)
    with Arena(writer, NBYTES) as source, Arena(session, NBYTES) as copy:
        copy.bytes[:] = 5
        with pytest.raises((TransferFailed, TransferOutcomeUnknown)):
            writer.write(batch(source, beyond), deadline_s=DEADLINE_S)
        with pytest.raises((TransferFailed, TransferOutcomeUnknown)):
            session.read(batch(copy, beyond), deadline_s=DEADLINE_S)
        assert (copy.bytes == 5).all()
    assert owner.digest() == before


def test_nobody_writes_once_the_process_that_stands_in_is_gone(
    owner: PeerProcess, session: MooncakeSession, writer: MooncakeTransport
) -> None:
    before = owner.digest()
    session.close()
    with Arena(writer, NBYTES) as source:
        source.bytes[:] = 9
        with pytest.raises(PeerUnreachable):
            writer.write(batch(source, session.regions[0]), deadline_s=DEADLINE_S)
    assert owner.digest() == before


def test_an_endpoint_that_no_process_stands_in_for_is_refused(
    session: MooncakeSession, writer: MooncakeTransport
) -> None:
    (region,) = session.regions
    bare = region.endpoint.incarnation.partition(":")[0]
    endpoint = msgspec.structs.replace(region.endpoint, incarnation=bare)
    with (
        Arena(writer, NBYTES) as source,
        pytest.raises(PeerUnreachable, match="no process stands in"),
    ):
        writer.write(
            batch(source, msgspec.structs.replace(region, endpoint=endpoint)), deadline_s=DEADLINE_S
        )


def test_the_end_of_the_owner_is_seen_by_both(
    owner: PeerProcess, session: MooncakeSession, writer: MooncakeTransport
) -> None:
    owner.kill()
    assert select.select([session.process], [], [], DEADLINE_S)[0]
    with Arena(writer, NBYTES) as source, pytest.raises(PeerUnreachable):
        writer.write(batch(source, session.regions[0]), deadline_s=DEADLINE_S)


def test_a_living_sender_of_this_host_passes_the_fence_but_not_a_newcomer(
    session: MooncakeSession,
) -> None:
    session.require_alone(deadline_s=DEADLINE_S)
    command = [sys.executable, "-c", SENDER, msgspec.json.encode(session.regions[0]).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
        assert sender.stdout is not None
        lines = iter(sender.stdout.readline, b"")
        assert b"written\n" in lines
        session.fence(deadline_s=DEADLINE_S)
        with pytest.raises(TransferFailed, match="connections are open"):
            session.require_alone(deadline_s=3.0)
        sender.kill()
    session.fence(deadline_s=DEADLINE_S)
    session.require_alone(deadline_s=DEADLINE_S)


def test_a_port_that_nobody_listens_at_has_no_owner() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        with pytest.raises(TransportUnavailable, match="none that listens there"):
            owner_of(port)
        with pytest.raises(TransportUnavailable):
            MooncakeSession(TCP, f"127.0.0.1:{port}", [(4096, 4096)])


def test_local_memory_outside_a_registration_is_not_read_into(session: MooncakeSession) -> None:
    with Arena(session, NBYTES) as copy:
        wanted = batch(copy, session.regions[0])
    with pytest.raises(RegionError, match="local registered memory"):
        session.read(wanted, deadline_s=DEADLINE_S)
