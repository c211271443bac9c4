"""A replica of GPU weights is sent whatever happens to the weights, with kernels in numpy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import msgspec
import numpy as np
import pytest
from memory_transport import GpuMemoryTransport, MemoryFabric, MemoryTransport
from numpy_gpu import KernelTransport, numpy_gpu
from recorded_driver import RecordedDriver

import windlass
from windlass.config import ControlConfig, ReplicaPlace, UpdateMode
from windlass.control.client import CommandHandler
from windlass.control.messages import Command, Result, Write
from windlass.control.trainer_agent import TrainerAgent
from windlass.engines.client import EngineClient, EngineWeights
from windlass.errors import (
    ConfigError,
    RegionError,
    RoundAborted,
    TransferFailed,
    TransferOutcomeUnknown,
)
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory import copy_sources as sources
from windlass.memory.cuda import driver, range_copy
from windlass.memory.cuda.driver import MemoryKind
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.links import DeviceLink
from windlass.planning.planner import plan_transfer
from windlass.testing.resting_engine import RestingEngine
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer import stored_links
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import LinkOutcome, LinkStatus
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.processes import own_endpoint

TOKEN = "secret of the test"
SECONDS = 20.0
SHAPES = {"same": (48, 16), "cast": (40, 24), "columns": (24, 48), "norm": (24,)}
POISON = -1.0
STREAM = 12345


def weights(version: int) -> list[np.ndarray]:
    """Return a version's weights: distinct elements that differ between versions."""
    found, first = [], 1 + version * 7
    for shape in SHAPES.values():
        numel = int(np.prod(shape))
        found.append(np.arange(first, first + numel, dtype="<f4"))
        first += numel
    return found


def trainer_manifest() -> ShardManifest:
    builder = ManifestBuilder("trainer/0", Role.TRAINER)
    for name, shape in SHAPES.items():
        builder.add_parameter(name, nbytes=4 * int(np.prod(shape)), dtype=DType.FLOAT32)
        builder.add_shard(name, shape, Box.full(shape), name)
    return builder.build()


def engine_manifest() -> ShardManifest:
    """Return a rank with `cast` in bfloat16 and the second half of every row of `columns`."""
    builder = ManifestBuilder("engine/0", Role.ENGINE)
    for name, shape in SHAPES.items():
        dtype = DType.BFLOAT16 if name == "cast" else DType.FLOAT32
        box = Box((0, 24), (24, 24)) if name == "columns" else Box.full(shape)
        builder.add_parameter(name, nbytes=box.numel * dtype.itemsize, dtype=dtype)
        builder.add_shard(name, shape, box, name)
    return builder.build()


def wanted(version: int) -> list[np.ndarray]:
    same, cast_, columns, norm = weights(version)
    bits = cast_.view("<u4").astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return [same, rounded, columns.reshape(SHAPES["columns"])[:, 24:].reshape(-1), norm]


class Weights:
    """Parameters of a trainer rank.

    Old versions stay allocated, so that addresses are not reused.
    """

    def __init__(self) -> None:
        self.held: list[list[np.ndarray]] = []

    def refill(self, version: int) -> None:
        self.held.append(weights(version))

    def overwrite(self, version: int) -> None:
        for mine, other in zip(self.held[-1], weights(version), strict=True):
            mine[:] = other

    def poison(self) -> None:
        for buffer in self.held[-1]:
            buffer[:] = POISON

    def __call__(self) -> list[ParameterMemory]:
        return [ParameterMemory(int(b.ctypes.data), b.nbytes) for b in self.held[-1]]


class Served:
    """Live parameters of an engine."""

    def __init__(self) -> None:
        self.buffers = [np.zeros_like(buffer) for buffer in wanted(0)]

    def addresses(self) -> list[int]:
        return [int(b.ctypes.data) for b in self.buffers]

    def check(self, version: int) -> None:
        for name, got, want in zip(SHAPES, self.buffers, wanted(version), strict=True):
            assert (got == want).all(), (version, name)

    def nothing_arrived(self) -> bool:
        return not any(buffer.any() for buffer in self.buffers)


