"""A trainer rank that holds one checkpoint tensor in two parameters publishes it only if both hold the same bytes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from embedded_process import CONFIG, start_engine
from two_memories_rank import TwoMemoriesSettings, run
from weight_fleet import TOKEN, Rank

import windlass
from windlass.config import ControlConfig, DiskBackend, P2pBackend, XcclBackend

ROWS = [("exporter", "p2p"), ("manifest", "p2p"), ("manifest", "xccl"), ("manifest", "disk")]


@pytest.mark.parametrize(
    ("way", "backend"),
    [
        pytest.param(*row, marks=() if row in ROWS[:1] else pytest.mark.long, id="-".join(row))
        for row in ROWS
    ],
)
async def test_two_memories_of_one_tensor_are_compared_before_anything_is_sent(
    way: str, backend: str, tmp_path: Path
) -> None:
    backends: dict[str, P2pBackend | XcclBackend | DiskBackend] = {
        "p2p": P2pBackend(),
        "xccl": XcclBackend(),
        "disk": DiskBackend(str(tmp_path)),
    }
    with ExitStack() as stack:
        config = ControlConfig(backend=backends[backend], compare_share=1.0)
        async with windlass.Controller(token=TOKEN, config=config) as controller:
            start_engine(stack, "a", tmp_path, controller.url)
            rank = Rank(run, TwoMemoriesSettings(controller.url, TOKEN, CONFIG, way))
            stack.callback(rank.close)
            await controller.wait_for_fleet(num_trainers=1, engines=("a",), deadline_s=300)
            said = await rank.ask(1.0)
            assert "RoundAborted" in said
            assert "trainer/0 ('halves.0') versus trainer/0 ('lm_head.weight')" in said
            assert "'lm_head.weight' [0:32, 0:16]" in said
            assert controller.coordinator.fleet.published == -1
            assert await rank.ask(0.0) == ""
            assert controller.coordinator.fleet.published == 1
            assert "trainer/0 ('halves." in await rank.ask(1.0)
            assert controller.coordinator.fleet.published == 1
