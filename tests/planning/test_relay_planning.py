"""Relay groups, stripes and payloads: every destination byte arrives exactly once, with the right value."""

from __future__ import annotations

import numpy as np
from ground_truth import distinct_values, fill
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from reference_executor import execute
from strategies import Fleet, fleets

from windlass.config import RelayShape
from windlass.layout.manifest import ShardManifest
from windlass.memory.host import HostMemory
from windlass.memory.packing import new_digest
from windlass.planning.plan import CopyMode, TransferPlan
from windlass.planning.planner import PlanPolicy, plan_transfer
from windlass.planning.program import bind_links
from windlass.planning.relay import (
    RelayGroup,
    children_of,
    depths_of,
    find_replicas,
    stripes_of,
)
from windlass.transfer.payload import Payload, payload_of

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]
"""Suppressed checks: machines may be busy, and reversed dims are frequent."""
SHAPES = [RelayShape.CHAIN, RelayShape.TREE, RelayShape.AUTO]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def renamed(manifest: ShardManifest, worker: str) -> ShardManifest:
    from dataclasses import replace

    return replace(manifest, worker=worker)


@given(st.sampled_from(SHAPES), st.integers(2, 300))
@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
def test_every_lane_is_a_tree_over_all_members(shape: RelayShape, num_members: int) -> None:
    stripes = stripes_of(shape, num_members)
    group = RelayGroup(tuple(f"e{i}" for i in range(num_members)), stripes, 1)
    for parents, depths in zip(stripes, depths_of(group), strict=True):
        assert parents.count(-1) == 1
        for member, parent in enumerate(parents):
            assert depths[member] == (1 if parent < 0 else depths[parent] + 1)
    sent = [len([c for stripe in children_of(group, m) for c in stripe]) for m in group.members]
    assert sum(sent) == len(stripes) * (num_members - 1)
    if len(stripes) == 2:
        # Each stripe has half of the bytes, so two children cost one copy.
        assert max(sent) <= (2 if num_members % 2 == 0 else 3)
        assert max(max(depths) for depths in depths_of(group)) <= np.log2(num_members) + 2
        assert len(set(group.roots())) == 2


def test_one_engine_and_no_shape_need_no_lanes() -> None:
    assert stripes_of(RelayShape.TREE, 1) == ()
    assert stripes_of(RelayShape.OFF, 5) == ()
    assert len(stripes_of(RelayShape.AUTO, 4)) == 1
    assert len(stripes_of(RelayShape.AUTO, 5)) == 2


@given(fleets())
@settings(max_examples=20, deadline=None, suppress_health_check=SLOW)
def test_only_engines_that_differ_only_in_names_are_replicas(fleet: Fleet) -> None:
    ranks = fleet.destinations
    same = [renamed(m, f"copy/{i}") for i, m in enumerate(ranks)]
    found = find_replicas({"engine": ranks, "copy": same, "part": ranks[:-1], "other": ranks[::-1]})
    assert ("engine", "copy") in {names[:2] for names in found}
    assert all("part" not in names for names in found)


def bindable(plan: TransferPlan) -> bool:
    """Return whether a plan can be bound: reversed dims are refused."""
    return bool((plan.ops.src_strides >= 0).all() and (plan.ops.dst_strides >= 0).all())


def destination_pieces(payload: Payload) -> list[tuple[bool, int, int, int]]:
    return list(
        zip(
            payload.lands.tolist(),
            payload.dst_parameter.tolist(),
            payload.dst_offset.tolist(),
            payload.nbytes.tolist(),
            strict=True,
        )
    )


