"""The complete agentic example: a real engine, real trainers, and updates during conversations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


# Variables that torchrun sets for the only rank of a job. The system chooses the store's port.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def start(stack: ExitStack, *command: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        **ONE_RANK,
        "PYTHONPATH": str(ROOT / "src"),
        "WINDLASS_TOKEN": "a-token",
    }
    process = stack.enter_context(
        subprocess.Popen(
            (sys.executable, *command),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    )
    stack.callback(process.kill)
    return process


@pytest.mark.long
def test_conversations_continue_during_weight_updates_and_none_is_lost(
    stack: ExitStack, tmp_path: Path
) -> None:
    config = tmp_path / "model.json"
    config.write_text(json.dumps(MODEL))
    agentic = str(ROOT / "examples" / "agentic.py")
    controller = start(stack, "-u", agentic, "controller", "--steps", "3", "--num-trainers", "1")
    assert controller.stdout is not None
    url = controller.stdout.readline().strip()
    start(
        stack,
        *("-m", "windlass.engines.embedded", "--name", "engine-a", "--model", str(config)),
        *("--controller", url, "--max-positions", "96"),
    )
    start(stack, agentic, "worker", "--name", "worker-0", "--controller", url)
    trainer = start(stack, str(ROOT / "examples" / "trainer.py"), url, str(config))
    printed, _ = controller.communicate(timeout=240)
    assert controller.returncode == 0
    assert trainer.wait(timeout=40) == 0
    lines = printed.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2", "lost 0"]
    versions = json.loads(lines[2].split("versions ")[1])
    assert versions
    assert set(versions) <= {1, 2}, "staleness 1: the third step trains on versions 1 and 2"
