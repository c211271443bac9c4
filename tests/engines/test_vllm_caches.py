"""Nothing in an engine's caches answers for other weights than those it was computed with.

A live server, with the caches that users have on, is updated with two sets of weights in turn, in
every mode and every pause mode. Around every update prompts with one long prefix are asked, by
Windlass's own client of engines and by foreign ones. While it comes, requests run in every seat of
the server and one waits for a seat. Then

1. what was asked afterwards is what a fresh server of these weights answers to the same questions in
   the same order, tokens and logprobs, to the bit; also where a prompt repeats what a request said
   that ran across the update;
2. what waited is answered by the new weights alone; what runs goes on where the pause mode says so,
   and otherwise goes on with the new weights, as a fresh server goes on from its tokens;
3. the caches are used: within one version prompts find the prefix of others, across an update none.

The last server updated is compared after it has ended: two live servers would share two cores.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import transformers
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
"""The name that foreign clients give."""
NUM_SEATS = 4
"""Of `FLAGS`: requests that run at once."""
NUM_TOKENS = 12
NUM_RUNNING_TOKENS = 1200
"""More than an update lasts."""
NUM_PREFIX_TOKENS = 400
TAILS: tuple[list[int], ...] = ([17, 18], [99, 4, 5], [])
BUSY_DISTANCE = 0.03
"""Of logprobs in bfloat16 that were computed beside other requests; other weights are far away."""
FLAGS = {
    "vllm": ("--max-model-len", "2048", "--no-skip-tokenizer-init", "--served-model-name", MODEL),
}


def prefix(number: int) -> list[int]:
    """Of the prompts around an update: what an earlier one left would hide what this one leaves."""
    return [(i * i * 7 + i * 3 + 31 * number) % 240 + 5 for i in range(NUM_PREFIX_TOKENS)]


def prompts(number: int) -> list[list[int]]:
    return [[*prefix(number), *tail] for tail in TAILS]


class Client(StrEnum):
    """Who asks."""

    WORKER = "worker"
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True)
class Way:
    """How an update goes."""

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
    """A question and its answer; `exact`: asked when nothing else ran."""

    client: Client
    prompt: Sequence[int]
    tokens: list[int]
    logprobs: list[float]
    exact: bool = True


@dataclass(frozen=True)
class Stretch:
    """What was heard of one set of weights, in order, from an empty cache on."""

    seed: int
    way: str
    heard: list[Heard]


async def ask(server: Server, client: Client, prompt: Sequence[int], count: int) -> Heard:
    """Greedily."""
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
    server: Server, prompt: Sequence[int], count: int, on_abort: OnAbort = OnAbort.CONTINUE
) -> Partial:
    """As rollout workers do."""
    task = RolloutTask(
        task_id=f"{id(prompt)}-{count}-{asyncio.get_running_loop().time()}",
        attempt=0,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True),
        engine=EngineTarget(name="engine", url=server.url),
        deadline_s=HTTP_S,
        on_abort=on_abort,
    )
    async with aiohttp.ClientSession() as session:
        return (await generate(session, task)).tokens


async def ask_all(server: Server, number: int, more: Sequence[Sequence[int]] = ()) -> list[Heard]:
    """One after the other."""
    heard = [await ask(server, c, prompt, NUM_TOKENS) for prompt in prompts(number) for c in Client]
    return heard + [
        await ask(server, Client.WORKER, prompt, NUM_TOKENS) for prompt in more for _ in range(2)
    ]


@dataclass(frozen=True)
class Spoken:
    """What ran across an update, and what waited for a seat meanwhile."""

    running: list[Partial]
    foreign: list[int]
    foreign_ended: str
    waited: Partial


def running_prompt(number: int, seat: int) -> list[int]:
    return [*prefix(number), 100 + seat]


@asynccontextmanager
async def busy(server: Server, number: int) -> AsyncIterator[asyncio.Future[Spoken]]:
    """Every seat is taken by requests that share the prefix, and one more waits."""
    async with asyncio.TaskGroup() as group, aiohttp.ClientSession() as session:
        running = [
            group.create_task(work(server, running_prompt(number, seat), NUM_RUNNING_TOKENS))
            for seat in range(NUM_SEATS - 1)
        ]
        await reached(server, "num_requests_running", NUM_SEATS - 1)
        began = asyncio.Event()
        foreign = group.create_task(stream(session, server, number, began))
        await began.wait()
        waiting = group.create_task(work(server, prompts(number)[0], NUM_TOKENS))
        await reached(server, "num_requests_waiting", 1)
        future: asyncio.Future[Spoken] = asyncio.get_running_loop().create_future()
        yield future
        tokens, ended = await foreign
        future.set_result(Spoken([await r for r in running], tokens, ended, await waiting))


async def stream(
    session: aiohttp.ClientSession, server: Server, number: int, began: asyncio.Event
) -> tuple[list[int], str]:
    """Tokens of a foreign client's answer, and why they end."""
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


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=HTTP_S) as response:
        text = response.read().decode()
    values = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE)
    assert values, name
    return sum(map(float, values))


