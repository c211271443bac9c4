"""Memory under a write of unknown outcome stays until that write ends, whatever is closed."""

from __future__ import annotations

import ctypes
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import numpy as np
import pytest
from memory_transport import MemoryFabric, MemoryTransport
from numpy_gpu import numpy_gpu

from windlass.errors import PeerUnreachable, RegionError, TransferFailed, TransferOutcomeUnknown
from windlass.memory.cuda.driver import IPC_HANDLE_NBYTES
from windlass.memory.device import CudaMemory
from windlass.net.clock import Deadline
from windlass.testing.wrapped_transport import WrappedTransport
from windlass.transfer.arena import Arena
from windlass.transports import cuda_ipc as ipc
from windlass.transports import region_transport as bounds
from windlass.transports.base import MemoryRegion, WriteBatch
from windlass.transports.cuda_ipc import CudaIpcTransport
from windlass.transports.mooncake import transport as mooncake
from windlass.transports.mooncake.native import NativeEngine, Started
from windlass.transports.mooncake.transport import MooncakeConfig, MooncakeTransport
from windlass.transports.peers import PeerEndpoint, RemoteRegion
from windlass.transports.region_transport import RegionTransport
from windlass.transports.traits import WireReport

SECONDS = 20.0
NBYTES = 1 << 14


class Deferring(WrappedTransport):
    """Transport with a write under way."""

    def __init__(self) -> None:
        super().__init__(MemoryTransport(MemoryFabric()))
        self.waiting: list[Callable[[], None]] = []

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        self.inner.unregister(region)
        if released is not None:
            self.waiting.append(released)


def test_an_arena_leaves_its_memory_to_the_transport() -> None:
    transport = Deferring()
    arena = Arena(transport, NBYTES)
    arena.bytes[:] = 7
    address, memory = arena.address, weakref.ref(arena.bytes)
    arena.close()
    assert arena.nbytes == 0
    assert ctypes.string_at(address, NBYTES) == bytes([7]) * NBYTES
    (released,) = transport.waiting
    released()
    transport.waiting.clear()
    del released
    assert memory() is None
    arena.close()
    transport.close()


def test_an_arena_on_a_gpu_leaves_its_memory_to_the_transport() -> None:
    transport, gpu = Deferring(), numpy_gpu()
    arena = Arena(transport, NBYTES, CudaMemory(gpu))
    held = gpu.device.allocated  # type: ignore[attr-defined]
    arena.close()
    arena.close()
    assert len(held) == len(transport.waiting) == 1
    transport.waiting[0]()
    assert not held
    transport.close()


def test_gpu_memory_under_late_kernels_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "Gpu", lambda *_: numpy_gpu())
    monkeypatch.setattr(bounds, "NEVER_FREED", kept := list[Callable[[], None]]())
    transport, freed = CudaIpcTransport(), list[str]()
    # Key of a region in an allocation of 64 bytes from cudaMalloc.
    key = f"0:0:{bytes(IPC_HANDLE_NBYTES).hex()}:64:0"
    regions = [
        MemoryRegion(address, 64, RemoteRegion(transport.endpoint(), address, 64, key))
        for address in (4096, 8192)
    ]
    for region in regions:
        transport.table.add(region)
    transport.unregister(regions[0], lambda: freed.append("at rest"))
    transport.gpu.distrust("late")
    transport.unregister(regions[1], lambda: freed.append("late"))
    transport.close()
    assert (freed, len(kept)) == (["at rest"], 1)


class Touching(RegionTransport):
    """Transport that frees the addresses in `touched` late, and others at once."""

    traits = MemoryTransport.traits

    def __init__(self, *touched: int) -> None:
        super().__init__(PeerEndpoint("nixl", "nobody", "0"))
        self.touched, self.freed = set(touched), list[int]()

    def report(self) -> WireReport:
        return WireReport("nixl", "none", "nothing moves")

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        pass

    def _is_touched(self, region: MemoryRegion) -> bool:
        return region.address in self.touched

    def free(self, *, keep: bool = False) -> None:
        with self._lock:
            self._free_untouched(keep=keep)

    def add(self, *addresses: int) -> None:
        for address in addresses:
            self.unregister(self.register(address, 64), partial(self.freed.append, address))


