"""Only an engine with exactly the trainers' weights may bring a new engine up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import msgspec
import pytest
import torch
from fake_agents import fake_hello
from flat_engine import flat_engine

import windlass
from windlass.control.donors import find_donor
from windlass.control.fleet import Agent, Group
from windlass.errors import PeerTimeout, PlanError
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.planner import plan_transfer

SHAPE = (4, 6)
TOKEN = "t" * 32


def manifest(worker: str, role: Role, dtype: DType, tensor: str = "weight") -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("p", nbytes=24 * dtype.itemsize, dtype=dtype)
    builder.add_shard(tensor, SHAPE, Box((0, 0), SHAPE), "p")
    return builder.build()


def engine(
    name: str,
    dtype: DType,
    *,
    can_send: bool = True,
    tensor: str = "weight",
    rounded: DType | None = None,
) -> Group:
    described = manifest(f"{name}/0", Role.ENGINE, dtype, tensor)
    hello = msgspec.structs.replace(
        fake_hello(described, group=name, incarnation=name),
        can_send=can_send,
        rounded={tensor: rounded} if rounded else {},
    )
    return Group(name, Role.ENGINE, 1, {0: Agent(hello, described)})


def is_donor(donor: Group, newcomer: Group, trainers: Sequence[ShardManifest]) -> bool:
    try:
        return find_donor(newcomer, [donor], trainers, plan_transfer)[0] is donor
    except PlanError as error:
        return f"{donor.name} has rounded values" not in str(error)


@pytest.mark.parametrize(
    ("donor", "newcomer", "trainer", "exact"),
    [
        (DType.BFLOAT16, DType.BFLOAT16, DType.FLOAT32, True),
        (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT32, True),
        (DType.BFLOAT16, DType.FLOAT32, DType.FLOAT32, False),
        (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, False),
        (DType.BFLOAT16, DType.FLOAT32, DType.BFLOAT16, True),
    ],
)
def test_a_catch_up_never_rounds_weights_twice(
    donor: DType, newcomer: DType, trainer: DType, exact: bool
) -> None:
    trainers = [manifest("trainer/0", Role.TRAINER, trainer)]
    assert is_donor(engine("a", donor), engine("b", newcomer), trainers) is exact


@pytest.mark.parametrize(
    ("donor", "newcomer", "trainer", "exact"),
    [
        # Both engines round in the same way, or only the newcomer rounds.
        (DType.BFLOAT16, DType.BFLOAT16, DType.FLOAT32, True),
        (None, DType.BFLOAT16, DType.FLOAT32, True),
        # The donor rounds values that the newcomer would get unrounded.
        (DType.BFLOAT16, None, DType.FLOAT32, False),
        (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, False),
        # The rounding does not change the trainer's values.
        (DType.BFLOAT16, None, DType.BFLOAT16, True),
        (DType.BFLOAT16, DType.FLOAT16, DType.BFLOAT16, True),
    ],
)
def test_values_that_the_donor_rounds_differ_from_the_trainers(
    donor: DType | None, newcomer: DType | None, trainer: DType, exact: bool
) -> None:
    """Both engines store the tensor in float32."""
    trainers = [manifest("trainer/0", Role.TRAINER, trainer)]
    sender = engine("a", DType.FLOAT32, rounded=donor)
    receiver = engine("b", DType.FLOAT32, rounded=newcomer)
    assert is_donor(sender, receiver, trainers) is exact


def test_cast_of_values_that_the_donor_rounds_rounds_them_twice() -> None:
    trainers = [manifest("trainer/0", Role.TRAINER, DType.FLOAT32)]
    donor = engine("a", DType.FLOAT32, rounded=DType.FLOAT16)
    assert not is_donor(donor, engine("b", DType.BFLOAT16), trainers)


def test_a_catch_up_without_trainers_needs_a_donor_of_the_same_dtype() -> None:
    newcomer = engine("c", DType.BFLOAT16)
    candidates = [engine("a", DType.FLOAT32), engine("b", DType.BFLOAT16)]
    donor, plan = find_donor(newcomer, candidates, (), plan_transfer)
    assert donor.name == "b"
    assert plan.nbytes == newcomer.manifests[0].nbytes


def test_tied_tensor_that_no_update_has_written_stays_under_all_its_names() -> None:
    def tied(name: str, own: str, other: str) -> Group:
        builder = ManifestBuilder(f"{name}/0", Role.ENGINE)
        for tensor in ("weight", own):
            builder.add_parameter(tensor, nbytes=96, dtype=DType.FLOAT32)
            builder.add_shard(tensor, SHAPE, Box((0, 0), SHAPE), tensor)
        builder.add_alias(other, own)
        described = builder.build()
        hello = msgspec.structs.replace(fake_hello(described, group=name), can_send=True)
        return Group(name, Role.ENGINE, 1, {0: Agent(hello, described)})

    donor = tied("a", "embed", "head")
    donor.agents[0].unwritten = frozenset({"embed"})
    for newcomer in (tied("b", "embed", "head"), tied("c", "head", "embed")):
        _, plan = find_donor(newcomer, [donor], (), plan_transfer)
        assert {plan.tensors[index] for index in plan.ops.tensor} == {"weight"}


def test_engines_that_cannot_send_or_have_other_tensors_are_no_donors() -> None:
    candidates = [
        engine("a", DType.BFLOAT16, can_send=False),
        engine("b", DType.BFLOAT16, tensor="another"),
    ]
    with pytest.raises(PlanError, match=r"^a cannot send its weights; b: no source has .*'weight'"):
        find_donor(engine("c", DType.BFLOAT16), candidates, (), plan_transfer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_later_trainers_do_not_decide_what_a_copy_of_an_earlier_version_may_round(
    dtype: torch.dtype,
) -> None:
    """Trainers in float32 published the version. The donor has it in bfloat16, as have the trainers that connect later."""
    tensors = {"weight": torch.arange(24, dtype=torch.float32).view(SHAPE) / 7}
    model = torch.nn.ParameterDict({n: t.clone() for n, t in tensors.items()})
    async with windlass.Controller(token=TOKEN) as controller:
        connect = partial(windlass.connect_trainer, controller=controller.url, token=TOKEN)
        wait = partial(controller.wait_for_version, 0, deadline_s=3)
        loop = asyncio.get_running_loop()

        def run() -> None:
            with ExitStack() as undo:
                engine_of = partial(flat_engine, controller.url, TOKEN)
                donor = {"weight": tensors["weight"].bfloat16()}
                undo.enter_context(engine_of(donor, name="donor"))
                with connect(model) as trainer:
                    trainer.publish(0, deadline_s=20)
                if dtype is torch.bfloat16:
                    later = torch.nn.ParameterDict({n: t.bfloat16() for n, t in tensors.items()})
                    trainer = undo.enter_context(connect(later))
                newcomer = undo.enter_context(engine_of(donor, name="same"))
                served = wait(engines=["same"])
                asyncio.run_coroutine_threadsafe(served, loop).result()
                assert torch.equal(newcomer["weight"], donor["weight"])
                newcomer = undo.enter_context(engine_of(tensors, name="wider"))
                served = wait(engines=["wider"])
                with pytest.raises(PeerTimeout):
                    asyncio.run_coroutine_threadsafe(served, loop).result()
                assert torch.equal(newcomer["weight"], torch.ones(SHAPE))

        await asyncio.to_thread(run)


async def test_engine_catches_up_from_a_donor_with_the_values_of_trainers_that_have_left() -> None:
    tensors = {"weight": torch.arange(24, dtype=torch.float32).view(SHAPE) / 7}
    model = torch.nn.ParameterDict({n: t.clone() for n, t in tensors.items()})
    async with windlass.Controller(token=TOKEN) as controller:
        connect = partial(windlass.connect_trainer, controller=controller.url, token=TOKEN)
        loop = asyncio.get_running_loop()

        def run() -> None:
            with ExitStack() as undo:
                engine_of = partial(flat_engine, controller.url, TOKEN)
                undo.enter_context(engine_of(tensors, name="donor"))
                with connect(model) as trainer:
                    trainer.publish(0, deadline_s=20)
                narrow = {"weight": tensors["weight"].bfloat16()}
                newcomer = undo.enter_context(engine_of(narrow, name="narrow"))
                served = controller.wait_for_version(0, engines=["narrow"], deadline_s=10)
                asyncio.run_coroutine_threadsafe(served, loop).result()
                assert torch.equal(newcomer["weight"], narrow["weight"])

        await asyncio.to_thread(run)
