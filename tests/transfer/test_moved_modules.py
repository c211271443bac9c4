"""A module may be moved, cast and restored between versions: a round keeps none of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from test_layout_changes import TOKEN, Model, connect_engine, served_equals, with_controller
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

import windlass
from windlass.backends.collective_group import Rendezvous
from windlass.config import ControlConfig, ReplicaPlace
from windlass.errors import PlanError, UnsupportedLayout
from windlass.transfer.dtensor import check_memory

Step = Callable[[Model], object]


@pytest.fixture
def process_group() -> Iterator[None]:
    store = Rendezvous("127.0.0.1", 20.0).store
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def swapping() -> Iterator[None]:
    """Make `Module.to` swap the tensors of plain modules, as it does with DTensors."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def fsdp2() -> Model:
    model = Model(1.0)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def tensor_parallel() -> Model:
    mesh = init_device_mesh("cpu", (1,))
    plan: dict[str, ParallelStyle] = {"gate": ColwiseParallel(), "up": ColwiseParallel()}
    parallelize_module(model := Model(1.0), mesh, plan)
    return model


def make_and_restore(change: Step) -> Step:
    def both(model: Model) -> None:
        kept = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        change(model)
        model.to(torch.float32)
        model.load_state_dict(kept)

    return both


def swap_each(model: Model) -> None:
    for parameter in model.parameters():
        fresh = torch.nn.Parameter(parameter.detach().clone())
        torch.utils.swap_tensors(parameter, fresh)  # type: ignore[no-untyped-call]


CHANGES: dict[str, Step] = {
    "cpu": lambda model: model.cpu(),
    "to": lambda model: model.to("cpu", torch.float32),
    "half": make_and_restore(lambda model: model.half()),
    "bfloat16": make_and_restore(lambda model: model.to(torch.bfloat16)),
    "to_empty": make_and_restore(lambda model: model.to_empty(device="cpu")),
    "swap_tensors": swap_each,
}


def whole(model: Model) -> Model:
    """Return a plain model with the same values."""
    plain = Model(0.0)
    values = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    plain.load_state_dict(values)
    return plain


async def publish_around(model: Model, change: Step, replica: ReplicaPlace) -> None:
    """Publish, change the module, and publish again."""

    def work(url: str) -> None:
        served = Model(-1000.0)
        with (
            connect_engine(served, url),
            windlass.connect_trainer(
                model, controller=url, token=TOKEN, transport="cma", replica=replica
            ) as trainer,
        ):
            for version in range(3):
                trainer.publish(version, deadline_s=20)
                assert served_equals(served, whole(model))
                change(model)
                with torch.no_grad():
                    for tensor in model.parameters():
                        tensor.add_(1.0)

    await with_controller(ControlConfig(), work)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("replica", [ReplicaPlace.OFF, ReplicaPlace.HOST])
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("make", [fsdp2, tensor_parallel])
async def test_a_sharded_module_is_moved_and_cast_between_versions(
    make: Callable[[], Model], change: str, replica: ReplicaPlace
) -> None:
    """After one version `model.cpu()` raised "Cannot swap t1 because it has weakref associated with
    it".
    """
    await publish_around(make(), CHANGES[change], replica)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("swapping")
async def test_a_plain_module_may_swap_its_tensors_between_versions(
    change: str,
) -> None:
    await publish_around(Model(1.0), CHANGES[change], ReplicaPlace.OFF)


