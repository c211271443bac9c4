"""One update over two transports: kernels store into one engine and pack for the other.

The kernels are numpy's, and the engines' memory is this process's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from memory_transport import GpuMemoryTransport, MemoryFabric
from numpy_gpu import OneProcess, numpy_gpu
from offers import GPU_TRAITS

from windlass.config import P2pBackend, ReplicaPlace, UpdateMode
from windlass.control.backend import backend_of
from windlass.errors import ConfigError, TransferFailed, TransferOutcomeUnknown
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory import copy_sources as sources
from windlass.memory.cuda import driver
from windlass.net.clock import Deadline
from windlass.planning.planner import plan_transfer
from windlass.transfer.base import ParameterMemory, joined_results
from windlass.transfer.bindings import LinkStatus, Written
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.auto import TransportSet
from windlass.transports.base import WriteBatch
from windlass.transports.peers import PeerMapper
from windlass.transports.processes import own_endpoint
from windlass.transports.region_transport import RegionTransport
from windlass.transports.traits import WireReport

SHAPE = (48, 40)
FULL = Box((0, 0), SHAPE)


class StoredByKernels(RegionTransport):
    """Transport with the traits of `cuda_ipc` and memory of this process."""

    traits = msgspec.structs.replace(
        GPU_TRAITS, strided_stores=True, notifies=True, ceiling_bytes_per_s=4e11
    )

    def __init__(self) -> None:
        super().__init__(own_endpoint("cuda_ipc"))
        self._mapper = OneProcess()

    @property
    def mapper(self) -> PeerMapper:
        return self._mapper

    def report(self) -> WireReport:
        return WireReport("cuda_ipc", "cuda-ipc", "GPU 0")

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        raise TransferFailed("kernels store, nobody writes")


def manifest(worker: str, role: Role, pitch: int = SHAPE[1]) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    padding = SHAPE[0] * (pitch - SHAPE[1]) * 2
    nbytes = SHAPE[0] * pitch * 2
    builder.add_parameter("w", nbytes=nbytes, dtype=DType.BFLOAT16, padding_nbytes=padding)
    builder.add_shard("w", SHAPE, FULL, "w", strides_bytes=(2 * pitch, 2))
    return builder.build()


TRAINER = manifest("trainer/0", Role.TRAINER)
PITCH = 64
"""Distance in elements between rows of an engine. Shorter rows are sent packed."""
ENGINES = {name: manifest(name, Role.ENGINE, PITCH) for name in ("near/0", "far/0")}
LINKS = {"near/0": "cuda_ipc", "far/0": "memory"}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = numpy_gpu()
    for name in ("transfer.replica", "memory.cuda.gpu"):
        monkeypatch.setattr(f"windlass.{name}.shared_gpu", lambda _: found)
    monkeypatch.setattr(sources, "memory_kind", lambda _: driver.MemoryKind.DEVICE)
    monkeypatch.setattr(sources, "gpu_of", lambda _: 0)


@contextmanager
def both(fabric: MemoryFabric) -> Iterator[TransportSet]:
    transports = TransportSet([GpuMemoryTransport(fabric), StoredByKernels()])
    yield transports
    transports.close()


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_each_engine_is_updated_by_the_transport_of_its_link(mode: UpdateMode) -> None:
    plan = plan_transfer([TRAINER], list(ENGINES.values()))
    assert all(nbytes > 0 for nbytes in plan.staging_nbytes)
    plan = plan.without_staging({("trainer/0", "near/0")})
    fabric, trained = MemoryFabric(), np.arange(SHAPE[0] * SHAPE[1], dtype="<u2").reshape(SHAPE)
    with both(fabric) as sending, both(fabric) as near, both(fabric) as far:
        bindings, receivers, served = [], {}, {}
        for name, transport in (("near/0", near), ("far/0", far)):
            served[name] = np.zeros((SHAPE[0], PITCH), "<u2")
            address = int(served[name].ctypes.data)
            region = transport.register(address, served[name].nbytes)
            one = Receiver(transport, ENGINES[name], [address], [region])
            receivers[name] = backend_of(P2pBackend()).receiver(one, "127.0.0.1")
            binding = receivers[name].connect(plan.parts(sending=False, all_names=True)[name], mode)
            assert (binding.staging_address > 0) is (name == "far/0")
            (offer,) = (o for o in transport.offers() if o.transport == LINKS[name])
            regions = tuple(r for r in binding.regions if r.endpoint == offer.endpoint)
            bindings.append(
                msgspec.structs.replace(binding, endpoint=offer.endpoint, regions=regions)
            )
        memory = (ParameterMemory(int(trained.ctypes.data), trained.nbytes),)
        sender = Sender(sending, TRAINER, lambda: memory)
        backend = backend_of(P2pBackend()).sender(sender, "127.0.0.1")
        backend.connect(plan.parts(sending=True, all_names=True)["trainer/0"], bindings)
        for version in range(3):
            trained += np.uint16(7)
            backend.prepare(version)
            sent = backend.write(version, ["far/0", "near/0"], 20.0)
            assert [link.destination for link in sent.links] == ["far/0", "near/0"]
            for link in sent.links:
                assert link.status is LinkStatus.OK, link
                receiver = receivers[link.destination]
                assert receiver.verify(version, {"trainer/0": link.digest}) == ()
                receiver.apply()
                assert (trained == served[link.destination][:, : SHAPE[1]]).all(), (
                    link.destination,
                    version,
                )
        sender.close()
        for receiver in receivers.values():
            receiver.close()


def test_a_replica_of_gpu_weights_needs_one_transport() -> None:
    with (
        both(MemoryFabric()) as sending,
        pytest.raises(ConfigError, match=r"needs a single transport .* \['cuda_ipc', 'memory'\]"),
    ):
        Sender(sending, TRAINER, tuple, replica=ReplicaPlace.AUTO)


def test_an_unknown_outcome_takes_precedence_over_other_errors() -> None:
    failed, unknown = TransferFailed("a GPU"), TransferOutcomeUnknown("a NIC")
    for stores, writes in ((failed, unknown), (unknown, failed)):
        written = Future[Written]()
        written.set_exception(writes)

        def store(error: Exception = stores) -> Written:
            raise error

        with pytest.raises(TransferOutcomeUnknown):
            joined_results(["near", "far"], written, store)
