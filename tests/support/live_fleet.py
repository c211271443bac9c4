"""Live engines and trainers on GPUs, each in its own process."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing as mp
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import pytest
import torch

from windlass.engines.client import EngineClient, EngineWeights
from windlass.errors import TransportUnavailable
from windlass.layout.manifest import Role
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer.dtensor import describe_module, parameter_addresses
from windlass.transports.auto import AutoConfig
from windlass.transports.cuda_ipc import CudaIpcConfig
from windlass.transports.mooncake.native import MooncakeProtocol
from windlass.transports.mooncake.transport import MooncakeConfig
from windlass.transports.nixl.native import NixlWire
from windlass.transports.nixl.transport import NixlConfig
from windlass.transports.registry import TransportConfig, create_transport

TOKEN = "secret of the test"
NUM_TRAINERS = 2
ENGINES = {"exact": torch.float32, "cast": torch.bfloat16}
HERE = "127.0.0.1"
WIRES: dict[str, TransportConfig] = {
    "cuda_ipc": CudaIpcConfig(),
    "nixl": NixlConfig(host=HERE),
    "nixl over TCP": NixlConfig(host=HERE, wire=NixlWire.TCP),
    "mooncake over TCP": MooncakeConfig(host=HERE, protocol=MooncakeProtocol.TCP),
    "auto": AutoConfig(),
    "cuda_ipc beside nixl": AutoConfig(
        offers=("cuda_ipc", '{"type": "nixl", "host": "127.0.0.1", "wire": "tcp"}')
    ),
}
"""Transports by name. `create_transport` adds each rank's GPU."""


def needs(wire: str) -> None:
    """Skip the test if a wire does not start for memory of a GPU."""
    try:
        create_transport(WIRES[wire], memory_at=torch.zeros(1, device="cuda").data_ptr()).close()
    except TransportUnavailable as error:
        pytest.skip(str(error))


def build() -> torch.nn.Sequential:
    """Return a decoder-like stack with uneven sizes."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Embedding(1000, 72),
        torch.nn.Linear(72, 200, bias=True),
        torch.nn.GELU(),
        torch.nn.Linear(200, 72, bias=False),
        torch.nn.LayerNorm(72),
        torch.nn.Linear(72, 1000, bias=False),
    )


def build_as(dtype: torch.dtype) -> torch.nn.Module:
    return build().to(dtype)


def serve(
    name: str,
    device: str,
    make: Callable[[], torch.nn.Module],
    url: str,
    wire: TransportConfig,
    pipe: Connection,
) -> None:
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    model = make().to(device).requires_grad_(requires_grad=False)
    manifest = describe_module(model, f"{name}/0", Role.ENGINE)
    addresses = parameter_addresses(model)
    transport = create_transport(wire, memory_at=addresses[0])
    regions = [
        transport.register(address, spec.nbytes)
        for address, spec in zip(addresses, manifest.parameters, strict=True)
    ]
    with EngineClient(
        EngineWeights(
            manifest=manifest,
            addresses=addresses,
            regions=regions,
        ),
        transport=transport,
        hooks=RestingEngine(),
        controller=url,
        token=TOKEN,
        url="http://nowhere",
    ) as client:
        pipe.send(("ready",))
        while pipe.recv():
            if on_gpu:
                torch.cuda.synchronize()
            # Send copies: torch would move sent tensors from host memory to shared memory.
            held = {n: p.detach().to("cpu", copy=True) for n, p in model.named_parameters()}
            pipe.send((client.agent.served_version, held))


class Fleet:
    """Processes and a pipe to each. At the end, running processes are killed."""

    def __init__(self, url: str, wire: TransportConfig) -> None:
        self._url = url
        self._wire = wire
        # With GPUs, each process must initialise CUDA by itself.
        self._context: SpawnContext | ForkServerContext = (
            mp.get_context("spawn") if torch.cuda.is_available() else mp.get_context("forkserver")
        )
        self._processes: list[BaseProcess] = []
        self._pipes: dict[str, Connection] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Start a process that runs `target(*arguments, pipe)`."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(*arguments, theirs))
        process.start()
        self._processes.append(process)
        self._pipes[name] = ours

    def start_engines(self) -> None:
        """Start one engine of each dtype, after the trainers' GPUs if there are enough GPUs."""
        for index, (name, dtype) in enumerate(ENGINES.items()):
            self.start_engine(name, dtype, NUM_TRAINERS + index)

    def start_engine(self, name: str, dtype: torch.dtype, device: int) -> None:
        """Start an engine on GPU `device`, modulo the number of GPUs."""
        place = f"cuda:{device % torch.cuda.device_count()}"
        self.start_model(name, functools.partial(build_as, dtype), place)

    def start_model(self, name: str, make: Callable[[], torch.nn.Module], device: str) -> None:
        """Start an engine with the model of `make`, on `device`."""
        self.start(name, serve, name, device, make, self._url, self._wire)

    def send(self, name: str, message: object) -> None:
        """Send a message to one process."""
        self._pipes[name].send(message)

    async def receive(self, name: str) -> Any:
        """Receive a message from one process within two minutes."""
        ready = await asyncio.to_thread(self._pipes[name].poll, 120)
        assert ready, f"{name} does not answer"
        return self._pipes[name].recv()

    async def join(self) -> None:
        """Wait for all processes to end, a minute each."""
        for process in self._processes:
            await asyncio.to_thread(process.join, 60)
            assert process.exitcode == 0, process
