"""Published weights are complete even if Megatron-core has stepped them and not gathered them yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from hf_settings import SMALL, spec_of
from megatron_rank import Case, checkpoint
from needs import need_package
from test_forward_oracle import described
from whole_rank import NUM_VERSIONS, Row, run_whole

import windlass
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.memory.torch_dtypes import dtype_of
from windlass.testing.resting_engine import RestingEngine
from windlass.transports.registry import create_transport, parse_transport

need_package("megatron")

TOKEN = "secret of the test"
CONFIG: dict[str, Any] = {
    **SMALL,
    "model_type": "qwen3",
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
}
LAZY = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}


def row(name: str, **how: Any) -> Row:
    layout = {key: how.pop(key) for key in ("dtype",) if key in how}
    return Row(Case(name, spec_of(CONFIG), config=CONFIG, **layout), **how)


WHOLE = [
    row("eager"),
    row("lazy", ddp=LAZY),
    row("lazy_replica", ddp=LAZY, way="copy"),
    row("lazy_update_weights", ddp=LAZY, way="update_weights"),
    row("lazy_aligned", ddp={**LAZY, "align_param_gather": True}),
    row("lazy_bf16", ddp=LAZY, dtype=torch.bfloat16),
    row("grad_reduce", ddp={"overlap_grad_reduce": True, "bucket_size": 2000}),
]
REFUSED = {
    row("unsynced", ddp=LAZY, unsynced=True): "must hold the same bytes",
    row("unsynced_replica", ddp=LAZY, unsynced=True, way="copy"): "the same bytes",
    row("freed", freed=True): "its storage is freed",
    row("freed_lazy", ddp=LAZY, freed=True): "its storage is freed",
    row("fp8_gathered", ddp={"fp8_param_gather": True}): "fp8_param_gather must be False",
    row("torch_fsdp", wrapper="TorchFullyShardedDataParallel"): "TorchFullyShardedDataParallel",
    row("megatron_fsdp", wrapper="FullyShardedDataParallel"): "FullyShardedDataParallel",
    row("norms", config={"layernorm_zero_centered_gamma": True}): "adds 1 to the weights of norms",
    row("rotated", config={"rotary_interleaved": True}): "rotates neighbouring elements",
    row("main_params", main_params=True, dtype=torch.bfloat16): "as flat ranges",
}
ROWS = [*WHOLE, *REFUSED]


class Served:
    """An engine in the test process that has every checkpoint tensor whole."""

    def __init__(self, row: Row, url: str) -> None:
        self.weights = {
            name: torch.zeros(tensor.shape, dtype=row.case.dtype)
            for name, tensor in checkpoint(row.case.spec).items()
        }
        builder = ManifestBuilder("engine/0", Role.ENGINE)
        for name, tensor in self.weights.items():
            builder.add_parameter(name, nbytes=tensor.nbytes, dtype=dtype_of(name, tensor))
            builder.add_shard(name, tuple(tensor.shape), Box.full(tuple(tensor.shape)), name)
        transport = create_transport(parse_transport("cma"))
        self.client = EngineClient(
            EngineWeights(
                manifest=builder.build(),
                addresses=[tensor.data_ptr() for tensor in self.weights.values()],
                regions=[
                    transport.register(tensor.data_ptr(), tensor.nbytes)
                    for tensor in self.weights.values()
                ],
            ),
            transport=transport,
            hooks=RestingEngine(),
            controller=url,
            token=TOKEN,
        )


async def publish_all(folder: Path) -> dict[str, tuple[int, dict[str, torch.Tensor]]]:
    """Return the published version and the engine's weights for each row."""
    async with AsyncExitStack() as stack:
        controllers = [
            await stack.enter_async_context(windlass.Controller(token=TOKEN)) for _ in ROWS
        ]
        engines = []
        for row, controller in zip(ROWS, controllers, strict=True):
            engines.append(await asyncio.to_thread(Served, row, controller.url))
            stack.callback(engines[-1].client.close)
        urls = [controller.url for controller in controllers]
        await asyncio.to_thread(
            mp.start_processes,  # type: ignore[attr-defined]
            run_whole,
            (2, ROWS, urls, TOKEN, str(folder)),
            nprocs=2,
            start_method="forkserver",
        )
        return {
            str(row): (engine.client.agent.served_version, engine.weights)
            for row, engine in zip(ROWS, engines, strict=True)
        }


Outcome = tuple[Path, dict[str, tuple[int, dict[str, torch.Tensor]]]]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("whole")
    return folder, asyncio.run(publish_all(folder))


def states_of(row: Row, folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{row}-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("row", WHOLE, ids=str)
def test_served_weights_equal_those_of_the_next_forward_pass(
    row: Row, outcome: Outcome, compared: Callable[[str, int], None]
) -> None:
    folder, served = outcome
    states = states_of(row, folder)
    assert all("publish" not in state["met"] for state in states), states[0]["met"]
    version, weights = served[str(row)]
    assert version == NUM_VERSIONS - 1
    truth = described(states)
    assert truth.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor.float(), truth[name]), name
    compared("published tensors with those of Megatron's next forward pass", len(weights))
    assert all("after" not in state["met"] for state in states), states[0]["met"]
    eager = states_of(ROWS[0], folder)
    # An early gather does not change the training.
    if row.case.dtype is torch.float32:
        assert [s["loss"] for s in states] == [s["loss"] for s in eager]


@pytest.mark.parametrize(("row", "reason"), REFUSED.items(), ids=str)
def test_half_stepped_weights_are_refused_by_name_and_not_published(
    row: Row, reason: str, outcome: Outcome
) -> None:
    folder, served = outcome
    version, weights = served[str(row)]
    assert version == -1
    assert all(not tensor.any() for tensor in weights.values())
    for state in states_of(row, folder):
        assert reason in state["met"]["publish"]
        if row.unsynced:
            assert ".weight" in state["met"]["publish"]
            assert "trainer/0 versus trainer/1" in state["met"]["publish"]


@pytest.mark.parametrize("row", WHOLE, ids=str)
def test_check_weights_reports_half_stepped_weights_before_publish(
    row: Row, outcome: Outcome
) -> None:
    lazy = bool(row.ddp.get("overlap_param_gather"))
    for state in states_of(row, outcome[0]):
        assert ("before" in state["met"]) is lazy
