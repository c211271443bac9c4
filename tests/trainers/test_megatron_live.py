"""Megatron-core trains and publishes to a live engine, and both compute the same loss."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import transformers
from child_process import running
from hf_settings import DENSE, SMALL_LATENT, SPARSE, spec_of, transformers_config
from live_trainer import NUM_TOKENS
from megatron_rank import checkpoint
from needs import need_package
from real_step import NUM_MICROBATCHES, microbatches

import windlass
from windlass.config import ControlConfig, UpdateMode

need_package("megatron")

TOKEN = "secret of the test"
TRAINER = Path(__file__).parents[1] / "support" / "live_trainer.py"
LATENT = {**DENSE, **SMALL_LATENT, "rms_norm_eps": 1e-6}


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "layout", "mode"),
    [
        (DENSE, {"tp": 2}, UpdateMode.STAGED),
        *(
            pytest.param(config, layout, mode, marks=pytest.mark.long)
            for config, layout, mode in (
                (SPARSE, {"ep": 2}, UpdateMode.IN_PLACE),
                (DENSE, {"cp": 2}, UpdateMode.STAGED),
                ({**DENSE, "num_hidden_layers": 4}, {"pp": 2, "vpp": 2}, UpdateMode.IN_PLACE),
                (DENSE, {"distributed": True}, UpdateMode.IN_PLACE),
                (LATENT, {"tp": 2, "ep": 2}, UpdateMode.STAGED),
                (LATENT, {"pp": 2}, UpdateMode.IN_PLACE),
            )
        ),
    ],
    ids=[
        "tp2_dense",
        "ep2_sparse",
        "cp2_dense",
        "pp2_virtual2_dense",
        "dp2_distributed_optimizer",
        "tp2_ep2_latent",
        "pp2_latent",
    ],
)
async def test_the_engine_computes_the_loss_that_megatron_reached(
    tmp_path: Path,
    config: Mapping[str, Any],
    layout: dict[str, int],
    mode: UpdateMode,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with ExitStack() as stack:
        async with (
            windlass.Controller(token=TOKEN, config=ControlConfig(mode=mode)) as controller,
            aiohttp.ClientSession(headers=headers) as http,
        ):
            engine = stack.enter_context(
                running(
                    *("-m", "windlass.engines.embedded", "--name", "one", "--tp", "1"),
                    *("--model", str(tmp_path / "config.json"), "--dtype", "float32"),
                    *("--controller", controller.url, "--seed", "5"),
                    token=TOKEN,
                )
            )
            for rank in range(2):
                stack.enter_context(
                    running(
                        *(str(TRAINER), str(rank), "2", str(tmp_path / "store")),
                        *(json.dumps(layout), controller.url, str(tmp_path)),
                        token=TOKEN,
                    )
                )
            await controller.wait_for_version(1, deadline_s=150)
            assert engine.stdout is not None
            url = json.loads(await asyncio.to_thread(engine.stdout.readline))["url"]
            served = await served_weights(http, url, config)
            states = [torch.load(tmp_path / f"1-{rank}.pt") for rank in range(2)]
            last = [state for state in states if not math.isnan(state["loss"])]
            assert last, "the last stage knows the loss"
            for state in last:
                assert state["loss"] < state["before"]
                assert loss_of(config, served) == pytest.approx(state["loss"], rel=1e-5)


async def served_weights(
    http: aiohttp.ClientSession, url: str, config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    names = transformers.AutoModelForCausalLM.from_config(transformers_config(config)).state_dict()
    served = {}
    for name in names:
        async with http.get(f"{url}/get_weights_by_name?name={name}") as response:
            served[name] = torch.tensor((await response.json())["parameter"])
    assert sum(t.numel() for t in served.values()) == sum(
        t.numel() for t in checkpoint(spec_of(config)).values()
    )
    return served


def loss_of(config: Mapping[str, Any], weights: dict[str, torch.Tensor]) -> float:
    """Return the next-token loss of transformers on Megatron's sequences."""
    model = transformers.AutoModelForCausalLM.from_config(transformers_config(config)).eval()
    model.load_state_dict(weights)
    losses = []
    for _, ids in zip(range(NUM_MICROBATCHES), microbatches(NUM_TOKENS), strict=False):
        with torch.no_grad():
            logits = model(ids).logits
        losses.append(float(torch.nn.functional.cross_entropy(logits[0], ids.roll(-1)[0])))
    return sum(losses) / len(losses)
