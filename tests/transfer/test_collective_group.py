"""Members of a group agree before they connect, and buckets of any size carry each element once."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from windlass.backends.collective_group import Rendezvous, TorchBroadcastGroup, join_group
from windlass.backends.xccl import (
    CollectiveReceiver,
    CollectiveSender,
    clip,
    cut_buckets,
    loads_of,
    signature_of_offer,
)
from windlass.config import CollectiveFabric, UpdateMode, XcclBackend
from windlass.errors import PeerTimeout, PlanError, TransferFailed, WindlassError
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory.packing import bytes_at
from windlass.net.clock import Deadline
from windlass.planning.plan import CopyMode
from windlass.planning.planner import plan_transfer
from windlass.planning.program import BoundOp, DirectRuns, LinkProgram
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import BucketPart, GroupOffer, LinkStatus

MEMBERS = ("trainer/0", "engine/0", "engine/1")
PARTS = (
    BucketPart("w", "float32", 4096, 0, 0, 4096, 0, 0),
    BucketPart("b", "bfloat16", 512, 1, 0, 512, 1, 0),
)


def offer_of(rendezvous: Rendezvous, name: str = "group") -> GroupOffer:
    return GroupOffer(name, MEMBERS, "127.0.0.1", rendezvous.port, PARTS, (4096, 512))


def join(offer: GroupOffer, worker: str, signature: str, rendezvous: Rendezvous, deadline_s: float) -> TorchBroadcastGroup | WindlassError:  # fmt: skip
    try:
        return join_group(
            offer,
            worker,
            fabric=CollectiveFabric.GLOO,
            num_buffers=2,
            signature=signature,
            host="127.0.0.1",
            deadline=Deadline.after(deadline_s, "join"),
            hosted=rendezvous if worker == MEMBERS[0] else None,
        )
    except WindlassError as error:
        return error


def join_all(offers: Sequence[GroupOffer], rendezvous: Rendezvous, deadline_s: float = 20.0) -> list[TorchBroadcastGroup | WindlassError]:  # fmt: skip
    with ThreadPoolExecutor(len(offers)) as pool:
        return list(
            pool.map(
                lambda pair: join(
                    pair[0], pair[1], signature_of_offer(pair[0], "d", "p"), rendezvous, deadline_s
                ),
                zip(offers, MEMBERS, strict=False),
            )
        )


@pytest.mark.parametrize(
    "other",
    [
        {"parts": (PARTS[1], PARTS[0])},
        {"parts": (msgspec.structs.replace(PARTS[0], dtype="float16"), PARTS[1])},
        {"parts": (msgspec.structs.replace(PARTS[0], name="v"), PARTS[1])},
        {"parts": (msgspec.structs.replace(PARTS[0], nbytes=8192), PARTS[1])},
        {"bucket_nbytes": (2048, 2048, 512)},
    ],
    ids=["order", "dtype", "name", "size", "cuts"],
)
def test_all_members_fail_before_a_collective_when_one_disagrees(
    other: dict[str, object],
) -> None:
    rendezvous = Rendezvous("127.0.0.1", 20.0)
    offer = offer_of(rendezvous)
    found = join_all([offer, offer, msgspec.structs.replace(offer, **other)], rendezvous)
    for answer in found:
        assert isinstance(answer, PlanError), answer
        assert "members must expect equal buckets" in str(answer)
        assert all(worker in str(answer) for worker in MEMBERS)


def test_an_absent_member_is_named_by_the_deadline() -> None:
    rendezvous = Rendezvous("127.0.0.1", 20.0)
    offer = offer_of(rendezvous)
    for answer in join_all([offer, offer], rendezvous, 1.0):
        assert isinstance(answer, PeerTimeout), answer


def test_several_groups_coexist_and_leave_the_default_group_unchanged() -> None:
    stores = [Rendezvous("127.0.0.1", 20.0), Rendezvous("127.0.0.1", 20.0)]
    assert stores[0].port != stores[1].port
    formed = [join_all([offer_of(store, name)] * 3, store) for store, name in zip(stores, "ab", strict=True)]  # fmt: skip
    groups = [[g for g in group if isinstance(g, TorchBroadcastGroup)] for group in formed]
    assert [len(group) for group in groups] == [3, 3]
    assert not dist.is_initialized()
    for number, group in enumerate(groups):
        bytes_at(group[0].buffer(0), 4096)[:] = bytes([number + 1]) * 4096
        for member in group:
            member.start(0, 4096, 10.0)
    # The groups finish in the opposite order.
    for number, group in enumerate(reversed(groups)):
        for member in group:
            member.finish(0, 10.0)
            assert bytes(bytes_at(member.buffer(0), 4096)) == bytes([2 - number]) * 4096
    for group in groups:
        for member in group:
            member.abort()
            assert member.broken


def op_of(sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> BoundOp:
    return BoundOp(
        mode=CopyMode.PACKED,
        src_parameter=0,
        dst_parameter=0,
        sizes=sizes,
        src_offset=offset,
        src_strides=strides,
        src_dtype=DType.INT32,
        dst_offset=0,
        dst_strides=tuple(int(np.prod(sizes[i + 1 :])) * 4 for i in range(len(sizes))),
        dst_dtype=DType.INT32,
        nbytes=int(np.prod(sizes)) * 4,
        staging_offset=-1,
        src_sizes=sizes,
    )


def elements(op: BoundOp) -> list[tuple[int, int]]:
    """Return (source byte, destination byte) of every element."""
    index = np.indices(op.sizes).reshape(len(op.sizes), -1)
    src = op.src_offset + np.array(op.src_strides) @ index
    dst = op.dst_offset + np.array(op.dst_strides) @ index
    return list(zip(src.tolist(), dst.tolist(), strict=True))


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    gaps=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    offset=st.integers(0, 9),
    bucket=st.integers(1, 7),
)
def test_every_element_of_an_op_is_in_exactly_one_bucket(
    sizes: list[int], gaps: list[int], order: list[int], offset: int, bucket: int
) -> None:
    strides = [0] * len(sizes)
    step = 4
    for dim in (d for d in order if d < len(sizes)):
        strides[dim] = step
        step *= sizes[dim] + gaps[dim]
    op = op_of(tuple(sizes), tuple(strides), offset * 4)
    whole = elements(op)
    end = max(src for src, _ in whole) + 4
    found = []
    for start in range(0, end, bucket * 8):
        for part in clip(op, start, start + bucket * 8):
            inside = elements(part)
            assert all(start <= src and src + 4 <= start + bucket * 8 for src, _ in inside)
            found += inside
    assert sorted(found) == sorted(whole)


def test_only_needed_bytes_are_broadcast_and_a_missing_byte_is_an_error() -> None:
    builder = ManifestBuilder("trainer/0", Role.TRAINER)
    for name in ("used", "unused"):
        builder.add_parameter(name, nbytes=4000, dtype=DType.INT32)
        builder.add_shard(name, (1000,), Box((0,), (1000,)), name)
    runs = DirectRuns.empty(0)
    op = op_of((500,), (4,), 400)
    program = LinkProgram(peer="engine/0", ops=(op,), direct=runs, nbytes=2000)
    parts, sizes = cut_buckets(builder.build(), [program, program], 256)
    assert sum(part.stop - part.start for part in parts) == 2000
    assert {part.name for part in parts} == {"used"}
    assert max(sizes) <= 256
    offer = GroupOffer("g", ("trainer/0", "engine/0"), "", 0, parts, sizes)
    assert sum(len(loads) for loads in loads_of(program, offer)) == len(parts)
    with pytest.raises(PlanError, match=r"must contain 500 elements of .*, got 448"):
        loads_of(program, msgspec.structs.replace(offer, parts=parts[:-1]))


ROWS = 512


def part_of(worker: str, role: Role, dtype: DType) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("w", nbytes=ROWS * dtype.itemsize, dtype=dtype)
    builder.add_shard("w", (ROWS,), Box((0,), (ROWS,)), "w")
    return builder.build()


class Pair:
    """Halves of the backend `xccl` in a trainer rank and in an engine rank, joined by gloo."""

    def __init__(self, dtype: DType = DType.FLOAT32) -> None:
        self.trained, self.served = np.arange(ROWS, dtype="<f4"), np.zeros(ROWS, "<f4")
        ours = part_of("trainer/0", Role.TRAINER, DType.FLOAT32)
        theirs = part_of("engine/0", Role.ENGINE, dtype)
        config = XcclBackend(bucket_nbytes=256)
        memory = [ParameterMemory(int(self.trained.ctypes.data), self.trained.nbytes)]
        self.sender = CollectiveSender(config, ours, lambda: memory, "127.0.0.1")
        address = int(self.served.ctypes.data)
        self.receiver = CollectiveReceiver(config, theirs, [address], "127.0.0.1")
        plan = plan_transfer([ours], [theirs])
        received = plan.parts(sending=False, all_names=True)["engine/0"]
        binding = self.receiver.connect(received, UpdateMode.IN_PLACE)
        sent = plan.parts(sending=True, all_names=True)["trainer/0"]
        offer = self.sender.connect(sent, [binding])
        assert offer is not None
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(self.receiver.join, [offer], 20.0)
            self.sender.join([offer], 20.0)
            joined.result()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def test_a_source_that_is_late_between_two_buckets_releases_its_receivers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, start, number = Pair(), TorchBroadcastGroup.start, itertools.count()

    def stalls(group: TorchBroadcastGroup, slot: int, nbytes: int, deadline_s: float) -> None:
        start(group, slot, nbytes, deadline_s)
        if threading.current_thread() is threading.main_thread() and next(number) == 4:
            time.sleep(1.5)

    monkeypatch.setattr(TorchBroadcastGroup, "start", stalls)
    pair.sender.prepare(0)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(pair.receiver.receive, {"trainer/0": ["engine/0"]}, 30.0)
        (link,) = pair.sender.write(0, ["engine/0"], 1.0).links
        assert "deadline of 1.0 s passed" in link.error
        with pytest.raises(TransferFailed):
            received.result()
    assert time.monotonic() - began < 10
    (link,) = pair.sender.write(0, ["engine/0"], 1.0).links
    assert "is broken after an earlier failure" in link.error
    pair.close()


def test_a_receiver_that_cannot_unpack_a_bucket_breaks_its_group() -> None:
    pair = Pair(DType.FLOAT16)
    pair.sender.prepare(0)
    pair.trained[ROWS // 2] = 1e30
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(pair.sender.write, 0, ["engine/0"], 3.0)
        with pytest.raises(TransferFailed, match="too large for float16"):
            pair.receiver.receive({"trainer/0": ["engine/0"]}, 3.0)
        # The broadcasts that have begun may still arrive in the buffers, so the group must not be used again.
        with pytest.raises(TransferFailed, match="is broken after an earlier failure"):
            pair.receiver.receive({"trainer/0": ["engine/0"]}, 3.0)
        assert sent.result().links[0].status is LinkStatus.FAILED
    pair.close()
