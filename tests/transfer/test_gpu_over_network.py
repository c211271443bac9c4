"""Weights on GPUs over a transport that writes runs: kernels pack, land, unpack and hash them.

The kernels here are numpy's, one row at a time (`numpy_gpu`). For real kernels and a real wire see
tests/control/test_live_update.py.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from ground_truth import distinct_values, fill
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from memory_transport import GpuMemoryTransport, MemoryFabric, MemoryTransport
from msgspec import structs
from numpy_gpu import numpy_gpu
from strategies import Fleet, fleets

from windlass.config import UpdateMode
from windlass.control.connect_messages import ConnectEngine
from windlass.control.engine_agent import EngineAgent
from windlass.errors import PlanError, TransferFailed, TransferOutcomeUnknown
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory.cuda import kernels
from windlass.memory.cuda import pieces as blocks
from windlass.memory.cuda.pieces import cut_link, payload_parts, store_packed
from windlass.net.messages import RoundId
from windlass.planning.plan import CopyMode, TransferPlan, Transform
from windlass.planning.planner import plan_transfer
from windlass.planning.program import BoundOp, DirectRuns, LinkProgram
from windlass.planning.relay import RelayGroup
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import DestinationBinding, LinkStatus
from windlass.transfer.receiver import Receiver
from windlass.transfer.relay import RelayNode, RelaySource
from windlass.transfer.sender import Sender
from windlass.transports.base import MemoryRegion, WriteBatch

Buffers = list[np.ndarray]
NOTHING = np.zeros(0, np.int64)
NO_RUNS = DirectRuns.empty(0)


class World:
    """All ranks of a fleet with their memory, on one fabric.

    `exact` is the fleet with engines in float32. If it is given, elements are numbers, and engines
    must hold them as torch casts them.
    """

    def __init__(
        self, fleet: Fleet, mode: UpdateMode, arena_nbytes: int, exact: Fleet | None = None
    ) -> None:
        self.fleet = fleet
        fabric = MemoryFabric()
        self.plan = plan_transfer(fleet.sources, fleet.destinations)
        values = distinct_values((*fleet.sources, *fleet.destinations))
        values |= {a: values[t] for m in fleet.sources for a, t in m.aliases.items()}
        self.held = {m.worker: fill(m, values, background=0xEE) for m in fleet.sources}
        wanted = fleet.destinations if exact is None else exact.destinations
        self.expected = {m.worker: fill(m, values, background=0xAA) for m in wanted}
        if exact is not None:
            for buffer in itertools.chain(*self.held.values(), *self.expected.values()):
                buffer.view("<f4")[:] = buffer.view("<u4").astype("<f4")
        self.live = {
            m.worker: [np.full(p.nbytes, 0xAA, np.uint8) for p in m.parameters]
            for m in fleet.destinations
        }
        self.receivers: dict[str, Receiver] = {}
        bindings: list[DestinationBinding] = []
        for manifest in fleet.destinations:
            transport = GpuMemoryTransport(fabric)
            buffers = self.live[manifest.worker]
            receiver = Receiver(
                transport, manifest, [b.ctypes.data for b in buffers],
                [transport.register(b.ctypes.data, b.nbytes) for b in buffers if b.nbytes],
            )  # fmt: skip
            bindings.append(
                receiver.connect(
                    self.plan.parts(sending=False, all_names=True)[manifest.worker], mode
                )
            )
            self.receivers[manifest.worker] = receiver
        self.senders = {
            m.worker: self.connect(fabric, m, arena_nbytes, bindings) for m in fleet.sources
        }

    def connect(
        self,
        fabric: MemoryFabric,
        manifest: ShardManifest,
        arena_nbytes: int,
        bindings: list[DestinationBinding],
    ) -> Sender:
        memory = [ParameterMemory(b.ctypes.data, b.nbytes) for b in self.held[manifest.worker]]
        sender = Sender(
            GpuMemoryTransport(fabric), manifest, lambda: memory, arena_nbytes=arena_nbytes
        )
        part = self.plan.parts(sending=True, all_names=True)[manifest.worker]
        wanted = set(part.destinations)
        sender.connect(part, [b for b in bindings if b.worker in wanted])
        return sender

    def update(self, version: int) -> None:
        """Run all steps of a round and check the engines' memory."""
        expected: dict[str, dict[str, str]] = {name: {} for name in self.receivers}
        for name, sender in self.senders.items():
            sources = self.plan.sources
            peers = [link.dst for link in self.plan.links() if sources[link.src] == name]
            sender.prepare()
            for link in sender.write(0, [self.plan.destinations[p] for p in peers], 20.0).links:
                assert link.status is LinkStatus.OK, link
                expected[link.destination][name] = link.digest
        for name, receiver in self.receivers.items():
            assert receiver.verify(version, expected[name]) == ()
            receiver.apply()
            manifest = receiver_manifest(self.fleet, name)
            for got, want, spec in zip(
                self.live[name], self.expected[name], manifest.parameters, strict=True
            ):
                assert (got == cast_to(want, spec.dtype)).all()

    def close(self) -> None:
        for sender in self.senders.values():
            sender.close()
        for receiver in self.receivers.values():
            receiver.close()