def negative(tensor: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(tensor)


def test_a_tensor_with_the_negative_bit_is_refused_by_name() -> None:
    """A tensor with torch's negative bit was published with the wrong sign and a right digest."""
    model = Model(1.0)
    model.up.weight = torch.nn.Parameter(negative(model.up.weight.detach()))
    with pytest.raises(
        UnsupportedLayout,
        match=r"parameter 'up.weight': .*negative bit; publish `tensor.resolve_neg",
    ):
        windlass.connect_trainer(model, controller="http://127.0.0.1:9", token=TOKEN)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", ["plain", "dtensor"])
async def test_a_tensor_that_gets_a_negative_bit_after_connect_is_refused_by_name(
    kind: str,
) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def made(values: torch.Tensor) -> torch.nn.Parameter:
        if kind == "plain":
            return torch.nn.Parameter(values)
        return torch.nn.Parameter(DTensor.from_local(values, mesh, [Shard(0)]))

    def work(url: str) -> None:
        model, served = Model(1.0), Model(-1000.0)
        weight = model.up.weight.detach().clone()
        model.up.weight = made(weight)
        with (
            connect_engine(served, url),
            windlass.connect_trainer(
                model, controller=url, token=TOKEN, transport="cma"
            ) as trainer,
        ):
            trainer.publish(0, deadline_s=20)
            model.up.weight = made(negative(weight))
            with pytest.raises(windlass.WindlassError, match=r"'up.weight': .*negative bit"):
                trainer.publish(1, deadline_s=20)

    await with_controller(ControlConfig(), work)


@pytest.mark.usefixtures("process_group")
async def test_a_change_of_a_gathered_copy_is_refused() -> None:
    """FSDP2 drops such a change when it reshards, so the version was published without it."""

    def work(url: str) -> None:
        model, served = fsdp2(), Model(-1000.0)

        def connect() -> windlass.TrainerClient:
            return windlass.connect_trainer(model, controller=url, token=TOKEN, transport="cma")

        def change() -> None:
            model.unshard()  # type: ignore[operator]
            with torch.no_grad():
                model.gate.weight.add_(1.0)

        refused = r"parameter 'gate.weight': must be changed while it is sharded.*reshard"
        with connect_engine(served, url), connect() as trainer:
            model.unshard()  # type: ignore[operator]
            trainer.publish(0, deadline_s=20)
            change()
            with pytest.raises(windlass.RoundAborted, match=refused):
                trainer.publish(1, deadline_s=20)
            with pytest.raises(PlanError, match=refused):
                connect()
            model.reshard()  # type: ignore[operator]
            # The gathered copy still counts one change, but has the values of the shards again.
            model.unshard()  # type: ignore[operator]
            trainer.publish(2, deadline_s=20)
            assert served_equals(served, whole(model))

    await with_controller(ControlConfig(), work)


class Running(Model):
    """Model with a forward pass that `during` interrupts while the parameters are gathered."""

    during: Step | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.gate(x)
        if self.during is not None:
            self.during(self)
        result: torch.Tensor = self.square(hidden * self.up(x))
        return result


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.usefixtures("process_group")
async def test_an_update_does_not_disturb_a_forward_pass(reshard_after_forward: bool) -> None:
    """An agent's thread resharded the modules of the running forward pass, which failed."""

    def work(url: str) -> None:
        model, served, x = Running(1.0), Model(-1000.0), torch.ones(2, 8)
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (1,)),
            reshard_after_forward=reshard_after_forward,
        )
        with (
            connect_engine(served, url),
            windlass.connect_trainer(
                model, controller=url, token=TOKEN, transport="cma"
            ) as trainer,
        ):
            expected = model(x).detach()
            for version in range(2):
                pending = trainer.publish(version, wait=False, deadline_s=20)
                model.during = lambda _, pending=pending: pending.result(deadline_s=20)
                assert torch.equal(model(x), expected)
                assert served_equals(served, whole(model))
                model.during = None

    await with_controller(ControlConfig(), work)


def test_tensors_whose_memory_differs_from_their_values_are_refused() -> None:
    values = torch.arange(12.0)
    complex_values = torch.zeros(4, dtype=torch.complex64)
    for tensor in (
        complex_values.conj(),
        complex_values.conj().imag,
        torch._efficientzerotensor((4,)),
        values.reshape(3, 4).to_sparse(),
        torch.empty(4, device="meta"),
        torch.nested.nested_tensor([values[:2], values[:3]], layout=torch.jagged),
    ):
        with pytest.raises(UnsupportedLayout, match="'w'"):
            check_memory("w", tensor)
    with torch.inference_mode():
        check_memory("w", torch.ones(4))
