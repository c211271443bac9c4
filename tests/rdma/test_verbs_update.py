"""The main job over verbs: FSDP2 ranks at one address publish into an engine at another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from nics import Nic, tell
from test_verbs_conformance import VerbsConfig
from test_verbs_failures import KINDS

import windlass
from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1500)]

TOKEN = "secret of the test"
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 66,
    "hidden_size": 20,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
NUM_TRAINERS = 2
TRAINER = Path(__file__).with_name("verbs_trainer.py")
PATIENCE_S = 1200.0
DEADLINES = PhaseDeadlines(
    connect_s=300.0, prepare_s=300.0, pause_s=120.0, verify_s=300.0, apply_s=300.0, publish_s=120.0
)
"""For an emulated processor."""


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "WINDLASS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"  # the trainers' own traffic is not under test
    process = subprocess.Popen(
        (sys.executable, *command), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


def spelled(config: VerbsConfig) -> str:
    return msgspec.json.encode(config).decode()


@pytest.mark.parametrize(("kind", "mode"), [("mooncake", UpdateMode.STAGED)])
async def test_an_engine_serves_what_trainers_wrote_over_verbs(
    tmp_path: Path, nics: tuple[Nic, Nic], kind: str, mode: UpdateMode
) -> None:
    import torch  # an emulated processor takes a minute, and other tests do without

    here, there = nics
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = ControlConfig(mode=mode, deadlines=DEADLINES, heartbeat_s=120.0)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    sent = here.packets_sent()
    with ExitStack() as stack:
        async with (
            windlass.Controller(token=TOKEN, host=here.host, config=config) as controller,
            aiohttp.ClientSession(headers=headers) as http,
        ):
            engine = stack.enter_context(
                running(
                    *("-m", "windlass.engines.embedded", "--name", "engine"),
                    *("--dtype", "bfloat16", "--model", str(tmp_path / "config.json")),
                    *("--seed", "5", "--controller", controller.url, "--host", there.host),
                    *("--transport", spelled(KINDS[kind](there))),
                )
            )
            arguments = (str(tmp_path), controller.url, spelled(KINDS[kind](here)))
            trainers = [
                stack.enter_context(running(str(TRAINER), str(rank), str(NUM_TRAINERS), *arguments))
                for rank in range(NUM_TRAINERS)
            ]
            await controller.wait_for_version(1, deadline_s=PATIENCE_S)
            (member,) = controller.coordinator.routable()
            truth: dict[str, torch.Tensor] = torch.load(tmp_path / "1.pt")
            for name, full in truth.items():
                async with http.get(f"{member.url}/get_weights_by_name?name={name}") as response:
                    served = torch.tensor((await response.json())["parameter"])
                assert torch.equal(served, full.bfloat16().float()), name
            report = controller.coordinator.reports[-1]
            tell(f"{kind}, {mode}: {len(truth)} parameters served as published: {report}")
            for process in trainers:
                tell(f"  trainer {here.describe(process.pid)}")
            tell(f"  engine {there.describe(engine.pid)}")
            pairs = [pair.kind for process in trainers for pair in here.queue_pairs(process.pid)]
            assert "RC" in pairs
    assert here.packets_sent() > sent
