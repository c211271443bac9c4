"""Boxes that ranks hold several times are found in any layout, and a byte that differs in them is detected."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from ground_truth import distinct_values, fill, shard_view
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_gpu import numpy_gpu
from strategies import Fleet, fleets

from windlass.errors import ManifestError, PlanError, ProtocolError, TransferFailed
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.device import CudaMemory
from windlass.planning import replicated
from windlass.planning.replicated import (
    HELD,
    Replicated,
    decode_held,
    due_pieces,
    find_replicated,
)
from windlass.transfer.base import ParameterMemory
from windlass.transfer.replicated_digests import ReplicatedDigests

INT32 = DType.INT32


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> object:
    """Make small boxes consist of many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated, "BLOCK_NBYTES", 24)
        yield


class Ranks:
    """Trainer ranks with memory, and the controller's comparison of them."""

    def __init__(self, manifests: Sequence[ShardManifest]) -> None:
        values = distinct_values(manifests)
        self.manifests = {m.worker: m for m in manifests}
        self.memory = {m.worker: fill(m, values, 0xAB) for m in manifests}
        self.found: Replicated = find_replicated(manifests)
        self.digests: dict[str, ReplicatedDigests] = {}
        for worker, part in self.found.parts.items():
            buffers = self.memory[worker]
            digests = ReplicatedDigests(self.manifests[worker], lambda at=buffers: located(at))  # type: ignore[misc]
            digests.bind(part.tobytes())
            self.digests[worker] = digests

    def compare(self, turn: int = 0, period: int = 1) -> str:
        return self.found.disagreement(self.taken(turn, period))

    def taken(self, turn: int, period: int) -> dict[str, np.ndarray]:
        return {worker: digests.take(turn, period) for worker, digests in self.digests.items()}


def located(buffers: Sequence[np.ndarray]) -> list[ParameterMemory]:
    return [ParameterMemory(b.ctypes.data, b.nbytes) for b in buffers]


def laid_out(manifest: ShardManifest, rng: random.Random) -> ShardManifest:
    """Return the same shards, each in its own parameter, with dims in any order and gaps between rows."""
    builder = ManifestBuilder(manifest.worker, Role.TRAINER)
    for number, shard in enumerate(manifest.shards()):
        strides, step = [0] * shard.box.num_dims, 4
        for dim in rng.sample(range(shard.box.num_dims), shard.box.num_dims):
            strides[dim] = step
            step = step * shard.box.sizes[dim] + 4 * rng.choice((0, 0, 1, 3))
        sizes = zip(shard.box.sizes, strides, strict=True)
        nbytes = sum((size - 1) * stride for size, stride in sizes) + 4
        padding = nbytes - shard.box.numel * 4
        name = f"p{number}"
        builder.add_parameter(name, nbytes=nbytes, dtype=INT32, padding_nbytes=padding)
        shape = next(t.shape for t in manifest.tensors if t.name == shard.tensor)
        builder.add_shard(shard.tensor, shape, shard.box, name, strides_bytes=tuple(strides))
    for alias, target in manifest.aliases.items():
        builder.add_alias(alias, target)
    return builder.build()


Held = dict[tuple[str, tuple[int, ...]], list[tuple[str, int, int]]]


def who_holds(ranks: Ranks) -> Held:
    """Return (tensor, index) -> (worker, parameter, byte offset) for every element."""
    held: Held = {}
    for manifest in ranks.manifests.values():
        index = {p.name: i for i, p in enumerate(manifest.parameters)}
        for shard in manifest.shards():
            for at in itertools.product(*(range(size) for size in shard.box.sizes)):
                where = tuple(o + i for o, i in zip(shard.box.offsets, at, strict=True))
                offset = shard.offset_bytes + sum(
                    i * s for i, s in zip(at, shard.strides_bytes, strict=True)
                )
                place = manifest.worker, index[shard.parameter], offset
                held.setdefault((shard.tensor, where), []).append(place)
    return held


