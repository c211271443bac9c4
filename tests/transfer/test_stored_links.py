"""The trainer's side within one host when kernels are late, with kernels in numpy."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from numpy_gpu import KernelTransport
from recorded_driver import RecordedDriver

from windlass.config import UpdateMode
from windlass.errors import RoundAborted, TransferFailed, TransferOutcomeUnknown
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory import copy_sources as sources
from windlass.memory.cuda import driver
from windlass.memory.cuda.driver import Device, Event, MemoryKind
from windlass.memory.cuda.gpu import Gpu
from windlass.planning.planner import plan_transfer
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import LinkStatus
from windlass.transfer.dtensor import LiveTensors, own_tensors
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.processes import own_endpoint

SHAPE = (48, 16)
SECONDS = 20.0


def manifest(worker: str, role: Role) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("w", nbytes=4 * SHAPE[0] * SHAPE[1], dtype=DType.FLOAT32)
    builder.add_shard("w", SHAPE, Box((0, 0), SHAPE), "w")
    return builder.build()


class Pair:
    """Trainer rank and engine rank in one process."""

    def __init__(self) -> None:
        self.trained = np.arange(SHAPE[0] * SHAPE[1], dtype="<f4")
        self.served = np.zeros_like(self.trained)
        ours, theirs = manifest("trainer/0", Role.TRAINER), manifest("engine/0", Role.ENGINE)
        self.plan = plan_transfer([ours], [theirs])
        self.memory = KernelTransport()
        region = self.memory.register(self.served.ctypes.data, self.served.nbytes)
        self.receiver = Receiver(self.memory, theirs, [self.served.ctypes.data], [region])
        binding = self.receiver.connect(
            self.plan.parts(sending=False, all_names=True)["engine/0"], UpdateMode.IN_PLACE
        )
        self.transport = KernelTransport()
        self.gpu = self.transport.mapper.gpu
        self.where: tuple[ParameterMemory, ...] = (
            ParameterMemory(self.trained.ctypes.data, self.trained.nbytes),
        )
        self.sender = Sender(self.transport, ours, lambda: self.where)
        # The sender looks the endpoint up among the processes of this host.
        self.binding = type(binding)(
            worker=binding.worker,
            endpoint=own_endpoint("cuda_ipc"),
            regions=binding.regions,
            parameter_addresses=binding.parameter_addresses,
            staging_address=binding.staging_address,
            listener=binding.listener,
            digest_kind=binding.digest_kind,
        )
        self.connect()

    def connect(self) -> None:
        self.sender.connect(
            self.plan.parts(sending=True, all_names=True)["trainer/0"], [self.binding]
        )

    @property
    def num_held(self) -> int:
        return len(self.gpu.device.allocated)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.memory.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(sources, "memory_kind", lambda _: MemoryKind.DEVICE)
    monkeypatch.setattr(sources, "gpu_of", lambda _: 0)
    found = Pair()
    yield found
    found.close()


def test_an_engine_hashes_bytes_of_the_sender_as_they_land(pair: Pair) -> None:
    for version in range(2):
        pair.trained += 1
        pair.sender.prepare(version)
        sent = pair.sender.write(version, ["engine/0"], SECONDS)
        (link,) = sent.links
        assert link.status is LinkStatus.OK, link.error
        assert 0 < link.wire_s <= sent.wire_s
        assert pair.receiver.verify(version, {"trainer/0": link.digest}) == ()
        assert pair.receiver.late_nbytes == 0
        assert (pair.served == pair.trained).all()
    pair.sender.close()
    assert pair.num_held == 0


def test_a_gpu_busy_until_the_deadline_sends_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(deadline_s: float) -> None:
        raise TransferFailed(f"work did not end within {deadline_s} s")

    pair.sender.prepare(0)
    with monkeypatch.context() as patch:
        patch.setattr(pair.gpu, "settle", busy)
        (link,) = pair.sender.write(0, ["engine/0"], 0.5).links
    assert (link.status, link.error) == (LinkStatus.FAILED, "work did not end within 0.5 s")
    assert not pair.served.any()


_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
_MAP_FIXED = 0x10


class PinnedPages:
    """Host memory of a module in torch, and a driver whose pins keep the pages that are there when it pins."""

    def __init__(self, device: object, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 4 * SHAPE[0] * SHAPE[1]
        self._home = mmap.mmap(-1, self.nbytes)
        self.address = int(np.frombuffer(self._home, np.uint8).ctypes.data)
        self._file = -1
        self._pinned: mmap.mmap | None = None
        self.module = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        monkeypatch.setattr(device, "pin", self.pin)
        monkeypatch.setattr(device, "unpin", self.unpin)
        monkeypatch.setattr(device, "device_pointer", self.device_pointer)

    def allocate(self, first: int) -> np.ndarray:
        """Free the parameter, and allocate it at the same address in new pages; return its values."""
        if self._file >= 0:
            os.close(self._file)
        self.module.weight.data = torch.empty(0)
        self._file = os.memfd_create("pages")
        os.ftruncate(self._file, self.nbytes)
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        assert _mmap(self.address, self.nbytes, access, kind, self._file, 0) == self.address
        values = np.arange(first, first + self.nbytes // 4, dtype="<f4")
        ctypes.memmove(self.address, values.ctypes.data, self.nbytes)
        fresh = torch.frombuffer(self._home, dtype=torch.float32).view(SHAPE)
        assert fresh.data_ptr() == self.address
        self.module.weight.data = fresh
        return values

    def pin(self, address: int, nbytes: int) -> None:
        assert self._pinned is None
        assert address == self.address
        assert nbytes >= self.nbytes
        self._pinned = mmap.mmap(self._file, self.nbytes)

    def unpin(self, address: int) -> None:
        assert address == self.address
        self._pinned = None

    def device_pointer(self, address: int) -> int:
        assert self._pinned is not None
        return int(np.frombuffer(self._pinned, np.uint8).ctypes.data) + address - self.address


def test_host_memory_that_was_freed_is_pinned_again_at_the_same_address(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels read and hashed the pages of the freed memory, so the digest was right and the engine served the old version.

    A trainer that moves its weights to a GPU for each step, and back to host memory, frees and allocates them.
    """
    monkeypatch.setattr(sources, "memory_kind", lambda _: MemoryKind.PAGEABLE)
    pages = PinnedPages(pair.gpu.device, monkeypatch)
    held = pages.allocate(0)
    live = LiveTensors([pages.module], lambda: own_tensors(pages.module))
    for version in range(3):
        pair.where = live.locate()
        pair.sender.prepare(version)
        (link,) = pair.sender.write(version, ["engine/0"], SECONDS).links
        assert link.status is LinkStatus.OK, link.error
        assert pair.receiver.verify(version, {"trainer/0": link.digest}) == ()
        assert (pair.served == held).all()
        held = pages.allocate(1000 * (version + 1))


