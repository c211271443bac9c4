"""No live engine serves stale tensors that a model class derives from weights and keeps outside its parameters.

After an update the engine gives the same tokens, log-probabilities and checksums as a fresh process that loaded the new
weights from a folder. Otherwise the update must be refused by the path of the derived tensor. The fresh process
runs without Windlass: see `fresh_servers`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from derived_state import KINDS
from fresh_servers import SUPPORT, Fresh, serving_fresh
from servers import TOKEN, Layout, Server, build, serving

import windlass
from windlass.errors import WindlassError

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPT = [5, 9, 33, 101]
NUM_TOKENS = 12
PATHS = {"holder": "aside", "lazy": "by_name", "cold": "float32_gain"}
"""Attributes that a refusal names."""
EMPTY = hashlib.sha256().hexdigest()
CHECKSUMS = {"vllm": "/weight_checker", "sglang": "/weights_checker"}


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


def checksums(server: Server | Fresh) -> dict[str, str]:
    """Return the engine's own checksums of its parameters, by name.

    A plain vLLM for CPUs packs some weights for its kernels and frees the originals. Those parameters are left out.
    """
    said = server.post(CHECKSUMS[server.engine], {"action": "checksum"})
    found = said["checksums"] if server.engine == "vllm" else said["ranks"][0]["checksums"]
    return {name: checksum for name, checksum in found.items() if checksum != EMPTY}


async def update(server: Server, model: Any) -> None:
    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(server.join, controller.url, "cma")
        client = await asyncio.to_thread(
            windlass.connect_trainer, model, controller=controller.url, token=TOKEN
        )
        try:
            report = await asyncio.to_thread(client.publish, 1)
            assert report.digest_ok
        finally:
            await asyncio.to_thread(client.close)


def refused(server: Server, model: Any) -> str:
    """Return why an update was refused; empty if it was not."""
    try:
        asyncio.run(update(server, model))
    except WindlassError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", KINDS)
def test_derived_state_is_fresh_or_refused(
    kind: str, engine: str, plugin: str, tmp_path: Path, compared: Callable[[str, int], None]
) -> None:
    save(kind, 1, tmp_path / "old")
    model = save(kind, 2, tmp_path / "new")
    with serving(
        engine, tmp_path / "old", tmp_path / "live.log", layout=Layout(),
        flags=("--dtype", "float32"), path=plugin, variables=EXTERNAL,
    ) as server:  # fmt: skip
        before = server.sample(PROMPT, NUM_TOKENS)
        if refusal := refused(server, model):
            assert PATHS[kind] in refusal
            assert server.sample(PROMPT, NUM_TOKENS).tokens == before.tokens
            compared(f"refusals of derived state ({engine} {kind})", 1)
            return
        # The first request after an update may make the tensor, and the second one use it.
        answers = [server.sample(PROMPT, NUM_TOKENS) for _ in range(2)]
        held = checksums(server)
    variables = {"PYTHONPATH": f"{plugin}:{SUPPORT}", **EXTERNAL}
    with serving_fresh(engine, tmp_path / "new", tmp_path / "fresh.log", variables) as fresh:
        tokens, logprobs = fresh.answer(PROMPT, NUM_TOKENS)
        kept = checksums(fresh)
        assert len(kept) > len(held) / 2
        assert kept.items() <= held.items()
    assert tokens != before.tokens
    for answer in answers:
        assert answer.tokens == tokens
        assert torch.allclose(torch.tensor(answer.logprobs), torch.tensor(logprobs), atol=1e-3)
    compared("greedy tokens with a fresh process's", len(tokens))
    compared("logprobs with a fresh process's", len(tokens))