@settings(deadline=None, max_examples=60)
@given(fleets(), st.randoms(use_true_random=False))
def test_exactly_the_bytes_at_two_or_more_places_are_compared(
    fleet: Fleet, rng: random.Random
) -> None:
    ranks = Ranks([laid_out(manifest, rng) for manifest in fleet.sources])
    assert ranks.compare() == ""
    period = rng.randint(1, 7)
    assert {ranks.compare(turn, period) for turn in range(period)} == {""}
    held = who_holds(ranks)
    several = {key for key, places in held.items() if len(places) > 1}
    boxes = list(zip(ranks.found.names, ranks.found.boxes, strict=True))
    covered = [
        (name, where)
        for name, box in boxes
        for where in itertools.product(*(map(range, box.offsets, box.ends)))
    ]
    assert sorted(covered) == sorted(several)
    for key, places in rng.sample(sorted(held.items()), min(len(held), 6)):
        worker, parameter, offset = rng.choice(places)
        ranks.memory[worker][parameter][offset + rng.randrange(4)] ^= 1 << rng.randrange(8)
        said = [ranks.compare(), *(ranks.compare(turn, period) for turn in range(period))]
        if key in several:
            own = [place for place in places if place[0] == worker]
            spec = ranks.manifests[worker].parameters[parameter]
            place = worker if len(own) == 1 else f"{worker} ({spec.name!r})"
            assert said[0].count(place) == 1
            assert repr(key[0]) in said[0]
            # Every block has one turn.
            assert sum(map(bool, said[1:])) == 1
        else:
            assert not any(said)
        ranks.memory[worker][parameter][offset : offset + 4] = fill(
            ranks.manifests[worker], distinct_values(ranks.manifests.values()), 0xAB
        )[parameter][offset : offset + 4]
    assert ranks.compare() == ""


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_pieces_follow_each_other_row_major_and_each_has_one_turn(
    sizes: list[int], row_nbytes: int, period: int, run: int
) -> None:
    steps = (100_000, 10_000, 1000, 100)
    held = np.zeros(1, HELD)
    held["sizes"][:, -4:], held["strides"][:, -4:] = sizes, steps
    held["sizes"][:, :-4] = 1
    held["row_nbytes"], held["run"] = row_nbytes, run
    starts = [
        sum(i * step for i, step in zip(at, steps, strict=True))
        for at in itertools.product(*map(range, sizes))
    ]
    want = [
        (start + part, min(row_nbytes - part, 24))
        for start in starts
        for part in range(0, row_nbytes, 24)
    ]
    _, offset, nbytes = due_pieces(held, 0, 1)
    assert list(zip(offset.tolist(), nbytes.tolist(), strict=True)) == want
    per_run = run * max(24 // row_nbytes, 1)
    for turn in range(period):
        _, offset, nbytes = due_pieces(held, turn, period)
        due = [piece for at, piece in enumerate(want) if at // per_run % period == turn]
        assert list(zip(offset.tolist(), nbytes.tolist(), strict=True)) == due


def hold(worker: str, box: Box, strides: tuple[int, ...], dtype: DType = INT32) -> ShardManifest:
    """Return a part of one tensor; gaps between rows are padding."""
    builder = ManifestBuilder(worker, Role.TRAINER)
    nbytes = sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True)) + dtype.itemsize
    padding = nbytes - box.numel * dtype.itemsize
    builder.add_parameter("p", nbytes=nbytes, dtype=dtype, padding_nbytes=padding)
    builder.add_shard("weight", (3, 5, 6, 10), box, "p", strides_bytes=strides)
    return builder.build()


WHOLE = Box.full((3, 5, 6, 10))
PLAIN = (1200, 240, 40, 4)
LAYOUTS = {
    "plain": (WHOLE, PLAIN),
    "gaps": (WHOLE, (1600, 320, 48, 4)),
    "gaps_between_matrices": (WHOLE, (1300, 250, 40, 4)),
    "part": (Box((0, 2, 0, 0), (3, 3, 6, 10)), (720, 240, 40, 4)),
}


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(numpy_gpu(), monkeypatch)


