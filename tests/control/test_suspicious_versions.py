"""Versions that change nothing or contain NaN or infinity: reports, counts, and configured refusal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
from flat_engine import flat_engine

import windlass
from windlass.config import ControlConfig, DiskBackend, Reaction, UpdateMode, XcclBackend
from windlass.control.report import RoundOutcome
from windlass.errors import ConfigError, RoundAborted
from windlass.observability.metrics import ControllerMetrics
from windlass.trainers.client import TrainerClient

TOKEN = "t" * 32
Engines = list[dict[str, torch.Tensor]]


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 6, dtype=dtype)
        self.down = torch.nn.Linear(6, 8, bias=False, dtype=dtype)
        self.register_buffer("steps", torch.arange(4))

    def step(self) -> None:
        with torch.no_grad():
            self.down.weight.add_(0.5)


Script = Callable[[Callable[[], TrainerClient], Engines], None]


async def scripted(
    model: Model, script: Script, config: ControlConfig | None = None
) -> list[windlass.UpdateReport]:
    """Run `script` with one engine and a function that connects a trainer, and return all reports."""
    async with windlass.Controller(token=TOKEN, config=config or ControlConfig()) as controller:

        def run() -> None:
            with ExitStack() as undo:
                like = {n: t.detach() for n, t in model.state_dict().items() if n != "steps"}
                held = undo.enter_context(flat_engine(controller.url, TOKEN, like))

                def connect() -> TrainerClient:
                    trainer = windlass.connect_trainer(
                        model, controller=controller.url, token=TOKEN
                    )
                    return undo.enter_context(trainer)

                script(connect, [held])

        await asyncio.to_thread(run)
        return list(controller.coordinator.reports)


def serves(held: Mapping[str, torch.Tensor], model: Model) -> bool:
    state = model.state_dict()
    return all(torch.equal(t, state[name]) for name, t in held.items())


def warnings_of(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and word in record.getMessage()
    ]


async def test_unchanged_versions_are_counted_and_cause_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model()

    def script(connect: Callable[[], TrainerClient], _: Engines) -> None:
        trainer = connect()
        for version in range(4):
            trainer.publish(version, deadline_s=20)
        model.step()
        trainer.publish(4, deadline_s=20)
        trainer.publish(5, deadline_s=20)

    reports = await scripted(model, script)
    assert [report.unchanged for report in reports] == [0, 1, 2, 3, 0, 1]
    first, second = warnings_of(caplog, "changes nothing")
    assert first.startswith("version 1 changes nothing")
    assert second.startswith("version 5 changes nothing")
    for cause in ("optimizer", "adapters", "learning rate"):
        assert cause in first


async def test_first_version_of_a_trainer_raises_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """A restarted trainer, or one started from the engines' checkpoint, publishes weights they
    have.
    """
    model = Model()

    def script(connect: Callable[[], TrainerClient], held: Engines) -> None:
        for name, tensor in model.state_dict().items():
            if name in held[0]:
                held[0][name].copy_(tensor)
        trainer = connect()
        trainer.publish(0, deadline_s=20)
        trainer.close()
        connect().publish(1, deadline_s=20)

    reports = await scripted(model, script, ControlConfig(unchanged=Reaction.REFUSE))
    assert [report.unchanged for report in reports] == [0, 0]
    assert not warnings_of(caplog, "changes nothing")


def configs(folder: Path, config: ControlConfig) -> dict[str, ControlConfig]:
    replace = msgspec.structs.replace
    return {
        "in_place": config,
        "staged": replace(config, mode=UpdateMode.STAGED),
        "xccl": replace(config, backend=XcclBackend()),
        "disk": replace(config, backend=DiskBackend(str(folder))),
    }


@pytest.mark.parametrize("way", configs(Path("/"), ControlConfig()))
async def test_a_version_that_changes_nothing_is_refused_if_configured(
    way: str, tmp_path: Path
) -> None:
    model = Model()

    def script(connect: Callable[[], TrainerClient], held: Engines) -> None:
        trainer = connect()
        trainer.publish(0, deadline_s=20)
        for version in (1, 2):
            with pytest.raises(
                RoundAborted, match=r"version . changes nothing.*optimizer.*unchanged"
            ):
                trainer.publish(version, deadline_s=20)
        assert serves(held[0], model)
        model.step()
        assert trainer.publish(3, deadline_s=20).result().engines == ("engine",)
        assert serves(held[0], model)

    reports = await scripted(
        model, script, configs(tmp_path, ControlConfig(unchanged=Reaction.REFUSE))[way]
    )
    assert [report.unchanged for report in reports] == [0, 1, 2, 0]
    for refused in reports[1:3]:
        assert refused.outcome == "aborted", "the version changes nothing"


async def test_an_unchanged_version_is_found_when_an_engine_joins_between_versions() -> None:
    model = Model()
    more = ExitStack()

    async with windlass.Controller(token=TOKEN) as controller:

        def run() -> list[int]:
            like = {n: t.detach() for n, t in model.state_dict().items() if n != "steps"}
            with (
                flat_engine(controller.url, TOKEN, like, name="one"),
                windlass.connect_trainer(model, controller=controller.url, token=TOKEN) as trainer,
                more,
            ):
                found = [trainer.publish(0, deadline_s=20).result().unchanged]
                more.enter_context(flat_engine(controller.url, TOKEN, like, name="two"))
                found.append(trainer.publish(1, deadline_s=20).result().unchanged)
                model.step()
                found.append(trainer.publish(2, deadline_s=20).result().unchanged)
                return found

        assert await asyncio.to_thread(run) == [0, 1, 0]


BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
async def test_tensors_that_are_not_finite_are_counted_by_name(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(dtype)

    def script(connect: Callable[[], TrainerClient], _: Engines) -> None:
        trainer = connect()
        for version, bad in enumerate([0.25, *BAD, 0.5]):
            with torch.no_grad():
                model.up.weight[3, 2] = bad
            trainer.publish(version, deadline_s=20)

    reports = await scripted(model, script)
    assert [report.non_finite for report in reports] == [{}, *[{"up.weight": 1}] * 3, {}]
    (line,) = warnings_of(caplog, "NaN")
    assert line.startswith("version 1: trainer parameters contain NaN or infinity: 'up.weight'")


@pytest.mark.parametrize("way", configs(Path("/"), ControlConfig()))
async def test_tensors_that_are_not_finite_are_refused_if_configured(
    way: str, tmp_path: Path
) -> None:
    model = Model()

    def script(connect: Callable[[], TrainerClient], held: Engines) -> None:
        trainer = connect()
        trainer.publish(0, deadline_s=20)
        whole = model.down.weight.detach().clone()
        with torch.no_grad():
            model.down.weight[7, 5] = float("nan")
        with pytest.raises(RoundAborted, match=r"'down.weight'.*NaN or infinity.*non_finite"):
            trainer.publish(1, deadline_s=20)
        assert torch.equal(held[0]["down.weight"], whole)
        model.down.weight = torch.nn.Parameter(whole + 1)
        trainer.publish(2, deadline_s=20)
        assert serves(held[0], model)

    await scripted(model, script, configs(tmp_path, ControlConfig(non_finite=Reaction.REFUSE))[way])


async def test_checks_of_suspicious_versions_can_be_switched_off() -> None:
    model = Model()

    def script(connect: Callable[[], TrainerClient], _: Engines) -> None:
        trainer = connect()
        with torch.no_grad():
            model.down.weight[7, 5] = float("nan")
        for version in range(2):
            trainer.publish(version, deadline_s=20)

    off = ControlConfig(unchanged=Reaction.OFF, non_finite=Reaction.OFF)
    reports = await scripted(model, script, off)
    assert [(report.unchanged, report.non_finite) for report in reports] == [(0, {})] * 2


async def test_gaps_and_tensors_that_no_engine_takes_may_contain_anything() -> None:
    model = Model()
    rows = torch.full((6, 11), float("nan"))
    rows[:, :8] = model.up.weight.detach()
    model.up.weight = torch.nn.Parameter(rows[:, :8])
    model.register_buffer("mask", torch.full((3,), -float("inf")))

    like = Model()

    async with windlass.Controller(token=TOKEN) as controller:

        def run() -> windlass.UpdateReport:
            tensors = {n: t.detach() for n, t in like.state_dict().items() if n != "steps"}
            with (
                flat_engine(controller.url, TOKEN, tensors),
                windlass.connect_trainer(model, controller=controller.url, token=TOKEN) as trainer,
            ):
                return trainer.publish(0, deadline_s=20).result()

        assert (await asyncio.to_thread(run)).non_finite == {}


def test_metrics_count_suspicious_versions() -> None:
    metrics = ControllerMetrics()
    for unchanged, found in ((0, {}), (1, {}), (2, {"layers.*.w": 3, "head": 1})):
        metrics.observe_round(
            windlass.UpdateReport(
                version=1,
                outcome=RoundOutcome.PUBLISHED,
                unchanged=unchanged,
                non_finite=found,
            )
        )
    text = metrics.render(version=1, engines=(), rollouts={}).decode()
    assert "windlass_unchanged_versions_total 2.0" in text
    assert "windlass_non_finite_tensors_total 4.0" in text


@pytest.mark.parametrize("name", ["unchanged", "non_finite"])
def test_unknown_reaction_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"ControlConfig: {name} must be one of \['off', 'warn', 'refuse'\]"
    ):
        ControlConfig(**{name: "raise"})  # type: ignore[arg-type]
