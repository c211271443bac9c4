"""A weight too large for the engine's dtype ends the update and is named, over any transport."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from memory_transport import GpuMemoryTransport, MemoryFabric, MemoryTransport
from numpy_gpu import KernelTransport, numpy_gpu
from safetensors.torch import save_file

from windlass.backends.push_halves import PushReceiver
from windlass.config import UpdateMode
from windlass.errors import TransferFailed
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory import copy_sources as sources
from windlass.memory.cuda import pieces as blocks
from windlass.memory.cuda.driver import MemoryKind
from windlass.planning.planner import plan_transfer
from windlass.transfer.base import ParameterMemory
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transfer.source import SourceMemory
from windlass.transports.processes import own_endpoint

NAMES = ("embed", "router", "head")
SHAPE = (48, 40)
WRONG = r"tensor 'router': a finite float32 is too large for float16"


def manifest(worker: str, role: Role, dtype: DType) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    for name in NAMES:
        builder.add_parameter(name, nbytes=SHAPE[0] * SHAPE[1] * dtype.itemsize, dtype=dtype)
        builder.add_shard(name, SHAPE, Box((0, 0), SHAPE), name)
    return builder.build()


TRAINER = manifest("trainer/0", Role.TRAINER, DType.FLOAT32)
ENGINE = manifest("engine/0", Role.ENGINE, DType.FLOAT16)
PLAN = plan_transfer([TRAINER], [ENGINE])


class Fleet:
    """Trainer rank in float32 and engine rank in float16, connected in a given `way`."""

    def __init__(self, way: str, arena_nbytes: int = 0) -> None:
        size = SHAPE[0] * SHAPE[1]
        self.trained = [np.arange(i * size, (i + 1) * size, dtype="<f4") for i in range(3)]
        self.served = [np.zeros(size, "<f2") for _ in range(3)]
        kind = MemoryTransport if way == "host" else GpuMemoryTransport
        fabric = MemoryFabric()
        theirs = KernelTransport() if way == "cuda_ipc" else kind(fabric)
        regions = [theirs.register(b.ctypes.data, b.nbytes) for b in self.served]
        addresses = [int(b.ctypes.data) for b in self.served]
        receiver = Receiver(theirs, ENGINE, addresses, regions)
        binding = receiver.connect(
            PLAN.parts(sending=False, all_names=True)["engine/0"], UpdateMode.IN_PLACE
        )
        memory = [ParameterMemory(int(b.ctypes.data), b.nbytes) for b in self.trained]
        if way == "cuda_ipc":
            binding = msgspec.structs.replace(binding, endpoint=own_endpoint("cuda_ipc"))
        ours = KernelTransport() if way == "cuda_ipc" else kind(fabric)
        self.sender = Sender(ours, TRAINER, lambda: memory, arena_nbytes=arena_nbytes)
        self.sender.connect(PLAN.parts(sending=True, all_names=True)["trainer/0"], [binding])
        self.receiver = receiver

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def update(self, version: int) -> str:
        """Write a version and return the link's error, or an empty string."""
        self.sender.prepare(version)
        (link,) = self.sender.write(version, ["engine/0"], 20.0).links
        return link.error


@pytest.fixture(autouse=True)
def _no_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.memory.cuda.gpu.shared_gpu", lambda _: numpy_gpu())
    monkeypatch.setattr(sources, "memory_kind", lambda _: MemoryKind.DEVICE)
    monkeypatch.setattr(sources, "gpu_of", lambda _: 0)
    monkeypatch.setattr(blocks, "MAX_PIECE_NBYTES", 512)


@pytest.mark.parametrize(("way", "arena_nbytes"), [("host", 0), ("host", 2048), ("network", 0), ("network", 2048), ("cuda_ipc", 0)])  # fmt: skip
def test_an_update_with_a_too_large_number_fails_and_the_next_one_succeeds(
    way: str, arena_nbytes: int
) -> None:
    fleet = Fleet(way, arena_nbytes)
    assert fleet.update(0) == ""
    assert all(
        (s == t.astype("<f2")).all() for s, t in zip(fleet.served, fleet.trained, strict=True)
    )
    # Infinity and NaN stay the same and do not count as overflow.
    fleet.trained[0][3], fleet.trained[1][7] = np.inf, np.nan
    assert fleet.update(1) == ""
    fleet.trained[1][1234] = -70000
    # `cuda_ipc` casts during the write.
    if way == "cuda_ipc":
        assert WRONG in fleet.update(2)
    else:
        with pytest.raises(TransferFailed, match=WRONG):
            fleet.update(2)
    fleet.trained[1][1234] = 1
    assert fleet.update(3) == ""
    fleet.close()


def test_backends_that_cast_at_the_engine_find_overflow_at_the_trainer() -> None:
    fleet = Fleet("host")
    memory = [ParameterMemory(int(b.ctypes.data), b.nbytes) for b in fleet.trained]
    source = SourceMemory(TRAINER, lambda: memory)
    part = PLAN.parts(sending=True, all_names=True)["trainer/0"]
    source.bind(part, [fleet.sender.links.peers["engine/0"].binding])
    source.locate()
    source.hash_links()
    fleet.trained[1][1919] = 65520
    with pytest.raises(TransferFailed, match=WRONG):
        source.hash_links()
    fleet.close()


def test_files_with_a_too_large_number_are_refused(tmp_path: Path) -> None:
    served = [np.zeros(SHAPE, "<f2") for _ in NAMES]
    receiver = PushReceiver(ENGINE, [int(b.ctypes.data) for b in served], "127.0.0.1")
    receiver.begin()
    held = {name: torch.ones(SHAPE) for name in NAMES}
    held["router"][5, 5] = 1e30
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(TransferFailed, match=WRONG):
        receiver.read_files(str(tmp_path))
    receiver.close()
