"""A live vLLM server never answers from a cache entry of other weights.

The server has its usual caches on. Two sets of weights alternate in it, in every update mode and pause mode. Around every
update, rollout workers and foreign clients send prompts with one long prefix. During the update, requests run in every
seat of the server, and one request waits for a seat.

1. After the update, tokens and logprobs are bitwise equal to a fresh server's answers to the same prompts in the same
   order. Some prompts repeat the answer of a request that ran across the update. If that request began again, its answer
   is in the cache, computed in a batch; then logprobs are equal within the rounding of a batch.
2. Only the new weights answer the waiting request. A running request continues if the pause mode says so. Otherwise the
   server aborts it, and a rollout worker continues it with the new weights, like a fresh server after the same tokens.
3. The shares of prompt tokens from the prefix cache show that the server uses it before and after the update.

On a busy machine, running requests may end before the update comes. The test then compares their answers with those of
the old weights, and repeats the update.

Fresh servers start after the updated server has ended, because two live servers would share two cores.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import transformers
from live_updates import metric
from servers import CONFIGS, HTTP_S, TOKEN, Layout, Server, build, save, serving

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.rollout.generate import generate
from windlass.rollout.messages import EngineTarget, OnAbort, Partial, RolloutTask
from windlass.sampling import SamplingParams

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

KIND = "long"
CONFIGS[KIND] = {**CONFIGS["dense"], "max_position_embeddings": 2048}
MODEL = "model"
"""Name of the model in requests of foreign clients."""
NUM_SEATS = 4
"""Number of requests that run at once: `--max-num-seqs` of `servers.serving`."""
NUM_TOKENS = 12
NUM_RUNNING_TOKENS = 1200
"""Length of answers that take longer than an update."""
MAX_LATE = 3
"""Number of updates of a server that may come after the running requests have ended."""
NUM_PREFIX_TOKENS = 400
TAILS: tuple[list[int], ...] = ([17, 18], [99, 4, 5], [])
BUSY_DISTANCE = 0.03
"""Largest distance of bfloat16 logprobs where other requests were in a batch; other weights differ by far more."""
FLAGS = {
    "vllm": ("--max-model-len", "2048", "--no-skip-tokenizer-init", "--served-model-name", MODEL),
}


def prefix(number: int) -> list[int]:
    """Return the prefix of the prompts around an update. A common prefix would hide errors behind older cache entries."""
    return [(i * i * 7 + i * 3 + 31 * number) % 240 + 5 for i in range(NUM_PREFIX_TOKENS)]


def prompts(number: int) -> list[list[int]]:
    return [[*prefix(number), *tail] for tail in TAILS]


class Client(StrEnum):
    """Client that sends a prompt."""

    WORKER = "worker"
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True)
class Way:
    """Update mode and pause mode of an update."""

    mode: UpdateMode
    pause: PauseMode

    def __str__(self) -> str:
        return f"{self.mode}, paused by {self.pause}"


WAYS = {
    "vllm": [
        Way(mode, pause)
        for pause in (PauseMode.IN_PLACE, PauseMode.ABORT)
        for mode in (UpdateMode.IN_PLACE, UpdateMode.STAGED)
    ]
}


@dataclass(frozen=True)
class Heard:
    """A prompt and its answer; `exact` if no other request ran at the same time."""

    client: Client
    prompt: Sequence[int]
    tokens: list[int]
    logprobs: list[float]
    exact: bool = True


@dataclass(frozen=True)
class Stretch:
    """Answers of one set of weights, in order, that began with an empty cache."""

    seed: int
    way: str
    heard: list[Heard]


async def ask(server: Server, client: Client, prompt: Sequence[int], count: int) -> Heard:
    """Ask for a greedy answer."""
    if client is Client.WORKER:
        said = await work(server, prompt, count)
        return Heard(client, prompt, list(said.output_ids), list(said.logprobs))
    body = {"model": MODEL, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    if client is Client.COMPLETIONS:
        answer = await asyncio.to_thread(
            server.post, "/v1/completions", {**body, "prompt": list(prompt), "logprobs": 1}
        )
        logprobs = answer["choices"][0]["logprobs"]
        return Heard(client, prompt, ids(logprobs["tokens"]), list(logprobs["token_logprobs"]))
    content = " ".join(f"w{token}" for token in prompt)
    messages = [{"role": "user", "content": content}]
    answer = await asyncio.to_thread(
        server.post, "/v1/chat/completions", {**body, "messages": messages, "logprobs": True}
    )
    entries = answer["choices"][0]["logprobs"]["content"]
    spoken = ids([entry["token"] for entry in entries])
    return Heard(client, prompt, spoken, [entry["logprob"] for entry in entries])


def ids(words: Sequence[str]) -> list[int]:
    return [int(word.strip().removeprefix("w")) for word in words]


async def work(
    server: Server, prompt: Sequence[int], count: int, sent: asyncio.Event | None = None
) -> Partial:
    """Generate like a rollout worker. Set `sent` when the first request is sent."""
    task = RolloutTask(
        task_id=f"{id(prompt)}-{count}-{asyncio.get_running_loop().time()}",
        attempt=0,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True),
        engine=EngineTarget(name="engine", url=server.url),
        deadline_s=HTTP_S,
        on_abort=OnAbort.CONTINUE,
    )
    trace = aiohttp.TraceConfig()

    async def note(*_: object) -> None:
        if sent is not None:
            sent.set()

    trace.on_request_chunk_sent.append(note)
    async with aiohttp.ClientSession(trace_configs=[trace]) as session:
        return (await generate(session, task)).tokens


async def ask_all(
    server: Server, number: int, more: Sequence[Sequence[int]] = (), *, exact: bool = True
) -> list[Heard]:
    """Ask prompts one after the other: each by all clients, and `more` twice by a worker.

    Args:
        server: updated server.
        number: number of the update.
        more: prompts that contain answers of requests that ran side by side.
        exact: whether no cache entry of these answers may be used for `more`.
    """
    heard = [await ask(server, c, prompt, NUM_TOKENS) for prompt in prompts(number) for c in Client]
    return heard + [
        replace(await ask(server, Client.WORKER, prompt, NUM_TOKENS), exact=exact)
        for prompt in more
        for _ in range(2)
    ]


@dataclass(frozen=True)
class Spoken:
    """Answers of the running requests and of the waiting request."""

    running: list[Partial]
    foreign: list[int]
    foreign_ended: str
    waited: Partial


def running_prompt(number: int, seat: int) -> list[int]:
    return [*prefix(number), 100 + seat]


@asynccontextmanager
async def busy(server: Server, number: int) -> AsyncIterator[asyncio.Future[Spoken]]:
    """Fill every seat with requests, let one more wait, and yield their future answers."""
    async with asyncio.TaskGroup() as group, aiohttp.ClientSession() as session:
        async with asyncio.timeout(HTTP_S):
            running = [
                await send(group, server, running_prompt(number, seat), NUM_RUNNING_TOKENS)
                for seat in range(NUM_SEATS - 1)
            ]
            await received(server)
            began = asyncio.Event()
            foreign = group.create_task(stream(session, server, number, began))
            # The scheduler is first come, first served: all seats are taken at this token.
            await began.wait()
            waiting = await send(group, server, prompts(number)[0], NUM_TOKENS)
            await received(server)
        future: asyncio.Future[Spoken] = asyncio.get_running_loop().create_future()
        yield future
        tokens, ended = await foreign
        future.set_result(Spoken([await r for r in running], tokens, ended, await waiting))


async def send(
    group: asyncio.TaskGroup, server: Server, prompt: Sequence[int], count: int
) -> asyncio.Task[Partial]:
    """Send a rollout worker's request, and return the task of its answer."""
    sent = asyncio.Event()
    task = group.create_task(work(server, prompt, count, sent))
    await sent.wait()
    return task


