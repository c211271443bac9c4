"""A live SGLang server with HiCache never answers from stored entries of other weights.

The test empties the server's caches in memory and asks again, so that prompts come from the storage backend `file`. The
first answers after an update compute their prompts again although the storage has entries of the old weights. Answers from
the storage equal computed answers, and the answers of the last weights equal those of a fresh server without HiCache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fresh_servers import filled_gaps, require_equal_answers, serving_fresh
from rows import Record, Shown
from servers import HTTP_S, TOKEN, Layout, Server, build, engine_version, save, serving

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

KIND = "long"
NUM_TOKENS = 12
PROMPTS = [[(i * i * 7 + i * 3 + 31 * n) % 240 + 5 for i in range(300)] for n in range(2)]
FLAGS = (
    *("--dtype", "float32", "--page-size", "16", "--enable-hierarchical-cache"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
    *("--hicache-ratio", "2", "--hicache-write-policy", "write_through"),
    *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}'),
)
Said = tuple[list[int], list[float]]


def tokens_of(answers: Sequence[Said]) -> list[list[int]]:
    return [tokens for tokens, _ in answers]


def ask(server: Server, prompt: list[int]) -> tuple[Said, int]:
    """Return a greedy answer, and the number of its prompt's tokens that came from a cache."""
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    answer = server.post("/generate", body)
    meta = answer["meta_info"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    return (list(answer["output_ids"]), logprobs), int(meta["cached_tokens"])


def ask_all(server: Server) -> tuple[list[Said], list[int]]:
    found = [ask(server, prompt) for prompt in PROMPTS]
    return [said for said, _ in found], [cached for _, cached in found]


def empty_memory(server: Server, storage: Path) -> None:
    """Wait until the storage has the pages of both prompts, and empty the caches in memory."""
    end = time.monotonic() + HTTP_S
    before = -1
    # Pages are written after the answer.
    while (count := len(list(storage.iterdir()))) != before or not count:
        assert time.monotonic() < end
        before = count
        time.sleep(1.0)
    server.http.post(f"/flush_cache?timeout={HTTP_S / 2:.0f}", {}, HTTP_S)


@pytest.mark.parametrize("layout", [Layout()], ids=str)
async def test_no_answer_after_an_update_comes_from_stored_entries_of_old_weights(
    layout: Layout, tmp_path: Path, shown: Record
) -> None:
    own, storage = save(KIND, 1, tmp_path / "1"), tmp_path / "storage"
    storage.mkdir()
    log = tmp_path / "live.log"
    told: dict[int, list[list[Said]]] = {}
    given = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(storage)}
    started = serving(
        "sglang", own, log, layout=layout, flags=FLAGS, path=filled_gaps(log), variables=given
    )
    with started as server:

        def check_stored(version: int) -> None:
            first, cached = ask_all(server)
            assert cached == [0, 0], f"version {version} must compute its prompts"
            empty_memory(server, storage)
            second, cached = ask_all(server)
            assert min(cached) > 0, f"version {version} must find its entries in the storage"
            told[version] = [first, second]

        await asyncio.to_thread(check_stored, 1)
        for version, mode in ((2, UpdateMode.IN_PLACE), (3, UpdateMode.STAGED)):
            config = ControlConfig(
                mode=mode, pause_mode=PauseMode.IN_PLACE, deadlines=PhaseDeadlines(pause_s=120)
            )
            model = build(KIND, version)
            model.save_pretrained(tmp_path / str(version))
            async with windlass.Controller(token=TOKEN, config=config) as controller:
                await asyncio.to_thread(server.join, controller.url, "cma")

                def update(
                    model: Any = model, version: int = version, url: str = controller.url
                ) -> None:
                    with windlass.connect_trainer(model, controller=url, token=TOKEN) as client:
                        assert client.publish(version).result().digest_ok

                await asyncio.to_thread(update)
            await asyncio.to_thread(check_stored, version)
            assert server.digests() == server.digests_of_fresh_load(tmp_path / str(version))
    for first, second in told.values():
        require_equal_answers(second, first)
    with serving_fresh("sglang", tmp_path / "3", tmp_path / "fresh.log", layout=layout) as fresh:
        said = [fresh.answer(prompt, NUM_TOKENS) for prompt in PROMPTS]
    for answers in told[3]:
        assert tokens_of(answers) == tokens_of(said)
        require_equal_answers(answers, said)
    one, two, three = (tokens_of(told[version][0]) for version in (1, 2, 3))
    assert one != two != three
    for option in ("--enable-hierarchical-cache", "--hicache-storage-backend"):
        shown(
            Shown(
                trainer="any", engine="sglang", engine_version=engine_version("sglang"),
                engine_parallelism="any", model="any", dtype="any", transport="any", mode=option,
                detail="entries are kept apart by version; the test copies blocks in plain torch, because SGLang's copies need a GPU",
            )
        )  # fmt: skip
