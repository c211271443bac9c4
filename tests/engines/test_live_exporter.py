"""Megatron ranks update a live engine with a model that no naming table knows, by their converter's exporter."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest
import torch.multiprocessing as mp
from exported_rank import Row, publish
from needs import need_package
from servers import CONFIGS, ROOT, TOKEN, Layout, save, serving

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.layout.naming.tables import FAMILIES

# `make test-megatron` installs the converter.
sys.path.append(str(ROOT / "build" / "converter"))
for package in ("megatron", "mcore_bridge"):
    need_package(package)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("kind", ["minimax_m2"])
async def test_an_exporter_replaces_the_naming_table(kind: str, tmp_path: Path) -> None:
    assert kind not in FAMILIES.names()
    own, trained = save(kind, 1, tmp_path / "own"), tmp_path / "3"
    trained.mkdir()
    shutil.copy(own / "config.json", trained)
    config = ControlConfig(
        mode=UpdateMode.STAGED,
        pause_mode=PauseMode.ABORT,
        deadlines=PhaseDeadlines(pause_s=120),
    )
    row = Row("mcore_bridge", CONFIGS[kind], tp=2)
    with serving("vllm", own, tmp_path / "live.log", layout=Layout(1)) as server:
        async with windlass.Controller(token=TOKEN, config=config) as controller:
            await asyncio.to_thread(server.join, controller.url, "cma")
            before = server.digests()
            await asyncio.to_thread(
                mp.start_processes,  # type: ignore[attr-defined]
                publish,
                (2, row, controller.url, TOKEN, str(trained)),
                nprocs=2,
                start_method="forkserver",
            )
            held, fresh = server.digests(), server.digests_of_fresh_load(trained)
            assert held != before
            assert held == fresh