async def received(server: Server) -> None:
    """Wait until vLLM's core has all requests sent so far. It takes requests and calls from one queue, in order."""
    await asyncio.to_thread(server.post, "/collective_rpc", {"method": "check_health"})


async def stream(
    session: aiohttp.ClientSession, server: Server, number: int, began: asyncio.Event
) -> tuple[list[int], str]:
    """Return the tokens of a foreign client's answer and its finish reason."""
    body = {
        "model": MODEL, "prompt": running_prompt(number, NUM_SEATS - 1), "stream": True, "logprobs": 1,
        "max_tokens": NUM_RUNNING_TOKENS, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    tokens, ended = [], ""
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        async for line in response.content:
            text = line.decode().removeprefix("data: ").strip()
            if not text or text == "[DONE]":
                continue
            choice = json.loads(text)["choices"][0]
            tokens += ids((choice["logprobs"] or {"tokens": []})["tokens"])
            ended = choice["finish_reason"] or ended
            began.set()
    return tokens, ended


@dataclass
class Hits:
    """Share of prompt tokens that vLLM found in its prefix cache since the last call of `since`."""

    server: Server
    queried: float = 0.0
    found: float = 0.0

    def since(self) -> float:
        queried, found = (
            metric(self.server, f"prefix_cache_{name}_total") for name in ("queries", "hits")
        )
        share = (found - self.found) / max(queried - self.queried, 1)
        self.queried, self.found = queried, found
        return share


@asynccontextmanager
async def updating(
    server: Server, way: Way, weights: Any
) -> AsyncIterator[Callable[[int], windlass.UpdateReport]]:
    """Yield a function that publishes a version of `weights` to the server, in a new fleet."""
    config = ControlConfig(
        mode=way.mode, pause_mode=way.pause, deadlines=PhaseDeadlines(pause_s=120)
    )
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(server.join, controller.url, "cma")
        trainer = await asyncio.to_thread(
            lambda: windlass.connect_trainer(weights, controller=controller.url, token=TOKEN)
        )
        try:
            yield lambda version: trainer.publish(version).result()
        finally:
            await asyncio.to_thread(trainer.close)


def checkpoint(seed: int, folder: Path) -> Path:
    """Save a checkpoint with a tokenizer of one word per token and a chat template that adds no text."""
    save(KIND, seed, folder)
    tokenizer = vocabulary({f"w{token}": token for token in range(CONFIGS[KIND]["vocab_size"])})
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def vocabulary(words: Mapping[str, int]) -> Any:
    """Return a tokenizer that splits text at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(dict(words), unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


SEEDS = (1, 2)
"""Seeds of the weights that a server starts with, and of the other weights."""


@pytest.mark.parametrize(
    ("engine", "layout", "ways"),
    [("vllm", Layout(), WAYS["vllm"]), ("vllm", Layout(tp=2), WAYS["vllm"][:1])],
    ids=lambda value: str(value) if isinstance(value, str | Layout) else "",
)
async def test_an_updated_server_with_caches_answers_as_a_fresh_server(
    engine: str,
    layout: Layout,
    ways: Sequence[Way],
    tmp_path: Path,
    compared: Callable[[str, int], None],
) -> None:
    checkpoints = {seed: checkpoint(seed, tmp_path / str(seed)) for seed in SEEDS}
    flags, stretches = FLAGS[engine], []
    log = tmp_path / "live.log"
    with serving(engine, checkpoints[SEEDS[0]], log, layout=layout, flags=flags) as server:
        hits, left, number = Hits(server), [*ways], 0
        while left:
            number, way = number + 1, left[0]
            assert number <= len(ways) + MAX_LATE, "the updates came too late"
            old, seed = SEEDS[(number - 1) % 2], SEEDS[number % 2]
            weights, version = build(KIND, old), 2 * number
            async with updating(server, way, weights) as publish:
                # This version does not change the weights. It binds the fleet, so that the measured update is short.
                await asyncio.to_thread(publish, version - 1)
                hits.since()
                await ask_all(server, number)
                before = hits.since()
                weights.load_state_dict(build(KIND, seed).state_dict())
                async with busy(server, number) as speaking:
                    report = await asyncio.to_thread(publish, version)
                spoken = await speaking
                if early := [*ended_early(spoken, number, version)]:
                    stretches.append(Stretch(old, f"{way}, too late", early))
                    continue
                hits.since()
                more = [
                    [*running_prompt(number, NUM_SEATS - 1), *spoken.foreign],
                    [*running_prompt(number, 0), *spoken.running[0].output_ids],
                ]
                # Requests that continued in place leave no entries of the new version.
                goes_on = way.pause is PauseMode.IN_PLACE
                heard = [
                    *check_spoken(spoken, way, number, version),
                    *await ask_all(server, number, more, exact=goes_on),
                ]
                after = hits.since()
            left.remove(way)
            stretches.append(Stretch(seed, str(way), heard))
            print(f"{engine} {layout} {way}: {report.pause_s=} hits {before:.3f} {after:.3f}")
            assert min(before, after) > 0.5, "the server does not use its prefix cache"
            # The answers of aborted requests that began again are in the cache, and the others are not.
            assert (after > 0.9) == (not goes_on)
    different = []
    for seed in SEEDS:
        if not (told := [stretch for stretch in stretches if stretch.seed == seed]):
            continue
        log = tmp_path / f"fresh-{seed}.log"
        with serving(engine, checkpoints[seed], log, layout=layout, flags=flags) as server:
            # Rollout workers need a version.
            server.post("/update_weight_version", {"new_version": "0"})
            for stretch in told:
                different += await differences(server, stretch, compared)
    assert not different, "\n".join(different)


def ended_early(spoken: Spoken, number: int, version: int) -> Iterator[Heard]:
    """Yield the answers of rollout workers that ended before the update."""
    for seat, ran in enumerate(spoken.running):
        if version not in ran.versions:
            yield Heard(
                Client.WORKER, running_prompt(number, seat), list(ran.output_ids), list(ran.logprobs),
                exact=False,
            )  # fmt: skip


def check_spoken(spoken: Spoken, way: Way, number: int, version: int) -> Iterator[Heard]:
    """Check the versions of running and waiting requests, and yield the parts that only the new weights generated."""
    goes_on = way.pause is PauseMode.IN_PLACE
    assert (spoken.foreign_ended, len(spoken.foreign) == NUM_RUNNING_TOKENS) == (
        ("length", True) if goes_on else ("abort", False)
    )
    assert set(spoken.waited.versions) == {version}
    yield Heard(
        Client.WORKER, prompts(number)[0], list(spoken.waited.output_ids), list(spoken.waited.logprobs),
        exact=False,
    )  # fmt: skip
    for seat, ran in enumerate(spoken.running):
        assert len(ran.versions) == NUM_RUNNING_TOKENS
        assert list(ran.versions) == sorted(ran.versions)
        assert len(set(ran.versions)) == 2, "the update came too early"
        if not goes_on:
            old = ran.versions.index(version)
            end = old + NUM_TOKENS
            yield Heard(
                Client.WORKER, [*running_prompt(number, seat), *ran.output_ids[:old]],
                list(ran.output_ids[old:end]), list(ran.logprobs[old:end]), exact=False,
            )  # fmt: skip


async def differences(
    server: Server, stretch: Stretch, compared: Callable[[str, int], None]
) -> list[str]:
    """Return the differences from the answers of a fresh server."""
    # The server must have empty caches, as after its start.
    await asyncio.to_thread(server.http.post, "/reset_prefix_cache", {}, HTTP_S)
    different = []
    for heard in stretch.heard:
        fresh = await ask(server, heard.client, heard.prompt, len(heard.tokens))
        pairs = [*zip(fresh.tokens, heard.tokens, strict=True)]
        # Rounding may decide between two tokens that are nearly equally likely. Later tokens have another prefix then.
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        distances = [abs(a - b) for a, b in zip(fresh.logprobs, heard.logprobs, strict=True)]
        far = max(distances if heard.exact else distances[: same + 1])
        if (heard.exact and same < len(pairs)) or far > (0 if heard.exact else BUSY_DISTANCE):
            different.append(
                f"{stretch.way}: {heard.client}, prompt of {len(heard.prompt)}, exact "
                f"{heard.exact}: {same} of {len(heard.tokens)} tokens, logprobs off by {far:.4f}"
            )
    tokens = sum(len(heard.tokens) for heard in stretch.heard)
    for what in ("greedy tokens", "logprobs"):
        compared(f"{what} with a fresh server's", tokens)
    compared("answers after updates with a fresh server's", len(stretch.heard))
    return different
