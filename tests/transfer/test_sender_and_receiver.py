"""Every byte of a plan arrives at its planned place, for any arena and mode."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.config import UpdateMode
from windlass.errors import TransferFailed
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.planner import plan_transfer
from windlass.transfer.arena import Arena
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import LinkStatus
from windlass.transfer.destination import Destination
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.base import MemoryRegion, OneSidedTransport
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport

TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
ROWS, COLS = 24, 20


def distinct(rows: int, cols: int) -> torch.Tensor:
    """Return elements distinct in float32 and, below 256, in bfloat16 up to a power of two."""
    return (torch.arange(rows * cols, dtype=torch.float32).reshape(rows, cols) + 1.0) / 64


@dataclass
class Rank:
    """Manifest and memory of a rank."""

    manifest: ShardManifest
    memory: list[torch.Tensor]


def trainer_rank(index: int, boxes: dict[str, Box], full: dict[str, torch.Tensor]) -> Rank:
    builder = ManifestBuilder(f"trainer/{index}", Role.TRAINER)
    memory = []
    for name, box in boxes.items():
        local = full[name][slices(box)].clone()
        builder.add_parameter(name, nbytes=local.nbytes, dtype=DType.FLOAT32)
        builder.add_shard(name, tuple(full[name].shape), box, name)
        memory.append(local)
    return Rank(builder.build(), memory)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))


def fused_engine(index: int, num_ranks: int, dtype: DType, full: dict[str, torch.Tensor]) -> Rank:
    """Return an engine rank that needs direct, packed and scatter ops.

    `gate` and `up` are stacked in one parameter with padding rows. `down` is cut by columns and
    stored transposed.
    """
    rows, cols = ROWS // num_ranks, COLS // num_ranks
    builder = ManifestBuilder(f"engine/{index}", Role.ENGINE)
    itemsize = dtype.itemsize
    padding = 3 * COLS * itemsize
    nbytes = 2 * rows * COLS * itemsize
    builder.add_parameter("gate_up", nbytes=nbytes + padding, dtype=dtype, padding_nbytes=padding)
    for position, name in enumerate(("gate", "up")):
        builder.add_shard(
            name,
            (ROWS, COLS),
            Box((index * rows, 0), (rows, COLS)),
            "gate_up",
            offset_bytes=position * rows * COLS * itemsize,
        )
    builder.add_parameter("down_t", nbytes=ROWS * cols * itemsize, dtype=dtype)
    builder.add_shard(
        "down",
        (ROWS, COLS),
        Box((0, index * cols), (ROWS, cols)),
        "down_t",
        strides_bytes=(itemsize, ROWS * itemsize),
    )
    del full
    memory = [
        torch.full((2 * rows + 3, COLS), -1.0, dtype=TORCH[dtype]),
        torch.full((cols, ROWS), -1.0, dtype=TORCH[dtype]),
    ]
    return Rank(builder.build(), memory)


def expected(index: int, num_ranks: int, dtype: DType, full: dict[str, torch.Tensor]) -> list[torch.Tensor]:  # fmt: skip
    rows, cols = ROWS // num_ranks, COLS // num_ranks
    part = slice(index * rows, (index + 1) * rows)
    padding = torch.full((3, COLS), -1.0)
    gate_up = torch.cat([full["gate"][part], full["up"][part], padding])
    down_t = full["down"][:, index * cols : (index + 1) * cols].T
    return [gate_up.to(TORCH[dtype]), down_t.contiguous().to(TORCH[dtype])]


class Fleet:
    """Trainer and engine ranks of one process, joined by a real transport."""

    def __init__(self, trainers: list[Rank], engines: list[Rank], mode: UpdateMode, arena_nbytes: int) -> None:  # fmt: skip
        self.trainers, self.engines = trainers, engines
        self.plan = plan_transfer([t.manifest for t in trainers], [e.manifest for e in engines])
        self.transports: list[OneSidedTransport] = []
        self.receivers: dict[str, Receiver] = {}
        self.senders: dict[str, Sender] = {}
        self.stands_still = False
        bindings = []
        for engine in engines:
            transport = self._transport()
            regions = [self._region(transport, tensor) for tensor in engine.memory]
            addresses = [tensor.data_ptr() for tensor in engine.memory]
            receiver = Receiver(transport, engine.manifest, addresses, regions)
            self.receivers[engine.manifest.worker] = receiver
            bindings.append(
                receiver.connect(
                    self.plan.parts(sending=False, all_names=True)[engine.manifest.worker], mode
                )
            )
        for trainer in trainers:
            memory = [ParameterMemory(t.data_ptr(), t.nbytes) for t in trainer.memory]
            sender = Sender(
                self._transport(),
                trainer.manifest,
                lambda m=memory: self._look(m),  # type: ignore[misc]
                arena_nbytes=arena_nbytes,
            )
            sender.connect(
                self.plan.parts(sending=True, all_names=True)[trainer.manifest.worker], bindings
            )
            self.senders[trainer.manifest.worker] = sender

    def _look(self, memory: list[ParameterMemory]) -> list[ParameterMemory]:
        assert self.stands_still, "parameters were read while the trainer may change them"
        return memory

    def _transport(self) -> OneSidedTransport:
        self.transports.append(create_transport(CmaConfig()))
        return self.transports[-1]

    @staticmethod
    def _region(transport: OneSidedTransport, tensor: torch.Tensor) -> MemoryRegion:
        return transport.register(tensor.data_ptr(), tensor.nbytes)

    def send(self) -> dict[str, dict[str, str]]:
        """Prepare and write everything, and return the digests by engine and trainer."""
        digests: dict[str, dict[str, str]] = {worker: {} for worker in self.receivers}
        self.stands_still = True
        for worker, sender in self.senders.items():
            sender.prepare()
            peers = sorted(
                self.plan.destinations[link.dst]
                for link in self.plan.parts(sending=True, all_names=True)[worker].links()
            )
            for outcome in sender.write(0, peers, 10.0).links:
                assert outcome.status is LinkStatus.OK, outcome.error
                digests[outcome.destination][worker] = outcome.digest
        return digests

    def close(self) -> None:
        for sender in self.senders.values():
            sender.close()
        for receiver in self.receivers.values():
            receiver.close()
        for transport in self.transports:
            transport.close()


def standard_fleet(dtype: DType, mode: UpdateMode, arena_nbytes: int) -> tuple[Fleet, dict[str, torch.Tensor]]:  # fmt: skip
    full = {name: distinct(ROWS, COLS) + i * 100 for i, name in enumerate(("gate", "up", "down"))}
    # The cuts give uneven rows.
    cuts = ((0, 7), (7, 9), (16, 8))
    trainers = [
        trainer_rank(i, {n: Box((start, 0), (count, COLS)) for n in full}, full)
        for i, (start, count) in enumerate(cuts)
    ]
    engines = [fused_engine(i, 2, dtype, full) for i in range(2)]
    return Fleet(trainers, engines, mode, arena_nbytes), full


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("arena_nbytes", [0, 256])
def test_every_destination_byte_equals_the_trainers_byte(dtype: DType, mode: UpdateMode, arena_nbytes: int) -> None:  # fmt: skip
    fleet, full = standard_fleet(dtype, mode, arena_nbytes)
    try:
        for _ in range(2):
            digests = fleet.send()
            for worker, receiver in fleet.receivers.items():
                assert receiver.verify(0, digests[worker]) == ()
                receiver.apply()
            for index, engine in enumerate(fleet.engines):
                for got, want in zip(engine.memory, expected(index, 2, dtype, full), strict=True):
                    assert torch.equal(got, want)
            # This is the next version.
            for trainer in fleet.trainers:
                for tensor in trainer.memory:
                    tensor.mul_(-2.0)
            full = {name: tensor * -2.0 for name, tensor in full.items()}
    finally:
        fleet.close()


def test_staged_writes_change_no_live_weight_before_apply() -> None:
    fleet, _ = standard_fleet(DType.BFLOAT16, UpdateMode.STAGED, 0)
    try:
        fleet.send()
        for engine in fleet.engines:
            assert all(bool((tensor == -1.0).all()) for tensor in engine.memory)
    finally:
        fleet.close()


def test_a_binding_without_its_copies_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """If `apply` would copy nothing, right bytes in the staging memory must not count as an update."""
    fleet, _ = standard_fleet(DType.FLOAT32, UpdateMode.STAGED, 0)
    fleet.close()
    engine = fleet.engines[0]
    destination = Destination(engine.manifest, [tensor.data_ptr() for tensor in engine.memory])
    part = fleet.plan.parts(sending=False, all_names=True)[engine.manifest.worker]
    try:
        destination.bind(part, shadow=True, staged=True)
        assert destination.digests is not None
        right = destination.digests.take([*destination.programs], 20.0)
        assert destination.verify(right) == ()

        def refuse(*_: object) -> None:
            raise TransferFailed("too little memory")

        monkeypatch.setattr(type(destination.memory), "prepare", refuse)
        with pytest.raises(TransferFailed, match="too little memory"):
            destination.bind(part, shadow=True, staged=True)
        assert destination.verify(right) == tuple(sorted(right))
    finally:
        destination.close()


def test_a_wrong_byte_is_found_named_and_healed_by_writing_again() -> None:
    fleet, full = standard_fleet(DType.FLOAT32, UpdateMode.IN_PLACE, 0)
    try:
        digests = fleet.send()
        receiver = fleet.receivers["engine/1"]
        fleet.engines[1].memory[0].view(torch.uint8).view(-1)[5] ^= 1
        found = receiver.verify(0, digests["engine/1"])
        assert len(found) == 1
        fleet.senders[found[0]].write(0, ["engine/1"], 10.0)
        assert receiver.verify(0, digests["engine/1"]) == ()
        receiver.apply()
        want = expected(1, 2, DType.FLOAT32, full)
        assert all(map(torch.equal, fleet.engines[1].memory, want))
    finally:
        fleet.close()


def served_is_right(fleet: Fleet, dtype: DType, full: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(got, want)
        for index, engine in enumerate(fleet.engines)
        for got, want in zip(engine.memory, expected(index, 2, dtype, full), strict=True)
    )


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("arena_nbytes", [0, 256])
def test_a_wrong_read_during_a_write_is_healed_by_writing_again(
    dtype: DType, arena_nbytes: int
) -> None:
    """Each parameter in turn is wrong during its write, and right before and after."""
    for number, name in enumerate(("gate", "up", "down")):
        fleet, full = standard_fleet(dtype, UpdateMode.IN_PLACE, arena_nbytes)
        fleet.stands_still = True
        try:
            for trainer in fleet.trainers:
                worker = trainer.manifest.worker
                sender = fleet.senders[worker]
                sender.prepare()
                wrong = trainer.memory[number].view(torch.int32).view(-1)
                peers = [p for p in fleet.plan.destinations if p in fleet.receivers]
                wrong[::3] ^= 1 << 22
                sent = sender.write(0, peers, 10.0)
                wrong[::3] ^= 1 << 22
                digests = {link.destination: {worker: link.digest} for link in sent.links}
                found = [p for p in peers if fleet.receivers[p].verify(0, digests[p])]
                # Digests are of the right bytes. Links packed before the change are right, and all
                # others are found.
                assert found or (dtype is DType.BFLOAT16 and arena_nbytes == 0) or name == "down"
                for link in sender.write(0, found, 10.0).links if found else ():
                    assert link.status is LinkStatus.OK, link.error
                    assert link.digest == digests[link.destination][worker]
                assert not any(fleet.receivers[p].verify(0, digests[p]) for p in peers)
            for receiver in fleet.receivers.values():
                receiver.apply()
            assert served_is_right(fleet, dtype, full)
        finally:
            fleet.close()


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_a_bit_flipped_in_the_arena_is_healed_by_writing_again(dtype: DType) -> None:
    fleet, full = standard_fleet(dtype, UpdateMode.IN_PLACE, 0)
    fleet.stands_still = True
    try:
        for worker, sender in fleet.senders.items():
            sender.prepare()
            arena = sender.packer.slot.arena
            assert isinstance(arena, Arena)
            # This byte belongs to the first link.
            arena.bytes[3] ^= 1
            peers = sorted(fleet.receivers)
            sent = {link.destination: link.digest for link in sender.write(0, peers, 10.0).links}
            wrong = [p for p in peers if fleet.receivers[p].verify(0, {worker: sent[p]})]
            assert len(wrong) == 1
            again = sender.write(0, wrong, 10.0).links
            assert [link.digest for link in again] == [sent[wrong[0]]]
            assert not fleet.receivers[wrong[0]].verify(0, {worker: sent[wrong[0]]})
        for receiver in fleet.receivers.values():
            receiver.apply()
        assert served_is_right(fleet, dtype, full)
    finally:
        fleet.close()


@pytest.mark.parametrize("arena_nbytes", [0, 256])
def test_weights_that_change_before_they_are_written_again_are_not_confirmed(
    arena_nbytes: int,
) -> None:
    fleet, _ = standard_fleet(DType.BFLOAT16, UpdateMode.IN_PLACE, arena_nbytes)
    try:
        digests = fleet.send()
        (worker, sender), trainer = next(iter(fleet.senders.items())), fleet.trainers[0]
        for tensor in trainer.memory:
            tensor.mul_(-2.0)
        (link,) = sender.write(0, ["engine/0"], 10.0).links
        if link.status is LinkStatus.OK:
            assert link.digest == digests["engine/0"][worker]
            assert fleet.receivers["engine/0"].verify(0, {worker: link.digest}) == (worker,)
        else:
            assert "the weights have changed since this version was prepared" in link.error
    finally:
        fleet.close()


def cut(size: int, marks: set[int]) -> list[tuple[int, int]]:
    """Return (start, count) of the parts between the marks inside the range."""
    edges = [0, *sorted(m for m in marks if 0 < m < size), size]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5)),
    source_marks=st.tuples(*[st.sets(st.integers(1, 8), max_size=2)] * 3),
    target_marks=st.tuples(*[st.sets(st.integers(1, 8), max_size=2)] * 3),
    order=st.permutations([0, 1, 2]),
    dtype=st.sampled_from([DType.FLOAT32, DType.BFLOAT16]),
    mode=st.sampled_from(list(UpdateMode)),
    arena_nbytes=st.sampled_from([0, 128, 1024]),
)
def test_every_grid_of_trainers_can_update_every_grid_of_engines(
    shape: tuple[int, int, int],
    source_marks: tuple[set[int], set[int], set[int]],
    target_marks: tuple[set[int], set[int], set[int]],
    order: list[int],
    dtype: DType,
    mode: UpdateMode,
    arena_nbytes: int,
) -> None:
    full = {"t": torch.arange(1, torch.Size(shape).numel() + 1).float().reshape(shape)}
    trainers = [
        trainer_rank(i, {"t": box}, full) for i, box in enumerate(grid(shape, source_marks))
    ]
    boxes = grid(shape, target_marks)
    engines = [permuted_engine(i, box, shape, order, dtype) for i, box in enumerate(boxes)]
    fleet = Fleet(trainers, engines, mode, arena_nbytes)
    try:
        digests = fleet.send()
        for worker, receiver in fleet.receivers.items():
            assert receiver.verify(0, digests[worker]) == ()
            receiver.apply()
        for box, engine in zip(boxes, engines, strict=True):
            want = full["t"][slices(box)].permute(*order).to(TORCH[dtype])
            assert torch.equal(engine.memory[0], want)
    finally:
        fleet.close()


def grid(shape: tuple[int, int, int], marks: tuple[set[int], set[int], set[int]]) -> list[Box]:
    first, second, third = (cut(size, m) for size, m in zip(shape, marks, strict=True))
    return [Box((a, b, c), (x, y, z)) for a, x in first for b, y in second for c, z in third]


def permuted_engine(index: int, box: Box, shape: tuple[int, int, int], order: list[int], dtype: DType) -> Rank:  # fmt: skip
    """Return a rank with its box's dims permuted in memory."""
    memory = torch.full([box.sizes[d] for d in order], -1.0, dtype=TORCH[dtype])
    strides = [0, 0, 0]
    for position, dim in enumerate(order):
        strides[dim] = memory.stride(position) * dtype.itemsize
    builder = ManifestBuilder(f"engine/{index}", Role.ENGINE)
    builder.add_parameter("p", nbytes=memory.nbytes, dtype=dtype)
    builder.add_shard("t", shape, box, "p", strides_bytes=tuple(strides))
    return Rank(builder.build(), [memory])
