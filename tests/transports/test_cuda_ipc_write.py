"""`CudaIpcTransport.write` with copies and kernels in numpy: ended writes and possible late ones."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numpy_gpu import numpy_gpu

from windlass.errors import TransferFailed, TransferOutcomeUnknown
from windlass.memory.cuda.driver import IPC_HANDLE_NBYTES
from windlass.memory.cuda.range_copy import copy_ranges
from windlass.transports import cuda_ipc as ipc
from windlass.transports.base import MemoryRegion, WriteBatch
from windlass.transports.cuda_ipc import CudaIpcTransport
from windlass.transports.peers import RemoteRegion

SECONDS = 20.0
LARGE = 4096
"""Smallest piece in bytes that a copy engine moves. A kernel moves smaller pieces."""


class Ends:
    """A process that writes a large piece and then small pieces into its own memory."""

    def __init__(self) -> None:
        self.transport = CudaIpcTransport()
        self.gpu = self.transport.gpu
        self.source = np.arange(2 * LARGE, dtype="<u2").view(np.uint8)
        self.target = np.zeros_like(self.source)
        for memory in (self.source, self.target):
            self.transport.table.add(self._region(memory))
        begins = np.array([0, LARGE, LARGE + 100], np.uint64)
        self.batch = WriteBatch(
            endpoint=self.transport.endpoint(),
            local_addresses=np.uint64(self.source.ctypes.data) + begins,
            remote_addresses=np.uint64(self.target.ctypes.data) + begins,
            nbytes=np.array([LARGE, 60, 3 * LARGE - 100], np.uint64)
            // np.array([1, 1, 4], np.uint64),
            regions=(self._region(self.target).remote,),
        )

    def _region(self, memory: np.ndarray) -> MemoryRegion:
        address, key = int(memory.ctypes.data), f"0:0:{bytes(IPC_HANDLE_NBYTES).hex()}:64:0"
        remote = RemoteRegion(self.transport.endpoint(), address, memory.nbytes, key)
        return MemoryRegion(address, memory.nbytes, remote)

    @property
    def num_held(self) -> int:
        return len(self.gpu.device.allocated)  # type: ignore[attr-defined]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    monkeypatch.setattr(ipc, "Gpu", lambda *_: numpy_gpu())
    monkeypatch.setattr(ipc, "copy_ranges", functools.partial(copy_ranges, engine_nbytes=LARGE))
    return Ends()


def test_large_and_small_pieces_arrive_and_no_table_is_left(ends: Ends) -> None:
    ends.transport.write(ends.batch, deadline_s=SECONDS)
    for start, nbytes in ((0, LARGE), (LARGE, 60), (LARGE + 100, (3 * LARGE - 100) // 4)):
        piece = slice(start, start + nbytes)
        assert (ends.target[piece] == ends.source[piece]).all()
    assert not ends.target[LARGE + 60 : LARGE + 100].any()
    assert ends.num_held == 0


@pytest.mark.parametrize("stops", [TransferFailed("no such launch"), MemoryError("none left")])
@pytest.mark.parametrize("where", ["kernel", "event"])
@pytest.mark.parametrize(
    "over", [None, TransferFailed("no event"), TransferOutcomeUnknown("late"), RuntimeError("no")]
)
def test_an_interrupted_write_fails_only_after_its_copies_ended(
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
    stops: Exception,
    where: str,
    over: Exception | None,
) -> None:
    finished: list[float] = []

    def stop(*_: object) -> None:
        raise stops

    def finish(deadline_s: float) -> None:
        finished.append(deadline_s)
        if over is not None:
            raise over

    owner, name = {
        "kernel": (ends.gpu.kernels, "put"),
        "event": (ends.gpu.stream, "record"),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        patch.setattr(ends.gpu, "finish", finish)
        with pytest.raises(type(stops) if over is None else TransferOutcomeUnknown):
            ends.transport.write(ends.batch, deadline_s=SECONDS)
    # The queued copy has landed.
    assert (ends.target[:LARGE] == ends.source[:LARGE]).all()
    assert len(finished) == 1
    assert 0 < finished[0] <= SECONDS
    assert ends.gpu.is_late == (over is not None)
    # A kernel that may still run reads its table.
    assert ends.num_held == (0 if over is None else 1)


def test_a_late_write_keeps_the_table_of_its_kernel(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> None:
        raise TransferOutcomeUnknown("late")

    monkeypatch.setattr(ends.gpu, "wait", late)
    with pytest.raises(TransferOutcomeUnknown):
        ends.transport.write(ends.batch, deadline_s=SECONDS)
    assert ends.num_held == 1
