"""Copies shared among threads have ended when the call returns, even if no thread could start."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import pytest
from memory_transport import MemoryFabric, MemoryTransport

from windlass.errors import TransferFailed
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.transfer.arena import Arena
from windlass.transfer.replica import Replica
from windlass.transports import process_memory, sharing
from windlass.transports.base import WriteBatch
from windlass.transports.cma import CmaTransport
from windlass.transports.sharing import share

SECONDS = 20.0


class NoThreads(Executor):
    """`ThreadPoolExecutor` as if the kernel refused threads: it queues a job and raises."""

    def __init__(self, after: int = 0) -> None:
        self.queued: list[Callable[[], object]] = []
        self.after = after

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.queued.append(lambda: fn(*args, **kwargs))
        if len(self.queued) > self.after:
            raise RuntimeError("can't start new thread")
        return Future()

    def come_late(self) -> None:
        for job in self.queued:
            job()


def test_a_late_thread_does_not_write_a_replica() -> None:
    transport, threads = MemoryTransport(MemoryFabric()), NoThreads()
    sources = [np.arange(1, 4097, dtype="<u4") * n for n in (1, 2, 3)]
    builder = ManifestBuilder("trainer/0", Role.TRAINER)
    for index, source in enumerate(sources):
        builder.add_parameter(str(index), nbytes=source.nbytes, dtype=DType.FLOAT32)
    replica = Replica(builder.build(), lambda nbytes: Arena(transport, nbytes), threads)
    replica.fit(range(3))
    replica.take(np.array([source.ctypes.data for source in sources], np.uint64))
    arena = replica.slot.arena
    assert isinstance(arena, Arena)
    wanted = b"".join(s.tobytes() for s in sources)
    assert arena.bytes.tobytes() == wanted
    for source in sources:
        # The owner continues training.
        source += 7
    assert threads.queued
    threads.come_late()
    assert arena.bytes.tobytes() == wanted
    replica.close()


def test_a_replica_that_got_no_memory_sends_the_parameters_themselves() -> None:
    transport, sizes = MemoryTransport(MemoryFabric()), [64, 1 << 16]
    builder = ManifestBuilder("trainer/0", Role.TRAINER)
    for index, nbytes in enumerate(sizes):
        builder.add_parameter(str(index), nbytes=nbytes, dtype=DType.FLOAT32)

    requested: list[int] = []

    def make(nbytes: int) -> Arena:
        requested.append(nbytes)
        if nbytes >= sizes[1]:
            raise TransferFailed("no memory of this size")
        # A later arena is larger than requested, so that a copy that is too large does no harm in this test.
        return Arena(transport, nbytes if len(requested) == 1 else 2 * sizes[1])

    replica = Replica(builder.build(), make, NoThreads())
    replica.fit([0])
    sources = [np.zeros(nbytes, np.uint8) for nbytes in sizes]
    addresses = np.array([source.ctypes.data for source in sources], np.uint64)
    assert replica.take(addresses)[0] != addresses[0]
    with pytest.raises(TransferFailed, match="no memory of this size"):
        replica.fit([0, 1])
    assert replica.take(addresses).tolist() == addresses.tolist()
    replica.close()


@pytest.mark.parametrize("after", [0, 1])
def test_a_cma_write_without_threads_is_complete_when_it_returns(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(process_memory, "MIN_THREAD_NBYTES", 1024)
    transport = CmaTransport(num_threads=4)
    helpers, threads = transport.helpers, NoThreads(after)
    monkeypatch.setattr(transport, "helpers", threads)
    with Arena(transport, 1 << 16) as source, Arena(transport, 1 << 16) as target:
        source.bytes.view("<u4")[:] = np.arange(1, (1 << 14) + 1)
        wanted = source.bytes.tobytes()
        batch = WriteBatch(
            endpoint=transport.endpoint(),
            local_addresses=np.array([source.address], np.uint64),
            remote_addresses=np.array([target.address], np.uint64),
            nbytes=np.array([source.nbytes], np.uint64),
            regions=(target.region.remote,),
        )
        transport.write(batch, deadline_s=SECONDS)
        assert target.bytes.tobytes() == wanted
        source.bytes[:] = 0
        threads.come_late()
        assert target.bytes.tobytes() == wanted
    monkeypatch.undo()
    transport.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        helpers.submit(os.getpid)
    assert transport.endpoint().address == str(os.getpid())


def test_a_failure_starts_no_further_job_and_waits_for_running_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, noted, ended = threading.Event(), threading.Event(), list[str]()

    class Jobs(deque[Callable[[], object]]):
        def clear(self) -> None:
            super().clear()
            noted.set()

    def fail() -> None:
        assert begun.wait(SECONDS)
        raise TransferFailed("the first")

    def go_on() -> None:
        begun.set()
        assert noted.wait(SECONDS)
        ended.append("begun before")

    monkeypatch.setattr(sharing, "deque", Jobs)
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(TransferFailed, match="the first"):
            share([fail, go_on, lambda: ended.append("never")], threads, 1)
        assert ended == ["begun before"]


def test_an_interrupted_caller_waits_for_jobs_of_other_threads() -> None:
    caller, begun = threading.current_thread(), threading.Event()
    going_on: list[str] = []

    def job() -> None:
        if threading.current_thread() is caller:
            assert begun.wait(SECONDS)
            raise KeyboardInterrupt
        going_on.append("a copy")
        begun.set()
        threading.Event().wait(0.1)
        going_on.pop()

    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(KeyboardInterrupt):
            share([job] * 20, threads, 1)
        assert not going_on


def test_each_of_many_jobs_runs_once() -> None:
    done: list[int] = []
    with ThreadPoolExecutor(4) as threads:
        share([lambda n=n: done.append(n) for n in range(500)], threads, 3)  # type: ignore[misc]
    assert sorted(done) == list(range(500))
