"""Trainers of a part of a model: engines keep only the tensors that the trainers declare missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from flat_engine import flat_engine

import windlass
from windlass.config import (
    ControlConfig,
    DiskBackend,
    PauseMode,
    PushBackend,
    UpdateMode,
    XcclBackend,
)
from windlass.control.connect_messages import ConnectEngine
from windlass.control.engine_agent import EngineAgent
from windlass.control.messages import Abort, BeginDriven, Pause, Publish
from windlass.control.recovery import CatchUps
from windlass.errors import ConfigError, PlanError, RoundAborted
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.planner import plan_transfer
from windlass.planning.unused import find_kept
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer.dtensor import describe_module, parameter_addresses
from windlass.transfer.receiver import Receiver
from windlass.transports.registry import create_transport, parse_transport

TOKEN = "t" * 32
T = TypeVar("T")


class Text(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 6)
        self.down = torch.nn.Linear(6, 8, bias=False)


def served(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    like = {name: tensor.detach() for name, tensor in model.named_parameters()}
    tower = {f"visual.blocks.{i}.weight": torch.zeros(4, 4) for i in range(3)}
    return {**like, **tower, "projector.weight": torch.zeros(4, 8)}


Report = windlass.UpdateReport


async def published(
    keep: Sequence[str],
    *,
    config: ControlConfig | None = None,
    model: torch.nn.Module | None = None,
    between: Callable[[dict[str, torch.Tensor]], None] = lambda held: None,
) -> list[Report]:
    """Publish two versions of a text model to a larger engine, and check all its tensors."""
    model = model or Text()
    async with windlass.Controller(token=TOKEN, config=config or ControlConfig()) as controller:

        def run() -> list[Report]:
            reports: list[Report] = []
            with ExitStack() as undo:
                held = undo.enter_context(flat_engine(controller.url, TOKEN, served(model)))
                for index, tensor in enumerate(held.values()):
                    tensor.fill_(index + 0.5)
                before = {name: tensor.clone() for name, tensor in held.items()}
                trainer = undo.enter_context(
                    windlass.connect_trainer(
                        model, controller=controller.url, token=TOKEN, transport="cma", keep=keep
                    )
                )
                trained = dict(model.named_parameters())
                for version in range(2):
                    reports.append(trainer.publish(version, deadline_s=20).result())
                    for name, tensor in held.items():
                        want = trained[name].detach() if name in trained else before[name]
                        assert torch.equal(tensor, want), name
                    between(held)
                    with torch.no_grad():
                        model.get_parameter("up.weight").add_(1.0)
            return reports

        return await asyncio.to_thread(run)


def configs(folder: Path) -> dict[str, ControlConfig]:
    return {
        "in_place": ControlConfig(),
        "staged": ControlConfig(mode=UpdateMode.STAGED),
        "xccl": ControlConfig(backend=XcclBackend()),
        "disk": ControlConfig(backend=DiskBackend(str(folder))),
    }


@pytest.mark.parametrize("way", configs(Path("/")))
async def test_engines_keep_the_tensors_that_the_trainer_names(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reports = await published(["visual.*", "projector.weight"], config=configs(tmp_path)[way])
    assert [r.kept for r in reports] == [{"visual.blocks.*.weight": 3, "projector.weight": 1}] * 2
    lines = [r.getMessage() for r in caplog.records if "engines keep" in r.getMessage()]
    assert lines == ["engines keep 'projector.weight', 3 of 'visual.blocks.*.weight' as they are"]


async def test_tensor_that_no_pattern_names_must_have_a_source() -> None:
    with pytest.raises(
        RoundAborted, match=r"no source has these tensors of engine/0: 'projector.weight'"
    ):
        await published(["visual.*"])


async def test_refusal_of_missing_tensors_advises_to_keep_them() -> None:
    with pytest.raises(
        RoundAborted, match=r"keep=\('projector.weight', 'visual.blocks.\*.weight',\)"
    ):
        await published([])


async def test_tensor_that_the_trainer_has_is_sent_despite_keep_patterns() -> None:
    reports = await published(["*"])
    assert sum(reports[-1].kept.values()) == 4


def test_other_name_of_a_tied_tensor_is_not_kept() -> None:
    """Trainers have the tensor under its own name, so the engine does not keep it."""

    def manifest(worker: str, role: Role, *names: str) -> ShardManifest:
        builder = ManifestBuilder(worker, role)
        for name in names:
            builder.add_parameter(name, nbytes=16, dtype=DType.FLOAT32)
            builder.add_shard(name, (2, 2), Box.full((2, 2)), name)
        if role is Role.ENGINE:
            builder.add_alias("head", "embed")
        return builder.build()

    source = manifest("trainer/0", Role.TRAINER, "embed")
    engine = manifest("engine/0", Role.ENGINE, "embed", "visual")
    assert find_kept([source], [engine], ["*"]) == {"visual"}


async def test_kept_tensor_that_something_else_changes_refuses_the_update() -> None:
    def write(held: dict[str, torch.Tensor]) -> None:
        held["visual.blocks.1.weight"][2, 3] = -7.0

    with pytest.raises(
        RoundAborted, match=r"visual.blocks.1.weight.* must not change after the trainers connected"
    ):
        await published(["visual.*", "projector.*"], between=write)


async def test_a_trainer_publishes_only_the_trainable_half() -> None:
    """The trainer's module does not contain the frozen half."""
    model = Text()
    half = torch.nn.Module()
    half.up = model.up

    async with windlass.Controller(token=TOKEN) as controller:

        def run() -> None:
            with (
                flat_engine(controller.url, TOKEN, served(model)) as held,
                windlass.connect_trainer(
                    half,
                    controller=controller.url,
                    token=TOKEN,
                    keep=("down.*", "visual.*", "projector.*"),
                ) as trainer,
            ):
                trainer.publish(0, deadline_s=20)
                assert torch.equal(held["up.weight"], model.up.weight.detach())
                assert (held["down.weight"] == 1).all()

        await asyncio.to_thread(run)


