"""A trainer or engine rank in its own process, without a model; every element is distinct.

One word, `fault`, selects its fault. Faults in commands of an engine: `die` (inside `Receive`),
`skip` (one `Receive`), `damage:FOLDER` (files before `Verify`). Faults in writes of either role,
with N from 1: `kill:N` and `stop:N` (this process, before write N), `tear:N` (it is killed after
half of write N), `spoil:N` (write N brings wrong bytes).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import windlass
from windlass.control.engine_agent import EngineAgent
from windlass.control.group_messages import Receive
from windlass.control.messages import Abort, Command, Result, Verify
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box, chunk
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.testing.resting_engine import RestingEngine
from windlass.testing.wrapped_transport import WrappedTransport
from windlass.transfer.base import ParameterMemory
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.registry import create_transport, parse_transport

PER_RUN = 20
ABORT_S = 60.0
"""Seconds until an engine on a busy machine carries out an `Abort`, for which the controller does not wait."""
ROW_PARALLEL = {"down"}
"""Tensors that engines cut along dim 1: strided on both sides."""


def shapes(scale: int = 1) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model with `scale` times as many rows, or columns if row-parallel."""
    return {
        "embed": (37 * scale, 24),
        "down": (24, 50 * scale),
        "norm": (24,),
        "gate": (50 * scale, 24),
    }


def model_nbytes(scale: int) -> int:
    return sum(int(np.prod(shape)) * 4 for shape in shapes(scale).values())


def truth(version: int, scale: int = 1) -> dict[str, npt.NDArray[np.int32]]:
    """Return the whole model. No two elements of any two versions are equal."""
    found, first = {}, 1 + version * 1_000_000
    for name, shape in shapes(scale).items():
        numel = int(np.prod(shape))
        found[name] = np.arange(first, first + numel, dtype=np.int32).reshape(shape)
        first += numel
    return found


@dataclass
class Part:
    """The shards of one rank."""

    manifest: ShardManifest
    places: dict[str, tuple[slice, ...]]
    scale: int

    def empty(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        return {
            name: torch.full(
                [s.stop - s.start for s in place], -1, dtype=torch.int32, device=device
            )
            for name, place in self.places.items()
        }

    def of(self, version: int) -> dict[str, npt.NDArray[np.int32]]:
        return {
            name: whole[self.places[name]] for name, whole in truth(version, self.scale).items()
        }


def part_of(worker: str, role: Role, index: int, parts: int, scale: int = 1) -> Part:
    """Return rank `index` of `parts`: trainers are cut as FSDP2 does, engines have whole norms."""
    builder = ManifestBuilder(worker, role)
    places: dict[str, tuple[slice, ...]] = {}
    for name, shape in shapes(scale).items():
        dim = 1 if role is Role.ENGINE and name in ROW_PARALLEL else 0
        whole = name == "norm" and role is Role.ENGINE
        offsets, sizes = [0] * len(shape), list(shape)
        if not whole:
            offsets[dim], sizes[dim] = chunk(shape[dim], parts, index)
        box = Box(tuple(offsets), tuple(sizes))
        builder.add_parameter(name, nbytes=box.numel * 4, dtype=DType.INT32)
        builder.add_shard(name, shape, box, name)
        places[name] = tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))
    return Part(builder.build(), places, scale)


class FaultyCommands:
    """Handler that carries out commands and misbehaves once. `has_aborted` is set when an `Abort` is carried out."""

    def __init__(self, agent: EngineAgent, fault: str, has_aborted: threading.Event) -> None:
        self.agent, self.fault, self.has_aborted = agent, fault, has_aborted

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        if isinstance(command, Receive):
            if self.fault == "die":
                # The other ranks already wait for this rank's part of the broadcast tree.
                threading.Timer(0.3, os._exit, (9,)).start()
                threading.Event().wait(30)
            if self.fault == "skip":
                self.fault = ""
                raise windlass.WindlassError("bucket 0 is told to fail")
        if isinstance(command, Verify) and self.fault.startswith("damage:"):
            damage(Path(self.fault.removeprefix("damage:")), command.version)
        result = self.agent.handle(command, epoch=epoch, round_number=round_number)
        if isinstance(command, Abort):
            self.has_aborted.set()
        return result


def damage(folder: Path, version: int) -> None:
    """Flip the last byte of every file of a version, and cut one file short."""
    files = sorted((folder / f"v{version:08d}").glob("*.safetensors"))
    for path in files:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    files[-1].write_bytes(files[-1].read_bytes()[:-7])


class FaultyWrites(WrappedTransport):
    """Transport that counts the bytes it writes, and misbehaves in one write."""

    def __init__(self, inner: OneSidedTransport, fault: str) -> None:
        super().__init__(inner)
        self.nbytes = 0
        self._kind, _, at = fault.partition(":")
        self._left = int(at) if self._kind in ("kill", "stop", "tear", "spoil") else 0
        self._lock = threading.Lock()

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        with self._lock:
            self.nbytes += int(batch.nbytes.sum())
            self._left -= 1
            now = self._left == 0
        if now and self._kind == "tear":
            half = WriteBatch(
                endpoint=batch.endpoint,
                local_addresses=batch.local_addresses,
                remote_addresses=batch.remote_addresses,
                nbytes=batch.nbytes // np.uint64(8) * np.uint64(4),
                regions=batch.regions,
            )
            self.inner.write(half, deadline_s=deadline_s)
        if now and self._kind in ("kill", "stop", "tear"):
            os.kill(os.getpid(), signal.SIGSTOP if self._kind == "stop" else signal.SIGKILL)
            # Another thread may get the signal, but this thread must not continue.
            threading.Event().wait()
        if now and self._kind == "spoil":
            # Shift the source, so that the first piece contains other elements.
            nbytes = batch.nbytes.copy()
            nbytes[0] -= 4
            batch = WriteBatch(
                endpoint=batch.endpoint,
                local_addresses=batch.local_addresses + np.uint64(4),
                remote_addresses=batch.remote_addresses,
                nbytes=np.minimum(nbytes, batch.nbytes) if len(nbytes) == 1 else nbytes,
                regions=batch.regions,
            )
        super().write(batch, deadline_s=deadline_s)


