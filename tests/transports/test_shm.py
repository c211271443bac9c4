from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, ClassVar

import msgspec
import numpy as np
import pytest

from windlass.errors import PeerUnreachable, RegionError, TransportUnavailable
from windlass.testing.peer_process import PeerProcess
from windlass.testing.transport_conformance import NBYTES, ProcessConformance, Rig
from windlass.transfer.arena import Arena
from windlass.transports.base import WriteBatch
from windlass.transports.peers import RemoteRegion
from windlass.transports.shm import ShmConfig, ShmTransport


def segments_of(pid: int) -> list[str]:
    """Return the segments that a process has open or mapped."""
    with open(f"/proc/{pid}/maps", encoding="ascii") as maps:
        return sorted({line.split()[4] for line in maps if "/memfd:windlass-" in line})


def one_piece(
    source: Arena, start: int, region: RemoteRegion, offset: int, nbytes: int
) -> WriteBatch:
    return WriteBatch(
        endpoint=region.endpoint,
        local_addresses=np.array([source.address + start], np.uint64),
        remote_addresses=np.array([region.address + offset], np.uint64),
        nbytes=np.array([nbytes], np.uint64),
        regions=(region,),
    )


class TestShm(ProcessConformance):
    config: ClassVar[ShmConfig] = ShmConfig()

    def test_memory_not_allocated_by_the_transport_is_only_a_source(self, rig: Rig) -> None:
        keyless = msgspec.structs.replace(rig.peer.region, key="")
        message = rig.refused(rig.batch([0], [0], [16], regions=(keyless,)), RegionError)
        assert "not allocated" in message

    @pytest.mark.parametrize(
        "key", ["x", "../../etc/passwd:0", "0:0123456789abcdef:0", "9999:0123456789abcdef:0", "::"]
    )
    def test_a_forged_key_opens_no_segment(self, rig: Rig, key: str) -> None:
        forged = msgspec.structs.replace(rig.peer.region, key=key)
        rig.refused(rig.batch([0], [0], [16], regions=(forged,)), RegionError)

    def test_a_region_larger_than_its_segment_is_refused(self, rig: Rig) -> None:
        wide = msgspec.structs.replace(rig.peer.region, nbytes=NBYTES + 4096)
        rig.refused(rig.batch([0], [NBYTES - 8], [16], regions=(wide,)), RegionError)

    def test_released_memory_is_refused_even_when_it_is_still_mapped_here(self) -> None:
        sender, receiver = ShmTransport(), ShmTransport()
        source, target = Arena(sender, 4096), Arena(receiver, 4096)
        batch = one_piece(source, 0, target.region.remote, 0, 16)
        sender.write(batch, deadline_s=5.0)
        target.close()
        with pytest.raises(RegionError, match="released"):
            sender.write(batch, deadline_s=5.0)
        source.close()
        sender.close()
        receiver.close()

    def test_segments_are_zeroed_and_removed_by_close(self) -> None:
        transport = ShmTransport()
        before = len(segments_of(os.getpid()))
        with Arena(transport, 10_000) as arena:
            assert not arena.bytes.any()
            assert len(segments_of(os.getpid())) == before + 1
            with pytest.raises(RegionError, match="unregistered first"):
                transport.release(arena.address)
        assert len(segments_of(os.getpid())) == before
        transport.allocate(4096)
        transport.close()
        assert len(segments_of(os.getpid())) == before

    def test_a_segment_of_a_killed_owner_is_unmapped_by_the_next_write(self) -> None:
        transport = ShmTransport()
        source = Arena(transport, 4096)
        before = len(segments_of(os.getpid()))
        with PeerProcess(ShmConfig(), 4096) as peer:
            batch = one_piece(source, 0, peer.region, 0, 16)
            transport.write(batch, deadline_s=5.0)
            assert len(segments_of(os.getpid())) == before + 1
            peer.kill()
            with pytest.raises(PeerUnreachable):
                transport.write(batch, deadline_s=5.0)
        assert len(segments_of(os.getpid())) == before
        source.close()
        transport.close()

    def test_an_allocation_beyond_the_available_memory_is_an_error(self) -> None:
        before = segments_of(os.getpid())
        transport = ShmTransport()
        with pytest.raises(TransportUnavailable, match="the memory available on this host"):
            transport.allocate(1 << 50)
        transport.close()
        assert segments_of(os.getpid()) == before

    def test_a_part_of_an_allocation_can_be_registered_by_itself(self) -> None:
        sender, receiver = ShmTransport(), ShmTransport()
        source = Arena(sender, 8192)
        source.bytes[:] = np.arange(8192) % 251
        address = receiver.allocate(8192)
        region = receiver.register(address + 4096, 4096)
        there = np.ctypeslib.as_array((ctypes.c_uint8 * 8192).from_address(address))
        sender.write(one_piece(source, 10, region.remote, 100, 500), deadline_s=5.0)
        assert there[4196:4696].tobytes() == source.bytes[10:510].tobytes()
        assert not there[:4196].any()
        assert not there[4696:].any()
        receiver.unregister(region)
        source.close()
        sender.close()
        receiver.close()


