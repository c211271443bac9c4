"""The receiver hashes parts while later parts are on the wire. These tests need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from windlass.config import UpdateMode
from windlass.layout.manifest import Role
from windlass.memory.cuda import kernels
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import DestinationBinding, LinkStatus
from windlass.transfer.dtensor import describe_module, parameter_addresses
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transfer.write_progress import PartWritten, notify
from windlass.transports.cuda_ipc import CudaIpcTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SOURCE = "trainer/0"


def build(*, dtype: torch.dtype, seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(512, 768), torch.nn.LayerNorm(768), torch.nn.Linear(768, 512))
    return torch.nn.Sequential(*layers).to(dtype).cuda().requires_grad_(requires_grad=False)


@dataclass(frozen=True)
class Pair:
    """Trainer and engine in one process, on one GPU."""

    trained: torch.nn.Sequential
    served: torch.nn.Sequential
    sender: Sender
    receiver: Receiver
    plan: TransferPlan
    binding: DestinationBinding

    def write(self, version: int) -> dict[str, str]:
        self.sender.prepare(version)
        (outcome,) = self.sender.write(version, ["engine/0"], 20.0).links
        assert outcome.status is LinkStatus.OK, outcome
        return {SOURCE: outcome.digest}

    def is_equal(self) -> bool:
        torch.cuda.synchronize()
        pairs = zip(self.trained.parameters(), self.served.parameters(), strict=True)
        return all(torch.equal(ours.to(theirs.dtype), theirs) for ours, theirs in pairs)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["plain", "cast"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # Make eight parts: a socket queue holds ten datagrams, and parts without a hint are hashed
    # last.
    monkeypatch.setattr(kernels, "PART_NBYTES", 200_000)
    trained = build(dtype=request.param, seed=1)
    served = build(dtype=torch.bfloat16, seed=2)
    ours, theirs = CudaIpcTransport(0), CudaIpcTransport(0)
    manifests = (
        describe_module(trained, SOURCE, Role.TRAINER),
        describe_module(served, "engine/0", Role.ENGINE),
    )
    addresses = parameter_addresses(served)
    regions = [
        theirs.register(address, spec.nbytes)
        for address, spec in zip(addresses, manifests[1].parameters, strict=True)
    ]
    plan = plan_transfer([manifests[0]], [manifests[1]])
    receiver = Receiver(theirs, manifests[1], addresses, regions)
    binding = receiver.connect(
        plan.parts(sending=False, all_names=True)["engine/0"], UpdateMode.IN_PLACE
    )
    located = [
        ParameterMemory(address, spec.nbytes)
        for address, spec in zip(parameter_addresses(trained), manifests[0].parameters, strict=True)
    ]
    sender = Sender(ours, manifests[0], lambda: located)
    sender.connect(plan.parts(sending=True, all_names=True)[SOURCE], [binding])
    yield Pair(trained, served, sender, receiver, plan, binding)
    sender.close()
    receiver.close()
    ours.close()
    theirs.close()


def test_every_byte_is_hashed_as_it_lands(pair: Pair) -> None:
    for version in range(3):
        for parameter in pair.trained.parameters():
            parameter.add_(1.0)
        expected = pair.write(version)
        assert pair.receiver.verify(version, expected) == ()
        assert pair.receiver.late_nbytes == 0
        assert pair.is_equal()


def test_an_update_of_another_version_is_hashed_after_the_wire(pair: Pair) -> None:
    expected = pair.write(4)
    assert pair.receiver.verify(5, expected) == ()
    assert pair.receiver.late_nbytes == pair.plan.nbytes


def test_a_second_verification_looks_at_the_memory_again(pair: Pair) -> None:
    expected = pair.write(0)
    assert pair.receiver.verify(0, expected) == ()
    next(iter(pair.served.parameters())).view(-1)[7] += 1
    torch.cuda.synchronize()
    assert pair.receiver.verify(0, expected) == (SOURCE,)


def test_an_engine_accepts_a_link_that_is_written_twice(pair: Pair) -> None:
    pair.write(0)
    for parameter in pair.trained.parameters():
        parameter.mul_(3.0)
    expected = pair.write(0)
    assert pair.receiver.verify(0, expected) == ()
    assert pair.receiver.late_nbytes == 0
    assert pair.is_equal()


def test_an_unexpected_digest_is_reported(pair: Pair) -> None:
    pair.write(0)
    assert pair.receiver.verify(0, {SOURCE: "0" * 32}) == (SOURCE,)


def test_false_hints_cost_only_time(pair: Pair) -> None:
    lies = [
        # Nothing has been written yet.
        PartWritten(SOURCE, 0, "lie", 0, 0, 1),
        # This table does not exist.
        PartWritten(SOURCE, 0, "lie", 9, 0, 1),
        # These pieces do not exist.
        PartWritten(SOURCE, 0, "lie", 0, 1, 1 << 30),
        PartWritten("trainer/7", 0, "lie", 0, 0, 1),
        # This hint is a repetition.
        PartWritten(SOURCE, 0, "lie", 0, 0, 1),
    ]
    for lie in lies:
        notify(pair.binding.listener, lie)
    expected = pair.write(0)
    # To the receiver, these hints arrive during the write.
    for lie in lies:
        notify(pair.binding.listener, lie)
    assert pair.receiver.verify(0, expected) == ()
    assert pair.receiver.late_nbytes == pair.plan.nbytes
    assert pair.is_equal()


def test_a_rank_that_connects_again_forgets_landed_parts(pair: Pair) -> None:
    expected = pair.write(0)
    pair.receiver.connect(
        pair.plan.parts(sending=False, all_names=True)["engine/0"], UpdateMode.IN_PLACE
    )
    assert pair.receiver.verify(0, expected) == ()
