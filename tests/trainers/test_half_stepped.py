"""With FSDP2 options that could leave weights half-stepped, engines get the same weights as from one process."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from half_stepped_rank import (
    DIVERGED,
    EMA,
    OPTIONS,
    PLAIN,
    WORLD_SIZE,
    ema_of,
    model,
    run_rank,
    trained_alone,
)

import windlass
from windlass.config import ControlConfig
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.manifest import Role
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer.dtensor import describe_module
from windlass.transports.registry import create_transport, parse_transport

TOKEN = "secret of the test"


def serve(served: torch.nn.Module, url: str) -> EngineClient:
    transport = create_transport(parse_transport("cma"))
    extents = [(p.data_ptr(), p.nbytes) for p in served.parameters()]
    return EngineClient(
        EngineWeights(
            manifest=describe_module(served, "engine/0", Role.ENGINE),
            addresses=[address for address, _ in extents],
            regions=[transport.register(*extent) for extent in extents],
        ),
        transport=transport,
        hooks=RestingEngine(),
        controller=url,
        token=TOKEN,
    )


async def publish_all(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the engine's weights after the last version, for each option."""
    served = {option: model() for option in OPTIONS}
    async with AsyncExitStack() as stack:
        urls = {}
        for option, module in served.items():
            for parameter in module.parameters():
                parameter.data.zero_()
            controller = await stack.enter_async_context(
                windlass.Controller(token=TOKEN, config=ControlConfig(compare_share=1.0))
            )
            engine = await asyncio.to_thread(serve, module, controller.url)
            stack.callback(engine.close)
            urls[option] = controller.url
        await asyncio.to_thread(
            mp.start_processes,  # type: ignore[attr-defined]
            run_rank,
            (urls, TOKEN, str(folder)),
            nprocs=WORLD_SIZE,
            start_method="forkserver",
        )
    return {option: dict(module.state_dict()) for option, module in served.items()}


Outcome = tuple[Path, dict[str, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("half_stepped")
    return folder, asyncio.run(publish_all(folder))


def said(option: str, folder: Path) -> list[str]:
    return [(folder / f"{option}-{rank}").read_text() for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("option", sorted(PLAIN))
def test_served_weights_equal_those_trained_in_one_process(option: str, outcome: Outcome) -> None:
    folder, served = outcome
    assert said(option, folder) == [""] * WORLD_SIZE
    tolerance = 2e-2 if option == "mixed_precision" else 1e-6
    for name, truth in trained_alone().items():
        assert torch.allclose(served[option][name], truth, rtol=0, atol=tolerance), name


def test_averaged_weights_that_are_swapped_in_are_served(outcome: Outcome) -> None:
    folder, served = outcome
    assert said(EMA, folder) == [""] * WORLD_SIZE
    for name, truth in trained_alone().items():
        assert torch.allclose(served[EMA][name], ema_of(truth), rtol=0, atol=1e-6), name


def test_differing_replicas_of_shards_are_named(outcome: Outcome) -> None:
    folder, served = outcome
    assert not any(tensor.any() for tensor in served[DIVERGED].values())
    for reason in said(DIVERGED, folder):
        assert "'2.weight'" in reason
        assert "trainer/1 versus trainer/3" in reason
