"""After an update, no live engine serves stale tensors that its model class derives from weights.

The classes keep these tensors outside their parameters. After an update the engine gives the same tokens,
log-probabilities and checksums as a fresh process that loaded the new weights from a folder. Otherwise the engine must
refuse the update, with the path of the derived tensor. The fresh process runs without Windlass: see `fresh_servers`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from derived_state import KINDS
from fresh_servers import (
    checksums,
    require_equal_answers,
    require_equal_parameters,
    serving_fresh,
)
from servers import TOKEN, Layout, Sample, Server, build, serving

import windlass
from windlass.errors import WindlassError

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPT = [5, 9, 33, 101]
NUM_TOKENS = 12
PATHS = {"holder": "aside", "lazy": "by_name", "late": "by_name", "cold": "float32_gain"}
"""Kind of model class -> attribute that the refusal names."""


def save(kind: str, seed: int, folder: Path) -> Any:
    """Write a checkpoint of a class of `derived_state`, and return the model."""
    model = build("dense", seed).float()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [f"{kind.capitalize()}Qwen3"]
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install a plugin with the model classes in a folder, and return the folder for the path."""
    site = tmp_path_factory.mktemp("plugin")
    info = site / "derived_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: derived-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nderived = derived_vllm:register\n"
    )
    return str(site)


EXTERNAL = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "derived_sglang"}


async def update(server: Server, models: Sequence[Any], served: list[Sample]) -> None:
    """Update a server with the weights of each model in turn, and add its answers after each update to `served`.

    The first request after an update may make the tensor, and the second one use it.
    """
    trained = models[0]
    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(server.join, controller.url, "cma")
        client = await asyncio.to_thread(
            windlass.connect_trainer, trained, controller=controller.url, token=TOKEN
        )
        try:
            for version, model in enumerate(models, 1):
                trained.load_state_dict(model.state_dict())
                done = await asyncio.to_thread(client.publish, version)
                assert done.result().digest_ok
                served += [
                    await asyncio.to_thread(server.sample, PROMPT, NUM_TOKENS) for _ in range(2)
                ]
        finally:
            await asyncio.to_thread(client.close)


def refused(server: Server, models: Sequence[Any], served: list[Sample]) -> str:
    """Return the reason of a refused update; empty if no update was refused."""
    try:
        asyncio.run(update(server, models, served))
    except WindlassError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", KINDS)
def test_derived_state_of_a_live_server_is_fresh_or_refused(
    kind: str, engine: str, plugin: str, tmp_path: Path, compared: Callable[[str, int], None]
) -> None:
    save(kind, 1, tmp_path / "old")
    models = [save(kind, seed, tmp_path / str(seed)) for seed in (2, 3)]
    with serving(
        engine, tmp_path / "old", tmp_path / "live.log", layout=Layout(),
        flags=("--dtype", "float32"), path=plugin, variables=EXTERNAL,
    ) as server:  # fmt: skip
        served = [server.sample(PROMPT, NUM_TOKENS)]
        if refusal := refused(server, models, served):
            assert PATHS[kind] in refusal
            assert server.sample(PROMPT, NUM_TOKENS).tokens == served[-1].tokens
            compared(f"refusals of derived state ({engine} {kind})", 1)
            return
        held = checksums(engine, server.post)
    with serving_fresh(
        engine, tmp_path / "3", tmp_path / "fresh.log", path=plugin, variables=EXTERNAL
    ) as fresh:
        answer = fresh.answer(PROMPT, NUM_TOKENS)
        require_equal_parameters(held, checksums(engine, fresh.post))
    assert answer[0] not in [earlier.tokens for earlier in served[:-2]]
    require_equal_answers([(each.tokens, each.logprobs) for each in served[-2:]], [answer] * 2)
    compared("greedy tokens with a fresh process's", NUM_TOKENS)
    compared("logprobs with a fresh process's", NUM_TOKENS)
