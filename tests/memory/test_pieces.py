"""Ops cut into blocks of rows and run piece by piece give the same bytes and digest at both ends."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from ground_truth import distinct_values, fill
from hypothesis import HealthCheck, assume, given, settings
from position_digest import PositionDigest
from strategies import Fleet, fleets

from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.memory.cuda import pieces as blocks
from windlass.memory.cuda.pieces import block_tables
from windlass.planning.planner import plan_transfer
from windlass.planning.program import BoundOp, bind_links

Buffers = list[np.ndarray]


def addresses(buffers: Buffers) -> np.ndarray:
    return np.array([buffer.ctypes.data for buffer in buffers], np.uint64)


def run(pieces: np.ndarray, itemsize: int, *, copy: bool, digest: PositionDigest) -> None:
    """Do the kernel's work one row at a time."""
    for piece in pieces:
        nbytes = int(piece["row_elems"]) * itemsize
        for row in range(int(piece["rows"])):
            target = int(piece["dst"]) + row * int(piece["dst_pitch"])
            if copy:
                ctypes.memmove(target, int(piece["src"]) + row * int(piece["src_pitch"]), nbytes)
            held = np.frombuffer(ctypes.string_at(target, nbytes), np.uint8)
            digest.add_row(held, int(piece["pos"]) + row * int(piece["pos_pitch"]))


@pytest.mark.parametrize("max_piece_nbytes", [8, 64 << 10])
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(fleet=fleets())
def test_pieces_move_exactly_the_plan_and_both_ends_get_equal_digests(
    max_piece_nbytes: int, fleet: Fleet
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "MAX_PIECE_NBYTES", max_piece_nbytes)
        plan = plan_transfer(fleet.sources, fleet.destinations)
        # Memory that runs backwards is refused when a plan is bound.
        assume(not (plan.ops.src_strides < 0).any() and not (plan.ops.dst_strides < 0).any())
        values = distinct_values((*fleet.sources, *fleet.destinations))
        values |= {a: values[t] for m in fleet.sources for a, t in m.aliases.items()}
        held = {m.worker: fill(m, values, background=0xEE) for m in fleet.sources}
        live = {
            m.worker: [np.full(p.nbytes, 0xAA, np.uint8) for p in m.parameters]
            for m in fleet.destinations
        }
        sent: dict[tuple[str, str], str] = {}
        for source, buffers in held.items():
            for program in bind_links(
                plan.parts(sending=True, all_names=True)[source], sending=True
            ):
                digest = PositionDigest()
                tables = block_tables(program, addresses(buffers), addresses(live[program.peer]))
                for kind, pieces in tables.items():
                    run(pieces, kind.dst_dtype.itemsize, copy=True, digest=digest)
                sent[source, program.peer] = digest.hexdigest()
        for manifest in fleet.destinations:
            expected = fill(manifest, values, background=0xAA)
            for got, want in zip(live[manifest.worker], expected, strict=True):
                assert (got == want).all()
            for program in bind_links(
                plan.parts(sending=False, all_names=True)[manifest.worker], sending=False
            ):
                digest = PositionDigest()
                tables = block_tables(program, None, addresses(live[manifest.worker]))
                for kind, pieces in tables.items():
                    run(pieces, kind.dst_dtype.itemsize, copy=False, digest=digest)
                assert digest.hexdigest() == sent[program.peer, manifest.worker]


def digest_of(payload: np.ndarray) -> str:
    digest = PositionDigest()
    digest.add_row(payload, 0)
    return digest.hexdigest()


@pytest.mark.parametrize("nbytes", [24, 20, 18, 17])
def test_any_changed_moved_or_missing_byte_changes_the_digest(nbytes: int) -> None:
    payload = np.arange(1, nbytes + 1, dtype=np.uint8)
    found = {digest_of(payload), digest_of(payload[::-1].copy()), digest_of(payload[:-1].copy())}
    for index in range(nbytes):
        changed = payload.copy()
        changed[index] ^= 1
        found.add(digest_of(changed))
        found.add(digest_of(np.roll(payload, index)))
    # Rolling the payload by 0 gives the payload itself.
    assert len(found) == 2 + nbytes + nbytes


def test_the_order_of_rows_does_not_matter_and_their_places_do() -> None:
    rows = np.arange(64, dtype=np.uint8).reshape(4, 16)
    forward, backward, swapped = PositionDigest(), PositionDigest(), PositionDigest()
    for index in range(4):
        forward.add_row(rows[index], 16 * index)
        backward.add_row(rows[3 - index], 16 * (3 - index))
        swapped.add_row(rows[3 - index], 16 * index)
    assert forward.words() == backward.words() != swapped.words()


def test_ops_of_the_same_shape_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts of experts stay one op per tensor, and cutting an op takes about 50 numpy calls."""
    trainer, engine = ManifestBuilder("t/0", Role.TRAINER), ManifestBuilder("e/0", Role.ENGINE)
    for builder, dtype in ((trainer, DType.FLOAT32), (engine, DType.BFLOAT16)):
        builder.add_parameter("w", nbytes=64 * 6 * dtype.itemsize, dtype=dtype)
        for index in range(64):
            at = index * 6 * dtype.itemsize
            builder.add_shard(f"t{index}", (2, 3), Box.full((2, 3)), "w", offset_bytes=at)
    plan = plan_transfer([trainer.build()], [engine.build()])
    (program,) = bind_links(plan, sending=True)
    cut, count = blocks.cut_op, []

    def counted(op: BoundOp, *, at_source: bool) -> np.ndarray:
        count.append(op)
        return cut(op, at_source=at_source)

    monkeypatch.setattr(blocks, "cut_op", counted)
    where = np.array([1 << 20], np.uint64)
    ((_, pieces),) = block_tables(program, where, where).items()
    assert (len(program.ops), len(count)) == (64, 1)
    assert pieces["src"].tolist() == [(1 << 20) + 24 * index for index in range(64)]
    assert pieces["dst"].tolist() == [(1 << 20) + 12 * index for index in range(64)]
    assert pieces["pos"].tolist() == [12 * index for index in range(64)]