@given(
    fleets(),
    st.sampled_from(SHAPES),
    st.integers(2, 7),
    st.sampled_from([8, 20, 64, 1000]),
    st.sampled_from([1, 16, 1 << 20]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
def test_a_relayed_plan_brings_every_byte_once_and_the_right_one(
    fleet: Fleet, shape: RelayShape, num_members: int, chunk_nbytes: int, run_nbytes: int
) -> None:
    values = distinct_values(fleet.sources)
    policy = PlanPolicy(direct_min_run_bytes=run_nbytes)
    plan = plan_transfer(fleet.sources, fleet.destinations, policy)
    assume(bindable(plan))
    sources = {m.worker: fill(m, values, 0) for m in fleet.sources}
    right = {m.worker: fill(m, values, 0) for m in fleet.destinations}
    for manifest in fleet.destinations:
        members = [manifest, *(renamed(manifest, f"copy{i}/0") for i in range(1, num_members))]
        names = tuple(m.worker for m in members)
        group = RelayGroup(names, stripes_of(shape, num_members), chunk_nbytes)
        leader = plan.parts(sending=False, all_names=True)[manifest.worker]
        parts = {m.worker: leader.for_replica(manifest.worker, m) for m in members}
        landed = relay(group, parts, members, sources)
        for member in members:
            assert all(
                np.array_equal(a, b)
                for a, b in zip(landed[member.worker], right[manifest.worker], strict=True)
            )


def relay(
    group: RelayGroup,
    parts: dict[str, TransferPlan],
    members: list[ShardManifest],
    sources: dict[str, list[Bytes]],
) -> dict[str, list[Bytes]]:
    """Run a relay in numpy; fail unless every chunk is written once to every member."""
    part = parts[group.members[0]]
    payloads = {
        p.peer: (p, payload_of(p, group.chunk_nbytes)) for p in bind_links(part, sending=False)
    }
    staged = {m.worker: np.zeros(part.staging_nbytes[0], np.uint8) for m in members}
    memory = {m.worker: [np.zeros(p.nbytes, np.uint8) for p in m.parameters] for m in members}
    written: dict[str, dict[tuple[bool, int, int], int]] = {m.worker: {} for m in members}
    order = sorted(
        (depth, member, stripe)
        for stripe, depths in enumerate(depths_of(group))
        for member, depth in enumerate(depths)
    )
    for _, member, stripe in order:
        worker, parent = group.members[member], group.stripes[stripe][member]
        for source, (program, payload) in payloads.items():
            stream = link_bytes(part, source, sources)
            begin = np.cumsum(payload.nbytes) - payload.nbytes
            table = destination_pieces(payload)
            assert int(payload.nbytes.sum()) == program.nbytes == len(stream)
            for chunk in range(stripe, payload.num_chunks, len(group.stripes)):
                pieces = payload.pieces_of(chunk)
                for index in range(pieces.start, pieces.stop):
                    lands, parameter, offset, nbytes = table[index]
                    at = slice(offset, offset + nbytes)
                    if parent < 0:
                        data = stream[begin[index] : begin[index] + nbytes]
                    else:
                        giver = group.members[parent]
                        held = staged[giver] if lands else memory[giver][parameter]
                        data = held[at]
                    key = (lands, parameter, offset)
                    written[worker][key] = written[worker].get(key, 0) + 1
                    (staged[worker] if lands else memory[worker][parameter])[at] = data
    assert all(count == 1 for counts in written.values() for count in counts.values())
    for worker in group.members:
        unpack(part, staged[worker], memory[worker])
    return memory


def link_bytes(part: TransferPlan, source: str, sources: dict[str, list[Bytes]]) -> Bytes:
    """Return the payload of one link in the order of its digest, read from the source."""
    found: list[Bytes] = [np.zeros(0, np.uint8)]
    ops = part.ops
    for row in np.flatnonzero(ops.src == part.sources.index(source)).tolist():
        buffer = sources[source][int(ops.src_parameter[row])]
        view = np.ndarray(
            ops.sizes[row], np.uint32, buffer, int(ops.src_offset[row]), ops.src_strides[row]
        )
        found.append(np.ascontiguousarray(view).reshape(-1).view(np.uint8))
    return np.concatenate(found)


def unpack(part: TransferPlan, staged: Bytes, memory: list[Bytes]) -> None:
    ops = part.ops
    for row in np.flatnonzero(ops.mode == CopyMode.SCATTER).tolist():
        first = int(ops.staging_offset[row])
        payload = staged[first : first + int(ops.nbytes[row])].view(np.uint32)
        view = np.ndarray(
            ops.sizes[row],
            np.uint32,
            memory[int(ops.dst_parameter[row])],
            int(ops.dst_offset[row]),
            ops.dst_strides[row],
        )
        view[...] = payload.reshape(ops.sizes[row])


@given(fleets(), st.sampled_from([8, 64, 1000]))
@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
def test_chunks_are_the_payload_in_order_and_have_its_digests(
    fleet: Fleet, chunk_nbytes: int
) -> None:
    plan = plan_transfer(fleet.sources, fleet.destinations)
    assume(bindable(plan))
    values = distinct_values(fleet.sources)
    sources = {m.worker: fill(m, values, 0) for m in fleet.sources}
    destinations = {m.worker: fill(m, values, 0) for m in fleet.destinations}
    execute(plan, sources, {w: [b.copy() for b in bs] for w, bs in destinations.items()})
    for manifest in fleet.destinations:
        part = plan.parts(sending=False, all_names=True)[manifest.worker]
        for program in bind_links(part, sending=False):
            payload = payload_of(program, chunk_nbytes)
            if payload.lands.any():
                continue
            targets = np.array([b.ctypes.data for b in destinations[manifest.worker]], np.uint64)
            digests = payload.digests(HostMemory(), payload.at(targets.tolist(), 0))
            stream, begin = link_bytes(part, program.peer, sources).tobytes(), 0
            for chunk, found in digests.take(range(payload.num_chunks), 20.0).items():
                expected, nbytes = new_digest(), int(payload.nbytes[payload.pieces_of(chunk)].sum())
                expected.update(stream[begin : begin + nbytes])
                assert found == expected.hexdigest()
                begin += nbytes
            assert begin == len(stream)
            assert (payload.nbytes <= chunk_nbytes).all()
