"""Updates continue whatever happens to trainer tensors that no engine takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flat_engine import flat_engine

import windlass
from windlass.config import ControlConfig, DiskBackend, ReplicaPlace, UpdateMode, XcclBackend
from windlass.errors import RoundAborted, UnsupportedLayout
from windlass.trainers.client import TrainerClient
from windlass.trainers.fsdp import describe_trainer
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport

TOKEN = "t" * 32
READ = ("up.weight", "up.bias", "down.weight")


class Model(torch.nn.Module):
    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 6)
        self.down = torch.nn.Linear(6, 8, bias=False)
        self.value_head = torch.nn.Linear(6, 1)
        self.register_buffer("counts", torch.arange(4.0))

    def step(self) -> None:
        with torch.no_grad():
            self.up.weight.add_(0.5)


def grow(model: Model) -> None:
    model.counts = torch.cat([model.counts, model.counts])


def appear(model: Model) -> None:
    model.register_buffer("seen", torch.zeros(3))


def count(model: Model) -> None:
    model.counts = model.counts.long()


def vanish(model: Model) -> None:
    del model.counts


def free(model: Model) -> None:
    model.counts.untyped_storage().resize_(0)


def put_on_meta(model: Model) -> None:
    model.counts = model.counts.to("meta")


def make_sparse(model: Model) -> None:
    model.counts = model.counts.to_sparse()


def make_complex(model: Model) -> None:
    model.counts = torch.ones(4, dtype=torch.complex64)


def negate(model: Model) -> None:
    model.counts = torch._neg_view(model.counts)


def cast_head(model: Model) -> None:
    model.value_head.to(torch.bfloat16)


def free_head(model: Model) -> None:
    for parameter in model.value_head.parameters():
        parameter.untyped_storage().resize_(0)


def put_head_on_meta(model: Model) -> None:
    model.value_head.to("meta")


def remove_head(model: Model) -> None:
    del model.value_head


def transpose_head(model: Model) -> None:
    model.value_head.weight = torch.nn.Parameter(torch.zeros(1, 12)[:, ::2])


BUFFER_CHANGES = (
    grow, appear, count, vanish, free, put_on_meta, make_sparse, make_complex, negate,
)  # fmt: skip
HEAD_CHANGES = (cast_head, free_head, put_head_on_meta, remove_head, transpose_head)
Change = Callable[[Model], None]


def named(change: object) -> str:
    return getattr(change, "__name__", "values")


def ways(folder: Path) -> dict[str, tuple[ControlConfig, ReplicaPlace]]:
    return {
        "in_place": (ControlConfig(), ReplicaPlace.OFF),
        "staged": (ControlConfig(mode=UpdateMode.STAGED), ReplicaPlace.OFF),
        "replica": (ControlConfig(), ReplicaPlace.HOST),
        "xccl": (ControlConfig(backend=XcclBackend()), ReplicaPlace.OFF),
        "disk": (ControlConfig(backend=DiskBackend(str(folder))), ReplicaPlace.OFF),
    }


async def publish_around(
    model: Model,
    change: Change,
    way: tuple[ControlConfig, ReplicaPlace] = (ControlConfig(), ReplicaPlace.OFF),
    names: tuple[str, ...] = READ,
) -> None:
    """Publish, change the model, publish again, and check the engine's tensors."""
    config, replica = way
    async with windlass.Controller(token=TOKEN, config=config) as controller:

        def run() -> None:
            like = {name: model.get_parameter(name).detach() for name in names}
            with (
                flat_engine(controller.url, TOKEN, like) as held,
                windlass.connect_trainer(
                    model,
                    controller=controller.url,
                    token=TOKEN,
                    transport="cma",
                    replica=replica,
                    allow_unused=("value_head.*",),
                ) as trainer,
            ):
                for version in range(3):
                    trainer.publish(version, deadline_s=20)
                    for name, tensor in held.items():
                        assert torch.equal(tensor, model.get_parameter(name).detach()), name
                    model.step()
                    if version == 0:
                        change(model)

        await asyncio.to_thread(run)


@pytest.mark.parametrize("change", [*BUFFER_CHANGES, *HEAD_CHANGES], ids=named)
async def test_tensor_that_no_engine_takes_may_change_between_versions(change: Change) -> None:
    await publish_around(Model(), change)