def test_memory_is_freed_only_when_it_is_untouched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = Touching(4096, 8192)
    memory.add(4096, 8192, 12288)
    assert memory.freed == [12288]
    assert "may still touch 64 bytes at 0x1000" in caplog.text
    assert "0x3000" not in caplog.text
    memory.touched.remove(8192)
    memory.free()
    assert memory.freed == [12288, 8192]
    memory.touched.clear()
    memory.add(16384)
    assert memory.freed == [12288, 8192, 4096, 16384]


def test_memory_in_use_at_the_end_of_its_transport_is_never_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "NEVER_FREED", kept := list[Callable[[], None]]())
    memory = Touching(4096, 8192)
    memory.add(4096, 8192)
    memory.touched.remove(8192)
    memory.free(keep=True)
    memory.touched.clear()
    memory.free()
    assert (memory.freed, len(kept)) == ([8192], 1)


@pytest.mark.parametrize("error", [TransferFailed("the GPU is gone"), OSError(22, "not mapped")])
def test_memory_that_cannot_be_freed_does_not_delay_other_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(bounds, "NEVER_FREED", kept := list[Callable[[], None]]())
    memory = Touching(4096, 8192)

    def refuse() -> None:
        raise error

    memory.unregister(memory.register(4096, 64), refuse)
    memory.add(8192)
    assert not memory.freed
    memory.touched.clear()
    memory.add(12288)
    assert memory.freed == [8192, 12288]
    assert "memory cannot be freed" in caplog.text
    assert len(kept) == 1
    with pytest.raises(type(error)):
        kept[0]()


def wait_until(is_so: Callable[[], bool]) -> None:
    before = time.monotonic()
    while not is_so():
        assert time.monotonic() - before < SECONDS
        threading.Event().wait(0.001)


class SlowEngine:
    """Mooncake's calls within one process. A write reads its memory once it `may_go`."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.began, self.may_go, self.ended = (threading.Event() for _ in range(3))
        self.may_go.set()
        self.codes: queue.SimpleQueue[int] | None = None
        """Codes that writes wait for and return instead of moving bytes."""

    def get_rpc_port(self) -> int:
        return int(self.listener.getsockname()[1])

    def register_memory(self, *_: int) -> int:
        return 0

    def batch_register_memory(self, *_: list[int]) -> int:
        return 0

    def unregister_memory(self, _: int) -> int:
        return 0

    def send_probe(self, _: str) -> int:
        return 0

    def transfer_sync_read(self, _: str, here: int, there: int, nbytes: int) -> int:
        ctypes.memmove(here, there, nbytes)
        return 0

    def batch_transfer_sync_write(
        self, _: str, here: list[int], there: list[int], sizes: list[int]
    ) -> int:
        self.began.set()
        self.may_go.wait(SECONDS)
        if self.codes is not None:
            code = self.codes.get(timeout=SECONDS)
            self.ended.set()
            return code
        for source, target, nbytes in zip(here, there, sizes, strict=True):
            ctypes.memmove(target, source, nbytes)
        self.ended.set()
        return 0


class Ends:
    """A transport that writes from an arena into another transport's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines: list[SlowEngine] = []

        def start(*_: object) -> Started:
            self.engines.append(SlowEngine())
            return Started(
                engine=cast("NativeEngine", self.engines[-1]),
                wire="tcp",
                ordered=False,
                detail="",
                ports=frozenset(),
                max_registration_nbytes=0,
                num_nics=0,
            )

        monkeypatch.setattr(mooncake, "start_engine", start)
        self.source, self.target = (
            MooncakeTransport(MooncakeConfig(host="127.0.0.1")) for _ in range(2)
        )
        self.native = self.engines[0]
        self.arena, self.landing = Arena(self.source, NBYTES), Arena(self.target, NBYTES)
        self.arena.bytes[:] = np.arange(NBYTES) % 251 + 1
        self.wanted = self.arena.bytes.tobytes()
        self.memory = weakref.ref(self.arena.bytes)

    def write(self, arena: Arena, deadline_s: float) -> None:
        batch = WriteBatch(
            endpoint=self.target.endpoint(),
            local_addresses=np.array([arena.address], np.uint64),
            remote_addresses=np.array([self.landing.address], np.uint64),
            nbytes=np.array([NBYTES], np.uint64),
            regions=(self.landing.region.remote,),
        )
        self.source.write(batch, deadline_s=deadline_s)

    def lose(self) -> None:
        """Close the arena during a write that continues."""
        self.native.may_go.clear()
        # On a busy machine the first deadlines may pass before the write begins.
        for deadline_s in (0.3, 2.0, 10.0):
            with pytest.raises((TransferOutcomeUnknown, TransferFailed, PeerUnreachable)) as found:
                self.write(self.arena, deadline_s)
            if found.type is TransferOutcomeUnknown:
                break
        assert self.native.began.is_set()
        self.arena.close()

    def end_of_call(self) -> None:
        """Return once the lost write has returned."""
        self.native.may_go.set()
        (peer,) = self.source.peers.values()
        wait_until(lambda: not (peer.is_in_use or peer.is_open()))

    def close(self) -> None:
        self.native.may_go.set()
        assert self.native.ended.wait(SECONDS)
        self.source.close()
        self.landing.close()
        self.target.close()
        for engine in self.engines:
            engine.listener.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(bounds, "NEVER_FREED", [])
    found = Ends(monkeypatch)
    yield found
    found.close()


