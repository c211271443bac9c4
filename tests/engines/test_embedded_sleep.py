"""Trainer and embedded engine take turns: the engine sleeps while the trainer steps, and reads its weights when it wakes."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from child_process import running
from weight_fleet import TOKEN

import windlass
from windlass import UpdateReport
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, Reaction
from windlass.control.engine_agent import EngineAgent
from windlass.control.messages import Prepare
from windlass.engines.embedded.sleep import SleepingHooks, SleepingWeights
from windlass.errors import RoundAborted, UnsupportedLayout
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.testing.resting_engine import RestingEngine
from windlass.trainers.client import TrainerClient
from windlass.transfer.arena import Arena
from windlass.transfer.base import ParameterMemory
from windlass.transfer.dtensor import describe_module
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.pull import PullTransport

DEADLINE_S = 150.0
PROMPT = [5, 9, 33, 7]
NUM_TOKENS = 6
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 8,
}

HELD_FOLLOWER = """
import sys

if "--follow" in sys.orig_argv:
    from windlass.memory.sleeping import SleepingMemory

    free = SleepingMemory.sleep

    def wait_and_free(memory):
        with open({pipe!r}) as pipe:
            pipe.read()
        free(memory)

    SleepingMemory.sleep = wait_and_free
"""
"""Python's start-up module in which the second rank waits, until the test closes a pipe, before it frees its memory."""
WAKE = """
import os
import resource

from windlass.memory.sleeping import SleepingMemory

wake = SleepingMemory.wake

def wake_as_told(memory):
    if os.path.exists({slow!r}):
        with open({slow!r}) as pipe:
            pipe.read()
    if not os.path.exists({scarce!r}):
        return wake(memory)
    # The kernel refuses every further page of private memory.
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.getpagesize(), before[1]))
    try:
        wake(memory)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)

SleepingMemory.wake = wake_as_told
"""
"""Python's start-up module with which an engine wakes slowly, or finds no memory, while a file exists."""


