"""With a replica, the next step of a job's FSDP2 engine does not wait for the fleet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest
import torch
import torch.distributed as dist
from served_linear import served_linear

import windlass
from windlass.config import ControlConfig, ReplicaPlace, UpdateMode
from windlass.errors import TransferFailed
from windlass.jobs.fsdp_engine import FsdpEngine
from windlass.jobs.train_worker import TrainContext
from windlass.rollout.messages import TrainingSample
from windlass.testing.wrapped_transport import WrappedTransport
from windlass.transports.base import WriteBatch
from windlass.transports.registry import create_transport

TOKEN = "secret of the test"
# The loss below reads no sample, but the engine refuses a step without samples.
SAMPLE = TrainingSample(
    prompt_ids=(1,),
    output_ids=(2,),
    logprobs=(-0.5,),
    versions=(0,),
    reward=0.0,
    group_id=0,
    engine="e",
)
GROUPS = [[SAMPLE]]
SECONDS = 30.0


class HeldTransport(WrappedTransport):
    """A transport that delays writes until `go` is set and then raises `error`, if there is one."""

    go = threading.Event()
    error = ""

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        assert self.go.wait(SECONDS)
        if self.error:
            raise TransferFailed(self.error)
        super().write(batch, deadline_s=deadline_s)


def build() -> torch.nn.Module:
    return torch.nn.Linear(24, 40, bias=False)


@contextmanager
def trained(url: str) -> Iterator[FsdpEngine]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    engine = FsdpEngine(
        model=build,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        loss=lambda model, _: model(torch.ones(3, 24)).sum(),
        max_grad_norm=0,
        replica=ReplicaPlace.HOST,
    )
    try:
        engine.setup(
            TrainContext(
                rank=0,
                world_size=1,
                store_host="127.0.0.1",
                store_port=store.port,
                controller=url,
                token=TOKEN,
                deadline_s=SECONDS,
            )
        )
        yield engine
    finally:
        engine.close()


def weight_of(engine: FsdpEngine) -> torch.Tensor:
    (parameter,) = engine.model.parameters()
    assert isinstance(parameter, dist.tensor.DTensor)
    return parameter.to_local().detach().clone()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "windlass.trainers.fsdp.create_transport",
        lambda *args, **kwargs: HeldTransport(create_transport(*args, **kwargs)),
    )
    monkeypatch.setattr(HeldTransport, "error", "")
    HeldTransport.go.set()


async def published(controller: windlass.Controller, engine: FsdpEngine, version: int) -> None:
    assert await asyncio.to_thread(engine.prepare_publish, version)
    update = controller.coordinator.publish(version, deadline_s=SECONDS)
    assert (await update.report).outcome is windlass.RoundOutcome.PUBLISHED


async def test_a_step_runs_while_the_previous_weights_are_published(held: None) -> None:
    config = ControlConfig(mode=UpdateMode.STAGED)
    async with (
        windlass.Controller(token=TOKEN, config=config) as controller,
        in_job(controller) as (
            live,
            engine,
        ),
    ):
        await published(controller, engine, 0)
        assert torch.equal(live, weight_of(engine))
        for version in (1, 2):
            await asyncio.to_thread(engine.train_step, version, GROUPS)
            copied = weight_of(engine)
            HeldTransport.go.clear()
            assert await asyncio.to_thread(engine.prepare_publish, version)
            update = controller.coordinator.publish(version, deadline_s=SECONDS)
            async with asyncio.timeout(SECONDS):
                await update.copied.wait()
            await asyncio.to_thread(engine.train_step, version + 1, GROUPS)
            assert not torch.equal(copied, weight_of(engine))
            assert not torch.equal(live, copied)
            assert not update.report.done()
            HeldTransport.go.set()
            assert (await update.report).outcome is windlass.RoundOutcome.PUBLISHED
            assert torch.equal(live, copied)


async def test_an_engine_prepares_the_next_version_after_a_failed_update(held: None) -> None:
    config = ControlConfig(mode=UpdateMode.STAGED)
    async with (
        windlass.Controller(token=TOKEN, config=config) as controller,
        in_job(controller) as (
            live,
            engine,
        ),
    ):
        await published(controller, engine, 0)
        HeldTransport.error = "no wire"
        await asyncio.to_thread(engine.prepare_publish, 1)
        report = await controller.coordinator.publish(1, deadline_s=SECONDS).report
        assert report.outcome is windlass.RoundOutcome.ABORTED
        assert "no wire" in report.reason
        HeldTransport.error = ""
        # The trainer prepares this version, but the controller never begins it.
        await asyncio.to_thread(engine.prepare_publish, 2)
        await asyncio.to_thread(engine.train_step, 1, GROUPS)
        await published(controller, engine, 3)
        assert torch.equal(live, weight_of(engine))


@asynccontextmanager
async def in_job(
    controller: windlass.Controller,
) -> AsyncIterator[tuple[torch.Tensor, FsdpEngine]]:
    """Yield the weight of an engine and a trainer's `FsdpEngine`, with their blocking calls in other threads."""
    with ExitStack() as stack:
        live = await asyncio.to_thread(stack.enter_context, served_linear(controller.url, TOKEN))
        engine = await asyncio.to_thread(stack.enter_context, trained(controller.url))
        try:
            yield live, engine
        finally:
            await asyncio.to_thread(stack.close)
