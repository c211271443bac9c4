"""Weights of a trainer with a replica may change, move and disappear as soon as they are copied."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import final

import pytest
import torch

import windlass
from windlass.config import ControlConfig, ReplicaPlace, UpdateMode, XcclBackend
from windlass.control.client import CommandHandler
from windlass.control.messages import Command, Result, Write
from windlass.control.trainer_agent import TrainerAgent
from windlass.engines.client import EngineClient, EngineWeights
from windlass.errors import ConfigError, PeerTimeout, PlanError, RegionError, RoundAborted
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer
from windlass.testing.faulty_transport import Fault, FaultKind, FaultyTransport
from windlass.testing.resting_engine import RestingEngine
from windlass.testing.wrapped_transport import WrappedTransport
from windlass.trainers import client
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import DestinationBinding, LinkStatus
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.base import MemoryRegion
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport

TOKEN = "secret of the test"
SHAPES = {"same": (40, 24), "cast": (40, 24), "columns": (24, 48), "norm": (24,)}
KEPT = ("same", "norm")
"""Tensors sent without packing: the same dtype, and whole rows. The others are packed."""


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return a version's weights.

    Elements are distinct, in bfloat16 up to powers of two, and differ between versions.
    """
    found, first = {}, 1 + version * 7
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        found[name] = torch.arange(first, first + numel, dtype=torch.float32).reshape(shape)
        first += numel
    return found


