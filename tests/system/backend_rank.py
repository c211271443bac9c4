"""One rank of `test_backends.py`: a trainer or an engine without a model, every element distinct."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import windlass
from windlass.config import PauseMode
from windlass.control.agents import EngineAgent
from windlass.control.client import AgentChannel
from windlass.control.messages import PROTOCOL_VERSION, Command, Hello, Receive, Result, Verify
from windlass.execution.receiver import Receiver
from windlass.execution.sender import ParameterMemory
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.transports.configs import CmaConfig
from windlass.transports.registry import create_transport

SHAPES = {"embed": (37, 24), "down": (24, 50), "norm": (24,), "gate": (50, 24)}
ROW_PARALLEL = {"down"}
"""Cut along dim 1 in the engines: strided on both sides."""


def truth(version: int) -> dict[str, npt.NDArray[np.int32]]:
    """The whole model: no two elements of any two versions are equal."""
    found, first = {}, 1 + version * 1_000_000
    for name, shape in SHAPES.items():
        numel = int(np.prod(shape))
        found[name] = np.arange(first, first + numel, dtype=np.int32).reshape(shape)
        first += numel
    return found


def cut(size: int, index: int, parts: int) -> tuple[int, int]:
    """As FSDP2 cuts: ceil-sized chunks, the last ones shorter or empty."""
    chunk = -(-size // parts)
    return min(index * chunk, size), min((index + 1) * chunk, size)


def shard(
    worker: str, role: Role, index: int, parts: int
) -> tuple[ShardManifest, dict[str, tuple[slice, ...]]]:
    """A rank's manifest, and its part of every tensor."""
    builder = ManifestBuilder(worker, role)
    places: dict[str, tuple[slice, ...]] = {}
    for name, shape in SHAPES.items():
        dim = 1 if role is Role.ENGINE and name in ROW_PARALLEL else 0
        start, stop = (0, shape[0]) if name == "norm" and role is Role.ENGINE else cut(shape[dim], index, parts)  # fmt: skip
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, stop - start
        box = Box(tuple(offsets), tuple(sizes))
        builder.add_parameter(name, nbytes=box.numel * 4, dtype=DType.INT32)
        builder.add_shard(name, shape, box, name)
        places[name] = tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))
    return builder.build(), places


class Hooks:
    """An engine that is always at rest."""

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        pass

    def resume(self) -> None:
        pass

    def finalise(self) -> None:
        pass

    def set_version(self, version: int) -> None:
        pass


class Scripted:
    """Carries out commands, and misbehaves once as `fault` says."""

    def __init__(self, agent: EngineAgent, fault: str) -> None:
        self.agent, self.fault = agent, fault

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        if isinstance(command, Receive):
            if self.fault == "die":
                # The others are already waiting for this rank's part of the broadcast tree.
                threading.Timer(0.3, os._exit, (9,)).start()
                threading.Event().wait(30)
            if self.fault == "skip":
                self.fault = ""
                raise windlass.WindlassError("bucket 0 is told to fail")
        if isinstance(command, Verify) and self.fault.startswith("damage:"):
            damage(Path(self.fault.removeprefix("damage:")), command.version)
        return self.agent.handle(command, epoch=epoch, round_number=round_number)


def damage(folder: Path, version: int) -> None:
    """Flip the last byte of every file of a version, and cut one of them short."""
    files = sorted((folder / f"v{version:08d}").glob("*.safetensors"))
    for path in files:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    files[-1].write_bytes(files[-1].read_bytes()[:-7])


def run_engine(
    pipe: Connection, name: str, index: int, parts: int, url: str, token: str, fault: str
) -> None:
    """Serve until the pipe closes; each message is answered with what memory holds."""
    torch.set_num_threads(1)
    manifest, places = shard(f"{name}/{index}", Role.ENGINE, index, parts)
    memory = {n: np.full([s.stop - s.start for s in places[n]], -1, np.int32) for n in SHAPES}
    transport = create_transport(CmaConfig())
    regions = [transport.register(a.ctypes.data, a.nbytes) for a in memory.values()]
    addresses = [a.ctypes.data for a in memory.values()]
    agent = EngineAgent(Receiver(transport, manifest, addresses, regions), Hooks())
    encoded, wire, incarnation = manifest.encode(), transport.report(), os.urandom(8).hex()

    def hello() -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            worker=manifest.worker,
            incarnation=incarnation,
            role=Role.ENGINE,
            group=name,
            rank=index,
            world_size=parts,
            manifest=encoded,
            wire=wire,
            served_version=agent.served_version,
            tainted=agent.tainted,
        )

    channel = AgentChannel(url, token, hello, Scripted(agent, fault))
    channel.connect(60)
    pipe.send("ready")
    while pipe.recv() is not None:
        held = "mixed"
        for version in range(8):
            whole = truth(version)
            if all(np.array_equal(memory[n], whole[n][places[n]]) for n in SHAPES):
                held = str(version)
        if all((m == -1).all() for m in memory.values()):
            held = "untouched"
        pipe.send((agent.served_version, held, agent.tainted))
    channel.close()


def run_trainer(pipe: Connection, index: int, parts: int, url: str, token: str) -> None:
    """Publish every version that comes; answer with the outcome."""
    torch.set_num_threads(1)
    manifest, places = shard(f"trainer/{index}", Role.TRAINER, index, parts)
    memory = {n: truth(0)[n][places[n]].copy() for n in SHAPES}
    client = windlass.TrainerClient(
        manifest=manifest,
        parameters=lambda: [ParameterMemory(a.ctypes.data, a.nbytes) for a in memory.values()],
        transport=create_transport(CmaConfig()),
        controller=url,
        token=token,
        rank=index,
        world_size=parts,
    )
    pipe.send("ready")
    with client:
        while (version := pipe.recv()) is not None:
            for n, whole in truth(version).items():
                memory[n][...] = whole[places[n]]
            try:
                report = client.publish(version, deadline_s=60)
                pipe.send(("published", sorted(report.left_out)))
            except windlass.WindlassError as error:
                pipe.send((type(error).__name__, str(error)))