TOWER = ("visual.*", "projector.*")


def distinct(held: dict[str, torch.Tensor], first: float) -> dict[str, torch.Tensor]:
    """Give every element of an engine a value of its own, from `first` on; return copies of the tensors."""
    for tensor in held.values():
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + first)
        first += tensor.numel()
    return {name: tensor.clone() for name, tensor in held.items()}


class Whole(torch.nn.Module):
    """Trainer's model with all tensors of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        for name, tensor in served(Text()).items():
            own = name.replace(".", "_")
            self.names[own] = name
            values = torch.arange(tensor.numel()).view_as(tensor) + 100.0 * len(self.names)
            self.register_parameter(own, torch.nn.Parameter(values))


@asynccontextmanager
async def entered(opened: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter a block whose calls wait for the controller in this loop."""
    found = await asyncio.to_thread(opened.__enter__)
    try:
        yield found
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)


def trainer_of(model: torch.nn.Module, url: str, *keep: str) -> windlass.TrainerClient:
    names = model.names.__getitem__ if isinstance(model, Whole) else None
    return windlass.connect_trainer(model, controller=url, token=TOKEN, keep=keep, name_map=names)


@pytest.mark.parametrize("later", ["no trainer", "keeps less", "keeps more"])
async def test_catch_up_leaves_kept_tensors_of_the_newcomer_unchanged(later: str) -> None:
    """The catch-up copies the donor's version, so the tensors that later trainers keep do not matter."""
    published = Whole() if later == "keeps more" else Text()
    async with windlass.Controller(token=TOKEN) as controller, AsyncExitStack() as stack:
        url = controller.url
        donor = await stack.enter_async_context(
            entered(flat_engine(url, TOKEN, served(Text()), name="donor"))
        )
        distinct(donor, 1000.0)
        first = await asyncio.to_thread(trainer_of, published, url, *TOWER)
        async with entered(first):
            await asyncio.to_thread(first.publish, 0, deadline_s=20)
        if later != "no trainer":
            other = Whole() if later == "keeps less" else Text()
            await stack.enter_async_context(
                entered(await asyncio.to_thread(trainer_of, other, url, *TOWER))
            )
        await check_newcomer(stack, controller, donor, published)


