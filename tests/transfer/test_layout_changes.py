"""Changes to a parameter after its trainer connected are read correctly or refused by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import pytest
import torch

import windlass
from windlass.config import (
    ControlConfig,
    DiskBackend,
    ReplicaPlace,
    UpdateBackend,
    UpdateMode,
    XcclBackend,
)
from windlass.control.messages import Command, Result, Write
from windlass.control.trainer_agent import TrainerAgent
from windlass.engines.client import EngineClient, EngineWeights
from windlass.errors import RoundAborted
from windlass.layout.manifest import Role
from windlass.testing.resting_engine import RestingEngine
from windlass.trainers.client import TrainerClient
from windlass.trainers.fsdp import describe_trainer
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.dtensor import describe_module, parameter_addresses
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport

TOKEN = "t" * 32


class Model(torch.nn.Module):
    """Parameters of equal sizes, a convolution of three dims, and a buffer, with distinct elements.

    Args:
        first: value of the first element.
        with_gaps: leave gaps between rows.
    """

    def __init__(self, first: float, *, with_gaps: bool = False) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(8, 6, bias=False)
        self.up = torch.nn.Linear(8, 6, bias=False)
        self.square = torch.nn.Linear(6, 6, bias=False)
        self.patch = torch.nn.Conv3d(3, 4, kernel_size=(2, 3, 5), bias=False)
        self.image = torch.nn.Conv2d(4, 6, kernel_size=2, bias=False)
        self.register_buffer("bias", torch.zeros(5))
        self.refill(first)
        if with_gaps:
            for linear in (self.gate, self.up):
                buffer = torch.full((6, 11), -5.0)
                buffer[:, :8] = linear.weight.detach()
                linear.weight = torch.nn.Parameter(buffer[:, :8])

    @torch.no_grad()
    def refill(self, first: float) -> None:
        for tensor in (*self.parameters(), *self.buffers()):
            numbers = torch.arange(tensor.numel(), dtype=torch.float32) + first
            tensor.copy_(numbers.reshape(tensor.shape))
            first += tensor.numel()


def served_equals(served: Model, trained: Model) -> bool:
    theirs = trained.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in served.state_dict().items())


@final
@dataclass
class BeforeWrite:
    """Trainer agent that calls `act` before each write."""

    agent: TrainerAgent
    act: Callable[[], None]

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        if isinstance(command, Write):
            self.act()
        return self.agent.handle(command, epoch=epoch, round_number=round_number)


@dataclass
class Setting:
    """Way to publish a version."""

    name: str
    config: ControlConfig = field(default_factory=ControlConfig)
    replica: bool = False
    arena_nbytes: int = 0

    def publish(self, trainer: TrainerClient, url: str, version: int) -> None:
        if self.name == "copy":
            trainer.publish(version, deadline_s=20, wait=False, copy=True).result(deadline_s=20)
        elif self.name == "callback":
            with windlass.RolloutCallback(url, TOKEN, client=trainer) as callback:
                callback.update_weights(version, deadline_s=20).result(deadline_s=20)
        else:
            trainer.publish(version, deadline_s=20)


def backend(config: UpdateBackend) -> ControlConfig:
    return ControlConfig(backend=config)


def settings(folder: Path) -> dict[str, Setting]:
    return {
        setting.name: setting
        for setting in (
            Setting("publish"),
            Setting("staged", ControlConfig(mode=UpdateMode.STAGED)),
            Setting("replica", replica=True),
            Setting("copy", replica=True),
            Setting("callback"),
            Setting("xccl", backend(XcclBackend())),
            Setting("disk", backend(DiskBackend(str(folder)))),
        )
    }


def connect_engine(served: Model, url: str) -> EngineClient:
    manifest = describe_module(served, "engine/0", Role.ENGINE)
    transport = create_transport(CmaConfig())
    addresses = parameter_addresses(served)
    return EngineClient(
        EngineWeights(
            manifest=manifest,
            addresses=addresses,
            regions=[
                transport.register(address, spec.nbytes)
                for address, spec in zip(addresses, manifest.parameters, strict=True)
            ],
        ),
        transport=transport,
        hooks=RestingEngine(),
        controller=url,
        token=TOKEN,
    )


def connect(
    trained: Model, url: str, setting: Setting, act: Callable[[], None] = lambda: None
) -> TrainerClient:
    described = describe_trainer(trained, group="trainer", name_map=None)
    return TrainerClient(
        TrainerWeights(
            manifest=described.manifest,
            parameters=described.parameters,
            changed=described.changed,
        ),
        transport=create_transport(CmaConfig()),
        controller=url,
        token=TOKEN,
        replica=ReplicaPlace.AUTO if setting.replica else ReplicaPlace.OFF,
        arena_nbytes=setting.arena_nbytes,
        intercept=lambda agent: BeforeWrite(agent, act),
    )


async def with_controller(config: ControlConfig, work: Callable[[str], None]) -> None:
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(work, controller.url)


def turn_channels_last(model: Model) -> None:
    model.image.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def store_transposed(model: Model) -> None:
    model.square.weight.data = model.square.weight.data.t().contiguous().t()


def halve(model: Model) -> None:
    model.half()


def reshape(model: Model) -> None:
    model.gate.weight = torch.nn.Parameter(model.gate.weight.detach().reshape(8, 6))


def rename(model: Model) -> None:
    gate = model.gate
    del model.gate
    model.gate_of_old = gate


def add_one(model: Model) -> None:
    model.more = torch.nn.Linear(2, 2)


REFUSED: dict[Callable[[Model], None], str] = {
    turn_channels_last: r"parameter 'image.weight': strides must be \(16, 4, 2, 1\).*connect again",
    store_transposed: r"parameter 'square.weight': strides must be \(6, 1\).*connect again",
    halve: r"parameter 'gate.weight': dtype must be torch.bfloat16.*got torch.float16: connect again",
    reshape: r"parameter 'gate.weight': shape must be \(6, 8\).*got \(8, 6\): connect again",
    rename: r"got 1 missing \['gate.weight'\] and 1 new \['gate_of_old.weight'\]: connect again",
    add_one: r"got 0 missing \[\] and 2 new \['more.weight', 'more.bias'\]: connect again",
}


@pytest.mark.parametrize("name", settings(Path("/")))
async def test_a_layout_changed_after_connect_is_refused_by_every_way_to_publish(
    name: str, tmp_path: Path
) -> None:
    setting = settings(tmp_path)[name]
    changes = REFUSED if name == "publish" else dict([*REFUSED.items()][1:3])
    for change, reason in changes.items():

        def work(url: str, change: Callable[[Model], None] = change, why: str = reason) -> None:
            trained, served = Model(1.0), Model(-1000.0)
            if change is halve:
                trained.to(torch.bfloat16)
                served.to(torch.bfloat16)
            with connect_engine(served, url), connect(trained, url, setting) as trainer:
                setting.publish(trainer, url, 0)
                assert served_equals(served, trained)
                before = {n: t.clone() for n, t in served.state_dict().items()}
                change(trained)
                with pytest.raises(RoundAborted, match=why):
                    setting.publish(trainer, url, 1)
                assert all(torch.equal(t, before[n]) for n, t in served.state_dict().items())

        await with_controller(setting.config, work)


def register_anew(model: Model) -> None:
    """Register both parameters in the opposite order, at new addresses."""
    gate, up = model.gate.weight.detach().clone(), model.up.weight.detach().clone()
    del model.gate.weight, model.up.weight
    model.up.weight, model.gate.weight = torch.nn.Parameter(up), torch.nn.Parameter(gate)


def swap_gate_and_up(model: Model) -> None:
    model.gate, model.up = model.up, model.gate


def swap_their_weights(model: Model) -> None:
    model.gate.weight, model.up.weight = model.up.weight, model.gate.weight


def reverse_the_modules(model: Model) -> None:
    model._modules = dict(reversed(model._modules.items()))


def move(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize(
    "change",
    [register_anew, swap_gate_and_up, swap_their_weights, reverse_the_modules, move],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("name", ["publish", "copy", "xccl"])
async def test_moved_parameters_are_found_by_name(
    change: Callable[[Model], None], name: str, tmp_path: Path
) -> None:
    setting = settings(tmp_path)[name]

    def work(url: str) -> None:
        trained, served = Model(1.0), Model(-1000.0)
        with connect_engine(served, url), connect(trained, url, setting) as trainer:
            for version in range(3):
                setting.publish(trainer, url, version)
                assert served_equals(served, trained)
                change(trained)

    await with_controller(setting.config, work)


@pytest.mark.parametrize("name", ["publish", "staged", "xccl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_five_dims_and_gaps_between_rows_reach_the_engine(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    setting = settings(tmp_path)[name]

    def work(url: str) -> None:
        trained, served = Model(1.0), Model(-1000.0, with_gaps=True)
        # The update casts if the engine's dtype differs.
        trained.to(dtype)
        with connect_engine(served, url), connect(trained, url, setting) as trainer:
            for version in range(2):
                trained.refill(7.0 * version)
                setting.publish(trainer, url, version)
                assert served_equals(served, trained)
                for linear in (served.gate, served.up):
                    gaps = linear.weight.detach().as_strided((5, 3), (11, 1), 8)
                    assert bool((gaps == -5.0).all())

    await with_controller(setting.config, work)


@pytest.mark.parametrize("name", ["publish", "staged", "xccl", "disk"])
@pytest.mark.parametrize("arena_nbytes", [0, 256])
async def test_a_parameter_written_during_its_update_is_not_published(
    name: str, arena_nbytes: int, tmp_path: Path
) -> None:
    setting = settings(tmp_path)[name]
    setting.arena_nbytes = arena_nbytes

    def work(url: str) -> None:
        trained, served = Model(1.0), Model(-1000.0)
        trained.to(torch.bfloat16)
        steps = threading.Event()

        def step() -> None:
            if steps.is_set():
                with torch.no_grad():
                    trained.up.weight[2, 3] += 1.0

        with connect_engine(served, url), connect(trained, url, setting, step) as trainer:
            setting.publish(trainer, url, 0)
            assert served_equals(served, trained)
            steps.set()
            with pytest.raises(RoundAborted, match=r"'up.weight' changed while its version"):
                setting.publish(trainer, url, 1)

    await with_controller(setting.config, work)