@pytest.fixture(autouse=True)
def _small_pieces_on_no_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.memory.cuda.gpu.shared_gpu", lambda _: numpy_gpu())
    # Cut small tensors into many pieces.
    monkeypatch.setattr(blocks, "MAX_PIECE_NBYTES", 64)


def binds(plan: TransferPlan) -> bool:
    """Return whether the plan can be bound. Memory that runs backwards is refused."""
    return not (plan.ops.src_strides < 0).any() and not (plan.ops.dst_strides < 0).any()


def settings_of(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck)
    )


DRAWN = {"fleet": fleets(), "arena_nbytes": st.sampled_from((0, 256, 1024))}


@pytest.mark.parametrize("mode", list(UpdateMode))
@settings_of(20)
@given(**DRAWN)
def test_engines_get_the_planned_bytes_for_every_layout_arena_and_mode(
    mode: UpdateMode, fleet: Fleet, arena_nbytes: int
) -> None:
    check_that_engines_hold_the_plan(mode, fleet, arena_nbytes)


@pytest.mark.long
@pytest.mark.parametrize("mode", list(UpdateMode))
@settings_of(200)
@given(**DRAWN)
def test_engines_get_the_planned_bytes_of_many_layouts(
    mode: UpdateMode, fleet: Fleet, arena_nbytes: int
) -> None:
    check_that_engines_hold_the_plan(mode, fleet, arena_nbytes)


def check_that_engines_hold_the_plan(mode: UpdateMode, fleet: Fleet, arena_nbytes: int) -> None:
    plan = plan_transfer(fleet.sources, fleet.destinations)
    assume(binds(plan))
    world = World(fleet, mode, arena_nbytes)
    # The second version uses existing tables.
    for version in range(2):
        world.update(version)
    world.close()


def receiver_manifest(fleet: Fleet, name: str) -> ShardManifest:
    return next(m for m in fleet.destinations if m.worker == name)


