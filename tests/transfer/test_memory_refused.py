"""Memory that a peer or a transport cannot use is refused with a remedy, and never read.

No GPU is needed: the tests replace the driver's answers about memory.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy_gpu import numpy_gpu

from windlass.errors import ConfigError, PlanError
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory import place
from windlass.memory.cuda import gpu
from windlass.planning.planner import plan_transfer
from windlass.planning.program import DigestKind
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.source import SourceMemory
from windlass.transports import registry
from windlass.transports.peers import PeerEndpoint
from windlass.transports.registry import create_transport, parse_transport

ON_GPU = 0x1000
"""Address at which nothing is mapped."""


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu_of(address: int) -> int:
        return 3 if address == ON_GPU else -1

    monkeypatch.setattr(registry, "gpu_of", gpu_of)


def manifest(worker: str, role: Role) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("w", nbytes=64, dtype=DType.FLOAT32)
    builder.add_shard("w", (16,), Box((0,), (16,)), "w")
    return builder.build()


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("name", ["cma", "shm"])
def test_a_transport_of_host_memory_is_refused_for_weights_on_a_gpu(name: str) -> None:
    create_transport(parse_transport(name), memory_at=1 << 20).close()
    with pytest.raises(
        ConfigError, match=rf"must be cuda_ipc .* on GPU 3, got {name}, which writes only"
    ):
        create_transport(parse_transport(name), memory_at=ON_GPU)


def test_weights_that_move_to_another_memory_after_they_were_bound_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lies = [np.zeros(16, np.float32).ctypes.data]
    source = SourceMemory(
        manifest("trainer/0", Role.TRAINER), lambda: [ParameterMemory(lies[0], 64)]
    )
    plan = plan_transfer(
        [manifest("trainer/0", Role.TRAINER)], [manifest("engine/0", Role.ENGINE)]
    ).parts(sending=True, all_names=True)["trainer/0"]
    source.bind(plan, [DestinationBinding("engine/0", PeerEndpoint("disk", "/w", ""), (), ())])
    lies[0] = ON_GPU
    monkeypatch.setattr(gpu, "shared_gpu", lambda _: numpy_gpu())
    monkeypatch.setattr(place, "gpu_of", lambda _: 0)
    with pytest.raises(PlanError, match=r"trainer/0: .* must stay on GPU -1, .* got GPU 0"):
        source.locate()


def test_an_engine_in_another_kind_of_memory_is_refused_before_anything_is_sent() -> None:
    held = np.zeros(16, np.float32)
    source = SourceMemory(
        manifest("trainer/0", Role.TRAINER), lambda: [ParameterMemory(held.ctypes.data, 64)]
    )
    plan = plan_transfer(
        [manifest("trainer/0", Role.TRAINER)], [manifest("engine/0", Role.ENGINE)]
    ).parts(sending=True, all_names=True)["trainer/0"]
    offered = DestinationBinding(
        "engine/0", PeerEndpoint("xccl", "h", ""), (), (), digest_kind=DigestKind.POSITION
    )
    with pytest.raises(PlanError, match="engine/0: weights must be on GPUs at both ends or"):
        source.bind(plan, [offered])