class Pair:
    """Trainer rank with a replica, and an engine rank, both on GPUs of one host."""

    def __init__(self, place: ReplicaPlace) -> None:
        self.weights, self.served = Weights(), Served()
        ours, theirs = trainer_manifest(), engine_manifest()
        self.plan = plan_transfer([ours], [theirs])
        self.memory = KernelTransport()
        regions = [
            self.memory.register(a, b.nbytes)
            for a, b in zip(self.served.addresses(), self.served.buffers, strict=True)
        ]
        self.receiver = Receiver(self.memory, theirs, self.served.addresses(), regions)
        binding = self.receiver.connect(
            self.plan.parts(sending=False, all_names=True)["engine/0"], UpdateMode.IN_PLACE
        )
        transport = KernelTransport()
        self.gpu = transport.mapper.gpu
        self.sender = Sender(transport, ours, self.weights, replica=place)
        assert self.sender.replica is not None
        self.replica = self.sender.replica
        # The sender looks the endpoint up among the processes of this host.
        self.binding = msgspec.structs.replace(binding, endpoint=own_endpoint("cuda_ipc"))
        self.connect()

    def connect(self) -> None:
        self.sender.connect(
            self.plan.parts(sending=True, all_names=True)["trainer/0"], [self.binding]
        )

    def begin(self, version: int, told: list[int] | None = None) -> None:
        told = [] if told is None else told
        self.sender.begin_version(lambda: told.append(version), version=version, stream=STREAM)

    def write(self, version: int) -> LinkOutcome:
        (link,) = self.sender.write(version, ["engine/0"], SECONDS).links
        return link

    def deliver(self, version: int) -> None:
        link = self.write(version)
        assert link.status is LinkStatus.OK, link.error
        assert self.receiver.verify(version, {"trainer/0": link.digest}) == ()
        self.served.check(version)

    @property
    def num_held(self) -> int:
        device = self.gpu.device
        return len(device.allocated) + len(device.pinned)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.memory.close()


