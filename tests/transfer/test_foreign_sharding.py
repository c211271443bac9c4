"""Parameters cut by FSDP1 or DeepSpeed ZeRO-3 are refused with a remedy, and published once whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_layout_changes import TOKEN, Model, connect_engine, served_equals, with_controller
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import windlass
from windlass.backends.collective_group import Rendezvous
from windlass.config import ControlConfig
from windlass.errors import RoundAborted, UnsupportedLayout
from windlass.layout.manifest import Role
from windlass.trainers.fsdp import describe_trainer
from windlass.transfer.dtensor import describe_module

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]


def wrapped(
    strategy: ShardingStrategy, *, original: bool, model: torch.nn.Module | None = None
) -> Fsdp1:
    return Fsdp1(
        model or Model(1.0),
        sharding_strategy=strategy,
        use_orig_params=original,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        device_id=torch.device("cpu"),
    )


def bare(name: str) -> str | None:
    return None if "_flat_param" in name else name.replace("_fsdp_wrapped_module.", "")


@pytest.fixture
def two_fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = Rendezvous("127.0.0.1", 20.0).store
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name_map", [None, bare], ids=["names_as_they_are", "bare_names"])
@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=str)
@pytest.mark.usefixtures("two_fake_ranks")
def test_parameters_that_fsdp1_has_cut_are_refused_by_its_name(
    strategy: ShardingStrategy, original: bool, name_map: Callable[[str], str | None] | None
) -> None:
    module = torch.nn.Sequential(wrapped(strategy, original=original))
    with pytest.raises(
        UnsupportedLayout, match=r"module '0': .*FSDP1.*`fully_shard`.*summon_full_params"
    ):
        describe_module(module, "trainer/0", Role.TRAINER, name_map=name_map)


@pytest.mark.parametrize("name_map", [None, bare], ids=["names_as_they_are", "bare_names"])
@pytest.mark.parametrize("original", [True, False])
@pytest.mark.usefixtures("one_rank")
async def test_parameters_that_fsdp1_has_gathered_are_published(
    original: bool, name_map: Callable[[str], str | None] | None
) -> None:
    plain = Model(1.0)
    module = wrapped(ShardingStrategy.FULL_SHARD, original=original, model=Model(1.0))

    def work(url: str) -> None:
        served = Model(-1000.0)
        with Fsdp1.summon_full_params(module):
            trainer = windlass.connect_trainer(
                module, controller=url, token=TOKEN, transport="cma", name_map=name_map
            )
        with connect_engine(served, url), trainer:
            for version in range(2):
                with torch.no_grad():
                    for tensor in plain.parameters():
                        tensor.add_(1.0)
                with Fsdp1.summon_full_params(module), torch.no_grad():
                    for name, tensor in module.named_parameters():
                        if "_flat_param" not in name:
                            tensor.add_(1.0)
                    trainer.publish(version, deadline_s=20)
                assert served_equals(served, plain)

    await with_controller(ControlConfig(), work)


def check_two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        for original in (True, False):
            module = wrapped(ShardingStrategy.FULL_SHARD, original=original)
            plain = describe_module(Model(1.0), f"trainer/{rank}", Role.TRAINER)
            with Fsdp1.summon_full_params(module):
                weights = describe_trainer(module, group="trainer", name_map=None)
                weights.parameters()
            assert {t.name: t.shape for t in weights.manifest.tensors} == {
                t.name: t.shape for t in plain.tensors
            }
            with pytest.raises(UnsupportedLayout, match="FSDP1"):
                weights.parameters()
            with Fsdp1.summon_full_params(module):
                weights.parameters()
    finally:
        dist.destroy_process_group()


def test_fsdp1_is_named_when_a_version_is_published_outside_of_its_context(tmp_path: Path) -> None:
    mp.spawn(check_two_ranks, (str(tmp_path),), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]


def placeholder(parameter: torch.Tensor) -> torch.Tensor:
    """Turn a parameter into DeepSpeed's placeholder between two uses, and return its values."""
    values = parameter.detach().clone()
    parameter.ds_id, parameter.ds_shape = 7, parameter.shape  # type: ignore[attr-defined]
    parameter.data = torch.empty(0)
    return values


def test_placeholder_of_zero_3_is_refused_by_its_name() -> None:
    model = Model(1.0)
    placeholder(model.gate.weight)
    with pytest.raises(
        UnsupportedLayout,
        match=r"'gate.weight'.*DeepSpeed ZeRO-3.*GatheredParameters.*`fully_shard`",
    ):
        describe_module(model, "trainer/0", Role.TRAINER)


async def test_parameters_that_zero_3_has_gathered_are_published() -> None:
    model = Model(1.0)

    def work(url: str) -> None:
        served = Model(-1000.0)
        values = placeholder(model.gate.weight)
        model.gate.weight.data = values
        with (
            connect_engine(served, url),
            windlass.connect_trainer(
                model, controller=url, token=TOKEN, transport="cma"
            ) as trainer,
        ):
            trainer.publish(0, deadline_s=20)
            assert served_equals(served, model)
            model.gate.weight.data = torch.empty(0)
            with pytest.raises(RoundAborted, match=r"DeepSpeed ZeRO-3.*GatheredParameters"):
                trainer.publish(1, deadline_s=20)
            model.gate.weight.data = values + 1
            trainer.publish(2, deadline_s=20)
            assert served_equals(served, model)

    await with_controller(ControlConfig(), work)
