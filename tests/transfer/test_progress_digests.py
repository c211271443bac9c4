"""An engine rank gets hints about landed parts in any order, with kernels in numpy."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from selectors import DefaultSelector

import numpy as np
import pytest
from numpy_gpu import KernelTransport, numpy_gpu

from windlass.config import UpdateMode
from windlass.errors import TransferFailed, TransferOutcomeUnknown
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory.cuda import kernels
from windlass.memory.cuda import pieces as blocks
from windlass.memory.cuda.links import WORDS_NBYTES, DeviceLink, read_digest
from windlass.memory.cuda.pieces import block_tables
from windlass.planning.planner import plan_transfer
from windlass.planning.program import bind_links
from windlass.transfer import write_progress as landings
from windlass.transfer.receiver import Receiver
from windlass.transfer.write_progress import PartWritten, ProgressListener, notify

ROWS, COLS = 64, 16
SOURCE, ENGINE = "trainer/0", "engine/0"


def manifest(worker: str, role: Role, dtype: DType) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    for name, kind in (("plain", DType.FLOAT32), ("cast", dtype)):
        builder.add_parameter(name, nbytes=ROWS * COLS * kind.itemsize, dtype=kind)
        builder.add_shard(name, (ROWS, COLS), Box((0, 0), (ROWS, COLS)), name)
    return builder.build()


@dataclass
class Pair:
    """Trainer with kernels that store into an engine of the same process."""

    trained: list[np.ndarray] = field(
        default_factory=lambda: [
            (np.arange(ROWS * COLS, dtype="<f4") + 7 * n).view(np.uint8) for n in range(2)
        ]
    )
    served: list[np.ndarray] = field(
        default_factory=lambda: [np.zeros(ROWS * COLS * n, np.uint8) for n in (4, 2)]
    )

    def __post_init__(self) -> None:
        self.gpu = numpy_gpu()
        ours = manifest(SOURCE, Role.TRAINER, DType.FLOAT32)
        theirs = manifest(ENGINE, Role.ENGINE, DType.BFLOAT16)
        self.plan = plan_transfer([ours], [theirs])
        self.transport = KernelTransport(self.gpu)
        self.receiver = Receiver(
            self.transport, theirs, [b.ctypes.data for b in self.served],
            [self.transport.register(b.ctypes.data, b.nbytes) for b in self.served],
        )  # fmt: skip
        self.connect()

    def connect(self) -> None:
        part = self.plan.parts(sending=False, all_names=True)[ENGINE]
        self.binding = self.receiver.connect(part, UpdateMode.IN_PLACE)

    def write(self, version: int, name: str) -> tuple[str, list[PartWritten]]:
        """Store everything and return the digest and the hints."""
        (program,) = bind_links(self.plan.parts(sending=True, all_names=True)[SOURCE], sending=True)
        sources = np.array([b.ctypes.data for b in self.trained], np.uint64)
        targets = np.array(self.binding.parameter_addresses, np.uint64)
        link = DeviceLink(self.gpu, program, block_tables(program, sources, targets))
        self.gpu.device.clear(link.digest, WORDS_NBYTES, self.gpu.stream)
        told = []
        for number, table in enumerate(link.tables):
            for part in table.parts:
                self.gpu.kernels.put(table, self.gpu.stream, link.digest, part)
                told.append(PartWritten(SOURCE, version, name, number, part.start, part.stop))
        digest = read_digest(self.gpu, link.digest)
        link.close()
        return digest, told

    def tell(self, told: list[PartWritten]) -> None:
        for landed in told:
            notify(self.binding.listener, landed)

    def close(self) -> None:
        self.receiver.close()
        self.transport.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(blocks, "MAX_PIECE_NBYTES", 64)
    monkeypatch.setattr(kernels, "PART_NBYTES", 1500)
    found = Pair()
    yield found
    found.close()
    assert not found.gpu.device.allocated  # type: ignore[attr-defined]


def test_hints_in_order_leave_no_byte_to_hash_in_verify(pair: Pair) -> None:
    for version in range(3):
        digest, told = pair.write(version, f"w{version}")
        assert len(told) == 3
        pair.tell(told)
        assert pair.receiver.verify(version, {SOURCE: digest}) == ()
        assert pair.receiver.late_nbytes == 0


@pytest.mark.parametrize("what", ["out of order", "doubled", "lost", "of another write", "none"])
def test_irregular_hints_cost_only_time(pair: Pair, what: str) -> None:
    digest, told = pair.write(4, "w")
    pair.tell(
        {
            "out of order": told[::-1],
            "doubled": [landed for landed in told for _ in range(2)],
            "lost": told[:1] + told[2:],
            "of another write": [*told, PartWritten(SOURCE, 4, "x", 0, 0, 1)],
            "none": [],
        }[what]
    )
    assert pair.receiver.verify(4, {SOURCE: digest}) == ()
    assert (pair.receiver.late_nbytes == 0) is (what == "doubled")


def test_bytes_announced_too_early_do_not_count(pair: Pair) -> None:
    told = pair.write(1, "w")[1]
    pair.trained[0][5] ^= 1
    # These hints precede the bytes of their write.
    pair.tell(told)
    pair.receiver.progress.listener.drain()  # type: ignore[union-attr]
    digest = pair.write(1, "w")[0]
    assert pair.receiver.verify(1, {SOURCE: digest}) == ()
    assert pair.receiver.late_nbytes > 0
    pair.served[1][9] ^= 1
    assert pair.receiver.verify(1, {SOURCE: digest}) == (SOURCE,)


def test_hints_of_an_earlier_connect_do_not_count(pair: Pair) -> None:
    digest, told = pair.write(2, "w")
    pair.tell(told)
    pair.receiver.progress.listener.drain()  # type: ignore[union-attr]
    pair.connect()
    pair.served[0][3] ^= 1
    assert pair.receiver.verify(2, {SOURCE: digest}) == (SOURCE,)


def test_hints_during_a_binding_do_no_harm(pair: Pair) -> None:
    stop = threading.Event()
    _, told = pair.write(0, "w")
    address = pair.binding.listener

    def go_on_telling() -> None:
        while not stop.is_set():
            for landed in told:
                notify(address, landed)

    thread = threading.Thread(target=go_on_telling)
    thread.start()
    try:
        # The hints are about version 0.
        for version in range(1, 11):
            pair.connect()
            digest, _ = pair.write(version, f"w{version}")
            assert pair.receiver.verify(version, {SOURCE: digest}) == ()
            pair.served[0][3] ^= 1
            assert pair.receiver.verify(version, {SOURCE: digest}) == (SOURCE,)
    finally:
        stop.set()
        thread.join(20.0)


def test_a_hint_in_no_known_encoding_does_not_end_an_update(pair: Pair) -> None:
    digest, told = pair.write(0, "w")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"\x96\xa1\xff\x00\xa1w\x00\x00\x01", f"\0windlass-{pair.binding.listener}")
    pair.tell(told)
    assert pair.receiver.verify(0, {SOURCE: digest}) == ()
    # The listener still runs.
    assert pair.receiver.late_nbytes == 0


def test_a_sender_of_endless_hints_does_not_block_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landings, "MAX_AT_ONCE", 8)
    heard = list[PartWritten]()
    may_start = threading.Event()

    def deliver(landed: PartWritten) -> None:
        heard.append(landed)
        # Each hint sends one more.
        notify(listener.address, landed)

    # The listener's thread waits, so that only this thread drains.
    monkeypatch.setattr(DefaultSelector, "select", lambda _: may_start.wait(20.0))
    listener = ProgressListener(deliver)
    notify(listener.address, PartWritten(SOURCE, 0, "w", 0, 0, 1))
    listener.drain()
    assert len(heard) == 8
    may_start.set()
    listener.close()


def test_an_engine_without_a_socket_for_hints_hashes_in_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No socket can have so long a name.
    monkeypatch.setattr(secrets, "token_hex", lambda _: "x" * 200)
    found = Pair()
    assert found.binding.listener == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "write-progress"]
    digest, _ = found.write(0, "w")
    assert found.receiver.verify(0, {SOURCE: digest}) == ()
    found.close()


def test_a_failed_allocation_on_a_gpu_leaks_nothing_and_frees_nothing_twice(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = pair.gpu.device
    pair.receiver.connect(
        pair.plan.parts(sending=False, all_names=True)[ENGINE], UpdateMode.IN_PLACE
    )
    held = len(device.allocated)  # type: ignore[attr-defined]
    allocate = device.allocate
    for room in range(held):
        left = iter(range(room))

        def scarce(nbytes: int, left: Iterator[int] = left) -> int:
            if next(left, None) is None:
                raise TransferFailed("no room")
            return allocate(nbytes)

        monkeypatch.setattr(device, "allocate", scarce)
        with pytest.raises(TransferFailed, match="no room"):
            pair.connect()
        monkeypatch.setattr(device, "allocate", allocate)
        if room % 2:
            pair.connect()
    pair.connect()
    assert len(device.allocated) == held  # type: ignore[attr-defined]
    digest, told = pair.write(0, "w")
    pair.tell(told)
    assert pair.receiver.verify(0, {SOURCE: digest}) == ()


def test_memory_under_late_kernels_is_not_freed() -> None:
    found = Pair()
    held = dict(found.gpu.device.allocated)  # type: ignore[attr-defined]
    found.gpu.is_late = True  # type: ignore[misc]
    with pytest.raises(TransferOutcomeUnknown, match="may still run"):
        found.connect()
    found.close()
    assert found.gpu.device.allocated == held  # type: ignore[attr-defined]
