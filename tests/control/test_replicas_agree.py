"""The controller does not publish a version if its trainer ranks hold different replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import torch

import windlass
from windlass.config import ControlConfig, ReplicaPlace
from windlass.engines.client import EngineClient, EngineWeights
from windlass.errors import RoundAborted
from windlass.layout.manifest import Role
from windlass.planning import replicated
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer.base import ParameterMemory
from windlass.transfer.dtensor import LiveTensors, describe_module, own_tensors
from windlass.transports.registry import create_transport, parse_transport

TOKEN = "secret of the test"
ROWS, COLUMNS = 64, 48


def model(first: int) -> torch.nn.Module:
    """Return a module with distinct elements."""
    module = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS), torch.nn.LayerNorm(ROWS))
    for parameter in module.parameters():
        values = torch.arange(first, first + parameter.numel(), dtype=torch.float32)
        parameter.data = values.reshape(parameter.shape)
        first += parameter.numel()
    return module


def extents_of(module: torch.nn.Module) -> Callable[[], tuple[ParameterMemory, ...]]:
    return LiveTensors([module], lambda: own_tensors(module)).locate


class Fleet:
    """Trainer ranks and an engine, each with its own module."""

    def __init__(
        self,
        url: str,
        modules: Sequence[torch.nn.Module],
        served: torch.nn.Module,
        *,
        replica: bool,
    ) -> None:
        self.served = served
        transport = create_transport(parse_transport("cma"))
        extents = extents_of(self.served)()
        self.engine = EngineClient(
            EngineWeights(
                manifest=describe_module(self.served, "engine/0", Role.ENGINE),
                addresses=[extent.address for extent in extents],
                regions=[transport.register(e.address, e.nbytes) for e in extents],
            ),
            transport=transport,
            hooks=RestingEngine(),
            controller=url,
            token=TOKEN,
        )
        self.modules = modules
        self.replica = replica
        self.num_located = 0
        self.reports: list[windlass.UpdateReport] = []
        self.trainers = [
            windlass.TrainerClient(
                windlass.TrainerWeights(
                    manifest=describe_module(module, f"trainer/{rank}", Role.TRAINER),
                    parameters=self._parameters_of(module),
                ),
                transport=create_transport(parse_transport("cma")),
                controller=url,
                token=TOKEN,
                job="agreeing",
                world_size=len(modules),
                replica=ReplicaPlace.AUTO if replica else ReplicaPlace.OFF,
            )
            for rank, module in enumerate(modules)
        ]

    def _parameters_of(self, module: torch.nn.Module) -> Callable[[], tuple[ParameterMemory, ...]]:
        extents = extents_of(module)

        def locate() -> tuple[ParameterMemory, ...]:
            self.num_located += 1
            return extents()

        return locate

    async def publish(self, version: int) -> str:
        """Return why the version was not published, or an empty string."""
        said = await asyncio.gather(
            *(asyncio.to_thread(self._publish, trainer, version) for trainer in self.trainers)
        )
        assert len(set(said)) == 1
        return said[0]

    def _publish(self, trainer: windlass.TrainerClient, version: int) -> str:
        try:
            if self.replica:
                report = trainer.publish(version, deadline_s=60, wait=False, copy=True).result(
                    deadline_s=60
                )
            else:
                report = trainer.publish(version, deadline_s=60).result()
            if trainer is self.trainers[0]:
                self.reports.append(report)
        except RoundAborted as error:
            return str(error)
        return ""

    def is_served(self, module: torch.nn.Module) -> bool:
        pairs = zip(self.served.parameters(), module.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()
        self.engine.close()


@asynccontextmanager
async def running(
    modules: Sequence[torch.nn.Module],
    *,
    served: torch.nn.Module | None = None,
    replica: bool = False,
    compare_share: float = 1.0,
) -> AsyncIterator[Fleet]:
    config = ControlConfig(compare_share=compare_share)
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        served = model(-10_000) if served is None else served
        fleet = await asyncio.to_thread(Fleet, controller.url, modules, served, replica=replica)
        try:
            yield fleet
        finally:
            await asyncio.to_thread(fleet.close)


@pytest.mark.parametrize("replica", [False, True])
async def test_one_differing_element_is_named_and_nothing_is_published(replica: bool) -> None:
    modules = [model(1) for _ in range(3)]
    weight = modules[1].get_parameter("0.weight").data
    weight[40, 7] += 1
    async with running(modules, replica=replica) as fleet:
        said = await fleet.publish(0)
        assert f"'0.weight' [0:{ROWS}, 0:{COLUMNS}]" in said
        assert "trainer/0, trainer/2 versus trainer/1" in said
        assert fleet.is_served(model(-10_000))
        weight[40, 7] -= 1
        assert await fleet.publish(1) == ""
        assert fleet.is_served(model(1))
        # This is one box of four, so a sample may or may not contain it.
        modules[2].get_parameter("1.bias").data += 1
        for version in range(2, 60):
            if said := await fleet.publish(version):
                break
        assert "'1.bias' [0:64]" in said
        assert "trainer/0, trainer/1 versus trainer/2" in said


async def test_later_rounds_compare_a_sample_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated, "BLOCK_NBYTES", 1024)
    modules = [model(1) for _ in range(2)]
    async with running(modules) as fleet:
        assert await fleet.publish(0) == ""
        found = replicated.find_replicated(
            [describe_module(m, f"trainer/{rank}", Role.TRAINER) for rank, m in enumerate(modules)]
        )
        turns = found.period(sum(p.nbytes for p in modules[0].parameters()) // 2)
        assert turns > 4
        weight = modules[1].get_parameter("0.weight").data
        weight[40, 7] += 1
        said = []
        for version in range(1, turns + 1):
            said.append(await fleet.publish(version))
            if said[-1]:
                break
        assert "'0.weight'" in said[-1]
        assert not any(said[:-1])
        assert await fleet.publish(turns + 1) == said[-1].replace(
            f"version {len(said)} ", f"version {turns + 1} "
        )


async def test_plain_tensors_cut_by_hand_are_not_published_as_replicas() -> None:
    """The test cuts the weight by hand, and no rank declares its half a piece.

    The engine rank is cut the same way.
    """
    modules = [torch.nn.Linear(COLUMNS, ROWS // 2, bias=False) for _ in range(2)]
    pieces = model(1).get_parameter("0.weight").data.chunk(2)
    for module, piece in zip(modules, pieces, strict=True):
        module.weight.data = piece.clone()
    served = torch.nn.Linear(COLUMNS, ROWS // 2, bias=False)
    before = served.weight.detach().clone()
    async with running(modules, served=served) as fleet:
        said = await fleet.publish(0)
    assert f"'weight' [0:{ROWS // 2}, 0:{COLUMNS}] differs: trainer/0 versus trainer/1" in said
    assert torch.equal(served.weight, before)


@pytest.mark.parametrize("replica", [False, True])
async def test_the_compare_share_decides_which_updates_compare(replica: bool) -> None:
    modules = [model(1) for _ in range(2)]
    async with running(modules, replica=replica, compare_share=0.0) as fleet:
        for version in range(2):
            assert await fleet.publish(version) == ""
        modules[1].get_parameter("0.weight").data[40, 7] += 1
        for version in range(2, 6):
            assert await fleet.publish(version) == ""
        reports = fleet.reports
        assert [report.compared for report in reports] == [True, True, *[False] * 4]
        assert all((report.compare_s > 0) is report.compared for report in reports)
        assert all(report.compare_s < report.update_s for report in reports)


async def test_parameters_are_located_once_in_an_update_that_compares() -> None:
    modules = [model(1) for _ in range(2)]
    async with running(modules) as fleet:
        for version in range(4):
            assert await fleet.publish(version) == ""
            assert fleet.num_located == 2 * (version + 1)