@pytest.mark.parametrize("stops", [TransferFailed("no such launch"), MemoryError("none left")])
@pytest.mark.parametrize(
    "ends",
    [
        None,
        TransferFailed("no event"),
        TransferOutcomeUnknown("late"),
        RuntimeError("can't start new thread"),
    ],
)
def test_an_interrupted_write_fails_only_after_all_queued_copies_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, ends: Exception | None, stops: Exception
) -> None:
    finished: list[float] = []
    wanted = type(stops) if ends is None else TransferOutcomeUnknown

    def refuse(*_: object) -> None:
        raise stops

    def finish(deadline_s: float) -> None:
        finished.append(deadline_s)
        if ends is not None:
            raise ends

    pair.sender.prepare(0)
    with monkeypatch.context() as patch:
        patch.setattr(pair.gpu.kernels, "put", refuse)
        patch.setattr(pair.gpu, "finish", finish)
        with pytest.raises(wanted):
            pair.sender.write(0, ["engine/0"], SECONDS)
    assert len(finished) == 1
    assert 0 < finished[0] <= SECONDS
    # Memory that a late kernel may still read is kept.
    assert pair.gpu.is_late == (ends is not None)


def test_an_unknown_outcome_is_reported_although_the_liveness_check_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "too many open files")

    def late(*_: object) -> None:
        raise TransferOutcomeUnknown("late")

    pair.sender.prepare(0)
    with monkeypatch.context() as patch:
        patch.setattr("windlass.transfer.stored_links.check_alive", refuse)
        patch.setattr(pair.gpu, "wait", late)
        (link,) = pair.sender.write(0, ["engine/0"], SECONDS).links
    assert (link.status, link.error) == (LinkStatus.UNKNOWN, "late")


