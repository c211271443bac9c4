"""The conformance suite for NIXL on GPU memory. It needs two GPUs of one host and NIXL."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from windlass.errors import (
    PeerUnreachable,
    TransferOutcomeUnknown,
    TransportUnavailable,
)
from windlass.layout.columns import UInt8Array
from windlass.memory.cuda.driver import Device
from windlass.testing.peer_process import digest_of
from windlass.testing.transport_conformance import (
    GUARD,
    NBYTES,
    Rig,
    TransportConformance,
    scattered,
)
from windlass.transports.base import MemoryRegion, OneSidedTransport
from windlass.transports.nixl.transport import NixlConfig
from windlass.transports.peers import RemoteRegion
from windlass.transports.registry import create_transport

HERE, THERE = NixlConfig(gpu=0), NixlConfig(gpu=1)
ANSWER_S = 60.0

pytestmark = [pytest.mark.gpu]
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
try:
    create_transport(HERE).close()
except TransportUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


class GpuArena:
    """Registered GPU memory. `bytes` is a host copy of the last `upload`."""

    def __init__(self, transport: OneSidedTransport, ordinal: int) -> None:
        self.device, self.transport, self.nbytes = Device(ordinal), transport, NBYTES
        self.address = self.device.allocate(NBYTES)
        self.bytes = np.zeros(NBYTES, np.uint8)
        self.region: MemoryRegion = transport.register(self.address, NBYTES)

    def upload(self) -> None:
        self.device.upload(self.address, self.bytes.data)
        self.device.synchronize()

    def download(self) -> np.ndarray:
        self.device.synchronize()
        return np.frombuffer(self.device.download(self.address, NBYTES), np.uint8)

    def close(self) -> None:
        if self.nbytes:
            self.transport.unregister(self.region)
            self.device.free(self.address)
            self.nbytes = 0


def serve(pipe: Connection) -> None:
    transport = create_transport(THERE)
    arena = GpuArena(transport, 1)
    arena.bytes[:] = GUARD
    arena.upload()
    region: MemoryRegion = arena.region

    def watch(offset: int) -> None:
        other = Device(1)
        first = other.download(arena.address + offset, 1)
        while other.download(arena.address + offset, 1) == first:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    pipe.send(region.remote)
    while (command := pipe.recv()) is not None:
        kind, value = command
        answer: Any = None
        if kind == "image":
            answer = arena.download().tobytes()
        elif kind == "fill":
            arena.bytes[:] = value
            arena.upload()
        elif kind == "unregister":
            transport.unregister(region)
        elif kind == "register":
            region = transport.register(arena.address, NBYTES)
            answer = region.remote
        elif kind == "fence":
            transport.fence(deadline_s=ANSWER_S / 2)
        elif kind == "die on write":
            threading.Thread(target=watch, args=(value,), daemon=True).start()
        pipe.send(answer)
    transport.close()


class GpuPeer:
    """`Peer` on the second GPU."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,))
        self.process.start()
        self.region: RemoteRegion = self.answer()

    def answer(self) -> Any:
        assert self.pipe.poll(ANSWER_S), "the peer does not answer"
        return self.pipe.recv()

    def ask(self, kind: str, value: int = 0) -> Any:
        self.pipe.send((kind, value))
        return self.answer()

    def read(self, offset: int, nbytes: int) -> bytes:
        image: bytes = self.ask("image")
        return image[offset : offset + nbytes]

    def digest(self) -> str:
        return digest_of(self.ask("image"))

    def fill(self, value: int) -> None:
        self.ask("fill", value)

    def unregister(self) -> None:
        self.ask("unregister")

    def register(self) -> None:
        self.region = self.ask("register")

    def fence(self) -> None:
        self.ask("fence")

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(ANSWER_S)
        self.pipe.close()

    def close(self) -> None:
        if self.process.is_alive():
            self.send_signal(signal.SIGCONT)
            # The process may die at this moment.
            with suppress(BrokenPipeError):
                self.pipe.send(None)
            self.process.join(ANSWER_S)
        self.kill()


class GpuRig(Rig):
    """Memory of the first GPU, freed with the process."""

    def place(self, content: UInt8Array) -> int:
        device = Device(0)
        address = device.allocate(content.nbytes)
        device.upload(address, content.tobytes())
        device.synchronize()
        return address


class TestNixlOnGpus(TransportConformance):
    config: ClassVar[NixlConfig] = HERE
    # The first write opens the peer's memory.
    prompt_s: ClassVar[float] = 10.0

    def start_peer(self, transport: OneSidedTransport) -> GpuPeer:
        return GpuPeer()

    def make(self) -> Rig:
        transport = self.start_transport()
        arena: Any = GpuArena(transport, 0)
        arena.bytes.view(np.uint64)[:] = np.arange(NBYTES // 8, dtype=np.uint64) * 2654435761
        arena.upload()
        rig = GpuRig(transport, arena, self.start_peer(transport))
        rig.deadline_s, rig.prompt_s = self.deadline_s, self.prompt_s
        return rig

    @pytest.fixture(scope="class")
    @classmethod
    def shared_rig(cls) -> Iterator[Rig]:
        rig = cls().make()
        yield rig
        close_rig(rig)

    @pytest.fixture
    def mortal(self) -> Iterator[Rig]:
        rig = self.make()
        yield rig
        close_rig(rig)

    def test_the_wire_is_cuda_ipc_and_one_sided(self, rig: Rig) -> None:
        rig.write(rig.batch([0], [0], [NBYTES]))
        report = rig.transport.report()
        print(report)
        assert "cuda_ipc" in report.protocol, report

    def test_a_write_reaches_a_stopped_peer(self, mortal: Rig) -> None:
        peer = mortal.peer
        assert isinstance(peer, GpuPeer)
        mortal.write(mortal.batch([64], [0], [8]))
        peer.send_signal(signal.SIGSTOP)
        mortal.write(mortal.batch([0], [0], [NBYTES]))
        peer.send_signal(signal.SIGCONT)
        mortal.check_peer(mortal.arena.bytes, "written while it was stopped")

    def test_a_peer_killed_during_a_write_is_unreachable(self, mortal: Rig) -> None:
        peer = mortal.peer
        assert isinstance(peer, GpuPeer)
        pieces = scattered(3000, 2500, 5)
        batch = mortal.batch(*pieces)
        peer.ask("die on write", int(pieces[1][0]))
        with pytest.raises((PeerUnreachable, TransferOutcomeUnknown)):
            mortal.write_until(batch, time.monotonic() + self.deadline_s)
        mortal.refused(batch, PeerUnreachable)


def close_rig(rig: Rig) -> None:
    rig.peer.close()
    rig.arena.close()
    rig.transport.close()


def test_an_absent_gpu_is_refused() -> None:
    with pytest.raises(TransportUnavailable, match="GPU 99"):
        create_transport(NixlConfig(gpu=99))