async def test_catch_up_copies_kept_tensors_that_earlier_trainers_have_written() -> None:
    """The first trainers publish the whole model. The later ones train only a part, and the rest must not be lost."""
    whole, text = Whole(), Text()
    async with windlass.Controller(token=TOKEN) as controller, AsyncExitStack() as stack:
        url = controller.url
        donor = await stack.enter_async_context(
            entered(flat_engine(url, TOKEN, served(text), name="donor"))
        )
        for version, model in enumerate((whole, text)):
            async with entered(await asyncio.to_thread(trainer_of, model, url, *TOWER)) as trainer:
                await asyncio.to_thread(trainer.publish, version, deadline_s=20)
        assert torch.equal(donor["up.weight"], text.up.weight.detach())
        assert torch.equal(
            donor["visual.blocks.1.weight"], whole.get_parameter("visual_blocks_1_weight").detach()
        )
        await check_newcomer(stack, controller, donor, whole)


async def test_status_names_tensors_with_old_values_after_an_update_without_a_catch_up() -> None:
    """The first engine cannot send its weights, so the second engine cannot catch up from it."""
    whole, text = Whole(), Text()
    async with windlass.Controller(token=TOKEN) as controller, AsyncExitStack() as stack:

        async def joined(name: str) -> None:
            block = flat_engine(controller.url, TOKEN, served(text), name=name, can_send=False)
            await stack.enter_async_context(entered(block))

        await joined("first")
        async with entered(
            await asyncio.to_thread(trainer_of, whole, controller.url, *TOWER)
        ) as trainer:
            await asyncio.to_thread(trainer.publish, 0, deadline_s=20)
        await joined("second")
        trainer = await stack.enter_async_context(
            entered(await asyncio.to_thread(trainer_of, text, controller.url, *TOWER))
        )
        await asyncio.to_thread(trainer.publish, 1, deadline_s=20)
        reasons = {state.name: state.reason for state in controller.coordinator.fleet.states()}
        assert reasons["first"] == ""
        assert "it may have old values of " in reasons["second"]
        assert "3 of 'visual.blocks.*.weight'" in reasons["second"]


