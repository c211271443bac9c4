from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import xxhash
from open_sockets import remote_ports

from windlass.envs import inherited_environment
from windlass.errors import (
    ConfigError,
    PeerUnreachable,
    RegionError,
    TransferOutcomeUnknown,
    TransportUnavailable,
)
from windlass.layout.columns import UInt64Array
from windlass.net.addresses import split_host_port
from windlass.net.clock import Deadline
from windlass.testing.peer_process import PeerProcess
from windlass.testing.transport_conformance import NBYTES, ProcessConformance, Rig
from windlass.transfer.arena import Arena
from windlass.transports.base import WriteBatch
from windlass.transports.liveness import PeerLiveness
from windlass.transports.nixl import transport as nixl
from windlass.transports.nixl.native import NativeAgent, NixlWire, new_write
from windlass.transports.nixl.transport import NixlConfig, NixlPeer, NixlTransport
from windlass.transports.registry import create_transport

CMA = NixlConfig(wire=NixlWire.CMA)
TCP = NixlConfig(wire=NixlWire.TCP, device="lo")

try:
    create_transport(CMA).close()
except TransportUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


class TestNixlCma(ProcessConformance):
    config: ClassVar[NixlConfig] = CMA

    def test_the_wire_is_looked_up_after_the_first_write(self, rig: Rig) -> None:
        rig.write(rig.batch([0], [0], [16]))
        report = rig.transport.report()
        assert (report.protocol, rig.transport.traits.one_sided) == ("cma", True)
        assert "memory" in report.detail

    def test_an_invalid_key_is_refused(self, rig: Rig) -> None:
        for key in ("", "nonsense", "AAAA", "\u00e9"):
            region = msgspec.structs.replace(rig.peer.region, key=key)
            rig.refused(rig.batch([0], [0], [16], regions=(region,)), RegionError)

    def test_an_absent_wire_is_refused(self) -> None:
        with pytest.raises(TransportUnavailable, match="wire rc"):
            create_transport(NixlConfig(wire=NixlWire.RC, device="none0:1"))

    def test_a_gpu_must_be_the_number_of_a_present_gpu(self) -> None:
        with pytest.raises(ConfigError, match="gpu: must be -1 or"):
            NixlConfig(gpu=-2)
        with pytest.raises(TransportUnavailable, match=r"GPU 99|NVIDIA driver"):
            create_transport(NixlConfig(gpu=99))

    def test_the_address_of_another_host_is_refused(self) -> None:
        with pytest.raises(TransportUnavailable, match="must be an address of this machine"):
            create_transport(NixlConfig(host="192.0.2.77"))


PLANTED = """
import os, sys
os.symlink("victim", f"windlass-ucx.{os.getpid()}.log")
from windlass.transports.nixl.native import NixlWire
from windlass.transports.nixl.transport import NixlConfig
transport = NixlConfig(host="127.0.0.1", wire=NixlWire.CMA).create()
print(len(os.listdir(".")))
for name in os.listdir("."):
    if os.path.isdir(name):
        print(oct(os.stat(name).st_mode & 0o777), os.listdir(name))
transport.close()
"""


