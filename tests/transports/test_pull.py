"""Tests of `pull`: the process that owns the memory reads."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from numpy_gpu import numpy_gpu

from windlass.errors import PeerUnreachable, RegionError, TransferFailed, TransferOutcomeUnknown
from windlass.memory.cuda.range_copy import copy_ranges
from windlass.net.clock import Deadline
from windlass.testing.transport_conformance import NBYTES, ProcessConformance, Rig
from windlass.transfer.arena import Arena
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.packer import batches_to
from windlass.transports import process_memory, pull, pull_gpu
from windlass.transports.auto import TransportSet
from windlass.transports.base import WriteBatch
from windlass.transports.cma import CmaConfig
from windlass.transports.processes import OwnProcess, connect_within, socket_name_of
from windlass.transports.pull import PullConfig, PullTransport
from windlass.transports.pull_gpu import GpuReads
from windlass.transports.shm import ShmConfig

ANOTHER_PROCESS = 1
"""A process id that is not this process's."""


class TestPull(ProcessConformance):
    config: ClassVar[PullConfig] = PullConfig()

    def test_the_reader_refuses_memory_that_it_has_not_registered(self, rig: Rig) -> None:
        """Check the reader's own table: the writer's view of the regions may be forged."""
        wide = msgspec.structs.replace(rig.peer.region, address=4096, nbytes=(1 << 47) - 8192)
        batch = rig.batch([0, 64], [0, 64], [16, 16], regions=(wide,))
        batch.remote_addresses[1] = rig.peer.region.address + NBYTES
        message = rig.refused(batch, RegionError)
        assert "memory that the reader has registered" in message
        rig.check_untouched("the good piece of a batch with a bad one")

    def test_memory_without_pages_is_a_clean_failure(self, rig: Rig) -> None:
        address = rig.place(np.full(4096, 5, np.uint8))
        region = rig.transport.register(address, 1 << 45)
        batch = rig.batch([0, 0], [0, 64], [16, 16])
        batch.local_addresses[1] = address + (1 << 44)
        message = rig.refused(batch, TransferFailed)
        rig.transport.unregister(region)
        assert "not mapped" in message
        rig.write(rig.batch([0], [0], [16]))

    def test_a_dead_writer_changes_nothing_after_a_fence(self, mortal: Rig) -> None:
        mortal.peer.kill()
        mortal.transport.fence(deadline_s=1.0)
        mortal.refused(mortal.batch([0], [0], [16]), PeerUnreachable)


def loopback(transport: PullTransport, source: Arena, target: Arena, nbytes: int) -> WriteBatch:
    one = (np.array([value], np.uint64) for value in (source.address, target.address, nbytes))
    local, remote, sizes = one
    return WriteBatch(
        endpoint=transport.endpoint(), local_addresses=local, remote_addresses=remote, nbytes=sizes,
        regions=(target.region.remote,),
    )  # fmt: skip


def test_memory_that_is_read_into_is_freed_only_after_the_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check both ends in one process: the target is unregistered while its read runs."""
    begun, may_end, freed = threading.Event(), threading.Event(), threading.Event()
    real = process_memory.readv

    def slow(pid: int, local: np.ndarray, remote: np.ndarray) -> int:
        begun.set()
        may_end.wait(10)
        return real(pid, local, remote)

    with closing(PullTransport()) as transport:
        source, target = Arena(transport, 4096), Arena(transport, 4096)
        source.bytes[:] = np.arange(4096) % 251
        monkeypatch.setattr(pull, "readv", slow)
        writing = threading.Thread(
            target=transport.write, args=(loopback(transport, source, target, 4096),),
            kwargs={"deadline_s": 20.0},
        )  # fmt: skip
        writing.start()
        assert begun.wait(10)
        transport.unregister(target.region, freed.set)
        assert not freed.is_set()
        with pytest.raises(TransferFailed, match="1 reads have not ended"):
            transport.fence(deadline_s=0.05)
        may_end.set()
        writing.join()
        assert freed.wait(10)
        transport.fence(deadline_s=1.0)
        assert (target.bytes == source.bytes).all()


def test_a_request_whose_writer_has_given_up_is_not_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that bytes do not arrive long after the writer's deadline, when the reader runs again."""
    began, may_go, calls = threading.Event(), threading.Event(), []
    real = pull.is_closed

    def late(line: socket.socket) -> bool:
        began.set()
        may_go.wait(10)
        return real(line)

    monkeypatch.setattr(pull, "is_closed", late)
    with closing(PullTransport()) as transport:
        monkeypatch.setattr(pull, "readv", lambda *call: calls.append(call))
        source, target = Arena(transport, 4096), Arena(transport, 4096)
        with pytest.raises(TransferOutcomeUnknown, match="may still read"):
            transport.write(loopback(transport, source, target, 64), deadline_s=0.3)
        assert began.is_set()
        may_go.set()
        transport.fence(deadline_s=5.0)
        time.sleep(0.05)
        assert not calls


def connected(transport: PullTransport) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(10.0)
    line.connect(socket_name_of(transport.endpoint()))
    return line