def test_a_mooncake_arena_without_open_writes_is_freed_at_once(ends: Ends) -> None:
    ends.write(ends.arena, SECONDS)
    assert ends.landing.bytes.tobytes() == ends.wanted
    ends.arena.close()
    assert ends.memory() is None


def test_a_late_mooncake_write_reads_its_closed_arena(ends: Ends) -> None:
    ends.lose()
    assert ends.memory() is not None
    assert not ends.landing.bytes.any()
    ends.end_of_call()
    assert ends.landing.bytes.tobytes() == ends.wanted
    other = Arena(ends.source, NBYTES)
    # This write finds that no write is open.
    ends.write(other, SECONDS)
    assert ends.memory() is None
    other.close()


def test_closing_mooncake_under_a_late_write_never_frees_the_memory(ends: Ends) -> None:
    ends.lose()
    ends.source.close()
    assert len(bounds.NEVER_FREED) == 1
    assert ends.memory() is not None
    ends.native.may_go.set()
    assert ends.native.ended.wait(SECONDS)
    assert ends.landing.bytes.tobytes() == ends.wanted


def test_a_late_mooncake_write_keeps_only_the_arena_that_it_reads(ends: Ends) -> None:
    before = Arena(ends.source, NBYTES)
    ends.lose()
    after = Arena(ends.source, NBYTES)
    memory = [weakref.ref(arena.bytes) for arena in (before, after)]
    before.close()
    after.close()
    assert [ref() is None for ref in memory] == [True, True]
    assert ends.memory() is not None


def test_a_late_mooncake_write_does_not_settle_another_unknown_write(
    ends: Ends,
) -> None:
    """Threads of a relay write to one peer like this: the second call queues behind the first."""
    ends.write(ends.arena, SECONDS)
    (peer,) = ends.source.peers.values()
    native = ends.native
    native.began.clear()
    native.codes = queue.SimpleQueue()
    local, remote, nbytes = (
        np.array([value], np.uint64) for value in (ends.arena.address, ends.landing.address, NBYTES)
    )
    found: list[Exception] = []

    def move(deadline_s: float) -> None:
        try:
            peer.write((local, remote, nbytes), Deadline.after(deadline_s, "write"))
        except TransferOutcomeUnknown as error:
            found.append(error)

    jobs = [threading.Thread(target=move, args=(seconds,)) for seconds in (1.0, 4.0)]
    jobs[0].start()
    assert native.began.wait(SECONDS)
    jobs[1].start()
    jobs[0].join(SECONDS)
    native.began.clear()
    native.codes.put(-1)
    assert native.began.wait(SECONDS)
    jobs[1].join(SECONDS)
    native.codes.put(0)
    wait_until(lambda: not peer.is_in_use)
    assert len(found) == 2
    with pytest.raises(TransferOutcomeUnknown, match="an earlier write may still continue"):
        ends.write(ends.arena, SECONDS)
    ends.arena.close()
    assert ends.memory() is not None


