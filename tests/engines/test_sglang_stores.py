"""A live SGLang server with HiCache never answers from stored entries of other weights.

The server's own cache and its copy in host memory have room for one prompt and a half each, so that a prompt which comes
again after two others comes from the storage backend. After every update the first answers compute their prompts again. Repeated
prompts come from storage with the new weights and are equal. The answers of the last weights equal those of a fresh
server without HiCache.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from fresh_servers import Answer, require_equal_answers, serving_fresh
from live_updates import update_beside
from rows import Record, of_setting
from servers import Layout, Server, build, engine_version, save, serving
from sglang_cpu_store import plugin_in

from windlass.config import UpdateMode

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

KIND, NUM_TOKENS, PAGE = "long", 12, 16
PROMPTS = [[(i * i * 7 + i * 3 + 31 * n) % 240 + 5 for i in range(320)] for n in range(4)]
"""Prompts without a common prefix, of 20 pages each."""
FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "512", "--page-size", str(PAGE)),
    *("--enable-hierarchical-cache", "--hicache-ratio", "1.1", "--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_through"),
    *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE})),
    *("--max-running-requests", "2", "--enable-cache-report"),
)


@dataclass(frozen=True)
class Said:
    """An answer, and the numbers of prompt tokens from any cache and from storage."""

    answer: Answer
    cached: int
    stored: int


def ask(server: Server, prompt: list[int]) -> Said:
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    answer = server.post("/generate", body)
    meta = answer["meta_info"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    of = meta.get("cached_tokens_details") or {}
    said = list(answer["output_ids"]), logprobs
    return Said(said, meta["cached_tokens"], of.get("storage") or 0)


def ask_all(server: Server) -> list[Said]:
    """Ask every prompt in turn; each displaces the pages of the prompt before it."""
    return [ask(server, prompt) for prompt in PROMPTS]


def answers_of(said: list[Said]) -> list[Answer]:
    return [each.answer for each in said]


async def test_no_answer_after_an_update_comes_from_stored_entries_of_old_weights(
    tmp_path: Path, shown: Record
) -> None:
    models = {seed: save(KIND, seed, tmp_path / str(seed)) for seed in (1, 2, 3)}
    told: dict[int, list[list[Said]]] = {}
    (folder := tmp_path / "store").mkdir()
    plugin = plugin_in(tmp_path / "plugin")
    with ExitStack() as running, ThreadPoolExecutor(2) as pool:
        fresh_later = pool.submit(
            running.enter_context, serving_fresh("sglang", models[3], tmp_path / "fresh.log")
        )
        server = running.enter_context(
            serving(
                "sglang",
                models[1],
                tmp_path / "live.log",
                layout=Layout(),
                flags=FLAGS,
                path=str(plugin),
                variables={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)},
            )
        )
        told[1] = [ask_all(server) for _ in range(2)]
        for version, mode in ((2, UpdateMode.IN_PLACE), (3, UpdateMode.STAGED)):
            # The request runs across the update: its entries belong to the old weights.
            await update_beside(
                server,
                build(KIND, version),
                version,
                mode,
                prompt=PROMPTS[0],
                num_tokens=100,
                head_start_s=0.1,
            )
            told[version] = [ask_all(server) for _ in range(2)]
        fresh = fresh_later.result()
        expected = [fresh.answer(prompt, NUM_TOKENS) for prompt in PROMPTS]
    for first, again in told.values():
        assert [said.cached for said in first] == [0] * len(PROMPTS)
        assert any(said.stored for said in again), "repeated prompts must come from storage"
        require_equal_answers(answers_of(again), answers_of(first))
    for said in told[3]:
        require_equal_answers(answers_of(said), expected)
    tokens = [[answer[0] for answer in answers_of(told[version][0])] for version in told]
    assert tokens[0] != tokens[1] != tokens[2]
    setting = "--enable-hierarchical-cache with --hicache-storage-backend file"
    detail = "entries are kept apart by version; the test copies pages in plain torch, because SGLang's copies need a GPU"
    shown(of_setting("sglang", engine_version("sglang"), setting, detail=detail))