def cast_to(buffer: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is not DType.BFLOAT16:
        return buffer
    numbers = torch.from_numpy(buffer.view("<f4").copy()).to(torch.bfloat16)
    return numbers.view(torch.uint8).numpy()


def dense_world(dtype: DType, mode: UpdateMode, arena_nbytes: int = 0) -> World:
    exact = dense_to_fused(DType.FLOAT32)
    return World(dense_to_fused(dtype), mode, arena_nbytes, exact)


def dense_to_fused(dtype: DType) -> Fleet:
    """Return a fleet with ops of every mode in its plan: rows against transposed and fused columns."""
    rows, cols = 24, 40
    sources, destinations = [], []
    for rank in range(2):
        builder = ManifestBuilder(f"trainer/{rank}", Role.TRAINER)
        for name in ("gate", "up", "down", "norm"):
            box = Box((rank * rows // 2, 0), (rows // 2, cols))
            builder.add_parameter(name, nbytes=rows // 2 * cols * 4, dtype=DType.FLOAT32)
            builder.add_shard(name, (rows, cols), box, name)
        sources.append(builder.build())
    for rank in range(2):
        builder = ManifestBuilder(f"engine/{rank}", Role.ENGINE)
        size, half = dtype.itemsize, cols // 2
        builder.add_parameter("gate_up", nbytes=rows * cols * size, dtype=dtype)
        for position, name in enumerate(("gate", "up")):
            box = Box((rank * rows // 2, 0), (rows // 2, cols))
            offset = position * rows // 2 * cols * size
            builder.add_shard(name, (rows, cols), box, "gate_up", offset_bytes=offset)
        builder.add_parameter("down", nbytes=rows * half * size, dtype=dtype)
        builder.add_shard("down", (rows, cols), Box((0, rank * half), (rows, half)), "down")
        builder.add_parameter("norm", nbytes=rows * cols * size, dtype=dtype)
        # These strides transpose the tensor.
        strides = (size, rows * size)
        builder.add_shard("norm", (rows, cols), Box((0, 0), (rows, cols)), "norm", strides_bytes=strides)  # fmt: skip
        destinations.append(builder.build())
    return Fleet(tuple(sources), tuple(destinations))


@pytest.mark.parametrize("arena_nbytes", [0, 512, 4096])
@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_ops_of_every_copy_mode_arrive(dtype: DType, mode: UpdateMode, arena_nbytes: int) -> None:
    world = dense_world(dtype, mode, arena_nbytes)
    modes = set(world.plan.ops.mode.tolist())
    assert CopyMode.SCATTER in modes
    assert (CopyMode.DIRECT if dtype is DType.FLOAT32 else CopyMode.PACKED) in modes
    world.update(0)
    for buffer in itertools.chain(*world.held.values(), *world.expected.values()):
        # This is an optimiser step.
        buffer.view("<f4")[:] *= 1.37
    world.update(1)
    world.close()


def test_verify_finds_a_changed_byte() -> None:
    world = dense_world(DType.BFLOAT16, UpdateMode.IN_PLACE)
    expected: dict[str, str] = {}
    for name, sender in world.senders.items():
        sender.prepare()
        (outcome, *_) = sender.write(0, ["engine/0"], 20.0).links
        expected[name] = outcome.digest
    world.live["engine/0"][0][5] ^= 1
    assert world.receivers["engine/0"].verify(0, expected) == ("trainer/0",)
    world.close()


def test_weights_in_host_memory_and_on_a_gpu_cannot_be_mixed() -> None:
    world = dense_world(DType.FLOAT32, UpdateMode.IN_PLACE)
    manifest = world.fleet.destinations[0]
    transport = MemoryTransport(MemoryFabric())
    buffers = world.live[manifest.worker]
    regions: list[MemoryRegion] = [transport.register(b.ctypes.data, b.nbytes) for b in buffers]
    host = Receiver(transport, manifest, [b.ctypes.data for b in buffers], regions)
    binding = host.connect(
        world.plan.parts(sending=False, all_names=True)[manifest.worker], UpdateMode.IN_PLACE
    )
    bindings = [structs.replace(binding, worker=m.worker) for m in world.fleet.destinations]
    with pytest.raises(PlanError, match="on GPUs at both ends or in host memory at both"):
        world.connect(MemoryFabric(), world.fleet.sources[0], 0, bindings)
    host.close()
    world.close()


@pytest.mark.parametrize("kind", [MemoryTransport, GpuMemoryTransport])
@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_an_engine_relays_verified_bytes_from_their_own_memory(
    kind: type[MemoryTransport], mode: UpdateMode, dtype: DType
) -> None:
    """Two trainer ranks feed one engine, which feeds its copy and stages some ops there."""
    exact, fabric, seconds = dense_to_fused(DType.FLOAT32), MemoryFabric(), 20.0
    fleet, round_id = dense_to_fused(dtype), RoundId(1, 1)
    leader = fleet.destinations[0]
    plan = plan_transfer(fleet.sources, [leader])
    assert plan.staging_nbytes[0] > 0
    values = distinct_values((*exact.sources, *exact.destinations))
    held = {m.worker: fill(m, values, background=0xEE) for m in exact.sources}
    wanted = fill(exact.destinations[0], values, background=0xAA)
    for buffer in itertools.chain(*held.values(), wanted):
        buffer.view("<f4")[:] = buffer.view("<u4").astype("<f4")
    live, receivers, nodes, bindings = {}, {}, {}, []
    part = plan.parts(sending=False, all_names=True)[leader.worker]
    for name in ("a/0", "b/0"):
        manifest = replace(leader, worker=name)
        live[name] = [np.full(p.nbytes, 0xAA, np.uint8) for p in manifest.parameters]
        transport = kind(fabric)
        regions = [transport.register(b.ctypes.data, b.nbytes) for b in live[name]]
        addresses = [b.ctypes.data for b in live[name]]
        receivers[name] = Receiver(transport, manifest, addresses, regions)
        own = part.for_replica(leader.worker, manifest)
        bindings.append(receivers[name].connect(own, mode))
        nodes[name] = RelayNode(receivers[name], "127.0.0.1")
    listening = [node.open() for node in nodes.values()]
    group = RelayGroup(members=("a/0", "b/0"), stripes=((-1, 0),), chunk_nbytes=300)
    for node in nodes.values():
        node.connect(group, bindings, listening)
    senders = []
    for source in fleet.sources:
        memory = [ParameterMemory(b.ctypes.data, b.nbytes) for b in held[source.worker]]
        sender = Sender(kind(fabric), source, lambda memory=memory: memory)  # type: ignore[misc]
        first = replace(leader, worker="a/0")
        sources = copy_of_destination(
            plan.parts(sending=True, all_names=True)[source.worker], first
        )
        sender.connect(sources, bindings[:1])
        source_of_group = RelaySource(sender)
        source_of_group.connect([group], bindings, listening)
        sender.prepare(0)
        source_of_group.prepare()
        senders.append((sender, source_of_group))
    with ThreadPoolExecutor() as threads:
        parts = [threads.submit(node.run, round_id, seconds) for node in nodes.values()]
        fed = [threads.submit(s.write, round_id, 0, group.members, seconds) for _, s in senders]
    assert all(not job.result()[0].missing for job in parts)
    for name, receiver in receivers.items():
        links = [link for job in fed for link in job.result().links if link.destination == name]
        expected = {s.worker: link.digest for s, link in zip(fleet.sources, links, strict=True)}
        assert receiver.verify(0, expected) == ()
        receiver.apply()
        for got, want, spec in zip(live[name], wanted, leader.parameters, strict=True):
            assert (got == cast_to(want, spec.dtype)).all()
    for node in nodes.values():
        node.close()
    for sender, source_of_group in senders:
        source_of_group.close()
        sender.close()
    for receiver in receivers.values():
        receiver.close()


def copy_of_destination(part: TransferPlan, manifest: ShardManifest) -> TransferPlan:
    """Return a source's part of the plan for a destination of another name."""
    return replace(part, destinations=(manifest.worker,), destination_digests=(manifest.digest(),))


def quantised_op(rows: int, cols: int, *, scales: bool) -> BoundOp:
    grid = (-(-rows // 128), -(-cols // 128))
    return BoundOp(
        mode=CopyMode.PACKED,
        src_parameter=0,
        dst_parameter=0,
        sizes=grid if scales else (rows, cols),
        src_offset=0,
        src_strides=(2 * cols, 2),
        src_dtype=DType.BFLOAT16,
        dst_offset=0,
        dst_strides=(4 * grid[1], 4) if scales else (cols, 1),
        dst_dtype=DType.FLOAT32 if scales else DType.FLOAT8_E4M3,
        nbytes=4 * grid[0] * grid[1] if scales else rows * cols,
        staging_offset=-1,
        src_sizes=(rows, cols),
        transform=Transform.FP8_BLOCK_SCALES if scales else Transform.FP8_BLOCK_VALUES,
    )


@given(
    rows=st.integers(1, 700),
    cols=st.integers(1, 400),
    scales=st.booleans(),
    limit=st.integers(52_000, 200_000),
)
def test_parts_of_a_quantised_op_are_its_payload_in_order(
    rows: int, cols: int, scales: bool, limit: int
) -> None:
    op = quantised_op(rows, cols, scales=scales)
    program = LinkProgram(peer="e", ops=(op,), direct=NO_RUNS, nbytes=op.nbytes)
    (found,) = cut_link(program, at_source=True).by_op()
    at = 0
    for part in payload_parts(found, limit):
        assert part.start == at
        assert 0 < part.nbytes <= limit
        covered = np.zeros(part.nbytes, np.int64)
        store_packed(part.pieces, part.start, 0)
        for piece in part.pieces:
            num_rows = 1 if scales else int(piece["rows"])
            nbytes = 4 if scales else int(piece["row_elems"])
            for row in range(num_rows):
                first = int(piece["dst"]) + row * int(piece["dst_pitch"])
                covered[first : first + nbytes] += 1
        assert (covered == 1).all()
        at += part.nbytes
    assert at == op.nbytes


def test_an_arena_too_small_for_a_row_of_blocks_is_refused() -> None:
    op = quantised_op(256, 400, scales=False)
    program = LinkProgram(peer="e", ops=(op,), direct=NO_RUNS, nbytes=op.nbytes)
    (found,) = cut_link(program, at_source=True).by_op()
    with pytest.raises(PlanError, match="half of the arena must hold 51200 bytes, got 1000"):
        list(payload_parts(found, 1000))


def test_piece_tables_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = dense_world(DType.BFLOAT16, UpdateMode.STAGED)
    world.update(0)

    def refuse(*_: object) -> None:
        raise AssertionError("a table was made again")

    monkeypatch.setattr(kernels.PieceTable, "__init__", refuse)
    world.update(1)
    world.close()


def lose_one_write(sender: Sender) -> None:
    """Give the next write of this sender an unknown outcome."""
    transport = sender.transport
    write = transport.write

    def lose(batch: WriteBatch, *, deadline_s: float) -> None:
        transport.write = write  # type: ignore[method-assign]
        write(batch, deadline_s=deadline_s)
        raise TransferOutcomeUnknown("bytes may still arrive")

    transport.write = lose  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [MemoryTransport, GpuMemoryTransport])
@pytest.mark.parametrize("count", [1, 32, 900])
def test_a_link_that_just_fits_is_written_again_after_an_unknown_outcome(
    monkeypatch: pytest.MonkeyPatch, kind: type[MemoryTransport], count: int
) -> None:
    monkeypatch.setattr(blocks, "MAX_PIECE_NBYTES", 64 << 10)
    fabric = MemoryFabric()
    trained = np.arange(count, dtype="<f4") + 1
    served = np.zeros(count, "<u2")
    manifests = []
    for worker, role, dtype in (
        ("trainer/0", Role.TRAINER, DType.FLOAT32),
        ("engine/0", Role.ENGINE, DType.BFLOAT16),
    ):
        builder = ManifestBuilder(worker, role)
        builder.add_parameter("w", nbytes=count * dtype.itemsize, dtype=dtype)
        builder.add_shard("w", (count,), Box((0,), (count,)), "w")
        manifests.append(builder.build())
    plan = plan_transfer(manifests[:1], manifests[1:])
    target = kind(fabric)
    receiver = Receiver(
        target, manifests[1], [served.ctypes.data],
        [target.register(served.ctypes.data, served.nbytes)],
    )  # fmt: skip
    binding = receiver.connect(
        plan.parts(sending=False, all_names=True)["engine/0"], UpdateMode.IN_PLACE
    )
    memory = ParameterMemory(trained.ctypes.data, trained.nbytes)
    sender = Sender(kind(fabric), manifests[0], lambda: [memory])
    sender.connect(plan.parts(sending=True, all_names=True)["trainer/0"], [binding])
    sender.prepare()
    lose_one_write(sender)
    assert [x.status for x in sender.write(0, ["engine/0"], 20.0).links] == [LinkStatus.UNKNOWN]
    served[:] = 0
    # This is the same round, so the sender packs the link as in a ring.
    (link,) = sender.write(0, ["engine/0"], 20.0).links
    assert link.status is LinkStatus.OK, link.error
    assert receiver.verify(0, {"trainer/0": link.digest}) == ()
    assert (served.view(np.uint8) == cast_to(trained.view(np.uint8), DType.BFLOAT16)).all()
    sender.close()
    receiver.close()
    target.close()


def test_an_unknown_outcome_is_reported_without_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = dense_world(DType.BFLOAT16, UpdateMode.IN_PLACE)
    sender = world.senders["trainer/0"]
    sender.prepare()
    lose_one_write(sender)

    def refuse(*_: object) -> None:
        raise TransferFailed("no room")

    with monkeypatch.context() as patch:
        patch.setattr("windlass.transfer.packer.Arena", refuse)
        (link,) = sender.write(0, ["engine/0"], 20.0).links
    assert link.status is LinkStatus.UNKNOWN
    (link,) = sender.write(0, ["engine/0"], 20.0).links
    assert link.status is LinkStatus.FAILED
    world.close()


def test_memory_under_late_kernels_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = numpy_gpu()
    monkeypatch.setattr("windlass.memory.cuda.gpu.shared_gpu", lambda _: gpu)
    world = dense_world(DType.BFLOAT16, UpdateMode.IN_PLACE)
    sender = world.senders["trainer/0"]
    sender.prepare()
    held = len(gpu.device.allocated)  # type: ignore[attr-defined]
    assert held > 0
    gpu.is_late = True  # type: ignore[misc]
    with pytest.raises(TransferOutcomeUnknown, match="may still run"):
        sender.prepare()
    sender.close()
    assert len(gpu.device.allocated) == held  # type: ignore[attr-defined]
    world.close()


def test_an_engine_frees_its_gpu_memory_when_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = numpy_gpu()
    monkeypatch.setattr("windlass.memory.cuda.gpu.shared_gpu", lambda _: gpu)
    fleet = dense_to_fused(DType.FLOAT32)
    manifest = fleet.destinations[0]
    transport = GpuMemoryTransport(MemoryFabric())
    live = [np.zeros(p.nbytes, np.uint8) for p in manifest.parameters]
    regions = [transport.register(b.ctypes.data, b.nbytes) for b in live]
    agent = EngineAgent(
        Receiver(transport, manifest, [b.ctypes.data for b in live], regions), RestingEngine()
    )
    plan = plan_transfer(fleet.sources, fleet.destinations).parts(sending=False, all_names=True)[
        manifest.worker
    ]
    agent.handle(
        ConnectEngine(plan=plan.encode(), plan_digest="", mode=UpdateMode.STAGED),
        epoch=1,
        round_number=1,
    )
    assert gpu.device.allocated  # type: ignore[attr-defined]
    agent.close()
    assert not gpu.device.allocated  # type: ignore[attr-defined]
    transport.close()


def test_a_too_small_arena_is_refused_before_any_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "MAX_PIECE_NBYTES", 512)
    with pytest.raises(PlanError, match="arena_nbytes: must be 0 or at least 1024, got 960"):
        dense_world(DType.BFLOAT16, UpdateMode.IN_PLACE, 960)
