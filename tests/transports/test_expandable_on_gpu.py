"""Writes between processes whose GPU memory is in torch's expandable segments. One GPU is enough for all processes.

Each process is told what to do over a pipe. Every element that is written differs from its neighbours.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from windlass.errors import RegionError
from windlass.memory.cuda.driver import Device, driver
from windlass.testing.transport_conformance import scattered
from windlass.transports.base import MemoryRegion, OneSidedTransport, WriteBatch
from windlass.transports.cuda_ipc import CudaIpcTransport
from windlass.transports.gpu_sharing import export_memory
from windlass.transports.peers import RemoteRegion
from windlass.transports.pull import PullTransport

MIB = 1 << 20
TARGET_NBYTES = 260 * MIB
SIZES = (64 << 10, 150 * MIB, 3 * MIB, 30 * MIB + 512)
"""Bytes of the writer's tensors: in chunks of 2 MiB, over several chunks of 20 MiB, and within one."""
SPREAD = np.uint64(16)
"""Factor of the places of scattered pieces, so that they are in several chunks."""
GUARD = 0xEE
ANSWER_S = 120.0
VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
TRANSPORTS: dict[str, Callable[[], OneSidedTransport]] = {
    "pull": lambda: PullTransport(gpu=0),
    "cuda_ipc": lambda: CudaIpcTransport(0),
}

