"""Weights on a GPU meet what moves host memory: refused with the way out, never read.

There is no GPU here: which memory is one's is answered in the driver's place.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from windlass.config import DiskBackend, P2pBackend, UpdateBackend, UpdateMode, XcclBackend
from windlass.errors import ConfigError, PlanError
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.planner import plan_transfer
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer import source
from windlass.transfer.base import ParameterMemory
from windlass.transfer.receiver import Receiver
from windlass.transfer.source import SourceMemory
from windlass.transports import registry
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport, parse_transport
from windlass.updates.agents import EngineAgent
from windlass.updates.messages import BeginByHand, Bound, Command, ConnectEngine

ON_GPU = 0x1000
"""An address that nothing is mapped at."""


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu_of(address: int) -> int:
        return 3 if address == ON_GPU else -1

    monkeypatch.setattr(registry, "gpu_of", gpu_of)
    monkeypatch.setattr(source, "gpu_of", gpu_of)


def manifest(worker: str, role: Role) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("w", nbytes=64, dtype=DType.FLOAT32)
    builder.add_shard("w", (16,), Box((0,), (16,)), "w")
    return builder.build()


@pytest.mark.parametrize("name", ["cma", "shm", "memory"])
def test_a_transport_of_host_memory_is_refused_for_weights_on_a_gpu(name: str) -> None:
    create_transport(parse_transport(name), memory_at=1 << 20).close()
    with pytest.raises(
        ConfigError, match=rf"must be cuda_ipc .* on GPU 3, got {name}, which moves"
    ):
        create_transport(parse_transport(name), memory_at=ON_GPU)


def test_a_trainer_that_sends_parameters_as_they_lie_finds_them_in_host_memory() -> None:
    lies = [np.zeros(16, np.float32).ctypes.data]
    memory = SourceMemory(
        manifest("trainer/0", Role.TRAINER), lambda: [ParameterMemory(lies[0], 64)]
    )
    memory.locate()
    lies[0] = ON_GPU
    with pytest.raises(
        PlanError, match=r"trainer/0: its weights are on GPU 3: .* use the backend p2p"
    ):
        memory.locate()


@pytest.fixture
def agent() -> Iterator[EngineAgent]:
    """Of an engine rank whose weights are where there is no memory of this process."""
    transport = create_transport(CmaConfig())
    receiver = Receiver(transport, manifest("engine/0", Role.ENGINE), [ON_GPU], [])
    found = EngineAgent(receiver, RestingEngine())
    yield found
    found.close()
    receiver.close()
    transport.close()


def connect(backend: UpdateBackend) -> ConnectEngine:
    plan = plan_transfer(
        [manifest("trainer/0", Role.TRAINER)], [manifest("engine/0", Role.ENGINE)]
    ).for_destination("engine/0")
    return ConnectEngine(plan.encode(), plan.digest(), UpdateMode.IN_PLACE, backend)


@pytest.mark.parametrize(
    "command", [connect(XcclBackend()), connect(DiskBackend("/w")), BeginByHand()]
)
def test_an_engine_on_a_gpu_refuses_updates_that_bring_their_own_bytes(
    agent: EngineAgent, command: Command
) -> None:
    with pytest.raises(PlanError, match="engine/0: its weights are on GPU 3"):
        agent.handle(command, epoch=1, round_number=1)
    assert isinstance(agent.handle(connect(P2pBackend()), epoch=1, round_number=2), Bound)
