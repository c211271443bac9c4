"""The scripts that the README shows, started as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DEADLINE_S = 220


def start(stack: ExitStack, *command: str) -> subprocess.Popen[str]:
    """One process, gone at the end whatever happens."""
    environment = {**os.environ, "WINDLASS_TOKEN": "secret", "PYTHONPATH": str(ROOT / "src")}
    process = stack.enter_context(
        subprocess.Popen(
            (sys.executable, *command), env=environment, stdout=subprocess.PIPE, text=True
        )
    )
    stack.callback(process.kill)
    return process


@pytest.mark.long
@pytest.mark.timeout(300)
def test_controller_engine_worker_and_torchrun_train_three_steps(tmp_path: Path) -> None:
    model = EXAMPLES / "launch" / "model.json"
    with ExitStack() as stack:
        controller = start(stack, str(EXAMPLES / "controller.py"))
        assert controller.stdout is not None
        url = controller.stdout.readline().strip()
        engine = ("-m", "windlass.engines.embedded", "--name", "engine-a", "--model", str(model))
        start(stack, *engine, "--controller", url)
        start(stack, "-m", "windlass.rollout.worker", "--name", "worker-0", "--controller", url)
        trainer = start(
            stack,
            *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
            *(str(EXAMPLES / "trainer.py"), url, str(model)),
        )
        printed, _ = trainer.communicate(timeout=DEADLINE_S)
        assert trainer.returncode == 0, printed
        assert controller.wait(DEADLINE_S) == 0
    lines = [line for line in printed.splitlines() if line.startswith("version ")]
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]