async def test_update_by_trainers_of_a_part_follows_a_catch_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update begins before the catch-up of a new engine. The trainers do not have all tensors of earlier versions."""
    monkeypatch.setattr(CatchUps, "bring_up_soon", lambda _self: None)
    whole, text = Whole(), Text()
    async with windlass.Controller(token=TOKEN) as controller, AsyncExitStack() as stack:

        async def joined(name: str) -> dict[str, torch.Tensor]:
            block = flat_engine(controller.url, TOKEN, served(text), name=name)
            return await stack.enter_async_context(entered(block))

        first = await joined("first")
        async with entered(
            await asyncio.to_thread(trainer_of, whole, controller.url, *TOWER)
        ) as trainer:
            await asyncio.to_thread(trainer.publish, 0, deadline_s=20)
        second = await joined("second")
        trainer = await stack.enter_async_context(
            entered(await asyncio.to_thread(trainer_of, text, controller.url, *TOWER))
        )
        published = await asyncio.to_thread(trainer.publish, 1, deadline_s=20)
        assert published.result().engines == ("first", "second")
        for key, tensor in second.items():
            assert torch.equal(tensor, first[key]), key
        assert torch.equal(first["up.weight"], text.up.weight.detach())
        assert (
            first["visual.blocks.1.weight"][1, 2]
            == whole.get_parameter("visual_blocks_1_weight")[1, 2]
        )


async def test_catch_up_from_a_donor_of_an_earlier_controller_copies_no_kept_tensor(
    tmp_path: Path,
) -> None:
    journal, model = tmp_path / "journal", Text()
    async with AsyncExitStack() as stack:
        async with windlass.Controller(token=TOKEN, journal_path=journal) as controller:
            url = controller.url
            donor = await stack.enter_async_context(
                entered(flat_engine(url, TOKEN, served(model), name="donor"))
            )
            distinct(donor, 1000.0)
            async with entered(await asyncio.to_thread(trainer_of, model, url, *TOWER)) as trainer:
                await asyncio.to_thread(trainer.publish, 0, deadline_s=20)
        port = int(url.rpartition(":")[2])
        async with windlass.Controller(token=TOKEN, port=port, journal_path=journal) as controller:
            await controller.wait_for_version(0, engines=["donor"], deadline_s=30)
            await check_newcomer(stack, controller, donor, model)
            await stack.aclose()


async def check_newcomer(
    stack: AsyncExitStack,
    controller: windlass.Controller,
    donor: dict[str, torch.Tensor],
    published: torch.nn.Module,
) -> None:
    """Let an engine catch up, and another engine from it. Check that only published tensors were copied."""
    names = published.names if isinstance(published, Whole) else {}
    trained = {names.get(name, name) for name, _ in published.named_parameters()}
    for number in range(2):
        name = f"newcomer{number}"
        block = flat_engine(controller.url, TOKEN, served(Text()), name=name)
        newcomer = await stack.enter_async_context(entered(block))
        version = controller.coordinator.fleet.published
        await controller.wait_for_version(version, engines=[name], deadline_s=20)
        for key, tensor in newcomer.items():
            want = donor[key] if key in trained else torch.ones_like(tensor)
            assert torch.equal(tensor, want), key


@contextmanager
def agent_of(
    model: torch.nn.Module, *, mixed_weights: bool = False
) -> Iterator[tuple[EngineAgent, Callable[..., None]]]:
    """Yield the agent of an engine, and a function that binds a plan in which the engine keeps some tensors."""
    manifest = describe_module(model, "engine/0", Role.ENGINE)
    source = describe_module(model, "trainer/0", Role.TRAINER)
    addresses = parameter_addresses(model)
    transport = create_transport(parse_transport("cma"))
    spans = zip(addresses, manifest.parameters, strict=True)
    regions = [transport.register(address, spec.nbytes) for address, spec in spans]
    receiver = Receiver(transport, manifest, addresses, regions)
    agent = EngineAgent(receiver, RestingEngine(), mixed_weights=mixed_weights)

    def bind(epoch: int, *kept: str) -> None:
        plan = plan_transfer([source], [manifest.without(kept)])
        plan = replace(plan, destination_digests=(manifest.digest(),))
        command = ConnectEngine(plan.encode(), "", UpdateMode.IN_PLACE, kept=kept)
        agent.handle(command, epoch=epoch, round_number=epoch)

    with ExitStack() as undo:
        undo.callback(transport.close)
        undo.callback(agent.close)
        yield agent, bind


def test_tensor_that_may_be_of_two_versions_cannot_be_kept() -> None:
    """A later round would count the weights as whole, but it would not write this tensor."""
    with agent_of(Text()) as (agent, bind):
        bind(1, "down.weight")
        agent.handle(Pause(PauseMode.ABORT, 1.0), epoch=1, round_number=2)
        agent.handle(Abort("", mixed_weights=True), epoch=1, round_number=2)
        with pytest.raises(
            PlanError, match=r"'up.bias' of engine/0 must have the values of one version"
        ):
            bind(3, "down.weight", "up.bias")
        # The aborted round has not written this tensor.
        bind(4, "down.weight")
        agent.handle(Pause(PauseMode.ABORT, 1.0), epoch=4, round_number=5)
        agent.handle(Publish(1, 1.0, ""), epoch=4, round_number=5)
        assert agent.unwritten == {"down.weight"}
        bind(6, "up.bias")


def test_new_agent_of_an_engine_with_mixed_weights_cannot_keep_tensors() -> None:
    """An agent of an earlier process has left a server without Windlass in the middle of an update."""
    with agent_of(Text(), mixed_weights=True) as (agent, bind):
        with pytest.raises(
            PlanError, match=r"'up.bias' of engine/0 must have the values of one version"
        ):
            bind(1, "up.bias")
        bind(2)
        agent.handle(Pause(PauseMode.ABORT, 1.0), epoch=2, round_number=3)
        agent.handle(Publish(1, 1.0, ""), epoch=2, round_number=3)
        assert not agent.mixed_weights
        bind(4, "up.bias")


def test_driven_round_writes_kept_tensors() -> None:
    with agent_of(Text()) as (agent, bind):
        bind(1, "down.weight")
        agent.handle(BeginDriven(PushBackend()), epoch=1, round_number=2)
        assert agent.kept == frozenset()


@pytest.mark.parametrize("keep", ["visual.*", [3], [""]])
def test_patterns_are_checked(keep: Sequence[str]) -> None:
    with pytest.raises(ConfigError, match=r"keep: must be a sequence of patterns"):
        windlass.connect_trainer(Text(), controller="http://127.0.0.1:9", token=TOKEN, keep=keep)
