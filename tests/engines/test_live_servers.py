"""After an update by Windlass, a live unmodified engine holds what its own loader would have put there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from servers import TOKEN, build, save, serving

import windlass
from windlass.config import ControlConfig, UpdateMode

PROMPT = [5, 9, 33, 101]

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


async def updated(
    engine: str, kind: str, tp: int, transport: str, mode: UpdateMode, folder: Path
) -> None:
    old, new = save(kind, 1, folder / "old"), save(kind, 2, folder / "new")
    model = build(kind, 2)
    config = ControlConfig(mode=mode)
    async with windlass.Controller(token=TOKEN, config=config) as controller:

        def run() -> tuple[list[dict[str, str]], list[dict[str, str]], list[int]]:
            with serving(
                engine, old, folder / "live.log",
                tp=tp, controller=controller.url, transport=transport,
            ) as server:  # fmt: skip
                before = server.digests()
                with windlass.connect_trainer(
                    model, controller=controller.url, token=TOKEN, transport=transport
                ) as trainer:
                    trainer.publish(1)
                return before, server.digests(), server.tokens(PROMPT, 8)

        before, after, tokens = await asyncio.to_thread(run)

    def load() -> tuple[list[dict[str, str]], list[int]]:
        with serving(engine, new, folder / "fresh.log", tp=tp) as server:
            return server.digests(), server.tokens(PROMPT, 8)

    fresh, expected = await asyncio.to_thread(load)
    assert after == fresh
    assert tokens == expected
    assert any(a != b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", ["dense", "tied"])
@pytest.mark.parametrize("tp", [1, 2])
async def test_vllm_holds_and_answers_what_a_fresh_engine_does(
    kind: str, tp: int, tmp_path: Path
) -> None:
    transport = "mooncake" if kind == "tied" else "cma"
    mode = UpdateMode.STAGED if kind == "tied" else UpdateMode.IN_PLACE
    await updated("vllm", kind, tp, transport, mode, tmp_path)


@pytest.mark.parametrize("kind", ["dense", "tied"])
@pytest.mark.parametrize("tp", [1, 2])
async def test_sglang_holds_and_answers_what_a_fresh_engine_does(
    kind: str, tp: int, tmp_path: Path
) -> None:
    transport = "mooncake" if kind == "tied" else "cma"
    mode = UpdateMode.STAGED if kind == "tied" else UpdateMode.IN_PLACE
    await updated("sglang", kind, tp, transport, mode, tmp_path)


async def test_vllm_experts_that_its_reload_leaves_unpacked_are_refused(tmp_path: Path) -> None:
    model = save("moe", 1, tmp_path / "old")
    async with windlass.Controller(token=TOKEN) as controller:

        def start() -> None:
            with serving(
                "vllm", model, tmp_path / "live.log", tp=1, controller=controller.url
            ):  # fmt: skip
                pass

        with pytest.raises(AssertionError, match=r"(?s)w13_weight.*does not repeat"):
            await asyncio.to_thread(start)
