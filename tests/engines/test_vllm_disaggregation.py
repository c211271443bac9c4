"""A live vLLM decode server continues only prefills that its own weights have computed.

A prefill server and a decode server are two engines of one fleet. The decode server reads keys and values from the
prefill server's memory (NIXL). One round of each update switches both. A prompt that was prefilled before an update is
computed again by the decode server after it. Every answer equals that of a fresh server that does both.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
from fresh_servers import Answer, require_equal_answers, serving_fresh
from live_updates import Counter
from rows import Record, of_setting
from servers import TOKEN, Layout, Server, build, engine_version, save, serving

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.net.addresses import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

KIND, NUM_TOKENS = "long", 12
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
PROMPTS = [[(i * i * 7 + i * 3 + 31 * n) % 240 + 5 for i in range(200)] for n in range(3)]
FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--block-size", "32")


def serving_role(model: Path, folder: Path, name: str) -> AbstractContextManager[Server]:
    """Run the prefill server or the decode server."""
    store = {"kv_connector": "NixlConnector", "kv_role": ROLES[name]}
    return serving(
        "vllm",
        model,
        folder / f"{name}.log",
        layout=Layout(),
        flags=(*FLAGS, "--kv-transfer-config", json.dumps(store)),
        variables={
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        },
    )


def ask(server: Server, prompt: list[int], count: int, handover: Any = None) -> Any:
    sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "logprobs": 0}
    body = {
        "token_ids": prompt,
        "sampling_params": {**sampling, "detokenize": False},
        "kv_transfer_params": handover,
    }
    return server.post("/inference/v1/generate", body)


def prefill(servers: dict[str, Server], prompt: list[int]) -> Any:
    """Return the address of the prompt's keys and values."""
    return ask(servers["prefill"], prompt, 1, {"do_remote_decode": True})["kv_transfer_params"]


def decode(servers: dict[str, Server], prompt: list[int], handover: Any) -> Answer:
    choice = ask(servers["decode"], prompt, NUM_TOKENS, handover)["choices"][0]
    return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


async def update(servers: dict[str, Server], model: Any, mode: UpdateMode) -> None:
    """Publish a model as version 1 of a new fleet into both servers."""
    config = ControlConfig(
        mode=mode, pause_mode=PauseMode.IN_PLACE, deadlines=PhaseDeadlines(pause_s=120)
    )
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        for name, server in servers.items():
            await asyncio.to_thread(server.join, controller.url, "cma", name)

        def publish() -> None:
            with windlass.connect_trainer(model, controller=controller.url, token=TOKEN) as client:
                report = client.publish(1).result()
                assert report.digest_ok
                assert sorted(report.engines) == sorted(servers)

        await asyncio.to_thread(publish)


async def test_no_decode_continues_a_prefill_of_other_weights(
    tmp_path: Path, shown: Record
) -> None:
    models = {seed: save(KIND, seed, tmp_path / str(seed)) for seed in (1, 2, 3)}
    said: list[list[Answer]] = []
    with ExitStack() as running, ThreadPoolExecutor(3) as pool:
        started = pool.map(
            running.enter_context,
            (
                *(serving_role(models[1], tmp_path, name) for name in ROLES),
                serving_fresh("vllm", models[3], tmp_path / "fresh.log"),
            ),
        )
        *pair, fresh = started
        servers = dict(zip(ROLES, pair, strict=True))
        hits = Counter(servers["decode"], "external_prefix_cache_hits_total")
        said.append([decode(servers, prompt, prefill(servers, prompt)) for prompt in PROMPTS])
        assert hits.since() > 0, "the decode server must read the prefill server's entries"
        # Both updates have the same number, in different runs.
        for seed, mode in ((2, UpdateMode.IN_PLACE), (3, UpdateMode.STAGED)):
            old = prefill(servers, PROMPTS[0])
            await update(servers, build(KIND, seed), mode)
            hits.since()
            early = decode(servers, PROMPTS[0], old)
            assert hits.since() == 0, "entries of old weights must not be read"
            new = [prefill(servers, prompt) for prompt in PROMPTS]
            said.append([decode(servers, p, n) for p, n in zip(PROMPTS, new, strict=True)])
            assert hits.since() > 0, "the decode server must read the prefill server's entries"
            require_equal_answers([early], said[-1][:1])
        require_equal_answers(said[-1], [fresh.answer(prompt, NUM_TOKENS) for prompt in PROMPTS])
    tokens = [[answer[0] for answer in answers] for answers in said]
    assert tokens[0] != tokens[1] != tokens[2]
    detail = (
        "prefill and decode in two engines, over NIXL; a prompt that is prefilled before an update is "
        "computed again after it, and answers equal those of a fresh server that does both"
    )
    setting = "--kv-transfer-config with kv_connector NixlConnector"
    shown(of_setting("vllm", engine_version("vllm"), setting, detail=detail))
