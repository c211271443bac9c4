"""Real FSDP2 ranks publish into live engines: served weights equal `full_tensor()` bit for bit."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import reshard_trainer
import torch
import transformers
from child_process import running
from weight_fleet import TOKEN, Rank

import windlass
from windlass.config import ControlConfig, UpdateMode

CONFIG = {
    "model_type": "qwen3",
    # This size is uneven over four ranks.
    "vocab_size": 66,
    # This size is uneven over three ranks.
    "hidden_size": 20,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
PROMPT = [5, 9, 33]
ENGINES = {"whole": (1, "bfloat16"), "halves": (2, "float32")}
"""Tensor-parallel size and dtype."""


async def get(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(url) as response:
        answer: dict[str, Any] = await response.json()
    return answer


async def generate(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": 8}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    async with http.post(url + "/generate", json=body) as response:
        answer: dict[str, Any] = await response.json()
    return answer


@pytest.mark.parametrize(
    ("layout", "num_trainers", "transport", "mode"),
    [
        ("fsdp", 3, "cma", UpdateMode.IN_PLACE),
        pytest.param("tp_fsdp", 4, "shm", UpdateMode.STAGED, marks=pytest.mark.long),
        pytest.param("hsdp", 4, "cma", UpdateMode.STAGED, marks=pytest.mark.long),
    ],
)
async def test_engines_serve_the_full_tensors_of_the_trainers(
    tmp_path: Path, layout: str, num_trainers: int, transport: str, mode: UpdateMode
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    config = ControlConfig(mode=mode, min_engines=2)
    with ExitStack() as stack:
        async with (
            windlass.Controller(token=TOKEN, config=config) as controller,
            aiohttp.ClientSession(headers=headers) as http,
        ):
            start_engines(stack, ENGINES, tmp_path, controller.url, transport)
            start_trainers(stack, num_trainers, tmp_path, layout, controller.url, transport)
            await controller.wait_for_version(1, deadline_s=150)
            await check(http, controller, tmp_path)


@pytest.mark.long
async def test_engines_that_join_late_catch_up_from_a_peer_without_a_trainer(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with ExitStack() as stack:
        async with (
            windlass.Controller(token=TOKEN) as controller,
            aiohttp.ClientSession(headers=headers) as http,
        ):
            start_engines(stack, {"first": (1, "float32")}, tmp_path, controller.url, "cma")
            # The trainers publish twice and never again.
            start_trainers(stack, 2, tmp_path, "fsdp", controller.url, "cma")
            await controller.wait_for_version(1, deadline_s=150)
            everyone = asyncio.Event()

            def look() -> None:
                if len(controller.coordinator.routable()) == 1 + len(ENGINES):
                    everyone.set()

            controller.coordinator.subscribe(look)
            start_engines(stack, ENGINES, tmp_path, controller.url, "cma")
            async with asyncio.timeout(100):
                await everyone.wait()
            await check(http, controller, tmp_path)
            assert len(controller.coordinator.reports) == 2, "a trainer got a command"


def start_engines(
    stack: ExitStack, engines: dict[str, tuple[int, str]], folder: Path, url: str, transport: str
) -> None:
    for name, (tensor_parallel_size, dtype) in engines.items():
        stack.enter_context(
            running(
                *("-m", "windlass.engines.embedded", "--name", name),
                *("--tp", str(tensor_parallel_size), "--dtype", dtype),
                *("--model", str(folder / "config.json"), "--seed", "5"),
                *("--controller", url, "--transport", transport),
                token=TOKEN,
            )
        )


def start_trainers(
    stack: ExitStack, count: int, folder: Path, layout: str, url: str, transport: str
) -> None:
    for rank in range(count):
        settings = reshard_trainer.TrainerSettings(
            rank, count, folder, layout, url, TOKEN, transport
        )
        stack.callback(Rank(reshard_trainer.run, settings).close)


async def check(http: aiohttp.ClientSession, controller: windlass.Controller, folder: Path) -> None:
    urls = {engine.name: engine.url for engine in controller.coordinator.routable()}
    truth: dict[str, torch.Tensor] = torch.load(folder / "1.pt")
    await check_every_parameter(http, urls["whole"], truth)
    await check_tokens(http, urls["halves"], truth)


async def check_every_parameter(
    http: aiohttp.ClientSession, url: str, truth: dict[str, torch.Tensor]
) -> None:
    for name, full in truth.items():
        served = torch.tensor(
            (await get(http, f"{url}/get_weights_by_name?name={name}"))["parameter"]
        )
        assert torch.equal(served, full.bfloat16().float()), name


async def check_tokens(
    http: aiohttp.ClientSession, url: str, truth: dict[str, torch.Tensor]
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**CONFIG)
    ).eval()
    model.load_state_dict(truth)
    answer = await generate(http, url)
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
    assert answer["output_ids"] == whole[0, len(PROMPT) :].tolist()
    assert answer["meta_info"]["output_token_versions"] == [1] * 8