async def reached(server: Server, name: str, value: float) -> None:
    async with asyncio.timeout(HTTP_S):
        while await asyncio.to_thread(metric, server, name) < value:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # servers tell when asked


@dataclass
class Hits:
    """Share of the tokens of prompts that vLLM found in its prefix cache since the last look."""

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
    """A fleet of its own, and what publishes a version of `weights` into it."""
    config = ControlConfig(
        mode=way.mode, pause_mode=way.pause, deadlines=PhaseDeadlines(pause_s=120)
    )
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(server.join, controller.url, "cma")
        trainer = await asyncio.to_thread(
            lambda: windlass.connect_trainer(weights, controller=controller.url, token=TOKEN)
        )
        try:
            yield trainer.publish
        finally:
            await asyncio.to_thread(trainer.close)


def checkpoint(seed: int, folder: Path) -> Path:
    """With a tokenizer of one word per token, and a template that adds nothing."""
    save(KIND, seed, folder)
    tokenizer = vocabulary({f"w{token}": token for token in range(CONFIGS[KIND]["vocab_size"])})
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def vocabulary(words: Mapping[str, int]) -> Any:
    """A tokenizer of words between spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(dict(words), unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


SEEDS = (1, 2)
"""Of the weights that a server starts with, and of the others."""


@pytest.mark.parametrize(
    ("engine", "layout", "ways"),
    [("vllm", Layout(), WAYS["vllm"]), ("vllm", Layout(tp=2), WAYS["vllm"][:1])],
    ids=lambda value: str(value) if isinstance(value, str | Layout) else "",
)
async def test_an_updated_server_answers_as_a_fresh_one_with_its_caches_on(
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
        hits = Hits(server)
        for number, way in enumerate(ways, 1):
            old, seed = SEEDS[(number - 1) % 2], SEEDS[number % 2]
            weights, version = build(KIND, old), 2 * number
            async with updating(server, way, weights) as publish:
                # What it holds already: the fleet is bound, and the update that counts is short.
                await asyncio.to_thread(publish, version - 1)
                hits.since()
                await ask_all(server, number)
                before = hits.since()
                weights.load_state_dict(build(KIND, seed).state_dict())
                async with busy(server, number) as speaking:
                    report = await asyncio.to_thread(publish, version)
                spoken = await speaking
                hits.since()
                more = [
                    [*running_prompt(number, NUM_SEATS - 1), *spoken.foreign],
                    [*running_prompt(number, 0), *spoken.running[0].output_ids],
                ]
                heard = [
                    *check_spoken(spoken, way, number, version),
                    *await ask_all(server, number, more),
                ]
            stretches.append(Stretch(seed, str(way), heard))
            print(
                f"{engine} {layout} {way}: {report.pause_s=} hits {before:.3f} {hits.since():.3f}"
            )
    different = []
    for seed in SEEDS:
        if not (told := [stretch for stretch in stretches if stretch.seed == seed]):
            continue
        log = tmp_path / f"fresh-{seed}.log"
        with serving(engine, checkpoints[seed], log, layout=layout, flags=flags) as server:
            server.post("/update_weight_version", {"new_version": "0"})  # workers want one
            for stretch in told:
                different += await differences(server, stretch, compared)
    assert not different, "\n".join(different)


def check_spoken(spoken: Spoken, way: Way, number: int, version: int) -> Iterator[Heard]:
    """What ran and what waited carries the right versions; parts that only new weights made."""
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
        assert len(set(ran.versions)) == 2, "the update came too late or too early"
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
    """From what a fresh server says."""
    # its caches are empty, as when it started
    await asyncio.to_thread(server.http.post, "/reset_prefix_cache", {}, HTTP_S)
    different = []
    for heard in stretch.heard:
        fresh = await ask(server, heard.client, heard.prompt, len(heard.tokens))
        far = max(abs(a - b) for a, b in zip(fresh.logprobs, heard.logprobs, strict=True))
        if fresh.tokens != heard.tokens or far > (0 if heard.exact else BUSY_DISTANCE):
            same = sum(a == b for a, b in zip(fresh.tokens, heard.tokens, strict=True))
            different.append(
                f"{stretch.way}: {heard.client}, prompt of {len(heard.prompt)}, exact "
                f"{heard.exact}: {same} of {len(heard.tokens)} tokens, logprobs off by {far:.4f}"
            )
    tokens = sum(len(heard.tokens) for heard in stretch.heard)
    for what in ("greedy tokens", "logprobs"):
        compared(f"{what} with a fresh server's", tokens)
    compared("answers after updates with a fresh server's", len(stretch.heard))
    return different