@pytest.mark.parametrize("sent", [b"", b"\1"])
def test_reader_closes_a_connection_without_a_request(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(pull, "HEAD_S", 0.1)
    with closing(PullTransport()) as transport, connected(transport) as line:
        line.sendall(sent)
        assert line.recv(1) == b""


def test_reader_closes_a_connection_whose_request_is_not_whole_by_its_deadline() -> None:
    """Check a writer that sends one byte at a time, and each byte in time."""
    with closing(PullTransport()) as transport, connected(transport) as line:

        def send_slowly() -> None:
            with suppress(OSError):
                for _ in range(24):
                    time.sleep(0.1)
                    line.sendall(b"\1")

        line.sendall(pull.HEAD.pack(1, 0.3, 0))
        began = time.monotonic()
        sending = threading.Thread(target=send_slowly)
        sending.start()
        with suppress(ConnectionResetError):
            line.recv(1000)
        took_s = time.monotonic() - began
        sending.join()
        assert took_s < 1.5


def test_writer_reads_a_bounded_answer() -> None:
    """Check a peer that sends 64 MiB: the writer fails at once instead of waiting for the end of the answer."""

    def flood(line: socket.socket) -> None:
        with line, suppress(OSError):
            line.sendall(bytes(64 << 20))
            while line.recv(1 << 16):
                pass

    with closing(PullTransport()) as transport, closing(OwnProcess("pull", serve=flood)) as peer:
        source, target = Arena(transport, 4096), Arena(transport, 4096)
        remote = msgspec.structs.replace(target.region.remote, endpoint=peer.endpoint)
        batch = loopback(transport, source, target, 64)
        batch = dataclasses.replace(batch, endpoint=peer.endpoint, regions=(remote,))
        with pytest.raises(TransferFailed):
            transport.write(batch, deadline_s=3.0)


def test_writer_waits_while_too_many_connections_wait_at_the_reader() -> None:
    begun, waiting = threading.Event(), threading.Event()

    def serve(line: socket.socket) -> None:
        begun.set()
        waiting.wait(10)
        line.close()

    with closing(OwnProcess("pull", serve=serve)) as peer, ExitStack() as lines:
        for count in range(200):
            if count == 1:
                assert begun.wait(10)
            line = lines.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            line.setblocking(False)
            try:
                line.connect(socket_name_of(peer.endpoint))
            except BlockingIOError:
                break
        else:
            pytest.fail("the queue of connections must be full")
        last = lines.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with pytest.raises(TimeoutError, match=r"did not accept the connection within 0\.2 s"):
            connect_within(last, peer.endpoint, 0.2)
        threading.Timer(0.2, waiting.set).start()
        connect_within(last, peer.endpoint, 10.0)
        assert last.gettimeout() == 10.0


def test_listener_serves_later_connections_after_an_error() -> None:
    """Let the first connection fail as it does if the system has no thread left."""
    calls = list[int]()

    def serve(line: socket.socket) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("can't start new thread")
        with line:
            line.sendall(b"served")

    with closing(OwnProcess("pull", serve=serve)) as peer:
        for expected in (b"", b"served"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                connect_within(line, peer.endpoint, 5.0)
                assert line.recv(16) == expected


def test_fence_fails_while_a_late_copy_of_the_gpu_may_still_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(PullTransport()) as transport:
        transport.fence(deadline_s=1.0)
        monkeypatch.setattr(PullTransport, "is_late", True)
        with pytest.raises(TransferFailed, match="may still write"):
            transport.fence(deadline_s=1.0)


def test_reads_of_the_gpu_that_run_together_share_the_mapping_of_an_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = threading.Barrier(2)

    def copy(*arguments: Any) -> None:
        together.wait(10)
        copy_ranges(*arguments)
        together.wait(10)

    monkeypatch.setattr(pull_gpu, "copy_ranges", copy)
    reads = GpuReads(numpy_gpu())
    source, *targets = (reads.gpu.device.allocate(64) for _ in range(3))
    reads.gpu.device.upload(source, bytes(range(64)))
    one = np.array([source], np.uint64)
    exported = msgspec.msgpack.encode([(source, 64, reads.gpu.device.export(source))])
    deadline = Deadline.after(20.0, "a test")

    def read(target: int) -> None:
        to, nbytes = np.array([target], np.uint64), np.array([64], np.uint64)
        with socket.socket() as line:
            reads.read(line, ANOTHER_PROCESS, exported, (to, one, nbytes), deadline)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(read, targets))
    assert [reads.gpu.device.download(t, 64) for t in targets] == [bytes(range(64))] * 2
    # The allocation can be opened again, so the last read has closed it.
    read_again = partial(reads.gpu.device.open, reads.gpu.device.export(source))
    assert read_again() == source
    with pytest.raises(TransferFailed, match="open already"):
        read_again()


@pytest.mark.parametrize(("config", "num_writes"), [(PullConfig(), 1), (CmaConfig(), 3)])
def test_a_link_of_many_pieces_is_one_request_to_a_reader(
    config: PullConfig | CmaConfig, num_writes: int
) -> None:
    with closing(TransportSet([config.create(), ShmConfig().create()])) as transport:
        (endpoint,) = (
            o.endpoint for o in transport.offers() if o.endpoint.transport == config.name
        )
        rows = np.arange(1, 10_001, dtype=np.uint64)
        binding = DestinationBinding("engine/0", endpoint, (), ())
        batches = list(batches_to(transport, binding, rows, rows + np.uint64(1), rows))
    assert len(batches) == num_writes
    assert np.concatenate([batch.local_addresses for batch in batches]).tolist() == rows.tolist()


def test_read_by_the_gpu_refuses_pieces_without_exported_memory() -> None:
    reads = GpuReads(numpy_gpu())
    addresses, nbytes = np.array([4096], np.uint64), np.array([16], np.uint64)
    outside = pytest.raises(RegionError, match="outside the memory that the writer exports")
    with socket.socket() as line, outside:
        reads.read(
            line,
            ANOTHER_PROCESS,
            msgspec.msgpack.encode([]),
            (addresses, addresses, nbytes),
            Deadline.after(5.0, "a test"),
        )