@pytest.mark.parametrize("way", ways(Path("/")))
async def test_tensors_that_no_engine_takes_may_change_in_every_way_to_publish(
    way: str, tmp_path: Path
) -> None:
    def change(model: Model) -> None:
        grow(model)
        appear(model)
        free_head(model)

    await publish_around(Model(), change, ways(tmp_path)[way])


@pytest.mark.parametrize("change", [put_on_meta, make_sparse, make_complex, negate], ids=named)
async def test_buffer_that_cannot_be_sent_does_not_stop_a_trainer_from_connecting(
    change: Change,
) -> None:
    model = Model()
    change(model)
    await publish_around(model, grow)


def test_parameter_that_cannot_be_sent_is_refused_by_name() -> None:
    model = Model()
    model.up.weight = torch.nn.Parameter(model.up.weight.detach().to(torch.complex64))
    with pytest.raises(UnsupportedLayout, match=r"up\.weight"):
        windlass.connect_trainer(model, controller="http://127.0.0.1:9", token=TOKEN)


@pytest.mark.parametrize("change", [cast_head, remove_head, put_head_on_meta], ids=named)
async def test_a_tensor_that_an_engine_takes_must_stay_available(change: Change) -> None:
    with pytest.raises(RoundAborted, match=r"value_head.*(connect again|meta device)"):
        await publish_around(Model(), change, names=(*READ, "value_head.weight"))


async def test_write_to_an_unread_buffer_does_not_stop_the_update_under_way() -> None:
    model = Model()
    async with windlass.Controller(token=TOKEN) as controller:

        def run() -> None:
            like = {name: model.get_parameter(name).detach() for name in READ}
            with (
                flat_engine(controller.url, TOKEN, like),
                windlass.connect_trainer(
                    model, controller=controller.url, token=TOKEN, allow_unused=("value_head.*",)
                ) as trainer,
            ):
                for version in range(3):
                    pending = trainer.publish(version, deadline_s=20, wait=False)
                    model.counts.add_(1.0)
                    pending.result(deadline_s=20)

        await asyncio.to_thread(run)


def connect_rank(model: Model, url: str, rank: int, undo: ExitStack) -> TrainerClient:
    weights = describe_trainer(model, group="trainer", name_map=None)
    client = TrainerClient(
        replace(
            weights,
            manifest=replace(weights.manifest, worker=f"trainer/{rank}"),
            allow_unused=(*weights.allow_unused, "value_head.*"),
        ),
        transport=create_transport(CmaConfig()),
        controller=url,
        token=TOKEN,
        job="job",
        world_size=2,
    )
    return undo.enter_context(client)


@pytest.mark.parametrize("change", [count, grow, vanish, make_complex, None], ids=named)
async def test_tensors_that_no_engine_takes_may_differ_between_ranks(change: Change | None) -> None:
    models = [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    if change is None:
        models[1].counts.add_(1.0)
        models[1].value_head.weight.data.add_(1.0)
    else:
        change(models[1])
    async with windlass.Controller(token=TOKEN) as controller:

        def run() -> None:
            with ExitStack() as undo:
                like = {name: models[0].get_parameter(name).detach() for name in READ}
                held = undo.enter_context(flat_engine(controller.url, TOKEN, like))
                ranks = [connect_rank(m, controller.url, i, undo) for i, m in enumerate(models)]
                for version in range(2):
                    pending = [rank.publish(version, deadline_s=20, wait=False) for rank in ranks]
                    for each in pending:
                        assert each.result(deadline_s=20).compared
                    for name, tensor in held.items():
                        assert torch.equal(tensor, models[0].get_parameter(name).detach())
                    for model in models:
                        model.step()

        await asyncio.to_thread(run)


async def test_tensors_that_an_engine_takes_must_not_differ_between_ranks() -> None:
    models = [Model(), Model()]
    async with windlass.Controller(token=TOKEN) as controller:

        def run() -> None:
            with ExitStack() as undo:
                like = {name: models[0].get_parameter(name).detach() for name in READ}
                undo.enter_context(flat_engine(controller.url, TOKEN, like))
                ranks = [connect_rank(m, controller.url, i, undo) for i, m in enumerate(models)]
                pending = [rank.publish(0, deadline_s=20, wait=False) for rank in ranks]
                for each in pending:
                    with pytest.raises(RoundAborted, match="hold the same box"):
                        each.result(deadline_s=20)

        await asyncio.to_thread(run)
