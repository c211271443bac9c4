"""Trainer and live vLLM server take turns: vLLM's sleep mode frees the memory, and the engine reads its weights when it wakes.

vLLM has no sleep mode on CPUs, so `vllm_cpu_sleep` gives its worker memory that sleeps. Everything else is vLLM's and
Windlass's own: the routes, the scheduler, the executor, the allocator, and the wrapped worker.
"""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_servers import (
    SUPPORT,
    checksums,
    require_equal_answers,
    require_equal_parameters,
    serving_fresh,
)
from live_updates import metric
from plain_vllm import checkpoint, serving_plain, syncing
from rows import Record, of_setting
from servers import (
    HTTP_S,
    TOKEN,
    Layout,
    Server,
    build,
    engine_version,
    family,
    save,
    serving,
)
from turn_rig import (
    KIND,
    NUM_TOKENS,
    PROMPT,
    Rig,
    control_config,
    serving_first_version,
    until_refused,
)
from vllm_cpu_sleep import COPIED

import windlass
from windlass.config import PauseMode, Reaction
from windlass.errors import RoundAborted

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

LONG, LOG = 60, "server.log"
SLEEPS = str(SUPPORT / "cpu_sleep")
"""Folder of the plugin that gives vLLM's worker for CPUs a sleep mode."""
FLAGS = ("--enable-sleep-mode", "--block-size", "32")


class Turns(Rig):
    def copied(self) -> int:
        """Return how many bytes all ranks had copied between device and host when they last woke memory."""
        found = re.findall(rf"{COPIED}(\d+) (\d+)\n", (self.folder.parent / LOG).read_text())
        return sum({rank: int(nbytes) for rank, nbytes in found}.values())

    async def until_running(self) -> None:
        """Wait until a request runs."""
        async with asyncio.timeout(HTTP_S):
            while not await asyncio.to_thread(metric, self.server, "num_requests_running"):
                pass


@contextmanager
def sleeping_server(folder: Path, tp: int) -> Iterator[Server]:
    """Run a server that may sleep and has joined no fleet."""
    first = save(KIND, 1, folder / "first")
    layout, log = Layout(tp=tp), folder / LOG
    with serving(
        "vllm", first, log, layout=layout, transport="pull", flags=FLAGS, path=SLEEPS
    ) as server:
        yield server


@asynccontextmanager
async def taking_turns(server: Server, folder: Path, **config: Any) -> AsyncIterator[Turns]:
    """Let the server join a new fleet and serve version 0."""
    async with windlass.Controller(token=TOKEN, config=control_config(**config)) as controller:
        await asyncio.to_thread(server.join, controller.url, "pull")
        async with serving_first_version(Turns, server, controller, folder) as turns:
            yield turns


@pytest.mark.parametrize("tp", [1, 2])
async def test_vllm_takes_turns_with_its_trainer(tp: int, tmp_path: Path, shown: Record) -> None:
    with sleeping_server(tmp_path, tp) as server:
        await take_turns(server, tmp_path / "turns")
        await fail_turns(server, tmp_path / "faults")
    detail = f"the server sleeps and reads, with {tp} ranks; the test gives vLLM on CPUs memory that sleeps"
    setting = f"--enable-sleep-mode with pull, TP{tp}"
    shown(of_setting("vllm", engine_version("vllm"), setting, detail=detail))


async def take_turns(server: Server, folder: Path) -> None:
    async with taking_turns(server, folder) as turns:
        # The framework wakes the engine, which then has its old weights.
        began = turns.copied()
        await turns.post("/sleep?level=1")
        waiting = turns.ask()
        await turns.post("/resume")
        await turns.must_wait(waiting)
        await turns.post("/wake_up")
        both_ways = turns.copied() - began
        await turns.check(await waiting)
        for level in (1, 2):
            began = turns.copied()
            await turns.post(f"/sleep?level={level}")
            turns.step()
            await turns.publish()
            # vLLM copies the weights to host memory. The update writes them, so only the rest is copied back.
            assert turns.copied() - began < 0.6 * both_ways
            await turns.check()
        running = asyncio.create_task(asyncio.to_thread(server.sample, PROMPT, LONG))
        await turns.until_running()
        await turns.controller.sleep_engines(mode=PauseMode.RETRACT)
        turns.step()
        await turns.publish()
        answer = await running
        assert set(answer.versions) <= {turns.version - 1, turns.version}
        assert answer.versions[-1] == turns.version
        await turns.check()
        # The framework wakes the weights before the update and the KV cache after it.
        await turns.post("/sleep?level=2")
        turns.step()
        await turns.post("/wake_up?tags=weights")
        waiting = turns.ask()
        await turns.publish()
        await turns.must_wait(waiting)
        await turns.post("/wake_up?tags=kv_cache")
        await turns.check(await waiting)
        # The framework wakes everything before the update.
        for order in (["weights", "kv_cache"], ["kv_cache", "weights"], []):
            await turns.post("/sleep?level=2")
            turns.step()
            for tag in order or [""]:
                await turns.post(f"/wake_up?tags={tag}" if tag else "/wake_up")
            waiting = turns.ask()
            await turns.must_wait(waiting)
            await turns.publish()
            await turns.check(await waiting)