def test_a_mooncake_write_that_never_began_keeps_no_arena(ends: Ends) -> None:
    """The write was queued behind a stuck write and ran out of time."""
    ends.native.may_go.clear()
    stuck = threading.Thread(target=ends.write, args=(ends.arena, SECONDS))
    stuck.start()
    assert ends.native.began.wait(SECONDS)
    ends.arena.close()
    (peer,) = ends.source.peers.values()
    arena = Arena(ends.source, NBYTES)
    memory = weakref.ref(arena.bytes)
    local, remote, nbytes = (
        np.array([value], np.uint64) for value in (arena.address, ends.landing.address, NBYTES)
    )
    with pytest.raises(TransferFailed, match="this write did not begin"):
        peer.write((local, remote, nbytes), Deadline.after(0.1, "write"))
    arena.close()
    assert memory() is None
    assert ends.memory() is not None
    ends.native.may_go.set()
    stuck.join(SECONDS)
    assert ends.memory() is None


def test_closing_mooncake_during_a_write_ends_the_write_and_keeps_its_memory(
    ends: Ends,
) -> None:
    ends.native.may_go.clear()
    found: list[Exception] = []

    def write() -> None:
        try:
            ends.write(ends.arena, SECONDS)
        except TransferOutcomeUnknown as error:
            found.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert ends.native.began.wait(SECONDS)
    ends.arena.close()
    ends.source.close()
    thread.join(5.0)
    assert not thread.is_alive()
    assert "the transport was closed; bytes may still arrive" in str(found[0])
    assert ends.memory() is not None
    ends.native.may_go.set()
    assert ends.native.ended.wait(SECONDS)
    assert ends.landing.bytes.tobytes() == ends.wanted
    with pytest.raises((TransferFailed, RegionError)):
        ends.write(Arena(ends.target, NBYTES), 1.0)


def test_closing_mooncake_ends_a_write_to_a_silent_peer(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer gets no further request, because that would wait behind the stuck call."""
    ends.write(ends.arena, SECONDS)
    asked, may_answer, found = threading.Event(), threading.Event(), list[Exception]()

    def read(*_: object) -> int:
        asked.set()
        may_answer.wait(SECONDS)
        return -1

    def write() -> None:
        try:
            ends.write(ends.arena, SECONDS)
        except TransferFailed as error:
            found.append(error)

    monkeypatch.setattr(ends.native, "transfer_sync_read", read)
    thread = threading.Thread(target=write)
    thread.start()
    assert asked.wait(SECONDS)
    ends.arena.close()
    ends.source.close()
    thread.join(5.0)
    still = thread.is_alive()
    may_answer.set()
    thread.join(SECONDS)
    assert not still
    assert "the transport is closed" in str(found[0])


def test_a_mooncake_call_that_gets_no_thread_leaves_no_descriptor(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "IDLE_S", 0.01)
    ends.write(ends.arena, SECONDS)
    (peer,) = ends.source.peers.values()
    name = f"mooncake-{peer.endpoint.address}"
    wait_until(lambda: name not in {thread.name for thread in threading.enumerate()})
    local, remote, nbytes = (
        np.array([value], np.uint64) for value in (ends.arena.address, ends.landing.address, NBYTES)
    )

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(TransferFailed, match="did not begin"):
                peer.write((local, remote, nbytes), Deadline.after(SECONDS, "write"))
        assert len(os.listdir("/proc/self/fd")) == before