def use_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.transfer.replicated_digests.gpu_of", lambda _: 0)
    monkeypatch.setattr("windlass.transfer.replicated_digests.memory_on", lambda _: CudaMemory(gpu))


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("block_nbytes", [24, 200, 1 << 20])
@pytest.mark.parametrize("other", LAYOUTS)
def test_gpus_compare_the_same_bytes(
    other: str, block_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "BLOCK_NBYTES", block_nbytes)
    ranks = Ranks([hold("trainer/0", WHOLE, PLAIN), hold("trainer/1", *LAYOUTS[other])])
    for turn in range(5):
        assert ranks.compare(turn, 5) == ""
    (buffer,) = ranks.memory["trainer/1"]
    shard = next(ranks.manifests["trainer/1"].shards())
    view = shard_view(buffer, shard.box, 0, shard.strides_bytes)
    for index in [(0, 0, 0, 0), (2, 2, 5, 9), (1, 1, 3, 7)]:
        view[index] ^= 1 << 20
        assert "trainer/0 versus trainer/1" in ranks.compare()
        assert sum(bool(ranks.compare(turn, 5)) for turn in range(5)) == 1
        view[index] ^= 1 << 20


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["gpu", "host"])
def test_pieces_cut_ahead_are_used_unless_memory_moved(
    kind: str, ahead: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if kind == "gpu":
        request.getfixturevalue("_on_a_gpu")
    monkeypatch.setattr(replicated, "BLOCK_NBYTES", 200)
    ranks = Ranks([hold(f"trainer/{rank}", WHOLE, PLAIN) for rank in range(2)])
    num_cut = 0
    cut = ReplicatedDigests.cut_pieces

    def counted_cut(*args: object) -> object:
        nonlocal num_cut
        num_cut += 1
        return cut(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ReplicatedDigests, "cut_pieces", counted_cut)
    found = []
    for turn in range(7):
        found.append(ranks.taken(turn, 5))
        assert ranks.found.disagreement(found[-1]) == ""
        if ahead:
            for digests in ranks.digests.values():
                digests.cut_ahead()
                # The second call has nothing to do.
                digests.cut_ahead()
    # Each rank cuts once per turn, ahead or not.
    assert num_cut == 2 * (7 + ahead)
    for worker in ranks.digests:
        assert [f[worker].tobytes() for f in found[:2]] == [f[worker].tobytes() for f in found[5:]]
        assert found[0][worker].tobytes() != found[1][worker].tobytes()
    # This is the digest of turn 6.
    before = found[-1]["trainer/1"].tobytes()
    memory = ranks.memory["trainer/1"]
    for moves in (False, True):
        ranks.taken(5, 5)
        if ahead:
            for digests in ranks.digests.values():
                digests.cut_ahead()
        if moves:
            kept = memory[0]
            memory[0] = kept.copy()
            kept[:] = 0
        memory[0] ^= 1
        assert ranks.taken(6, 5)["trainer/1"].tobytes() != before
        memory[0] ^= 1
        assert ranks.taken(6, 5)["trainer/1"].tobytes() == before
    for digests in ranks.digests.values():
        digests.close()
        digests.close()


def test_gpu_tables_of_the_next_turn_are_kept_and_later_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = numpy_gpu()
    use_gpu(gpu, monkeypatch)
    allocated = gpu.device.allocated  # type: ignore[attr-defined]
    ranks = Ranks([hold(f"trainer/{rank}", WHOLE, PLAIN) for rank in range(2)])
    first, second = ranks.digests.values()
    assert ranks.compare(0, 1) == ""
    assert not allocated
    for turn in range(1, 5):
        assert ranks.compare(turn, 3) == ""
        assert not allocated
        first.cut_ahead()
        kept = dict(allocated)
        # The second call has nothing to do.
        first.cut_ahead()
        assert allocated.keys() == kept.keys() != set()
    monkeypatch.setattr("windlass.transfer.replicated_digests.BATCH_PIECES", 1)
    assert ranks.compare(5, 1) == ""
    assert not allocated
    assert ranks.compare(6, 3) == ""
    for digests in (first, second):
        digests.cut_ahead()
    both = len(allocated)
    first.close()
    assert len(allocated) == both // 2
    # Such kernels may read the tables of the second rank, so these are not freed.
    gpu.distrust("kernels that go on for ever")
    second.close()
    assert len(allocated) == both // 2


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("first", [PLAIN, (4, 12, 60, 360)])
def test_transposed_storage_is_compared_on_a_gpu(first: tuple[int, ...]) -> None:
    strides = {"trainer/0": first, "trainer/1": (4, 12, 60, 360)}
    ranks = Ranks([hold(worker, WHOLE, of) for worker, of in strides.items()])
    assert ranks.compare() == ""
    ranks.memory["trainer/0"][0][5] ^= 1
    assert "'weight' [0:3, 0:5, 0:6, 0:10]" in ranks.compare()


def test_ranks_with_another_dtype_are_compared_with_each_other() -> None:
    wide = WHOLE, tuple(2 * step for step in PLAIN), DType.INT64
    manifests = [
        hold("trainer/0", WHOLE, PLAIN),
        hold("trainer/1", *wide),
        hold("trainer/2", WHOLE, PLAIN),
        hold("trainer/3", *wide),
    ]
    found = find_replicated(manifests)
    assert found.num_places.tolist() == [2, 2]
    box_of = {worker: part["box"].tolist() for worker, part in found.parts.items()}
    assert box_of["trainer/0"] == box_of["trainer/2"] != box_of["trainer/1"] == box_of["trainer/3"]
    for worker, part in found.parts.items():
        assert part["row_nbytes"][0] == 900 * (4 if worker[-1] in "02" else 8)
    assert sorted(find_replicated(manifests[:3]).parts) == ["trainer/0", "trainer/2"]
    assert find_replicated(manifests[:2]).parts == {}


def test_digests_that_cannot_be_compared_are_a_disagreement() -> None:
    ranks = Ranks([hold(f"trainer/{rank}", WHOLE, PLAIN) for rank in range(6)])
    taken = {worker: digests.take(0, 1) for worker, digests in ranks.digests.items()}
    silent = {**taken, "trainer/1": taken["trainer/1"][:0]}
    assert (
        "must report 6 digests of 'weight' [0:3, 0:5, 0:6, 0:10], one for each place that holds this box, got 5"
        in ranks.found.disagreement(silent)
    )
    strange = taken["trainer/1"].copy()
    strange["row"] = 7
    assert "are not replicated" in ranks.found.disagreement({**taken, "trainer/1": strange})
    for worker in ("trainer/0", "trainer/5"):
        ranks.memory[worker][0][3] ^= 1
    assert "trainer/0, trainer/5 versus trainer/1, trainer/2, trainer/3, trainer/4" in (
        ranks.compare()
    )


def hold_twice(*, second: DType = INT32, at: tuple[int, int] = (0, 6)) -> ShardManifest:
    """Return a rank with a tensor of 6 elements in the parameter "first", and the range `at` of it in "second"."""
    builder = ManifestBuilder("trainer/0", Role.TRAINER)
    for name, dtype, (start, size) in (("first", INT32, (0, 6)), ("second", second, at)):
        builder.add_parameter(name, nbytes=size * dtype.itemsize, dtype=dtype)
        builder.add_shard("weight", (6,), Box((start,), (size,)), name)
    return builder.build()


@pytest.mark.parametrize("at", [(0, 6), (2, 3)])
def test_two_parameters_of_one_rank_are_compared_and_named(at: tuple[int, int]) -> None:
    ranks = Ranks([hold_twice(at=at)])
    assert ranks.compare() == ""
    ranks.memory["trainer/0"][1][0] ^= 1
    said = ranks.compare()
    start, size = at
    assert f"'weight' [{start}:{start + size}]" in said
    assert "trainer/0 ('first') versus trainer/0 ('second')" in said
    assert "give each parameter its own checkpoint name" in said


def test_a_parameter_that_differs_in_one_of_two_ranks_is_named() -> None:
    other = replace(hold_twice(), worker="trainer/1")
    ranks = Ranks([hold_twice(), other])
    ranks.memory["trainer/1"][0][0] ^= 1
    said = ranks.compare()
    same = "trainer/0 ('first'), trainer/0 ('second'), trainer/1 ('second')"
    assert f"{same} versus trainer/1 ('first')" in said


def test_parameters_with_the_same_memory_may_have_one_name() -> None:
    ranks = Ranks([hold_twice()])
    memory = ranks.memory["trainer/0"]
    memory[1] = memory[0]
    memory[0][0] ^= 1
    assert ranks.compare() == ""
    # A copy in other memory is compared again.
    memory[1] = memory[0].copy()
    memory[1][0] ^= 1
    assert "('second')" in ranks.compare()


def test_bytes_that_are_described_twice_are_not_compared() -> None:
    builder = ManifestBuilder("trainer/0", Role.TRAINER)
    builder.add_parameter("w", nbytes=24, dtype=INT32)
    builder.add_shard("weight", (6,), Box((0,), (6,)), "w")
    builder.add_shard("weight", (6,), Box((2,), (3,)), "w", offset_bytes=8)
    assert find_replicated([builder.build()]).parts == {}


def test_one_rank_with_a_box_in_two_dtypes_is_refused() -> None:
    both = hold_twice(second=DType.INT64, at=(2, 3))
    with pytest.raises(
        ManifestError, match=r"'weight' \[2:5\] must have one dtype.*'first'.*'second'"
    ):
        find_replicated([both])
    assert find_replicated([both], unread={"weight"}).parts == {}


def test_a_part_that_leaves_the_parameters_is_refused() -> None:
    manifest = hold("trainer/0", WHOLE, PLAIN)
    part = find_replicated([manifest, hold("trainer/1", WHOLE, PLAIN)]).parts["trainer/0"]
    assert len(decode_held(part.tobytes(), manifest)) == 1
    for column, value in (("parameter", 1), ("parameter", -1), ("offset", 4), ("offset", -4)):
        held = part.copy()
        held[column] = value
        with pytest.raises(PlanError, match="must be inside the parameter"):
            decode_held(held.tobytes(), manifest)
    with pytest.raises(ProtocolError, match="replicated boxes of trainer/0"):
        decode_held(part.tobytes()[:-1], manifest)


def test_a_sample_is_a_small_part_of_the_sent_bytes_and_never_empty() -> None:
    ranks = Ranks([hold(f"trainer/{rank}", WHOLE, PLAIN) for rank in range(2)])
    nbytes = 3600
    assert ranks.found.nbytes == nbytes
    for sent in (1 << 30, 64 * nbytes + 64, 16 * nbytes, 4 * nbytes, 0):
        period = ranks.found.period(sent)
        sizes = [
            int(due_pieces(ranks.found.parts["trainer/0"], t, period)[2].sum())
            for t in range(period)
        ]
        assert sum(sizes) == nbytes
        assert min(sizes) > 0
        assert period == 1 if sent > 64 * nbytes else period > 1


def test_digests_upload_and_free_nothing_during_the_trainers_gpu_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both would wait for that work in the driver, without a deadline; `settle` has a deadline."""
    gpu = numpy_gpu()
    use_gpu(gpu, monkeypatch)
    ranks = Ranks([hold(f"trainer/{rank}", WHOLE, PLAIN) for rank in range(2)])
    digests = ranks.digests["trainer/0"]
    hanging = True

    def settle(_: float) -> None:
        if hanging:
            raise TransferFailed("GPU 0: work of this process did not end within 60 s")

    def wait_for_ever(*_: object) -> None:
        raise AssertionError("the driver waits for the trainer's work")

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "settle", settle)
        patch.setattr(gpu.device, "upload", wait_for_ever)
        with pytest.raises(TransferFailed):
            digests.take(0, 3)
    digests.take(0, 3)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "settle", settle)
        patch.setattr(gpu.device, "upload", wait_for_ever)
        with pytest.raises(TransferFailed):
            digests.cut_ahead()
    digests.take(0, 3)
    digests.cut_ahead()
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "settle", settle)
        patch.setattr(gpu.device, "free", wait_for_ever)
        for turn in (1, 2):
            with pytest.raises(TransferFailed):
                digests.take(turn, 3)
    hanging = False
    assert ranks.compare(1, 3) == ""
    digests.close()
