"""One rank of `test_relay.py`: real processes that pass real bytes on, every element distinct."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import torch

import windlass
from windlass.config import PauseMode
from windlass.control.agents import EngineAgent
from windlass.control.client import AgentChannel
from windlass.control.messages import PROTOCOL_VERSION, Hello
from windlass.execution.receiver import Receiver
from windlass.execution.sender import ParameterMemory, Sender
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.transports.base import (
    MemoryRegion,
    OneSidedTransport,
    PeerEndpoint,
    WireReport,
    WriteBatch,
)
from windlass.transports.configs import parse_transport
from windlass.transports.registry import create_transport

SHAPES = {"embed": (296, 24), "down": (24, 400), "norm": (24,), "gate": (400, 24)}
ROW_PARALLEL = {"down"}
"""Cut along dim 1 in engines of several ranks: strided on both sides."""
NBYTES = sum(int(np.prod(shape)) * 4 for shape in SHAPES.values())


def truth(version: int) -> dict[str, npt.NDArray[np.int32]]:
    """The whole model: no two elements of any two versions are equal."""
    found, first = {}, 1 + version * 1_000_000
    for name, shape in SHAPES.items():
        numel = int(np.prod(shape))
        found[name] = np.arange(first, first + numel, dtype=np.int32).reshape(shape)
        first += numel
    return found


def shard(
    worker: str, role: Role, index: int, parts: int
) -> tuple[ShardManifest, dict[str, tuple[slice, ...]]]:
    """A rank's manifest, and its part of every tensor."""
    builder = ManifestBuilder(worker, role)
    places: dict[str, tuple[slice, ...]] = {}
    for name, shape in SHAPES.items():
        dim = 1 if role is Role.ENGINE and name in ROW_PARALLEL else 0
        chunk = -(-shape[dim] // parts)
        start, stop = min(index * chunk, shape[dim]), min((index + 1) * chunk, shape[dim])
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


class FaultyWrites:
    """A transport that counts what it writes, and misbehaves in one write.

    Args:
        inner: does the work.
        fault: `kill:N`, `stop:N` (this process, before write N) or `spoil:N` (write N brings
            wrong bytes), N from 1; empty for none.
    """

    def __init__(self, inner: OneSidedTransport, fault: str) -> None:
        self.inner = inner
        self.nbytes = 0
        self._kind, _, at = fault.partition(":")
        self._left = int(at or 0)
        self._lock = threading.Lock()

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        with self._lock:
            self.nbytes += batch.total_nbytes
            self._left -= 1
            now = self._left == 0
        if now and self._kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self._kind == "kill" else signal.SIGSTOP)
            threading.Event().wait()  # other threads may take the signal: this one goes no further
        if now and self._kind == "spoil":
            # From where it reads in truth, but shifted: the first piece brings other elements.
            nbytes = batch.nbytes.copy()
            nbytes[0] -= 4
            batch = WriteBatch(
                endpoint=batch.endpoint,
                local_addresses=batch.local_addresses + np.uint64(4),
                remote_addresses=batch.remote_addresses,
                nbytes=np.minimum(nbytes, batch.nbytes) if len(nbytes) == 1 else nbytes,
                regions=batch.regions,
            )
        self.inner.write(batch, deadline_s=deadline_s)

    def report(self) -> WireReport:
        return self.inner.report()

    def endpoint(self) -> PeerEndpoint:
        return self.inner.endpoint()

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        return self.inner.register(address, nbytes)

    def unregister(self, region: MemoryRegion) -> None:
        self.inner.unregister(region)

    def close(self) -> None:
        self.inner.close()


def run_engine(
    pipe: Connection,
    name: str,
    index: int,
    parts: int,
    url: str,
    token: str,
    transport_name: str,
    fault: str,
) -> None:
    """Serve until the pipe closes; each message is answered with what memory holds."""
    torch.set_num_threads(1)
    manifest, places = shard(f"{name}/{index}", Role.ENGINE, index, parts)
    memory = {n: np.full([s.stop - s.start for s in places[n]], -1, np.int32) for n in SHAPES}
    transport = FaultyWrites(create_transport(parse_transport(transport_name)), fault)
    regions = [transport.register(a.ctypes.data, a.nbytes) for a in memory.values()]
    addresses = [a.ctypes.data for a in memory.values()]
    parameters = [ParameterMemory(a.ctypes.data, a.nbytes) for a in memory.values()]
    receiver = Receiver(transport, manifest, addresses, regions)
    sender = Sender(transport, manifest, lambda: parameters, registered=regions)
    agent = EngineAgent(receiver, Hooks(), sender)
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
            can_send=True,
        )

    channel = AgentChannel(
        url, token, hello, agent, on_disconnect=agent.on_disconnect, on_command=agent.on_command
    )
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
        pipe.send((agent.served_version, held, agent.tainted, transport.nbytes))
    channel.close()
    agent.close()


def run_trainer(
    pipe: Connection,
    index: int,
    parts: int,
    url: str,
    token: str,
    transport_name: str,
    arena_nbytes: int,
    fault: str,
) -> None:
    """Publish every version that comes; answer with the outcome and the bytes written for it."""
    torch.set_num_threads(1)
    manifest, places = shard(f"trainer/{index}", Role.TRAINER, index, parts)
    memory = {n: truth(0)[n][places[n]].copy() for n in SHAPES}
    transport = FaultyWrites(create_transport(parse_transport(transport_name)), fault)
    client = windlass.TrainerClient(
        manifest=manifest,
        parameters=lambda: [ParameterMemory(a.ctypes.data, a.nbytes) for a in memory.values()],
        transport=transport,
        controller=url,
        token=token,
        rank=index,
        world_size=parts,
        arena_nbytes=arena_nbytes,
    )
    pipe.send("ready")
    with client:
        while (version := pipe.recv()) is not None:
            for n, whole in truth(version).items():
                memory[n][...] = whole[places[n]]
            before = transport.nbytes
            try:
                report = client.publish(version, deadline_s=60)
                answer = "published", sorted(report.left_out)
            except windlass.WindlassError as error:
                answer = type(error).__name__, [str(error)]
            pipe.send((*answer, transport.nbytes - before))
