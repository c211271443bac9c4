"""The main job over verbs: FSDP2 ranks at one address publish into an engine at another."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from nics import Nic, tell
from test_verbs_conformance import VerbsConfig
from test_verbs_failures import KINDS
from verbs_launch import CONFIG, NUM_VERSIONS, launch_engine, launch_trainer

import windlass
from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

TOKEN = "secret of the test"
NUM_TRAINERS = 2
PATIENCE_S = 600.0
DEADLINES = PhaseDeadlines(
    connect_s=300.0,
    prepare_s=300.0,
    pause_s=300.0,
    write_s=300.0,
    verify_s=300.0,
    apply_s=300.0,
    publish_s=300.0,
    fleet_s=300.0,
)
"""Deadlines for an emulated processor."""


@contextmanager
def running(
    context: ForkServerContext, run: Callable[..., None], *args: object
) -> Iterator[BaseProcess]:
    process = context.Process(target=run, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(60)


def spelled(config: VerbsConfig) -> str:
    return msgspec.json.encode(config).decode()


def saved_by_rank_0(folder: Path, version: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return a version's true weights, rounded to the engines' dtype."""
    prefix = f"{version}."
    return {path.stem.removeprefix(prefix): np.load(path) for path in folder.glob(f"{prefix}*.npy")}


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("kind", ["mooncake", "nixl-rc"])
async def test_an_engine_serves_what_trainers_wrote_over_verbs(
    tmp_path: Path, nics: tuple[Nic, Nic], forks: ForkServerContext, kind: str, mode: UpdateMode
) -> None:
    here, there = nics
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"model_type": "qwen3", **CONFIG}))
    config = ControlConfig(mode=mode, deadlines=DEADLINES, heartbeat_s=120.0)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    sent = here.packets_sent()
    start = time.monotonic()
    with ExitStack() as stack:
        async with (
            windlass.Controller(token=TOKEN, host=here.host, config=config) as controller,
            aiohttp.ClientSession(headers=headers) as http,
        ):
            to_engine = (str(model), controller.url, there.host, spelled(KINDS[kind](there)))
            engine = stack.enter_context(running(forks, launch_engine, *to_engine, TOKEN))
            hold, held = forks.Pipe()
            trainers = [
                stack.enter_context(
                    running(
                        forks,
                        launch_trainer,
                        *(rank, NUM_TRAINERS, str(tmp_path), controller.url),
                        *(spelled(KINDS[kind](here)), TOKEN, held),
                    )
                )
                for rank in range(NUM_TRAINERS)
            ]
            await controller.wait_for_version(NUM_VERSIONS - 1, deadline_s=PATIENCE_S)
            (member,) = controller.coordinator.routable()
            truth = saved_by_rank_0(tmp_path, NUM_VERSIONS - 1)
            assert "lm_head.weight" in truth
            for name, full in truth.items():
                async with http.get(f"{member.url}/get_weights_by_name?name={name}") as response:
                    served = np.array((await response.json())["parameter"], np.float32)
                assert np.array_equal(served, full), name
            report = controller.coordinator.reports[-1]
            packets = here.packets_sent() - sent
            tell(
                f"{kind}, {mode}: {len(truth)} parameters served as published, {packets} "
                f"packets sent by {here.name}, {time.monotonic() - start:.0f} s: {report}"
            )
            pids = [process.pid for process in trainers]
            for pid in pids:
                tell(f"  trainer {here.describe(pid or 0)}")
            tell(f"  engine {there.describe(engine.pid or 0)}")
            pairs = [pair.kind for pid in pids for pair in here.queue_pairs(pid or 0)]
            assert "RC" in pairs
        hold.close()
    assert packets > 0