def test_ucx_does_not_follow_a_planted_link_in_the_shared_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "victim").write_text("precious")
    environment = inherited_environment() | {"TMPDIR": str(tmp_path)}
    environment.pop("UCX_LOG_FILE", None)
    found = subprocess.run(
        [sys.executable, "-c", PLANTED],
        env=environment,
        cwd=tmp_path,
        timeout=60,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (tmp_path / "victim").read_text() == "precious"
    num_entries, folder = found.stdout.splitlines()
    assert num_entries == "3"
    assert folder.startswith("0o700 ['ucx."), "other users can enter the folder"
    assert len(list(tmp_path.iterdir())) == 2, "the folder outlives the process"


def until_ended(liveness: PeerLiveness) -> None:
    """Wait until the kernel reports the end, a moment after the process ended."""
    assert liveness.wait_ended(20.0)


def test_dead_peers_keep_no_descriptor_after_the_next_write() -> None:
    transport = create_transport(CMA)
    assert isinstance(transport, NixlTransport)
    source, dead = np.arange(1, 129, dtype=np.uint8), set[int]()
    transport.register(source.ctypes.data, source.nbytes)
    try:
        for _ in range(4):
            with PeerProcess(CMA, NBYTES) as peer:
                source += 1
                batch = WriteBatch(
                    endpoint=peer.region.endpoint,
                    local_addresses=np.array([source.ctypes.data], np.uint64),
                    remote_addresses=np.array([peer.region.address], np.uint64),
                    nbytes=np.array([source.nbytes], np.uint64),
                    regions=(peer.region,),
                )
                transport.write(batch, deadline_s=20.0)
                assert peer.read(0, source.nbytes) == source.tobytes()
                assert list(transport.peers) == [peer.region.endpoint]
                assert not remote_ports() & dead
                dead.add(split_host_port(peer.region.endpoint.address)[1])
                peer.kill()
                until_ended(transport.peers[peer.region.endpoint].liveness)
    finally:
        transport.close()


class Ends:
    """Two transports of this process, each with memory, that write in both directions."""

    def __init__(self, config: NixlConfig) -> None:
        self.transports = [create_transport(config), create_transport(config)]
        self.memory = [np.zeros(1 << 15, np.uint64), np.zeros(1 << 15, np.uint64)]
        self.regions = [
            t.register(m.ctypes.data, m.nbytes)
            for t, m in zip(self.transports, self.memory, strict=True)
        ]

    def write(self, source: int, first: int) -> None:
        """Write new values from one end to the other and check every element."""
        target = 1 - source
        self.memory[source][:] = np.arange(first, first + (1 << 15), dtype=np.uint64)
        batch = WriteBatch(
            endpoint=self.transports[target].endpoint(),
            local_addresses=np.array([self.memory[source].ctypes.data], np.uint64),
            remote_addresses=np.array([self.memory[target].ctypes.data], np.uint64),
            nbytes=np.array([self.memory[source].nbytes], np.uint64),
            regions=(self.regions[target].remote,),
        )
        self.transports[source].write(batch, deadline_s=20.0)
        assert np.array_equal(self.memory[0], self.memory[1])

    def close(self) -> None:
        for transport in self.transports:
            transport.close()

    def num_connections(self) -> int:
        """Cut UCX's connections in this process, except agents' to themselves, and return their
        number.
        """
        ours = self.transports[0]
        assert isinstance(ours, NixlTransport)
        return ours.tcp_fence.cut(Deadline.after(10.0, "test"))


@pytest.mark.parametrize("config", [TCP, NixlConfig()], ids=["tcp", "auto"])
def test_a_fence_stops_writes_of_old_connections_and_peers_reconnect(
    config: NixlConfig,
) -> None:
    ends = Ends(config)
    try:
        # This fence has nothing to cut yet.
        ends.transports[1].fence(deadline_s=10.0)
        first = 1
        for fenced in (1, 0, 1):
            for source in (0, 1, 0):
                ends.write(source, first)
                first += 1 << 20
            ends.transports[fenced].fence(deadline_s=10.0)
            assert ends.num_connections() == 0
        ends.write(0, first)
        # UCX may need no connection within a host.
        assert ends.num_connections() > 0 or config is not TCP
    finally:
        ends.close()


@pytest.mark.parametrize("config", [TCP, NixlConfig()], ids=["tcp", "auto"])
def test_memory_can_be_registered_and_written_after_a_fence(config: NixlConfig) -> None:
    """An engine that changes its controller allocates a shadow like this."""
    ends = Ends(config)
    try:
        ends.write(0, 1)
        for number, fenced in enumerate((1, 0)):
            ends.transports[fenced].fence(deadline_s=10.0)
            ends.memory[fenced] = np.zeros(1 << 15, np.uint64)
            ends.regions[fenced] = ends.transports[fenced].register(
                ends.memory[fenced].ctypes.data, ends.memory[fenced].nbytes
            )
            for source in (0, 1):
                ends.write(source, (2 * number + source + 1) << 20)
    finally:
        ends.close()


def stop_between_word_and_batch(monkeypatch: pytest.MonkeyPatch, process: PeerProcess) -> None:
    """Let the peer answer the start of the next write and stop before its first byte."""
    reach = NixlPeer.reach

    def reach_and_stop(*args: Any) -> None:
        monkeypatch.undo()
        reach(*args)
        process.stop()

    monkeypatch.setattr(NixlPeer, "reach", reach_and_stop)


def test_adjacent_regions_are_written_as_one() -> None:
    """Adjacent parameters in a GPU's memory pool are such regions.

    Here they are pages of one buffer.
    """
    page, num = 4096, 4
    ours, theirs = create_transport(CMA), create_transport(CMA)
    source, target = (np.zeros((num + 1) * page, np.uint8) for _ in range(2))
    source[:] = np.arange(len(source)) % 251
    begins = [-(-int(buffer.ctypes.data) // page) * page for buffer in (source, target)]
    offsets = np.arange(num) * page
    regions = []
    for offset in offsets.tolist():
        ours.register(begins[0] + offset, page)
        regions.append(theirs.register(begins[1] + offset, page).remote)
    batch = WriteBatch(
        endpoint=theirs.endpoint(),
        local_addresses=(offsets + begins[0]).astype(np.uint64),
        remote_addresses=(offsets + begins[1]).astype(np.uint64),
        nbytes=np.full(num, page, np.uint64),
        regions=tuple(regions),
    )
    ours.write(batch, deadline_s=20.0)
    shifts = [begin - int(b.ctypes.data) for begin, b in zip(begins, (source, target), strict=True)]
    held = [b[s : s + num * page] for s, b in zip(shifts, (source, target), strict=True)]
    assert (held[0] == held[1]).all()
    ours.close()
    theirs.close()


LARGE = 32 << 20
"""More bytes than socket buffers take."""


class Mortal:
    """Arenas on this side, and a TCP peer that stops or dies during a write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transport = create_transport(TCP)
        self.arena, self.other = Arena(self.transport, LARGE), Arena(self.transport, 4096)
        self.arena.bytes.view("<u8")[:] = np.arange(LARGE // 8)
        self.memory = weakref.ref(self.arena.bytes)
        self.peer = PeerProcess(TCP, LARGE)
        self.write(self.other)
        stop_between_word_and_batch(monkeypatch, self.peer)

    def write(self, source: Arena, peer: PeerProcess | None = None, s: float = 20.0) -> None:
        region = (peer or self.peer).region
        batch = WriteBatch(
            endpoint=region.endpoint,
            local_addresses=np.array([source.address], np.uint64),
            remote_addresses=np.array([region.address], np.uint64),
            nbytes=np.array([source.nbytes], np.uint64),
            regions=(region,),
        )
        self.transport.write(batch, deadline_s=s)

    def lose(self) -> None:
        with pytest.raises(TransferOutcomeUnknown):
            self.write(self.arena, s=3.0)

    def close(self) -> None:
        self.transport.close()
        self.peer.__exit__()


@pytest.fixture
def mortal_peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mortal]:
    found = Mortal(monkeypatch)
    yield found
    found.close()


def test_an_arena_under_a_late_write_is_freed_when_the_write_is_over(mortal_peer: Mortal) -> None:
    ends = mortal_peer
    wanted = bytes(ends.other.nbytes) + ends.arena.bytes[ends.other.nbytes :].tobytes()
    ends.lose()
    ends.arena.close()
    assert ends.memory() is not None
    ends.peer.resume()
    # This write waits for the late one.
    ends.write(ends.other)
    assert ends.memory() is None
    assert ends.peer.digest() == xxhash.xxh3_128_hexdigest(wanted)
    ends.other.close()


def test_a_peer_that_died_during_a_write_keeps_only_the_read_memory(
    mortal_peer: Mortal,
) -> None:
    ends = mortal_peer
    ends.lose()
    ends.peer.kill()
    for _ in range(2):
        later, released = np.zeros(4096, np.uint8), list[bool]()
        region = ends.transport.register(later.ctypes.data, later.nbytes)
        ends.transport.unregister(region, partial(released.append, True))
        assert released == [True]
    memory = weakref.ref(ends.other.bytes)
    with PeerProcess(TCP, LARGE) as successor:
        ends.write(ends.other, successor)
        ends.other.close()
        assert memory() is None
        ends.arena.close()
        with Arena(ends.transport, 4096) as another:
            ends.write(another, successor)
            with pytest.raises(PeerUnreachable):
                ends.write(another)
        assert ends.memory() is not None


def test_closing_during_a_write_ends_it_and_bytes_on_the_wire_arrive_whole(
    mortal_peer: Mortal,
) -> None:
    ends, found, begun = mortal_peer, list[Exception](), threading.Event()
    patch = pytest.MonkeyPatch()

    def make_and_tell(
        agent: NativeAgent, peer: str, pieces: Sequence[UInt64Array], gpus: tuple[int, int]
    ) -> object:
        # The lock of the transport is held until the transfer has begun.
        if pieces[-1].sum() == LARGE:
            begun.set()
        return new_write(agent, peer, pieces, gpus)

    def write() -> None:
        try:
            ends.write(ends.arena)
        except TransferOutcomeUnknown as error:
            found.append(error)

    patch.setattr(nixl, "new_write", make_and_tell)
    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(20.0)
    wanted = xxhash.xxh3_128_hexdigest(ends.arena.bytes.tobytes())
    patch.undo()
    ends.arena.close()
    ends.other.close()
    ends.transport.close()
    thread.join(5.0)
    assert not thread.is_alive()
    assert "the transport was closed; bytes may still arrive" in str(found[0])
    assert ends.memory() is not None
    ends.peer.resume()
    deadline = Deadline.after(20.0, "the last byte")
    while ends.peer.digest() != wanted:
        deadline.check_before_more()


@pytest.mark.long
class TestNixlTcp(ProcessConformance):
    config: ClassVar[NixlConfig] = TCP

    def test_the_wire_is_looked_up_after_the_first_write(self, rig: Rig) -> None:
        rig.write(rig.batch([0], [0], [16]))
        report = rig.transport.report()
        assert (report.protocol, rig.transport.traits.one_sided) == ("tcp", False)
        assert "lo" in report.detail

    def test_a_write_that_timed_out_is_unknown_until_it_is_over(
        self, mortal: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batch = mortal.batch([0], [0], [NBYTES])
        mortal.write(mortal.batch([64], [0], [8]))
        process = self.process(mortal)
        process.stop()
        # No byte was sent.
        mortal.refused(batch, PeerUnreachable, within_s=2.0, deadline_s=0.5)
        process.resume()
        mortal.write(mortal.batch([64], [0], [8]))
        stop_between_word_and_batch(monkeypatch, process)
        mortal.refused(batch, TransferOutcomeUnknown, within_s=2.0, deadline_s=0.5)
        source = np.full(4096, 5, np.uint8)
        region = mortal.transport.register(int(source.ctypes.data), source.nbytes)
        # This call waits for the open write.
        mortal.transport.unregister(region)
        mortal.refused(mortal.batch([0], [0], [16]), TransferOutcomeUnknown, deadline_s=0.5)
        process.resume()
        for _ in range(400):
            # The open write continues during this round trip.
            process.digest()
            try:
                mortal.write(batch)
                break
            except TransferOutcomeUnknown:
                continue
        mortal.check_peer(mortal.arena.bytes, "after it went on")

    def test_a_peer_that_dies_under_an_open_write_is_unreachable(
        self, mortal: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batch = mortal.batch([0], [0], [NBYTES])
        mortal.write(mortal.batch([64], [0], [8]))
        process = self.process(mortal)
        stop_between_word_and_batch(monkeypatch, process)
        mortal.refused(batch, TransferOutcomeUnknown, within_s=2.0, deadline_s=0.5)
        process.kill()
        start = time.monotonic()
        mortal.refused(batch, PeerUnreachable)
        assert time.monotonic() - start < 1.0
        with PeerProcess(TCP, NBYTES) as successor:
            rig = Rig(mortal.transport, mortal.arena, successor)
            rig.write(rig.batch([0], [0], [4096]))
            assert successor.read(0, 4096) == mortal.arena.bytes[:4096].tobytes()