async def fail_turns(server: Server, folder: Path) -> None:
    async with taking_turns(server, folder, non_finite=Reaction.REFUSE) as turns:
        await turns.post("/sleep?level=2")
        turns.step()
        waiting = turns.ask()
        weight = turns.model.lm_head.weight
        saved = weight[0, 0].item()
        with torch.no_grad():
            weight[0, 0] = torch.nan
        with pytest.raises(RoundAborted, match="lm_head"):
            await turns.publish()
        with torch.no_grad():
            weight[0, 0] = saved
        # No round has filled the weights.
        await turns.post("/resume")
        await turns.post("/wake_up")
        await turns.must_wait(waiting)
        await turns.must_refuse("this engine has no weights")
        # A trainer that needs its memory again makes the server sleep once more.
        await turns.post("/sleep?level=2&mode=keep")
        await turns.publish_again()
        await turns.check(await waiting)
        # A rank has too little memory.
        for level in (1, 2):
            await turns.post(f"/sleep?level={level}")
            waiting = turns.ask()
            turns.step()
            why = "Cannot allocate memory"
            with no_more_memory(server), pytest.raises(RoundAborted, match=why):
                await turns.publish()
            # The round has begun to wake the weights and has not filled them.
            await turns.post("/resume")
            await turns.post("/wake_up")
            await turns.must_wait(waiting)
            await turns.must_refuse("this engine has no weights")
            if level == 1:
                await turns.post("/sleep?level=1&mode=keep")
            await turns.publish_again()
            await turns.check(await waiting)
        # The controller ends while the weights are lost. The next trainer fills all of them.
        await turns.post("/sleep?level=2")
        waiting = turns.ask()
        await turns.post("/wake_up")
        await turns.must_wait(waiting)
    await until_refused(server, "this engine has no weights")
    async with taking_turns(server, folder / "next") as turns:
        await turns.check(await waiting)


@contextmanager
def no_more_memory(server: Server) -> Iterator[None]:
    """Let no process of the server get more private memory than it has."""
    pids = family(server.process.pid)
    before = {pid: resource.prlimit(pid, resource.RLIMIT_DATA) for pid in pids}
    for pid, (_, hard) in before.items():
        status = Path(f"/proc/{pid}/status").read_text()
        used = int(status.partition("VmData:")[2].split()[0]) << 10
        resource.prlimit(pid, resource.RLIMIT_DATA, (used, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, resource.RLIMIT_DATA, limits)


async def test_tensor_that_no_trainer_has_outlives_the_servers_sleep(tmp_path: Path) -> None:
    """The last norm is in memory that vLLM frees, and trainers send all other tensors."""
    model, sent = build(KIND, 1), torch.nn.Module()
    sent.model, sent.lm_head = torch.nn.Module(), model.lm_head
    sent.model.embed_tokens, sent.model.layers = model.model.embed_tokens, model.model.layers
    with sleeping_server(tmp_path, 1) as server:
        async with windlass.Controller(token=TOKEN, config=control_config()) as controller:
            await asyncio.to_thread(server.join, controller.url, "pull")
            trainer = await asyncio.to_thread(
                windlass.connect_trainer,
                sent,
                controller=controller.url,
                token=TOKEN,
                transport="pull",
                keep=("model.norm.weight",),
            )
            with trainer:
                turns = Turns(server, controller, trainer, model, tmp_path / "turns")
                await turns.publish_again()
                for level in (1, 2):
                    await turns.post(f"/sleep?level={level}")
                    with torch.no_grad():
                        for parameter in sent.parameters():
                            parameter.mul_(1.25)
                    await turns.publish_again()
                    await turns.check()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_plain_server_takes_turns_by_vllms_own_routes(tp: int, tmp_path: Path) -> None:
    """With one rank the agent wakes the server, in the core's process as on GPUs. With two, `/update_weights` does."""
    source = checkpoint(1, tmp_path / "source")
    with serving_plain(
        source, tmp_path / "live.log", tp=tp, in_core=tp == 1, flags=FLAGS, path=SLEEPS
    ) as server:
        with syncing(
            tmp_path / "trainers", 2, source=str(source), servers=[server.url], transport="pull"
        ) as trainers:
            assert [joined.error for joined in trainers.answers()] == ["", ""]
            version, answers = 0, list[tuple[list[int], list[float]]]()
            for calls in (["/sleep?level=1"], ["/sleep?level=2"], ["/sleep?level=2", "/wake_up"]):
                for call in calls:
                    server.http.post(call, {}, HTTP_S)
                version += 1
                for sent in trainers.send(version, tmp_path / str(version)):
                    assert (sent.version, sent.error, sent.left_out) == (version, "", {})
                assert not server.is_paused()
                assert server.version() == str(version)
                answers = [server.answer(PROMPT, NUM_TOKENS)]
            updated = server.checksums()
            server.http.post("/sleep?level=2", {}, HTTP_S)
        # The controller lives in the trainer.
        asyncio.run(until_refused(server, "this engine has no weights"))
    with serving_fresh(
        "vllm", tmp_path / str(version), tmp_path / "fresh.log", layout=Layout(tp), dtype="bfloat16"
    ) as fresh:
        require_equal_parameters(updated, checksums("vllm", fresh.post))
        require_equal_answers(answers, [fresh.answer(PROMPT, NUM_TOKENS)], dtype="bfloat16")