ENGINE = """
import os, sys
import msgspec
from windlass.transfer.arena import Arena
from windlass.transports.shm import ShmTransport

transport = ShmTransport()
arena = Arena(transport, 8 << 20)
print(msgspec.json.encode(arena.region.remote).decode(), flush=True)
sys.stdin.readline()
mine = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
mine += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name]
for path in mine:
    try:
        if "windlass-" in os.path.realpath(path):
            os.truncate(path, 0)
    except OSError:
        pass
print("shrunk", flush=True)
sys.stdin.readline()
"""
TRAINER = """
import sys
import msgspec
import numpy as np
from windlass.errors import RegionError
from windlass.transfer.arena import Arena
from windlass.transports.base import WriteBatch
from windlass.transports.peers import RemoteRegion
from windlass.transports.shm import ShmTransport

transport = ShmTransport()
arena = Arena(transport, 8 << 20)
region = msgspec.json.decode(sys.stdin.readline(), type=RemoteRegion)
columns = [np.array([n], np.uint64) for n in (arena.address, region.address, region.nbytes)]
batch = WriteBatch(endpoint=region.endpoint, local_addresses=columns[0], remote_addresses=columns[1],
                   nbytes=columns[2], regions=(region,))
for _ in range(2):
    try:
        transport.write(batch, deadline_s=30.0)
    except RegionError as error:
        print("refused", error, flush=True)
    else:
        print("written", flush=True)
    sys.stdin.readline()
"""


class Script:
    """Separate process that is controlled by lines."""

    def __init__(self, process: subprocess.Popen[str], to: IO[str], of: IO[str]) -> None:
        self.process, self._to, self._of = process, to, of

    def ask(self, line: str = "") -> str:
        self._to.write(line + "\n")
        self._to.flush()
        return self.said()

    def said(self) -> str:
        return self._of.readline().strip()

    def end(self) -> int:
        self.process.communicate("\n", timeout=30)
        return self.process.returncode


@contextmanager
def started(script: str) -> Iterator[Script]:
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Script(process, process.stdin, process.stdout)
    finally:
        process.kill()
        process.communicate()


def test_an_engine_that_shrinks_its_segments_does_not_kill_the_trainer() -> None:
    with started(ENGINE) as engine, started(TRAINER) as trainer:
        assert trainer.ask(engine.said()) == "written"
        assert engine.ask() == "shrunk"
        assert trainer.ask() == "written"
        assert trainer.end() == 0
        assert engine.end() == 0


ENDING = """
import os
import msgspec
from windlass.transfer.arena import Arena
from windlass.transports.shm import ShmTransport

transport = ShmTransport()
arena = Arena(transport, 4096)
rest = os.memfd_create("rest")  # closed after the segment, and not at once
os.posix_fallocate(rest, 0, 256 << 20)
print(msgspec.json.encode(arena.region.remote).decode(), flush=True)
input()
"""


def test_an_ending_peer_with_closed_segments_is_unreachable() -> None:
    with contextlib.closing(ShmTransport()) as sender, Arena(sender, 4096) as source:
        for _ in range(3):
            with started(ENDING) as peer:
                batch = one_piece(
                    source, 0, msgspec.json.decode(peer.said(), type=RemoteRegion), 0, 16
                )
                sender.write(batch, deadline_s=5.0)
                peer.process.kill()
                has_ended = False
                while not has_ended:
                    has_ended = peer.process.poll() is not None
                    with contextlib.suppress(PeerUnreachable):
                        sender.write(batch, deadline_s=5.0)


@pytest.mark.parametrize(
    ("evil", "says"),
    [
        ("import fcntl; fcntl.F_ADD_SEALS = fcntl.F_GET_SEALS", "sealed"),
        (
            "os.posix_fallocate = lambda file, start, n: os.ftruncate(file, n + (1 << 40))",
            "must be allocated",
        ),
    ],
    ids=["unsealed", "sparse"],
)
def test_a_segment_that_could_kill_its_writer_is_refused(evil: str, says: str) -> None:
    script = ENGINE.replace("transport = ", f"{evil}; transport = ")
    with started(script) as engine, started(TRAINER) as trainer:
        assert says in trainer.ask(engine.said())
        assert engine.ask() == "shrunk"
        assert says in trainer.ask()
        assert trainer.end() == 0


INTRUDER = """
import os, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for name in sys.argv[1:]:
    try:
        os.open(name, os.O_RDWR)
        print("opened", name)
    except PermissionError:
        print("refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root plays two users")
def test_another_user_of_the_host_cannot_open_a_segment() -> None:
    with started(ENGINE) as engine:
        key = msgspec.json.decode(engine.said(), type=RemoteRegion).key
        path = f"/proc/{engine.process.pid}/fd/{key.partition(':')[0]}"
        assert "windlass-" in os.readlink(path)
        done = subprocess.run(
            [sys.executable, "-c", INTRUDER, path],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == "refused\n"
