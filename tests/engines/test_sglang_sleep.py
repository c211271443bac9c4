"""Trainer and live SGLang server take turns: its memory saver frees the memory, and the engine reads its weights when it wakes.

torch_memory_saver needs CUDA, so `sglang_cpu_sleep` replaces SGLang's adapter of it. Everything else is SGLang's and
Windlass's own: the routes, the scheduler and its handlers, and the hooks in the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_servers import filled_gaps
from rows import Record, of_setting
from servers import (
    TOKEN,
    Layout,
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
)

import windlass
from windlass.config import PauseMode, Reaction
from windlass.errors import PeerUnreachable, RoundAborted

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


class Turns(Rig):
    async def refused(self, path: str, body: object, reason: str) -> None:
        with pytest.raises(PeerUnreachable, match=reason):
            await self.post(path, body)

    async def toggle_searches(self) -> None:
        """Make the ranks refuse to sleep, or let them sleep again."""
        await asyncio.to_thread(self.server.digests_of_fresh_load, Path())

    def nbytes(self) -> int:
        """Return the memory of the server's processes that is in use."""
        pages = (
            Path(f"/proc/{pid}/statm").read_text().split()[1]
            for pid in family(self.server.process.pid)
        )
        return 4096 * sum(map(int, pages))


@asynccontextmanager
async def taking_turns(folder: Path, tp: int, *flags: str, **config: Any) -> AsyncIterator[Turns]:
    """Run a server that serves version 0."""
    first, log = save(KIND, 1, folder / "first"), folder / "server.log"
    async with windlass.Controller(token=TOKEN, config=control_config(**config)) as controller:
        running = serving(
            *("sglang", first, log),
            layout=Layout(tp=tp),
            controller=controller.url,
            transport="pull",
            flags=("--enable-memory-saver", *flags),
            path=filled_gaps(log),
        )
        with ExitStack() as stack:
            # The server joins while the controller's loop runs.
            server = await asyncio.to_thread(stack.enter_context, running)
            async with serving_first_version(Turns, server, controller, folder) as turns:
                yield turns


@pytest.mark.engines
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tp", [1, 2])
async def test_sglang_takes_turns_with_its_trainer(tp: int, tmp_path: Path, shown: Record) -> None:
    async with taking_turns(tmp_path, tp, non_finite=Reaction.REFUSE) as turns:
        # The controller calls, and the round wakes everything.
        awake = turns.nbytes()
        await turns.controller.sleep_engines(mode=PauseMode.ABORT)
        assert not turns.controller.coordinator.routable()
        assert awake - turns.nbytes() > (2 << 20), "the memory is freed"
        turns.step()
        await turns.publish()
        await turns.check()
        # A request that runs is computed again with the next version.
        # On an idle machine the 150 tokens take less than half a second.
        running = asyncio.create_task(asyncio.to_thread(turns.server.sample, PROMPT, 150))
        await asyncio.sleep(0.1)
        await turns.post(RELEASE, {})
        turns.step()
        await turns.must_wait(running)
        await turns.publish()
        long = await running
        assert len(long.tokens) == 150
        assert {*long.versions} <= {turns.version - 1, turns.version}
        assert long.versions[-1] == turns.version
        await turns.check()
        # slime and verl call without a pause before, and wake the weights before the update and the caches after it.
        for tags in ({}, {"tags": ["kv_cache", "weights"]}):
            await turns.post(RELEASE, tags)
            await turns.post(RELEASE, tags)
            waiting = turns.ask()
            await turns.must_wait(waiting)
            turns.step()
            await turns.post(RESUME, {"tags": ["weights"]})
            await turns.must_wait(waiting)
            await turns.publish()
            await turns.must_wait(waiting)
            await turns.post(RESUME, {"tags": ["kv_cache", "cuda_graph"]})
            await turns.check(await waiting)
            await turns.post(RESUME, {"tags": ["kv_cache"]})
        # The framework wakes everything before the update.
        await turns.post(RELEASE, {})
        turns.step()
        await turns.post(RESUME, {})
        waiting = turns.ask()
        await turns.must_wait(waiting)
        await turns.post("/continue_generation", {})
        await turns.must_wait(waiting)
        await turns.publish()
        await turns.check(await waiting)
        # Only the caches sleep: the weights stay, and the engine serves again without a round.
        await turns.post(RELEASE, {"tags": ["kv_cache"]})
        waiting = turns.ask()
        await turns.must_wait(waiting)
        await turns.post(RESUME, {"tags": ["kv_cache"]})
        await turns.check(await waiting)
        # A round that fails fills nothing.
        await turns.post(RELEASE, {})
        turns.step()
        waiting = turns.ask()
        await turns.must_wait(waiting)
        weight = turns.model.lm_head.weight
        with torch.no_grad():
            saved, weight[0, 0] = weight[0, 0].item(), torch.nan
            with pytest.raises(RoundAborted, match="lm_head"):
                await turns.publish()
            weight[0, 0] = saved
        await turns.must_refuse("this engine has no weights")
        await turns.must_wait(waiting)
        await turns.publish_again()
        await turns.check(await waiting)
    shown(
        of_setting(
            "sglang",
            engine_version("sglang"),
            "--enable-memory-saver",
            detail="transport pull; trainer and engine take turns on the same memory",
        )
    )


@pytest.mark.engines
@pytest.mark.timeout(1200)
async def test_refused_sleep_keeps_the_pause_of_a_framework(tmp_path: Path) -> None:
    async with taking_turns(tmp_path, 1) as turns:
        await turns.toggle_searches()
        for mode in ("", "retract", "abort"):
            if mode:
                await turns.post("/pause_generation", {"mode": mode})
            with pytest.raises(RoundAborted, match="uninitialized parameter"):
                await turns.controller.sleep_engines(mode=PauseMode.ABORT)
            waiting = turns.ask()
            if mode:
                await turns.must_wait(waiting)
                await turns.post("/continue_generation", {})
            assert len((await waiting).tokens) == NUM_TOKENS
        await turns.toggle_searches()
        await turns.controller.sleep_engines(mode=PauseMode.ABORT)
        turns.step()
        await turns.publish()
        await turns.check()