@pytest.fixture(params=[ReplicaPlace.HOST, ReplicaPlace.DEVICE])
def pair(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Yield a pair: a kernel copies most parameters, and a copy engine copies the largest."""
    for engine_nbytes in ("COPY_ENGINE_NBYTES", "PCIE_ENGINE_NBYTES"):
        monkeypatch.setattr(f"windlass.transfer.replica.{engine_nbytes}", 4000)
    monkeypatch.setattr(sources, "memory_kind", lambda _: MemoryKind.DEVICE)
    monkeypatch.setattr(sources, "gpu_of", lambda _: 0)
    found = Pair(request.param)
    yield found
    found.close()


def test_engines_serve_the_copy_of_overwritten_weights(pair: Pair) -> None:
    told: list[int] = []
    pair.weights.refill(0)
    for version in range(3):
        pair.weights.overwrite(version)
        pair.begin(version, told)
        pair.sender.prepare(version)
        assert told == list(range(version + 1))
        pair.weights.poison()
        pair.deliver(version)
    assert pair.gpu.device.recorded == [STREAM] * 3  # type: ignore[attr-defined]
    assert pair.replica.times.nbytes == sum(b.nbytes for b in weights(0))
    pair.close()
    assert pair.num_held == 0


def test_a_trainer_without_memory_for_a_replica_binds_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a replica, the sender would read weights while the trainer changes them."""

    def refuse(*_: object) -> None:
        raise RegionError("no memory")

    pair.weights.refill(0)
    with monkeypatch.context() as patch:
        patch.setattr(pair.replica.slot, "fit", refuse)
        with pytest.raises(RegionError, match="no memory"):
            pair.connect()
    pair.begin(0)
    pair.sender.prepare(0)
    with pytest.raises(RoundAborted):
        pair.write(0)
    assert pair.served.nothing_arrived()
    pair.connect()
    pair.begin(1)
    pair.sender.prepare(1)
    link = pair.write(1)
    assert link.status is LinkStatus.OK, link.error


def test_weights_that_move_need_no_new_tables_of_links(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[int] = []

    def load(*arguments: Any) -> DeviceLink:
        cut.append(1)
        return DeviceLink(*arguments)

    monkeypatch.setattr(stored_links, "DeviceLink", load)
    for version in range(3):
        pair.weights.refill(version)
        pair.begin(version)
        pair.sender.prepare(version)
        pair.weights.poison()
        pair.deliver(version)
    assert len(cut) == 1


def test_a_repeated_round_sends_the_copy_unless_the_fleet_changed(
    pair: Pair,
) -> None:
    told: list[int] = []
    pair.weights.refill(0)
    pair.begin(0, told)
    pair.sender.prepare(0)
    pair.weights.poison()
    # A restarted controller repeats the version and gets the same copy.
    pair.sender.prepare(0)
    assert told == [0]
    pair.deliver(0)
    pair.connect()
    with pytest.raises(RoundAborted, match="the fleet has changed since"):
        pair.sender.prepare(0)
    with pytest.raises(RoundAborted, match="sends nothing to engine/0"):
        pair.write(0)


def test_an_abandoned_round_sends_no_weights_of_the_next_version(
    pair: Pair,
) -> None:
    told: list[int] = []
    pair.weights.refill(0)
    pair.begin(0, told)
    pair.sender.prepare(0)
    pair.weights.overwrite(1)
    pair.begin(1, told)
    with pytest.raises(RoundAborted, match="version must be 1, the version being published, got 0"):
        pair.sender.prepare(0)
    # The copy still contains version 0.
    pair.deliver(0)
    pair.sender.prepare(1)
    assert told == [0, 1]
    # The copy now contains version 1.
    link = pair.write(0)
    assert (link.status, link.error.split(":")[0]) == (LinkStatus.FAILED, "replica")
    pair.deliver(1)


def test_weights_copied_after_the_end_of_their_version_are_not_sent(pair: Pair) -> None:
    pair.weights.refill(0)
    pair.begin(0)
    pair.sender.prepare(0)
    pair.weights.poison()
    # The owner gave the version up while it was copied.
    pair.sender.end_version()
    assert pair.write(0).status is LinkStatus.FAILED
    with pytest.raises(RoundAborted, match="no longer waits for this version"):
        pair.sender.prepare(0)
    assert pair.served.nothing_arrived()


def test_the_copy_waits_for_its_step_and_the_write_for_no_later_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[object] = []

    def settle(deadline_s: float, step: object = None) -> None:
        waited.append(step)
        # The step ends now.
        pair.weights.overwrite(1)

    pair.weights.refill(0)
    monkeypatch.setattr(pair.gpu, "settle", settle)
    pair.begin(1)
    pair.sender.prepare(1)
    assert len(waited) == 1
    assert waited[0] is not None
    pair.weights.poison()
    pair.deliver(1)
    assert len(waited) == 1


def test_a_hanging_step_copies_nothing_and_the_next_version_is_whole(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(deadline_s: float, step: object = None) -> None:
        raise TransferFailed("not over")

    told: list[int] = []
    pair.weights.refill(0)
    pair.begin(0, told)
    pair.sender.prepare(0)
    pair.begin(1, told)
    with monkeypatch.context() as patch:
        patch.setattr(pair.gpu, "settle", busy)
        with pytest.raises(TransferFailed, match="not over"):
            pair.sender.prepare(1)
    assert told == [0]
    for version in (0, 1):
        link = pair.write(version)
        assert (link.status, link.error.split(":")[0]) == (LinkStatus.FAILED, "replica")
    pair.begin(2, told)
    pair.weights.overwrite(2)
    pair.sender.prepare(2)
    pair.deliver(2)


def test_a_partly_queued_copy_ends_before_the_error_is_raised(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[float] = []

    def refuse(*_: object) -> None:
        raise TransferFailed("no such launch")

    pair.weights.refill(0)
    pair.begin(0)
    with monkeypatch.context() as patch:
        patch.setattr(pair.gpu.kernels, "put", refuse)
        patch.setattr(pair.gpu, "finish", finished.append)
        with pytest.raises(TransferFailed, match="no such launch"):
            pair.sender.prepare(0)
    assert len(finished) == 1
    assert pair.served.nothing_arrived()


def test_memory_under_late_kernels_is_neither_freed_nor_written(pair: Pair) -> None:
    pair.weights.refill(0)
    pair.begin(0)
    pair.sender.prepare(0)
    held = pair.num_held
    pair.gpu.is_late = True  # type: ignore[misc]
    assert pair.write(0).status is LinkStatus.UNKNOWN
    pair.begin(1)
    for again in (pair.connect, lambda: pair.sender.prepare(1)):
        with pytest.raises(TransferOutcomeUnknown, match="may still run"):
            again()
    pair.close()
    assert pair.num_held == held > 0


def test_pageable_parameters_are_not_locked_after_their_copy(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "memory_kind", lambda _: MemoryKind.PAGEABLE)
    before = len(pair.gpu.device.pinned)  # type: ignore[attr-defined]
    for version in range(2):
        pair.weights.refill(version)
        pair.begin(version)
        pair.sender.prepare(version)
        assert len(pair.gpu.device.pinned) == before  # type: ignore[attr-defined]
        pair.weights.poison()
        pair.deliver(version)


def test_neither_the_copy_nor_a_digest_waits_in_the_stream_of_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = RecordedDriver()
    monkeypatch.setattr(driver, "driver", lambda: recorded)
    device = driver.Device(0)
    event, stream = device.record(STREAM), driver.Stream(device)
    stream.handle = 99
    (arguments,) = [found for name, _, found in recorded.calls if name == "cuEventRecord"]
    assert arguments[1] == STREAM
    recorded.calls.clear()
    event.wait()
    assert recorded.names == [
        "cuCtxPushCurrent", "cuEventSynchronize", "cuCtxPopCurrent", "cuEventDestroy"
    ]  # fmt: skip
    recorded.calls.clear()
    assert device.download(4096, 16, stream) == bytes(16)
    assert [(name, arguments[-1]) for name, _, arguments in recorded.calls[1:-1]] == [
        ("cuMemcpyDtoHAsync", 99), ("cuStreamSynchronize", 99)
    ]  # fmt: skip


# --- over a network ------------------------------------------------------------------------------


@final
@dataclass
class HeldWrites:
    """Trainer agent that delays writes until the test sets `go`."""

    agent: TrainerAgent
    go: threading.Event

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        if isinstance(command, Write):
            assert self.go.wait(SECONDS)
        return self.agent.handle(command, epoch=epoch, round_number=round_number)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = numpy_gpu()
    for name in ("transfer.replica", "memory.cuda.gpu"):
        monkeypatch.setattr(f"windlass.{name}.shared_gpu", lambda _: found)
    return found


@pytest.mark.parametrize("replica", [ReplicaPlace.AUTO, ReplicaPlace.DEVICE])
@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_a_trainer_trains_while_its_copy_is_published_over_a_network(
    gpu: Gpu, mode: UpdateMode, replica: ReplicaPlace
) -> None:
    fabric, served, held = MemoryFabric(), Served(), Weights()
    go, streams = threading.Event(), iter(range(1, 100))

    def intercept(agent: TrainerAgent) -> CommandHandler:
        return HeldWrites(agent, go)

    def work(url: str) -> None:
        transport = GpuMemoryTransport(fabric)
        engine = EngineClient(EngineWeights(manifest=engine_manifest(), addresses=served.addresses(), regions=[
                transport.register(int(b.ctypes.data), b.nbytes) for b in served.buffers
            ],), transport=transport, hooks=RestingEngine(), controller=url, token=TOKEN,)  # fmt: skip
        trainer = TrainerClient(
            TrainerWeights(
                manifest=trainer_manifest(),
                parameters=held,
                step_stream=lambda: next(streams),
            ),
            transport=GpuMemoryTransport(fabric),
            controller=url,
            token=TOKEN,
            replica=replica,
            intercept=intercept,
        )
        with engine, trainer:
            for version in range(3):
                go.clear()
                held.refill(version)
                pending = trainer.publish(version, wait=False, copy=True)
                held.poison()
                assert not pending.done()
                # Tensors that are cast or cut are packed. The replica holds the others.
                assert pending.copy.nbytes == sum(weights(0)[i].nbytes for i in (0, 3))
                assert pending.stood_s >= pending.copy.copy_s > 0
                go.set()
                assert pending.result(deadline_s=SECONDS).left_out == {}
                served.check(version)

    async with windlass.Controller(token=TOKEN, config=ControlConfig(mode=mode)) as controller:
        await asyncio.to_thread(work, controller.url)
    assert gpu.device.recorded == [1, 2, 3]  # type: ignore[attr-defined]
    assert gpu.device.allocated == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "replica", "message"),
    [
        (GpuMemoryTransport, "host", "must be 'device' with memory for weights on a GPU"),
        (
            MemoryTransport,
            "device",
            "must be 'host' with memory, which writes only from host memory",
        ),
        (MemoryTransport, "gpu", r"replica must be one of .*'host', 'device'\], got 'gpu'"),
    ],
)
def test_a_replica_place_that_the_transport_cannot_send_from_is_refused(
    gpu: Gpu, kind: type[MemoryTransport], replica: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Sender(kind(MemoryFabric()), trainer_manifest(), Weights(), replica=replica)  # type: ignore[arg-type]
    assert gpu.device.allocated == {}  # type: ignore[attr-defined]


def test_ranges_are_copied_whole_by_kernel_and_by_copy_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(range_copy, "MAX_PIECE_NBYTES", 100)
    found, sizes = numpy_gpu(), [1, 99, 100, 101, 1000, 1001]
    source = np.arange(sum(sizes), dtype=np.uint32).astype(np.uint8)
    target = np.zeros_like(source)
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.uint64)
    copied = range_copy.RangeCopy(
        found,
        starts + np.uint64(source.ctypes.data),
        starts + np.uint64(target.ctypes.data),
        np.array(sizes, np.uint64),
        engine_nbytes=1000,
    )
    for turn in range(2):
        source += np.uint8(turn)
        copied.queue()
        assert (source == target).all()
    copied.close()
    assert found.device.allocated == {}  # type: ignore[attr-defined]