@dataclass
class RankSettings:
    """Settings that a rank gets at its start."""

    url: str
    token: str
    index: int
    parts: int
    group: str = "trainer"
    scale: int = 1
    transport: str = "cma"
    device: str = "cpu"
    expandable: bool = False
    """Whether torch's allocator uses expandable segments."""
    can_send: bool = False
    arena_nbytes: int = 0
    fault: str = ""
    run: int = 0
    """Number of the run. Runs train different weights: version v of run r is `truth(v + PER_RUN * r)`."""
    job: str = "one start"


def made_transport(settings: RankSettings, like: torch.Tensor) -> OneSidedTransport:
    """Return a transport that counts and spoils writes; without both if kernels store the bytes."""
    transport = create_transport(
        parse_transport(settings.transport), memory_at=like.data_ptr() if like.is_cuda else 0
    )
    stores = transport.traits.strided_stores
    return transport if stores else FaultyWrites(transport, settings.fault)


def empty(part: Part, settings: RankSettings) -> dict[str, torch.Tensor]:
    """Return the rank's empty tensors on its device, in expandable segments if the settings say so."""
    if not settings.expandable:
        return part.empty(settings.device)
    # torch reads the variable when it first allocates.
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    memory = part.empty(settings.device)
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    assert all(segment["is_expandable"] for segment in segments)
    return memory


def written(transport: OneSidedTransport) -> int:
    """Return the bytes written; 0 if they are not counted."""
    return transport.nbytes if isinstance(transport, FaultyWrites) else 0


def run_engine(pipe: Connection, settings: RankSettings) -> None:
    """Serve until the pipe closes.

    Each message is answered with: served version, version of all memory, whether the agent reports
    mixed weights, bytes written to other engines. "clock" is answered with the time of day, and "aborted" with whether
    an `Abort` was carried out within `ABORT_S`.
    """
    torch.set_num_threads(1)
    group, fault = settings.group, settings.fault
    part = part_of(
        f"{group}/{settings.index}", Role.ENGINE, settings.index, settings.parts, settings.scale
    )
    memory, has_aborted = empty(part, settings), threading.Event()
    transport = made_transport(settings, next(iter(memory.values())))
    client = EngineClient(
        EngineWeights(
            manifest=part.manifest,
            addresses=[t.data_ptr() for t in memory.values()],
            regions=[transport.register(t.data_ptr(), t.nbytes) for t in memory.values()],
        ),
        transport=transport,
        hooks=RestingEngine(),
        controller=settings.url,
        token=settings.token,
        world_size=settings.parts,
        can_send=settings.can_send,
        intercept=lambda agent: FaultyCommands(agent, fault, has_aborted),
    )
    with client:
        pipe.send("ready")
        while (message := pipe.recv()) is not None:
            if message == "clock":
                pipe.send(time.time())
                continue
            if message == "aborted":
                pipe.send(has_aborted.wait(ABORT_S))
                continue
            found = {name: tensor.cpu().numpy() for name, tensor in memory.items()}
            held, version = "mixed", (int(found["embed"].flat[0]) - 1) // 1_000_000
            whole = part.of(version)
            if all(np.array_equal(found[name], whole[name]) for name in found):
                held = str(version)
            if all((m == -1).all() for m in found.values()):
                held = "untouched"
            agent = client.agent
            pipe.send((agent.served_version, held, agent.mixed_weights, written(transport)))


def run_trainer(pipe: Connection, settings: RankSettings) -> None:
    """Publish every version from the pipe; answer with outcome, details and the bytes written for it."""
    torch.set_num_threads(1)
    os.environ["WINDLASS_JOB"] = settings.job
    index, parts = settings.index, settings.parts
    part = part_of(f"trainer/{index}", Role.TRAINER, index, parts, settings.scale)
    memory = empty(part, settings)
    transport = made_transport(settings, next(iter(memory.values())))
    client = windlass.TrainerClient(
        windlass.TrainerWeights(
            manifest=part.manifest,
            parameters=lambda: [ParameterMemory(t.data_ptr(), t.nbytes) for t in memory.values()],
        ),
        transport=transport,
        controller=settings.url,
        token=settings.token,
        world_size=parts,
        arena_nbytes=settings.arena_nbytes,
    )
    pipe.send("ready")
    with client:
        while (version := pipe.recv()) is not None:
            for name, values in part.of(version + PER_RUN * settings.run).items():
                memory[name].copy_(torch.from_numpy(values))
            before = written(transport)
            try:
                report = client.publish(version, deadline_s=60).result()
                answer = "published", sorted(report.left_out)
            except windlass.WindlassError as error:
                answer = type(error).__name__, [str(error)]
            pipe.send((*answer, written(transport) - before))


def run_bystander(pipe: Connection, nbytes: int) -> None:
    """Register memory that peers might write, without a part in a fleet; report whether it is untouched."""
    memory = np.full(nbytes, 255, np.uint8)
    transport = create_transport(parse_transport("cma"))
    transport.register(memory.ctypes.data, nbytes)
    pipe.send((os.getpid(), memory.ctypes.data))
    while pipe.recv() is not None:
        pipe.send(bool((memory == 255).all()))