pytestmark = [pytest.mark.gpu]
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def values(numel: int, seed: int) -> torch.Tensor:
    """Return bytes whose 8-byte words all differ, also from those of another seed."""
    words = torch.arange(-(-numel // 8), dtype=torch.int64, device="cuda:0")
    return (words * 2654435761 + seed * 1_000_003).view(torch.uint8)[:numel]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_expandable() -> bool:
    return any(s["is_expandable"] for s in torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]


class Engine:
    """Owner of the target. It can free the target and get another one at the same address."""

    def __init__(self, name: str) -> None:
        self.transport = TRANSPORTS[name]()
        # The target begins within a chunk.
        self.before = torch.zeros(7 * MIB, dtype=torch.uint8, device="cuda:0")
        self.target: torch.Tensor
        self.region: MemoryRegion | None = None

    def free(self) -> None:
        if self.region is not None:
            self.transport.unregister(self.region)
            self.region = None
            del self.target
        torch.cuda.empty_cache()

    def make(self) -> RemoteRegion:
        self.free()
        self.target = torch.full((TARGET_NBYTES,), GUARD, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        self.region = self.transport.register(self.target.data_ptr(), TARGET_NBYTES)
        return self.region.remote

    def make_again(self) -> tuple[bool, RemoteRegion]:
        """Return whether the new target has the address of the old one, and its region."""
        old = self.target.data_ptr()
        self.free()
        # Other memory takes the first free chunks, so the target gets other physical memory.
        beside = torch.zeros(40 * MIB, dtype=torch.uint8, device="cuda:0")
        del beside
        found = self.make()
        return self.target.data_ptr() == old, found

    def held(self) -> np.ndarray:
        torch.cuda.synchronize()
        found = self.target.cpu().numpy()
        self.target.fill_(GUARD)
        torch.cuda.synchronize()
        return found

    def facts(self) -> tuple[bool, int]:
        return is_expandable(), num_descriptors()


class Trainer:
    """Owner of tensors that it writes into the target."""

    def __init__(self, name: str) -> None:
        self.transport = TRANSPORTS[name]()
        self.tensors: list[torch.Tensor] = []
        self.regions: list[MemoryRegion] = []

    def make(self, seed: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
        """Free all tensors and the allocator's cache, and make new ones; return their addresses and sizes."""
        for region in self.regions:
            self.transport.unregister(region)
        self.tensors, self.regions = [], []
        torch.cuda.empty_cache()
        self.tensors = [values(size, seed + index) for index, size in enumerate(sizes)]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        spans = [(t.data_ptr(), t.nbytes) for t in self.tensors]
        self.regions = list(self.transport.register_all(spans))
        return spans

    def write(self, region: RemoteRegion) -> tuple[float, list[np.ndarray]]:
        """Write all tensors one after another; return the seconds and the bytes."""
        starts = np.cumsum([0, *(t.nbytes for t in self.tensors)])[:-1].astype(np.uint64)
        batch = WriteBatch(
            endpoint=region.endpoint,
            local_addresses=np.array([t.data_ptr() for t in self.tensors], np.uint64),
            remote_addresses=np.uint64(region.address) + starts,
            nbytes=np.array([t.nbytes for t in self.tensors], np.uint64),
            regions=(region,),
        )
        began = time.perf_counter()
        self.transport.write(batch, deadline_s=60)
        seconds = time.perf_counter() - began
        return seconds, [t.cpu().numpy() for t in self.tensors]

    def scatter(self, region: RemoteRegion, index: int, seed: int) -> tuple[Any, ...]:
        """Write many small pieces of one tensor to other places; return the pieces and the tensor's bytes."""
        tensor = self.tensors[index]
        local, remote, nbytes = scattered(2000, 9000, seed)
        local, remote = local * SPREAD, remote * SPREAD
        batch = WriteBatch(
            endpoint=region.endpoint,
            local_addresses=np.uint64(tensor.data_ptr()) + np.asarray(local, np.uint64),
            remote_addresses=np.uint64(region.address) + np.asarray(remote, np.uint64),
            nbytes=np.asarray(nbytes, np.uint64),
            regions=(region,),
        )
        self.transport.write(batch, deadline_s=60)
        return local, remote, nbytes, tensor.cpu().numpy()

    def keep_mapped(self, regions: list[RemoteRegion]) -> None:
        if self.transport.mapper is not None:
            self.transport.mapper.keep_mapped(regions)

    def freed(self) -> int:
        """Free all tensors; return the bytes of the GPU that this frees."""
        before, _ = torch.cuda.mem_get_info()
        self.make(0, ())
        after, _ = torch.cuda.mem_get_info()
        return after - before

    def free_nbytes(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    facts = Engine.facts


def serve(pipe: Connection, kind: type, name: str) -> None:
    """Carry out calls of methods. Answer with the result, or with the text of an error."""
    made = kind(name)
    while (message := pipe.recv()) is not None:
        method, *arguments = message
        try:
            pipe.send((True, getattr(made, method)(*arguments)))
        except Exception as error:  # noqa: BLE001
            pipe.send((False, f"{type(error).__name__}: {error}"))
    made.transport.close()


class Process:
    """Process with an `Engine` or a `Trainer`."""

    def __init__(self, kind: type, name: str, expandable: bool) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, kind, name))
        # torch reads the variable when it first allocates.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, f"expandable_segments:{expandable}")
            self.process.start()
        theirs.close()

    def ask(self, *message: Any) -> Any:
        self._pipe.send(message)
        assert self._pipe.poll(ANSWER_S)
        succeeded, found = self._pipe.recv()
        assert succeeded, found
        return found

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self.process.join(10)
        self.process.kill()
        self.process.join(30)


@pytest.fixture(scope="module", params=["trainer", "engine", "both"])
def where(request: pytest.FixtureRequest) -> str:
    """Return which processes have expandable segments."""
    found: str = request.param
    return found


@pytest.fixture(scope="module", params=list(TRANSPORTS))
def pair(request: pytest.FixtureRequest, where: str) -> Iterator[tuple[Process, Process]]:
    made = (
        Process(Engine, request.param, where != "trainer"),
        Process(Trainer, request.param, where != "engine"),
    )
    yield made
    for process in made:
        process.close()


def check_whole(engine: Process, written: list[np.ndarray]) -> None:
    held, at = engine.ask("held"), 0
    for tensor in written:
        assert (held[at : at + len(tensor)] == tensor).all()
        at += len(tensor)
    assert (held[at:] == GUARD).all()


def test_every_byte_arrives_after_segments_were_freed_and_grown(
    pair: tuple[Process, Process], where: str
) -> None:
    engine, trainer = pair
    region = engine.ask("make")
    first = spans = trainer.ask("make", 1, SIZES)
    told = {name: process.ask("facts")[0] for name, process in (("engine", engine), ("trainer", trainer))}  # fmt: skip
    assert told == {"engine": where != "trainer", "trainer": where != "engine"}
    seconds, written = trainer.ask("write", region)
    check_whole(engine, written)
    counts = [process.ask("facts")[1] for process in pair]
    # Fewer and smaller tensors, then larger ones: the allocator unmaps chunks and maps others at the same addresses.
    for seed, sizes in ((10, SIZES[:2]), (20, (*SIZES, 40 * MIB)), (30, SIZES)):
        spans = trainer.ask("make", seed, sizes)
        seconds, written = trainer.ask("write", region)
        check_whole(engine, written)
        print(
            f"{where}: {sum(n for _, n in spans) >> 20} MiB in {seconds * 1e3:.2f} ms", flush=True
        )
    assert {address for address, _ in spans} & {address for address, _ in first}
    for seed in range(2):
        local, remote, nbytes, own = trainer.ask("scatter", region, 1, seed)
        image = np.full(TARGET_NBYTES, GUARD, np.uint8)
        for a, b, size in zip(local.tolist(), remote.tolist(), nbytes.tolist(), strict=True):
            image[b : b + size] = own[a : a + size]
        assert (engine.ask("held") == image).all()
    # Each write sends 13 descriptors at least.
    now = [process.ask("facts")[1] for process in pair]
    assert all(abs(a - b) < 8 for a, b in zip(now, counts, strict=True)), (counts, now)


def test_another_target_at_the_same_address_is_written(pair: tuple[Process, Process]) -> None:
    """The writer still maps the chunks of the old target."""
    engine, trainer = pair
    region = engine.ask("make")
    trainer.ask("make", 1, SIZES)
    check_whole(engine, trainer.ask("write", region)[1])
    is_same, again = engine.ask("make_again")
    print(f"same address: {is_same}", flush=True)
    trainer.ask("make", 2, SIZES)
    check_whole(engine, trainer.ask("write", again)[1])
    trainer.ask("keep_mapped", [again])
    check_whole(engine, trainer.ask("write", again)[1])


def test_freed_memory_of_the_trainer_is_free_after_a_write(pair: tuple[Process, Process]) -> None:
    """The driver frees chunks only when no process maps them."""
    engine, trainer = pair
    region = engine.ask("make")
    trainer.ask("make", 1, SIZES)
    trainer.ask("write", region)
    assert trainer.ask("freed") >= sum(SIZES) - 4 * MIB


def test_a_freed_target_is_free_after_the_peer_has_unmapped_it(
    pair: tuple[Process, Process],
) -> None:
    engine, trainer = pair
    region = engine.ask("make")
    trainer.ask("make", 1, SIZES)
    trainer.ask("write", region)
    before = trainer.ask("free_nbytes")
    _, again = engine.ask("make_again")
    trainer.ask("keep_mapped", [again])
    assert before - trainer.ask("free_nbytes") <= 64 * MIB


class Unshareable:
    """GPU memory from cuMemCreate without handles for other processes."""

    def __init__(self) -> None:
        cuda, self.device = driver(), Device(0)
        prop = cuda.CUmemAllocationProp()
        prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = 0
        self.address = self.device.reserve(4 * MIB)
        chunk = self.device.call("cuMemCreate", 4 * MIB, prop, 0)
        self.device.call("cuMemMap", self.address, 4 * MIB, 0, chunk, 0)
        self.device.allow_access(self.address, 4 * MIB)
        self.device.call("cuMemRelease", chunk)


def test_memory_without_a_handle_for_other_processes_is_refused() -> None:
    memory = Unshareable()
    transport = CudaIpcTransport(0)
    with pytest.raises(RegionError, match="cannot be mapped by another process: it must come from"):
        transport.register(memory.address, MIB)
    transport.close()
    one = np.array([memory.address + 5], np.uint64)
    with pytest.raises(RegionError, match="handle types 0x0; set PYTORCH_CUDA_ALLOC_CONF"):
        export_memory(memory.device, one, one * 0 + np.uint64(9))
    memory.device.unmap_chunks(memory.address, 4 * MIB, 4 * MIB)
