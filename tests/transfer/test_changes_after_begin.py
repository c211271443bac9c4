"""Weights that change between the start of an update and the read are refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import peft
import pytest
import torch
from test_layout_changes import (
    TOKEN,
    Model,
    Setting,
    connect_engine,
    served_equals,
    settings,
    with_controller,
)

import windlass
from windlass.config import ControlConfig, ReplicaPlace
from windlass.control.messages import Command, Prepare, Result
from windlass.control.trainer_agent import TrainerAgent
from windlass.errors import RoundAborted
from windlass.trainers.client import TrainerClient
from windlass.trainers.fsdp import describe_trainer
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport

WAIT_S = 20.0


@final
@dataclass
class HeldPrepare:
    """Trainer agent that delays `Prepare` until the test sets `go`."""

    agent: TrainerAgent
    go: threading.Event

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        if isinstance(command, Prepare):
            assert self.go.wait(WAIT_S)
        return self.agent.handle(command, epoch=epoch, round_number=round_number)


def adapted() -> tuple[Model, Any]:
    """Return a model and a PEFT wrapper with adapters for two of its weights."""
    model = Model(1.0)
    config = peft.LoraConfig(r=2, target_modules=["gate", "square"], init_lora_weights=False)
    return model, peft.get_peft_model(model, config)


def base_names(name: str) -> str | None:
    if "lora_" in name:
        return None
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def connect(
    wrapper: torch.nn.Module, url: str, setting: Setting, go: threading.Event
) -> TrainerClient:
    return TrainerClient(
        describe_trainer(wrapper, group="trainer", name_map=base_names),
        transport=create_transport(CmaConfig()),
        controller=url,
        token=TOKEN,
        replica=ReplicaPlace.AUTO if setting.replica else ReplicaPlace.OFF,
        intercept=lambda agent: HeldPrepare(agent, go),
    )


def unmerge(wrapper: Any) -> None:
    wrapper.unmerge_adapter()


def disable(wrapper: Any) -> None:
    """Run a reference forward pass, which takes merged adapters out."""
    with wrapper.disable_adapter():
        wrapper.base_model.model.gate(torch.zeros(1, 8))


def step(wrapper: Any) -> None:
    with torch.no_grad():
        for parameter in wrapper.parameters():
            parameter.add_(1.0)


def move(wrapper: Any) -> None:
    up = wrapper.base_model.model.up
    up.weight.data = up.weight.data + 1.0


@pytest.mark.parametrize(
    "change", [unmerge, disable, step, move], ids=lambda change: change.__name__
)
@pytest.mark.parametrize("name", ["publish", "replica", "xccl", "disk"])
async def test_weights_that_change_before_they_are_read_are_not_published(
    name: str, change: Callable[[Any], None], tmp_path: Path
) -> None:
    """`merge_adapter`, `publish(wait=False)`, `unmerge_adapter` used to publish the base without an error."""
    setting = settings(tmp_path)[name]

    def work(url: str) -> None:
        served, go = Model(-1000.0), threading.Event()
        _, wrapper = adapted()
        with connect_engine(served, url), connect(wrapper, url, setting, go) as trainer:
            go.set()
            wrapper.merge_adapter()
            trainer.publish(0, deadline_s=WAIT_S)
            before = {n: t.clone() for n, t in served.state_dict().items()}
            go.clear()
            pending = trainer.publish(1, deadline_s=WAIT_S, wait=False)
            change(wrapper)
            go.set()
            with pytest.raises(
                RoundAborted, match=r"weight' changed .*after the update has ended.*copy=True"
            ):
                pending.result(deadline_s=WAIT_S)
            assert all(torch.equal(t, before[n]) for n, t in served.state_dict().items())
            for layer in (wrapper.base_model.model.gate, wrapper.base_model.model.square):
                if not layer.merged:
                    layer.merge()
            trainer.publish(2, deadline_s=WAIT_S)
            assert served_equals(served, merged(wrapper))

    await with_controller(setting.config, work)


def merged(wrapper: Any) -> Model:
    """Return a plain model with the current weights of `wrapper`."""
    plain = Model(0.0)
    named = ((base_names(name), tensor) for name, tensor in wrapper.state_dict().items())
    values = {name: tensor for name, tensor in named if name is not None}
    plain.load_state_dict(values)
    return plain


@pytest.mark.parametrize("change", [unmerge, step], ids=lambda change: change.__name__)
async def test_engines_serve_copied_weights_unchanged_by_later_training(
    change: Callable[[Any], None],
) -> None:
    def work(url: str) -> None:
        served = Model(-1000.0)
        _, wrapper = adapted()
        with (
            connect_engine(served, url),
            windlass.connect_trainer(
                wrapper, controller=url, token=TOKEN, name_map=base_names, replica=ReplicaPlace.HOST
            ) as trainer,
        ):
            for version in range(3):
                wrapper.merge_adapter()
                want = merged(wrapper)
                pending = trainer.publish(version, deadline_s=WAIT_S, wait=False, copy=True)
                change(wrapper)
                pending.result(deadline_s=WAIT_S)
                assert served_equals(served, want)
                if change is not unmerge:
                    wrapper.unmerge_adapter()

    await with_controller(ControlConfig(), work)


def test_weight_whose_merged_adapter_was_replaced_is_named() -> None:
    model, wrapper = adapted()
    wrapper.merge_adapter()
    weights = describe_trainer(wrapper, group="trainer", name_map=base_names)
    assert weights.watch is not None
    weights.watch()
    wrapper.unmerge_adapter()
    wrapper.unload()
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["gate", "square"]))
    assert weights.changed() in {
        f"base_model.model.{layer}.base_layer.weight" for layer in ("gate", "square")
    }


async def test_weights_may_change_between_two_versions() -> None:
    def work(url: str) -> None:
        served = Model(-1000.0)
        _, wrapper = adapted()
        with (
            connect_engine(served, url),
            windlass.connect_trainer(
                wrapper, controller=url, token=TOKEN, name_map=base_names
            ) as trainer,
        ):
            for version in range(3):
                wrapper.merge_adapter()
                trainer.publish(version, deadline_s=WAIT_S, wait=False).result(deadline_s=WAIT_S)
                assert served_equals(served, merged(wrapper))
                wrapper.unmerge_adapter()
                step(wrapper)
                move(wrapper)

    await with_controller(ControlConfig(), work)