def trainer_manifest(index: int, world_size: int) -> ShardManifest:
    """Return the manifest of a trainer rank with an equal share of rows."""
    builder = ManifestBuilder(f"trainer/{index}", Role.TRAINER)
    for name, shape in SHAPES.items():
        box = Box((index * shape[0] // world_size, *(0,) * (len(shape) - 1)),
                  (shape[0] // world_size, *shape[1:]))  # fmt: skip
        builder.add_parameter(name, nbytes=box.numel * 4, dtype=DType.FLOAT32)
        builder.add_shard(name, shape, box, name)
    return builder.build()


def engine_manifest(name: str) -> ShardManifest:
    """Return a rank with `cast` in bfloat16 and the second half of every row of `columns`."""
    builder = ManifestBuilder(f"{name}/0", Role.ENGINE)
    for tensor, shape in SHAPES.items():
        dtype = DType.BFLOAT16 if tensor == "cast" else DType.FLOAT32
        offsets, sizes = [0] * len(shape), list(shape)
        if tensor == "columns":
            offsets[1], sizes[1] = 24, 24
        box = Box(tuple(offsets), tuple(sizes))
        builder.add_parameter(tensor, nbytes=box.numel * dtype.itemsize, dtype=dtype)
        builder.add_shard(tensor, shape, box, tensor)
    return builder.build()


def wanted(version: int) -> dict[str, torch.Tensor]:
    full = weights(version)
    return {**full, "cast": full["cast"].bfloat16(), "columns": full["columns"][:, 24:]}


class Memory:
    """Parameters of a trainer rank. `refill` moves them, as offloading does."""

    def __init__(self, index: int, world_size: int) -> None:
        self.index, self.world_size = index, world_size
        self.tensors: list[torch.Tensor] = []

    def refill(self, version: int) -> None:
        self.tensors = [t.chunk(self.world_size)[self.index].clone() for t in weights(version).values()]  # fmt: skip

    def destroy(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(-1.0)

    def __call__(self) -> list[ParameterMemory]:
        return [ParameterMemory(t.data_ptr(), t.nbytes) for t in self.tensors]


class EngineMemory:
    """Live parameters of an engine."""

    def __init__(self) -> None:
        self.tensors = {n: torch.zeros_like(t) for n, t in wanted(0).items()}

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors.values()]

    def check(self, version: int) -> None:
        for name, tensor in wanted(version).items():
            assert torch.equal(self.tensors[name], tensor), (version, name)


class Counting(WrappedTransport):
    """Transport that records registered addresses."""

    def __init__(self) -> None:
        super().__init__(create_transport(CmaConfig()))
        self.registered: list[int] = []

    def register_all(self, spans: Sequence[tuple[int, int]]) -> tuple[MemoryRegion, ...]:
        self.registered += [address for address, _ in spans]
        return super().register_all(spans)


@final
@dataclass
class HeldWrites:
    """Trainer agent that delays writes until the test sets `go`, and then may fail."""

    agent: TrainerAgent
    go: threading.Event
    error: str = ""

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        if isinstance(command, Write):
            assert self.go.wait(30)
            if self.error:
                raise RoundAborted(self.error)
        return self.agent.handle(command, epoch=epoch, round_number=round_number)


def connect_engine(url: str) -> tuple[EngineClient, EngineMemory]:
    memory, transport = EngineMemory(), create_transport(CmaConfig())
    rank = EngineClient(
        EngineWeights(
            manifest=engine_manifest("engine"),
            addresses=memory.addresses(),
            regions=[transport.register(t.data_ptr(), t.nbytes) for t in memory.tensors.values()],
        ),
        transport=transport,
        hooks=RestingEngine(),
        controller=url,
        token=TOKEN,
    )
    return rank, memory


def connect(
    url: str,
    memory: Memory,
    go: threading.Event,
    *,
    transport: Counting | None = None,
    replica: ReplicaPlace = ReplicaPlace.AUTO,
    arena_nbytes: int = 0,
    error: str = "",
    step_stream: Callable[[], int] | None = None,
) -> TrainerClient:
    def intercept(agent: TrainerAgent) -> CommandHandler:
        return HeldWrites(agent, go, error)

    return TrainerClient(
        TrainerWeights(
            manifest=trainer_manifest(memory.index, memory.world_size),
            parameters=memory,
            step_stream=step_stream,
        ),
        transport=transport or Counting(),
        controller=url,
        token=TOKEN,
        world_size=memory.world_size,
        job="one start",
        replica=replica,
        arena_nbytes=arena_nbytes,
        intercept=intercept,
    )


async def with_controller(config: ControlConfig, work: Callable[[str], None]) -> None:
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(work, controller.url)


@pytest.mark.parametrize("mode", UpdateMode)
async def test_engines_serve_copied_weights_unchanged_by_later_training(
    mode: UpdateMode,
) -> None:
    def work(url: str) -> None:
        memory, transport, go = Memory(0, 1), Counting(), threading.Event()
        engine, served = connect_engine(url)
        with engine, connect(url, memory, go, transport=transport) as trainer:
            for version in range(3):
                go.clear()
                # The weights move to new addresses.
                memory.refill(version)
                pending = trainer.publish(version, wait=False, copy=True)
                memory.destroy()
                assert not pending.done()
                with pytest.raises(
                    ConfigError, match="the previous update must end before version"
                ):
                    trainer.publish(version + 1)
                with pytest.raises(PeerTimeout, match=f"version {version}: the round did not end"):
                    pending.result(deadline_s=0.01)
                go.set()
                report = pending.result(deadline_s=30)
                assert (report.version, report.left_out, pending.done()) == (version, {}, True)
                served.check(version)
            registered = len(transport.registered)
            memory.refill(3)
            trainer.publish(3)
            served.check(3)
            # One arena holds packed tensors and one the rest. No parameter is registered.
            assert len(transport.registered) == registered == 2

    await with_controller(ControlConfig(mode=mode), work)


async def test_a_failed_update_without_a_waiter_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(url: str) -> None:
        memory, go, ended = Memory(0, 1), threading.Event(), threading.Event()
        memory.refill(0)
        engine, _ = connect_engine(url)
        with engine, connect(url, memory, go, error="no wire") as trainer:
            trainer.publish(0, wait=False, copy=True).when_done(ended.set)
            go.set()
            assert ended.wait(30)

    await with_controller(ControlConfig(mode=UpdateMode.STAGED), work)
    told = [m for m in caplog.messages if m.startswith("version 0: RoundAborted: ")]
    assert len(told) == 1, caplog.messages
    assert "no wire" in told[0]


async def test_two_ranks_continue_independently_after_their_copies() -> None:
    def work(url: str) -> None:
        go = threading.Event()
        memories = [Memory(rank, 2) for rank in range(2)]
        engine, served = connect_engine(url)
        with (
            engine,
            connect(url, memories[0], go) as first,
            connect(url, memories[1], go) as second,
        ):
            for version in range(2):
                go.clear()
                for memory in memories:
                    memory.refill(version)
                with ThreadPoolExecutor(1) as other:
                    begun = other.submit(second.publish, version, wait=False, copy=True)
                    pending = first.publish(version, wait=False, copy=True)
                    memories[0].destroy()
                    later = begun.result(30)
                memories[1].destroy()
                go.set()
                assert pending.result(deadline_s=30) == later.result(deadline_s=30)
                served.check(version)

    await with_controller(ControlConfig(mode=UpdateMode.STAGED), work)


async def test_publish_with_a_copy_needs_a_replica() -> None:
    go = threading.Event()
    go.set()

    def no_replica(url: str) -> None:
        memory = Memory(0, 1)
        memory.refill(0)
        engine, served = connect_engine(url)
        with engine, connect(url, memory, go, replica=ReplicaPlace.OFF) as trainer:
            with pytest.raises(ConfigError, match="copy must be False for a trainer"):
                trainer.publish(0, wait=False, copy=True)
            trainer.publish(0)
            served.check(0)

    def small_arena(url: str) -> None:
        memory = Memory(0, 1)
        memory.refill(0)
        engine, _ = connect_engine(url)
        with engine, connect(url, memory, go, arena_nbytes=256) as trainer:
            with pytest.raises(RoundAborted, match="with a replica it must be 0 or at least"):
                trainer.publish(0, deadline_s=30, wait=False, copy=True)
            with pytest.raises(RoundAborted, match="with a replica it must be 0 or at least"):
                trainer.publish(0, deadline_s=30)

    def other_backend(url: str) -> None:
        memory = Memory(0, 1)
        memory.refill(0)
        refused = pytest.raises(RoundAborted, match="XcclBackend sends from the parameters")
        engine, _ = connect_engine(url)
        with engine, connect(url, memory, go) as trainer, refused:
            trainer.publish(0, deadline_s=30, wait=False, copy=True)

    await with_controller(ControlConfig(), no_replica)
    await with_controller(ControlConfig(), small_arena)
    await with_controller(ControlConfig(backend=XcclBackend()), other_backend)


async def test_a_version_without_a_waiter_copies_nothing() -> None:
    def work(url: str) -> None:
        memory, go = Memory(0, 1), threading.Event()
        go.set()
        memory.refill(0)
        with connect(url, memory, go) as trainer:
            # No engine is connected.
            with pytest.raises(PeerTimeout, match="version 0"):
                trainer.publish(0, wait=False, copy=True, deadline_s=0.2)
            memory.refill(1)
            engine, served = connect_engine(url)
            with engine:
                trainer.publish(1, deadline_s=30, wait=False, copy=True).result(deadline_s=30)
                served.check(1)

    await with_controller(ControlConfig(), work)


class Links:
    """One trainer rank with a replica and two engines, without a controller."""

    def __init__(self, faults: dict[int, Fault] | None = None) -> None:
        self.memory = Memory(0, 1)
        self.engines = {name: EngineMemory() for name in ("a/0", "b/0")}
        manifest, engines = trainer_manifest(0, 1), [engine_manifest(n) for n in ("a", "b")]
        self.plan: TransferPlan = plan_transfer([manifest], engines).parts(
            sending=True, all_names=True
        )["trainer/0"]
        self.transports = [create_transport(CmaConfig()) for _ in range(2)]
        self.receivers, self.bindings = {}, list[DestinationBinding]()
        whole = plan_transfer([manifest], engines)
        for transport, target in zip(self.transports, engines, strict=True):
            memory = self.engines[target.worker]
            regions = [transport.register(t.data_ptr(), t.nbytes) for t in memory.tensors.values()]
            receiver = Receiver(transport, target, memory.addresses(), regions)
            self.receivers[target.worker] = receiver
            part = whole.parts(sending=False, all_names=True)[target.worker]
            self.bindings.append(receiver.connect(part, UpdateMode.IN_PLACE))
        self.transport = FaultyTransport(create_transport(CmaConfig()), faults or {})
        self.sender = Sender(self.transport, manifest, self.memory, replica=ReplicaPlace.AUTO)
        self.sender.connect(self.plan, self.bindings)

    def deliver(self, name: str, version: int) -> None:
        (link,) = self.sender.write(0, [name], 10.0).links
        assert link.status is LinkStatus.OK, link.error
        receiver = self.receivers[name]
        assert receiver.verify(0, {"trainer/0": link.digest}) == ()
        receiver.apply()
        self.engines[name].check(version)

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers.values():
            receiver.close()
        for transport in (self.transport, *self.transports):
            transport.close()


def test_a_repeated_round_sends_the_copy_or_nothing() -> None:
    links, told = Links(), list[int]()
    try:
        links.memory.refill(0)
        links.sender.begin_version(lambda: told.append(0))
        links.sender.prepare()
        links.memory.refill(1)
        # A restarted controller repeats the version and gets the same copy.
        links.sender.prepare()
        assert told == [0]
        links.deliver("a/0", 0)
        links.deliver("b/0", 0)
        # These bindings are for another fleet.
        links.sender.connect(links.plan, links.bindings)
        with pytest.raises(RoundAborted, match="the fleet has changed since"):
            links.sender.prepare()
        links.sender.begin_version(lambda: told.append(1))
        links.sender.prepare()
        assert told == [0, 1]
        links.deliver("a/0", 1)
        # The weights do not change now, so each `prepare` copies them again.
        links.sender.begin_version()
        for version in (2, 3):
            links.memory.refill(version)
            links.sender.prepare()
            links.deliver("b/0", version)
        links.sender.begin_version(lambda: told.append(2))
        links.sender.end_version()
        with pytest.raises(RoundAborted, match="no longer waits for this version"):
            links.sender.prepare()
        assert told == [0, 1]
    finally:
        links.close()


def test_an_abandoned_round_sends_no_weights_of_the_next_version() -> None:
    links, told = Links(), list[int]()
    try:
        links.memory.refill(0)
        links.sender.begin_version(lambda: told.append(0), version=0)
        links.sender.prepare(0)
        links.memory.refill(1)
        links.sender.begin_version(lambda: told.append(1), version=1)
        with pytest.raises(
            RoundAborted, match="version must be 1, the version being published, got 0"
        ):
            links.sender.prepare(0)
        assert told == [0]
        # The copy still contains version 0.
        links.deliver("a/0", 0)
        links.sender.prepare(1)
        assert told == [0, 1]
        links.deliver("a/0", 1)
    finally:
        links.close()


def test_weights_copied_too_late_or_never_are_not_sent() -> None:
    links = Links()
    try:
        links.memory.refill(0)
        links.sender.begin_version(lambda: None, version=0)
        links.sender.prepare(0)
        links.memory.refill(1)
        # The owner gave the version up while it was copied.
        links.sender.end_version()
        (link,) = links.sender.write(0, ["a/0"], 10.0).links
        assert (link.status, link.error.split(":")[0]) == (LinkStatus.FAILED, "replica")
        links.sender.begin_version(lambda: None, version=1)
        links.sender.prepare(1)
        links.deliver("a/0", 1)
        links.sender.connect(links.plan, links.bindings)
        # Nothing has been copied for these bindings.
        (link,) = links.sender.write(0, ["a/0"], 10.0).links
        assert link.status is LinkStatus.FAILED
    finally:
        links.close()


def test_memory_under_a_write_of_unknown_outcome_is_read_again_and_never_written() -> None:
    links = Links({0: Fault(kind=FaultKind.UNKNOWN)})
    try:
        links.memory.refill(0)
        links.sender.begin_version(lambda: None)
        links.sender.prepare()
        links.memory.destroy()
        (link,) = links.sender.write(0, ["a/0"], 10.0).links
        assert link.status is LinkStatus.UNKNOWN
        held = links.sender.replica
        assert held is not None
        copied, replica = links.sender.packer.slot.nbytes, held.nbytes
        # Packed tensors are not copied into the replica as well.
        assert replica == sum(-(-t.nbytes // 64) * 64 for n, t in weights(0).items() if n in KEPT)
        links.deliver("b/0", 0)
        links.memory.refill(1)
        links.sender.begin_version(lambda: None)
        links.sender.prepare()
        links.deliver("b/0", 1)
        assert (links.sender.packer.slot.nbytes, held.nbytes) == (copied, replica)
    finally:
        links.close()


def test_a_sender_without_memory_for_another_replica_never_reuses_a_doubtful_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RegionError("no memory")

    links = Links({0: Fault(kind=FaultKind.UNKNOWN)})
    try:
        links.memory.refill(0)
        links.sender.begin_version(lambda: None)
        links.sender.prepare()
        (link,) = links.sender.write(0, ["a/0"], 10.0).links
        assert link.status is LinkStatus.UNKNOWN
        arena, replica = links.sender.packer.slot.arena, links.sender.replica
        assert replica is not None
        nbytes = replica.nbytes
        links.memory.refill(1)
        links.sender.begin_version(lambda: None)
        with monkeypatch.context() as patch:
            patch.setattr("windlass.transfer.replica.Arena", refuse)
            for _ in range(2):
                with pytest.raises(RegionError, match="no memory"):
                    links.sender.prepare()
                assert links.sender.packer.slot.arena not in {None, arena}
        links.sender.prepare()
        links.deliver("b/0", 1)
        assert replica.nbytes == nbytes
    finally:
        links.close()


def test_a_sender_without_memory_for_another_arena_copies_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RegionError("no memory")

    links, told = Links({0: Fault(kind=FaultKind.UNKNOWN)}), list[int]()
    try:
        links.memory.refill(0)
        links.sender.begin_version(lambda: None)
        links.sender.prepare()
        (link,) = links.sender.write(0, ["a/0"], 10.0).links
        assert link.status is LinkStatus.UNKNOWN
        nbytes = links.sender.packer.slot.nbytes
        links.memory.refill(1)
        links.sender.begin_version(lambda: told.append(1))
        with monkeypatch.context() as patch:
            patch.setattr("windlass.transfer.packer.Arena", refuse)
            for _ in range(2):
                with pytest.raises(RegionError, match="no memory"):
                    links.sender.prepare()
        assert not told
        links.sender.prepare()
        assert told == [1]
        assert links.sender.packer.slot.nbytes == nbytes > 0
        links.deliver("b/0", 1)
    finally:
        links.close()


def test_a_too_small_arena_is_refused_before_any_copy() -> None:
    links = Links()
    try:
        small = Sender(
            links.transport,
            trainer_manifest(0, 1),
            links.memory,
            arena_nbytes=128,
            replica=ReplicaPlace.AUTO,
        )
        with pytest.raises(PlanError, match="with a replica it must be 0 or at least"):
            small.connect(links.plan, links.bindings)
        small.close()
    finally:
        links.close()


async def test_a_version_is_given_up_after_its_last_copy_stops_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "MARGIN_S", 0.1)
    asked, read, go = threading.Event(), threading.Event(), threading.Event()
    go.set()

    class Slow(Memory):
        def __call__(self) -> list[ParameterMemory]:
            asked.set()
            assert read.wait(30)
            return super().__call__()

    def work(url: str) -> None:
        memory = Slow(0, 1)
        memory.refill(0)
        engine, _ = connect_engine(url)
        with (
            engine,
            connect(url, memory, go) as trainer,
            ThreadPoolExecutor(1) as other,
        ):
            begun = other.submit(trainer.publish, 0, wait=False, copy=True, deadline_s=2.0)
            assert asked.wait(30)
            assert not wait([begun], 4.0).done
            read.set()
            with pytest.raises(PeerTimeout):
                begun.result(30)

    await with_controller(ControlConfig(), work)


async def test_a_version_with_a_failing_step_stream_does_not_block_the_next() -> None:
    def work(url: str) -> None:
        memory, go = Memory(0, 1), threading.Event()
        memory.refill(0)
        go.set()
        engine, served = connect_engine(url)
        divisors = iter((0, 1))
        with (
            engine,
            connect(url, memory, go, step_stream=lambda: 1 // next(divisors)) as trainer,
        ):
            with pytest.raises(ZeroDivisionError):
                trainer.publish(0, wait=False, copy=True)
            trainer.publish(0, wait=False, copy=True).result(deadline_s=30)
            served.check(0)

    await with_controller(ControlConfig(), work)
