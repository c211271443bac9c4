"""A live SGLang server, with its caches on, never answers a new request from a cache entry of older weights.

Two sets of weights alternate in one server, in every mode of updates and of pauses. After every update, the test sends
prompts of 320 tokens twice: one prompt for each route (plain `/generate`, both OpenAI routes, a rollout worker). Greedy
tokens, logprobs and the number of cached prompt tokens must equal the answers of a fresh server with these weights.
While the weights change

1. a request runs. It must reach its last token, or end with the tokens and the version of the old weights if the pause
   aborts. No later request may use its cache entries;
2. a rollout worker's request waits, admitted but not started. Its answer must come from the new weights;
3. the server fills in prompts, chunk by chunk. No later request may use the entries of a prompt that spans the update.
   The expected answers come from the same server with emptied caches.

Options and log lines are those used by SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file
from servers import TOKEN, VENVS, Layout, Server, build, environment, save, serving

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.rollout.generate import generate
from windlass.rollout.messages import EngineTarget, RolloutTask
from windlass.sampling import SamplingParams
from windlass.trainers.client import TrainerClient

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

KIND = "long"
PROMPT_TOKENS, CHUNK, ANSWER_TOKENS = 320, 16, 8
RUNNING_TOKENS = 1200
"""Length of the answer to the request that runs while weights change."""
FILLED_TOKENS = 1600
"""Length of a prompt that the server fills in while weights change."""
VOCABULARY = 250
DEADLINE_S = 120.0
TRIES = 5
"""Number of updates; at least one must find a prompt half filled in."""
WAYS = [
    (mode, pause)
    for pause in (PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT)
    for mode in (UpdateMode.IN_PLACE, UpdateMode.STAGED)
]


FLAGS = (
    *("--max-running-requests", "1", "--chunked-prefill-size", str(CHUNK)),
    *("--enable-cache-report", "--context-length", "2048"),
)
"""Options of SGLang. Only one request runs at a time, so other requests change no batch and no bit of an answer."""


def prompt(number: int) -> list[int]:
    """Return a prompt of `PROMPT_TOKENS` tokens with a distinct first token."""
    generator = torch.Generator().manual_seed(number)
    rest = torch.randint(0, VOCABULARY, (PROMPT_TOKENS - 1,), generator=generator).tolist()
    return [number % VOCABULARY, *rest]


def word(token: int) -> str:
    return f"t{token:03}"


def save_with_tokenizer(seed: int, folder: Path) -> Path:
    """Save a checkpoint with a tokenizer that writes token numbers, for the OpenAI routes."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word(n): n for n in range(VOCABULARY)}, unk_token=word(0)))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=word(0), eos_token=word(1)
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    save(KIND, seed, folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with their logprobs, and the number of cached tokens of the prompt.

    Rollout workers do not get this number.
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int | None


def ask_generate(server: Server, tokens: list[int], count: int = ANSWER_TOKENS) -> Answer:
    sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
    answer = server.post("/generate", body)
    meta = answer["meta_info"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    assert meta["finish_reason"]["type"] == "length"
    return Answer(list(answer["output_ids"]), logprobs, meta["cached_tokens"])


def ask_completions(server: Server, tokens: list[int]) -> Answer:
    answer = server.post(
        "/v1/completions",
        {
            "model": "m", "prompt": tokens, "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "ignore_eos": True, "logprobs": 1,
        },
    )  # fmt: skip
    found = answer["choices"][0]["logprobs"]
    return Answer(numbers(found["tokens"]), found["token_logprobs"], cached(answer))


def ask_chat(server: Server, tokens: list[int]) -> Answer:
    answer = server.post(
        "/v1/chat/completions",
        {
            "model": "m", "messages": [{"role": "user", "content": " ".join(map(word, tokens))}],
            "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": True,
        },
    )  # fmt: skip
    found = answer["choices"][0]["logprobs"]["content"]
    written = numbers([entry["token"] for entry in found])
    return Answer(written, [entry["logprob"] for entry in found], cached(answer))


def ask_worker(server: Server, tokens: list[int], count: int = ANSWER_TOKENS) -> Answer:
    """Ask like a rollout worker, which continues after an abort."""

    async def ask() -> Answer:
        task = RolloutTask(
            task_id=f"t{time.monotonic_ns()}", attempt=1, prompt_ids=tuple(tokens),
            sampling=SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True),
            engine=EngineTarget("engine", server.url), deadline_s=DEADLINE_S,
        )  # fmt: skip
        async with aiohttp.ClientSession() as session:
            generation = await generate(session, task)
        assert generation.finish_reason == "length"
        found = generation.tokens
        return Answer(list(found.output_ids), list(found.logprobs), None)

    return asyncio.run(ask())


def numbers(written: list[str]) -> list[int]:
    return [int(word.strip().removeprefix("t")) for word in written]


def cached(answer: Mapping[str, Any]) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"])


RUNNING, WAITING = "running", "waiting"
ROUTES: dict[str, tuple[Callable[[Server, list[int]], Answer], list[int]]] = {
    "generate": (ask_generate, prompt(1)),
    "completions": (ask_completions, prompt(2)),
    "chat": (ask_chat, prompt(3)),
    "worker": (ask_worker, prompt(4)),
    RUNNING: (ask_generate, prompt(5)),
    WAITING: (ask_generate, prompt(6)),
}
Answers = dict[str, list[Answer]]


def ask_all(server: Server) -> Answers:
    """Send each prompt twice: uncached at first, then with all but its last token cached."""
    return {name: [ask(server, tokens) for _ in range(2)] for name, (ask, tokens) in ROUTES.items()}


@dataclass(frozen=True)
class Weights:
    """A checkpoint, and the answers of a fresh server with it."""

    folder: Path
    answers: Answers


@dataclass
class Trainer:
    """One process that publishes into a live server.

    Attributes:
        version: last published version.
    """

    model: Any
    client: TrainerClient
    version: int

    def publish(self, weights: Weights) -> None:
        loaded = load_file(weights.folder / "model.safetensors")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(loaded[name])
        self.version += 1
        assert self.client.publish(self.version).result().digest_ok


@asynccontextmanager
async def training(
    server: Server, mode: UpdateMode, pause: PauseMode, version: int
) -> AsyncIterator[Trainer]:
    """Yield a trainer in a new fleet with the server; it publishes versions after `version`."""
    deadlines = PhaseDeadlines(pause_s=DEADLINE_S)
    config = ControlConfig(mode=mode, pause_mode=pause, deadlines=deadlines)
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(server.join, controller.url, "cma")
        model = build(KIND, seed=9)
        connect = partial(windlass.connect_trainer, model, controller=controller.url, token=TOKEN)
        client = await asyncio.to_thread(connect)
        try:
            yield Trainer(model, client, version)
        finally:
            await asyncio.to_thread(client.close)


def stream(server: Server, tokens: list[int], begun: threading.Event) -> Mapping[str, Any]:
    """Send a foreign client's request for `RUNNING_TOKENS`, set `begun` at its first token and return its last event."""
    sampling = {"temperature": 0.0, "max_new_tokens": RUNNING_TOKENS, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "stream": True}
    request = urllib.request.Request(
        server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    last: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        for line in response:
            told = line.decode().strip().removeprefix("data: ")
            if told and told != "[DONE]":
                last = json.loads(told)
                begun.set()
    return last


def publish_into_busy(
    server: Server, trainer: Trainer, before: Weights, weights: Weights, pause: PauseMode
) -> None:
    """Publish while one request runs and another waits, and check both answers."""
    begun, old = threading.Event(), trainer.version
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, server, ROUTES[RUNNING][1], begun)
        assert begun.wait(DEADLINE_S)
        waiting = pool.submit(ask_worker, server, ROUTES[WAITING][1])
        trainer.publish(weights)
        answer, last = waiting.result(DEADLINE_S), running.result(DEADLINE_S)
    check([answer], weights.answers[WAITING][:1])
    meta = last["meta_info"]
    spans = [(span["version"], span["end"] - span["start"]) for span in meta["weight_versions"]]
    by_old = before.answers[RUNNING][0].tokens[: spans[0][1]]
    assert last["output_ids"][: len(by_old)] == by_old
    if pause is PauseMode.ABORT:
        assert meta["finish_reason"]["type"] == "abort"
        assert len(last["output_ids"]) == meta["completion_tokens"] < RUNNING_TOKENS
        assert spans == [(str(old), meta["completion_tokens"])]
        return
    assert meta["finish_reason"]["type"] == "length"
    assert meta["completion_tokens"] == RUNNING_TOKENS
    assert [version for version, _ in spans] == [str(old), str(trainer.version)]
    assert all(length > 0 for _, length in spans), "it must span the update"


def check(answers: list[Answer], expected: list[Answer]) -> None:
    """Check that tokens and logprobs are bitwise equal."""
    assert [a.tokens for a in answers] == [e.tokens for e in expected]
    assert [a.logprobs for a in answers] == [e.logprobs for e in expected]


def check_all(server: Server, weights: Weights, kept: tuple[str, ...]) -> int:
    """Compare all answers with a fresh server's, and return their number.

    Prompts named in `kept` may be cached, because the server has already answered them with these weights.
    """
    for name, answers in ask_all(server).items():
        expected = weights.answers[name]
        check(answers, expected)
        cold, warm = expected[0].cached, expected[1].cached
        assert [a.cached for a in answers] == [warm if name in kept else cold, warm], name
    return 2 * len(ROUTES)


@contextmanager
def filling(server: Server, log: Path, seed: int) -> Iterator[list[list[int]]]:
    """Let the server fill in long, distinct prompts, one after the other, and yield the growing list of prompts.

    The block begins when SGLang logs that it has filled in less than half of a prompt.
    """
    prompts: list[list[int]] = []
    over, since = threading.Event(), log.stat().st_size

    def fill() -> None:
        while not over.is_set():
            generator = torch.Generator().manual_seed(seed + len(prompts))
            shape = (FILLED_TOKENS,)
            prompts.append(torch.randint(0, VOCABULARY, shape, generator=generator).tolist())
            sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
            server.post("/generate", {"input_ids": prompts[-1], "sampling_params": sampling})

    with ThreadPoolExecutor(1) as pool:
        filling = pool.submit(fill)
        try:
            end = time.monotonic() + DEADLINE_S
            while not any(n > FILLED_TOKENS // 2 for n in pending(log, since)):
                assert time.monotonic() < end
                threading.Event().wait(0.005)
            yield prompts
        finally:
            over.set()
        filling.result(DEADLINE_S)


def pending(log: Path, since: int, until: str = "") -> list[int]:
    """Return the pending prompt tokens that SGLang logged after each prefill step."""
    told = log.read_bytes()[since:].decode(errors="replace")
    told = told.partition(until)[0] if until else told
    return [int(n) for n in re.findall(r"#pending-token: (\d+)", told)]


def publish_into_filling(
    server: Server, log: Path, trainer: Trainer, weights: Weights
) -> tuple[int, bool]:
    """Publish while the server fills in prompts, and check that no prompt uses its cache entries of old weights.

    Returns:
        Number of compared answers, and whether a prompt was half filled in when the engine paused.
    """
    since = log.stat().st_size
    with filling(server, log, seed=1000 * trainer.version) as filled:
        trainer.publish(weights)
    left = pending(log, since, "POST /begin_weight_update")
    answers = [ask_generate(server, tokens) for tokens in filled]
    for tokens, answer in zip(filled, answers, strict=True):
        flush(server)
        check([answer], [ask_generate(server, tokens)])
    return len(filled), bool(left) and left[-1] > 0


def flush(server: Server) -> None:
    """Empty the cache, after the scheduler has released the request that it has just answered."""
    server.http.post(f"/flush_cache?timeout={DEADLINE_S / 2:.0f}", {}, DEADLINE_S)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
async def test_an_updated_server_uses_no_prefix_of_old_weights(
    layout: Layout, tmp_path: Path, compared: Callable[[str, int], None]
) -> None:
    first, second = (save_with_tokenizer(seed, tmp_path / str(seed)) for seed in (1, 2))
    start = partial(serving, "sglang", layout=layout, flags=FLAGS, tokenizes=True)
    with start(second, tmp_path / "fresh.log") as server:
        stamp(server)
        other = Weights(second, await asyncio.to_thread(ask_all, server))
    log = tmp_path / "live.log"
    with start(first, log) as server:
        stamp(server)
        now = Weights(first, await asyncio.to_thread(ask_all, server))
        for name in ROUTES:
            assert now.answers[name][0].tokens != other.answers[name][0].tokens
        version = 0
        for mode, pause in WAYS if layout.tp == 1 else WAYS[:1]:
            print(f"{mode} updates, {pause} pauses, from version {version}")
            async with training(server, mode, pause, version) as trainer:
                now, other = other, now
                await asyncio.to_thread(publish_into_busy, server, trainer, other, now, pause)
                kept = (WAITING, RUNNING) if pause is PauseMode.RETRACT else (WAITING,)
                count = await asyncio.to_thread(check_all, server, now, kept)
                for _ in range(TRIES):
                    now, other = other, now
                    filled, in_the_middle = await asyncio.to_thread(
                        publish_into_filling, server, log, trainer, now
                    )
                    count += filled
                    # An aborting pause leaves no half-filled prompt.
                    if in_the_middle or pause is PauseMode.ABORT:
                        break
                else:
                    pytest.fail(f"no prompt was in the middle in {TRIES} updates")
                # Caches are empty now. This call fills them, so that the next update finds prefixes of these weights.
                count += await asyncio.to_thread(check_all, server, now, ())
                version = trainer.version
            compared("answers after updates with a fresh server's", count)


def stamp(server: Server) -> None:
    """Set a version number, which rollout workers need."""
    body = {"new_version": "0", "abort_all_requests": False}
    server.post("/update_weight_version", body)


EMBEDDINGS = """
import torch
from sglang.srt.managers import mm_schedule
from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult
from windlass.engines.sglang.hook import _outdate_caches
mm_schedule.init_mm_embedding_cache(1 << 20)
mm_schedule.embedding_cache.set(7, EmbeddingResult(embedding=torch.arange(8.0)))
assert mm_schedule.embedding_cache.has(7)
_outdate_caches("a")
assert not mm_schedule.embedding_cache.has(7)
assert mm_schedule.embedding_cache.current_size == 0
"""
TREE_WITHOUT_KEYS = """
from windlass.engines.sglang.hook import separate_caches
from windlass.errors import UnsupportedLayout
try:
    separate_caches()
except UnsupportedLayout as refused:
    assert "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE must not be set" in str(refused)
else:
    raise AssertionError("must be refused")
"""


ABORT = """
import asyncio
from sglang.srt.managers.io_struct import PauseGenerationReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.aio_rwlock import RWLock
from windlass.engines.sglang.plugin import pause_at_once

class Manager(TokenizerManager):
    def __init__(self):
        self.model_update_lock, self.is_pause_cond, self.is_pause = RWLock(), asyncio.Condition(), False
        self.running, self.num_aborts, self.answered = set(), 0, []

    def abort_request(self, rid="", abort_all=False):
        self.num_aborts += 1
        for ended in self.running:
            ended.set()
        if self.num_aborts == 1:  # a request that was on its way to the scheduler
            asyncio.get_running_loop().call_soon(asyncio.ensure_future, self.request("late"))

    async def request(self, name):
        async with self.model_update_lock.reader_lock:
            self.running.add(ended := asyncio.Event())
            await ended.wait()
            await asyncio.sleep(0.01)  # the last step of the model
            self.running.discard(ended)
            self.answered.append(name)

async def main():
    pause_at_once(TokenizerManager)
    manager = Manager()
    first = [asyncio.create_task(manager.request(f"first {i}")) for i in range(3)]
    await asyncio.sleep(0.01)
    begun = asyncio.get_running_loop().time()
    await manager.pause_generation(PauseGenerationReqInput(mode="abort"))
    took_s = asyncio.get_running_loop().time() - begun
    assert manager.is_pause and not manager.running and not await manager.model_update_lock.is_locked()
    assert sorted(manager.answered) == ["first 0", "first 1", "first 2", "late"], manager.answered
    assert took_s < 0.9, f"SGLang itself looks again after 1 s, this took {took_s}"

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("code", "variables"),
    [
        (ABORT, {}),
        (EMBEDDINGS, {}),
        (TREE_WITHOUT_KEYS, {"SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": "1"}),
    ],
    ids=[
        "a pause that aborts returns with the last request",
        "embeddings of images go with their weights",
        "a tree without keys is refused",
    ],
)
def test_code_passes_in_a_rank_of_sglang(code: str, variables: dict[str, str]) -> None:
    """Run code in SGLang's environment, because no model with encoders is small enough to serve on a CPU."""
    source = str(Path(windlass.__file__).parents[1])
    done = subprocess.run(
        [str(VENVS["sglang"] / "bin/python"), "-c", code],
        check=False, capture_output=True, text=True, timeout=DEADLINE_S,
        env={**environment("sglang", 1, source), **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