@dataclass
class Turns:
    """A controller, a trainer in this process, and a running engine."""

    controller: windlass.Controller
    trainer: TrainerClient
    module: Any
    pid: int
    url: str
    version: int = -1
    num_released: int = 0
    on_release: Callable[[], None] = lambda: None

    async def call(self, path: str, body: object | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Authorization": f"Bearer {TOKEN}"}
        )

        def answer() -> dict[str, Any]:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                found: dict[str, Any] = json.loads(response.read())
                return found

        return await asyncio.to_thread(answer)

    async def refused(self, path: str, body: object | None = None) -> str:
        with pytest.raises(urllib.error.HTTPError) as caught:
            await self.call(path, body)
        with caught.value as error:
            return str(json.loads(error.read())["error"])

    async def until_running(self) -> None:
        """Wait until a request runs."""
        async with asyncio.timeout(DEADLINE_S):
            while (await self.call("/server_info"))["running"] == 0:
                pass

    async def sleep(self, mode: str = "abort") -> None:
        await self.call("/release_memory_occupation", {"mode": mode})

    async def publish(self) -> UpdateReport:
        self.version += 1
        publish = self.trainer.publish
        pending = await asyncio.to_thread(publish, self.version, deadline_s=DEADLINE_S)
        return pending.result()

    def step(self) -> None:
        """Change every weight."""
        with torch.no_grad():
            for index, parameter in enumerate(self.module.parameters()):
                noise = torch.Generator().manual_seed(1000 * (self.version + 1) + index)
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.05)

    async def generate(self, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": num_tokens}
        return await self.call("/generate", {"input_ids": PROMPT, "sampling_params": sampling})

    async def check_serves(self) -> None:
        """Check tokens and logprobs against transformers with the trainer's weights."""
        answer = await self.generate()
        with torch.no_grad():
            whole = self.module.generate(
                torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
            )
            logits = self.module(whole).logits[0, len(PROMPT) - 1 : -1]
        expected = whole[0, len(PROMPT) :]
        assert answer["output_ids"] == expected.tolist()
        assert answer["meta_info"]["output_token_versions"] == [self.version] * NUM_TOKENS
        logprobs = logits.log_softmax(-1).gather(1, expected[:, None])[:, 0]
        got = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        torch.testing.assert_close(torch.tensor(got), logprobs, atol=1e-4, rtol=1e-4)

    def engine_nbytes(self) -> int:
        return resident_nbytes(self.pid)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident_nbytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def start_with(folder: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python run the source `module` at the start of processes."""
    (folder / "sitecustomize.py").write_text(module)
    path = (str(folder), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


@asynccontextmanager
async def taking_turns(
    folder: Path,
    *,
    size: int = 1,
    transport: str = "pull",
    deadlines: PhaseDeadlines | None = None,
    max_positions: int = 512,
    kept: str = "",
    **changes: Any,
) -> AsyncIterator[Turns]:
    """Run an engine with `size` ranks that has version 0, and a trainer that counts calls of `release`.

    The trainer does not publish the tensor `kept`.
    """
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | changes))
    torch.manual_seed(0)
    model = transformers.AutoConfig.for_model(**(CONFIG | changes))
    module = transformers.AutoModelForCausalLM.from_config(model).eval()
    config = ControlConfig(
        non_finite=Reaction.REFUSE,
        pause_mode=PauseMode.RETRACT,
        deadlines=deadlines or PhaseDeadlines(),
    )
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        command = (
            *("-m", "windlass.engines.embedded", "--name", "a", "--model", str(path)),
            *("--controller", controller.url, "--transport", transport, "--tp", str(size)),
            *("--max-positions", str(max_positions)),
        )
        with running(*command, token=TOKEN) as process, ThreadPoolExecutor(1) as pool:
            assert process.stdout is not None
            loop = asyncio.get_running_loop()
            url = json.loads(await loop.run_in_executor(pool, process.stdout.readline))["url"]
            turns: Turns

            def release() -> None:
                turns.num_released += 1
                turns.on_release()

            trainer = await asyncio.to_thread(
                windlass.connect_trainer,
                module,
                controller=controller.url,
                token=TOKEN,
                transport=transport,
                release=release,
                name_map=(lambda name: None if name == kept else name) if kept else None,
                keep=[kept] if kept else (),
            )
            with trainer:
                turns = Turns(controller, trainer, module, process.pid, url)
                await turns.publish()
                yield turns


@pytest.mark.parametrize("size", [1, 2])
async def test_a_sleeping_engine_frees_its_weights_and_serves_the_next_version(
    tmp_path: Path, size: int
) -> None:
    """Check both callers: the framework, by the engine's route, and the controller, by the agents."""
    async with taking_turns(tmp_path, size=size) as turns:
        nbytes = sum(p.nbytes for p in turns.module.parameters()) / size
        await turns.check_serves()
        for sleep in (turns.sleep, turns.controller.sleep_engines, turns.sleep):
            awake = turns.engine_nbytes()
            await sleep()
            assert awake - turns.engine_nbytes() > 0.8 * nbytes, "the pages are freed"
            asleep = turns.engine_nbytes()
            turns.step()
            report = await turns.publish()
            assert {*report.memory} == {"trainer/0", *(f"a/{rank}" for rank in range(size))}
            assert report.memory["a/0"] - asleep > 0.8 * nbytes, "the weights are mapped"
            assert report.memory["a/0"] < awake + nbytes / 2
            assert report.memory["trainer/0"] > nbytes * size
            await turns.check_serves()
        assert turns.num_released == turns.version + 1
        assert turns.controller.coordinator.fleet.published == turns.version


@pytest.mark.parametrize("size", [1, 2])
async def test_sleeping_engine_keeps_a_tensor_that_no_trainer_has(
    tmp_path: Path, size: int
) -> None:
    name = "lm_head.weight"
    async with taking_turns(tmp_path, size=size, kept=name, **SMALL) as turns:
        before = (await turns.call(f"/get_weights_by_name?name={name}"))["parameter"]
        assert len({value for row in before for value in row}) > 500
        for _ in range(2):
            await turns.sleep()
            turns.step()
            await turns.publish()
            after = (await turns.call(f"/get_weights_by_name?name={name}"))["parameter"]
            assert after == before
        if size == 1:
            with torch.no_grad():
                turns.module.lm_head.weight.copy_(torch.tensor(before))
            await turns.check_serves()


async def test_a_request_that_runs_when_the_engine_falls_asleep_ends_after_it_wakes(
    tmp_path: Path,
) -> None:
    async with taking_turns(tmp_path, **SMALL) as turns:
        long = asyncio.create_task(turns.generate(300))
        await turns.until_running()
        await turns.sleep("retract")
        waits = asyncio.create_task(turns.generate())
        turns.step()
        await turns.publish()
        answer = await long
        assert len(answer["output_ids"]) == 300
        assert set(answer["meta_info"]["output_token_versions"]) <= {0, 1}
        assert answer["meta_info"]["weight_version"] == "1"
        assert (await waits)["meta_info"]["output_token_versions"] == [1] * NUM_TOKENS
        await turns.check_serves()


async def test_an_engine_without_weights_serves_nothing_until_a_version_is_published(
    tmp_path: Path,
) -> None:
    async with taking_turns(tmp_path, **SMALL) as turns:
        await turns.sleep()
        for path in ("/continue_generation", "/get_weights_by_name?name=lm_head.weight"):
            body: dict[str, Any] | None = {} if path.startswith("/continue") else None
            assert "sleeps until the next version" in await turns.refused(path, body)
        asked = asyncio.create_task(turns.generate())
        turns.step()
        weight = turns.module.lm_head.weight
        saved = weight[0, 0].item()
        with torch.no_grad():
            weight[0, 0] = torch.nan
        with pytest.raises(RoundAborted, match="lm_head"):
            await turns.publish()
        # The round has woken the weights and has not filled them.
        await turns.controller.coordinator.changes.until(
            lambda: not turns.controller.coordinator.routable(), DEADLINE_S, lambda: "routable"
        )
        assert "sleeps until" in await turns.refused("/continue_generation", {})
        assert not asked.done()
        with torch.no_grad():
            weight[0, 0] = saved
        await turns.publish()
        assert (await asked)["meta_info"]["output_token_versions"] == [2] * NUM_TOKENS
        await turns.check_serves()


async def test_an_engine_sleeps_when_all_its_ranks_have_freed_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    start_with(tmp_path, HELD_FOLLOWER.format(pipe=str(pipe)), monkeypatch)
    async with taking_turns(tmp_path, size=2) as turns:
        (follower,) = children_of(turns.pid)
        nbytes = sum(p.nbytes for p in turns.module.parameters()) / 2
        awake = resident_nbytes(follower)
        asleep = asyncio.create_task(turns.sleep())
        # The pipe opens when the second rank is about to free its memory.
        with await asyncio.to_thread(pipe.open, "w"):
            done, _ = await asyncio.wait([asleep], timeout=1.0)
            assert not done, "the engine must wait for its second rank"
        await asleep
        assert awake - resident_nbytes(follower) > 0.8 * nbytes
        turns.step()
        await turns.publish()
        await turns.check_serves()


async def test_an_engine_without_memory_to_wake_waits_for_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, scarce = tmp_path / "slow", tmp_path / "scarce"
    start_with(tmp_path, WAKE.format(slow=str(slow), scarce=str(scarce)), monkeypatch)
    async with taking_turns(tmp_path, **SMALL) as turns:
        await turns.sleep()
        asked = asyncio.create_task(turns.generate())
        scarce.touch()
        turns.step()
        with pytest.raises(RoundAborted, match=r"a: .*could not map .* again: Cannot alloc"):
            await turns.publish()
        assert "sleeps until" in await turns.refused("/continue_generation", {})
        assert not turns.controller.coordinator.routable()
        assert not asked.done()
        scarce.unlink()
        await turns.publish()
        answer = await asked
        assert answer["meta_info"]["output_token_versions"] == [turns.version] * NUM_TOKENS
        await turns.check_serves()


async def test_an_engine_that_wakes_after_the_deadline_waits_for_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, scarce = tmp_path / "slow", tmp_path / "scarce"
    start_with(tmp_path, WAKE.format(slow=str(slow), scarce=str(scarce)), monkeypatch)
    deadlines = PhaseDeadlines(prepare_s=2, pause_s=2)
    async with taking_turns(tmp_path, deadlines=deadlines, **SMALL) as turns:
        await turns.sleep()
        asked = asyncio.create_task(turns.generate())
        os.mkfifo(slow)
        turns.step()
        with pytest.raises(RoundAborted, match=r"a: a/0: no answer in phase prepare by its dead"):
            await turns.publish()
        # The engine wakes now, and it has the weights of no version.
        with await asyncio.to_thread(slow.open, "w"):
            slow.unlink()
        assert "sleeps until" in await turns.refused("/continue_generation", {})
        assert not turns.controller.coordinator.routable()
        assert not asked.done()
        await turns.publish()
        answer = await asked
        assert answer["meta_info"]["output_token_versions"] == [turns.version] * NUM_TOKENS
        await turns.check_serves()


async def test_an_engine_that_cannot_fit_beside_its_trainer_is_refused_before_it_sleeps(
    tmp_path: Path,
) -> None:
    huge = 1 << 44
    with pytest.raises(RoundAborted) as caught:
        async with taking_turns(
            tmp_path, max_positions=huge, max_position_embeddings=huge, **SMALL
        ):
            pytest.fail("version 0 must not be published")
    assert "a/0: weights and caches need " in str(caught.value)
    assert " bytes, but the memory of the host has " in str(caught.value)
    assert "give the engine a smaller KV cache" in str(caught.value)


async def test_an_engine_refuses_to_sleep_during_an_update(tmp_path: Path) -> None:
    """Ask in the trainer's `release`, while the engine has read its bytes and has not applied them."""
    async with taking_turns(tmp_path, **SMALL) as turns:
        loop, reasons = asyncio.get_running_loop(), list[str]()

        def ask() -> None:
            asking = turns.refused("/release_memory_occupation", {})
            reasons.append(asyncio.run_coroutine_threadsafe(asking, loop).result(DEADLINE_S))

        turns.on_release = ask
        for _ in range(2):
            turns.step()
            await turns.publish()
            await turns.check_serves()
            await turns.sleep()
        assert reasons == ["sleep: an update runs; ask again after its end"] * 2


async def test_a_sleeping_engine_gets_no_traffic_and_no_commands_to_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with taking_turns(tmp_path, **SMALL) as turns:
        coordinator = turns.controller.coordinator
        assert len(coordinator.routable()) == 1
        await turns.controller.sleep_engines()
        assert not coordinator.routable()
        (engine,) = coordinator.fleet.engines()
        assert engine.reason == "it sleeps until the next version"
        assert "did not resume" not in caplog.text, "the controller would repeat the command"
        turns.step()
        await turns.publish()
        assert len(coordinator.routable()) == 1
        await turns.check_serves()


async def test_an_engine_whose_memory_peers_map_refuses_to_sleep(tmp_path: Path) -> None:
    async with taking_turns(tmp_path, transport="shm", **SMALL) as turns:
        reason = await turns.refused("/release_memory_occupation", {})
        assert reason.startswith("sleep: transport must be pull or cma")
        with pytest.raises(RoundAborted, match=r"a/0 did not sleep: .*transport must be pull"):
            await turns.controller.sleep_engines()
        await turns.check_serves()


@pytest.mark.parametrize("num_turns", [20, pytest.param(200, marks=pytest.mark.long)])
async def test_turns_leave_no_memory_threads_or_descriptors(tmp_path: Path, num_turns: int) -> None:
    def held(pid: int) -> tuple[int, int, int]:
        """Return the numbers of threads, of descriptors, and of mapped files in shared memory."""
        kinds = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("task", "fd"))
        mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
        shared = {line.split()[4] for line in mapped if "/dev/shm/" in line or "memfd:" in line}
        return next(kinds), next(kinds), len(shared)

    def shared_files() -> int:
        """Return the number of this user's files in shared memory that one of the two processes made."""
        names = (entry.name for entry in os.scandir("/dev/shm"))
        pids = (str(turns.pid), str(os.getpid()))
        return sum(any(pid in name for pid in pids) for name in names)

    async with taking_turns(tmp_path, **SMALL) as turns:

        async def turn() -> None:
            await turns.sleep()
            turns.step()
            await turns.publish()

        # The first turns and answers fill caches of the libraries.
        for _ in range(10):
            await turn()
            await turns.check_serves()
        num_shared = shared_files()
        before = [(held(pid), resident_nbytes(pid)) for pid in (turns.pid, os.getpid())]
        for _ in range(num_turns):
            await turn()
        await turns.check_serves()
        after = [(held(pid), resident_nbytes(pid)) for pid in (turns.pid, os.getpid())]
        assert shared_files() <= num_shared
        for (held_before, nbytes_before), (held_after, nbytes_after) in zip(
            before, after, strict=True
        ):
            assert max(b - a for a, b in zip(held_before, held_after, strict=True)) <= 3
            assert nbytes_after - nbytes_before < (8 << 20)


@pytest.mark.parametrize(("found", "text"), [((0, 64), "of 2 found"), ((0, 8, 128), "of 3 found")])
def test_weights_that_wake_at_other_addresses_are_refused(
    found: tuple[int, ...], text: str
) -> None:
    with closing(PullTransport()) as transport, Arena(transport, 4096) as arena:
        before = tuple(arena.address + offset for offset in (0, 64, 128))
        now = before
        manifest = ManifestBuilder("a/0", Role.ENGINE).build()
        weights = SleepingWeights(arena, manifest, before, lambda: now, may_sleep=True)
        weights.sleep()
        weights.wake()
        now = tuple(arena.address + offset for offset in found)
        rule = "all 3 parameters must keep their addresses"
        with pytest.raises(
            UnsupportedLayout, match=f"wake: {rule}, got 2 with an unchanged address, {text};"
        ):
            weights.wake()


def test_weights_stay_in_memory_while_the_engine_sends_them() -> None:
    """A framework asks the engine to sleep while another engine catches up from it."""
    model, waited = torch.nn.Linear(8, 8, bias=False), list[bool]()
    manifest = describe_module(model, "a/0", Role.ENGINE)
    with closing(PullTransport()) as transport, Arena(transport, 4096) as arena:
        memory = [ParameterMemory(arena.address, manifest.parameters[0].nbytes)]
        addresses, regions = [arena.address], [arena.region]
        weights = SleepingWeights(arena, manifest, addresses, lambda: addresses, may_sleep=True)
        falling_asleep = threading.Thread(target=weights.sleep)

        def read() -> list[ParameterMemory]:
            falling_asleep.start()
            falling_asleep.join(0.3)
            waited.append(falling_asleep.is_alive() and not weights.is_empty)
            return memory

        receiver = Receiver(transport, manifest, addresses, regions)
        hooks = SleepingHooks(RestingEngine(), weights, None)
        sender = Sender(transport, manifest, read, registered=regions)
        agent = EngineAgent(receiver, hooks, sender, sleeper=hooks)
        agent.served_version = 3
        with closing(sender), closing(receiver), closing(agent):
            agent.handle(Prepare(3), epoch=1, round_number=1)
            falling_asleep.join(DEADLINE_S)
            assert (waited, weights.is_empty) == ([True], True)
            with pytest.raises(RoundAborted, match="version 3 cannot be sent"):
                agent.handle(Prepare(3), epoch=1, round_number=2)