def gpu_that(monkeypatch: pytest.MonkeyPatch, *, synchronize: Callable[[], object]) -> Gpu:
    """Return a `Gpu` on a device without hardware, on which `synchronize` waits for all work."""
    device = SimpleNamespace(ordinal=3, synchronize=synchronize)
    for name in ("Device", "Kernels", "Stream"):
        monkeypatch.setattr(f"windlass.memory.cuda.gpu.{name}", lambda *_: device)
    return Gpu(3)


def test_a_gpu_without_a_waiting_thread_does_not_count_as_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    gpu = gpu_that(monkeypatch, synchronize=refuse)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransferFailed, match="nothing was sent"):
            gpu.settle(SECONDS)
        assert not gpu.is_late
        with pytest.raises(TransferOutcomeUnknown, match="may still run"):
            gpu.wait(cast("Event", SimpleNamespace(wait=lambda: None)), SECONDS)
    assert gpu.is_late


def test_tables_that_late_kernels_may_read_are_neither_freed_nor_replaced(pair: Pair) -> None:
    pair.sender.prepare(0)
    held = pair.num_held
    pair.gpu.is_late = True  # type: ignore[misc]
    (link,) = pair.sender.write(0, ["engine/0"], SECONDS).links
    assert link.status is LinkStatus.UNKNOWN
    for again in (pair.connect, lambda: pair.sender.prepare(1)):
        with pytest.raises(TransferOutcomeUnknown, match="may still run"):
            again()
    pair.sender.close()
    assert pair.num_held == held > 0


def test_tables_are_not_freed_under_a_running_write(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    statuses: list[LinkStatus] = []

    def wait(_: object, deadline_s: float) -> None:
        begun.set()
        assert go_on.wait(deadline_s)

    monkeypatch.setattr(pair.gpu, "wait", wait)
    pair.sender.prepare(0)
    held = pair.num_held

    def write() -> None:
        statuses.extend(x.status for x in pair.sender.write(0, ["engine/0"], SECONDS).links)

    writing = threading.Thread(target=write)
    closing = threading.Thread(target=pair.sender.close)
    writing.start()
    assert begun.wait(SECONDS)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    assert pair.num_held == held
    go_on.set()
    for thread in (writing, closing):
        thread.join(SECONDS)
    assert statuses == [LinkStatus.OK]
    assert pair.num_held == 0
    with pytest.raises(RoundAborted, match="sends nothing to engine/0"):
        pair.sender.write(0, ["engine/0"], SECONDS)


def test_an_upload_is_complete_before_a_kernel_of_another_stream_can_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = RecordedDriver()
    monkeypatch.setattr(driver, "driver", lambda: recorded)
    Device(0).upload(4096, b"table")
    queued = [name for name in recorded.names if not name.startswith("cuCtx")]
    assert queued[-2:] == ["cuMemcpyHtoD", "cuStreamSynchronize"]


def test_a_wait_for_other_gpu_work_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    gpu = gpu_that(monkeypatch, synchronize=over.wait)
    with pytest.raises(
        TransferFailed, match=r"GPU 3: .* did not end within 0.05 s; nothing was sent"
    ):
        gpu.settle(0.05)
    assert not gpu.is_late
    over.set()
    gpu.settle(SECONDS)
