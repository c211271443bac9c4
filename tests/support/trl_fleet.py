"""Runs of TRL's trainer in its own environment, with plain vLLM servers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from plain_vllm import PlainServer
from servers import ROOT

from windlass.net.addresses import free_port

VENV = Path(os.environ.get("WINDLASS_TRL_VENV", "") or ROOT / ".venv-trl")
SCRIPT = ROOT / "tests" / "integrations" / "trl_run.py"
RUN_S = 420.0


def server_flags(model: Path) -> tuple[str, ...]:
    """Return flags with the model's path as its name, because TRL requests the model by its path."""
    return ("--dtype", "float32", "--served-model-name", str(model))


def command(*arguments: str, num_ranks: int = 1, script: Path = SCRIPT) -> list[str]:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks))
    port = ("--master-port", str(free_port()))
    return [
        str(VENV / "bin/python"), *((*torchrun, *port) if num_ranks > 1 else ()),
        str(script), *arguments,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


def make_model(folder: Path, *, hidden: int = 64, layers: int = 2) -> Path:
    """Save a model of random weights and its tokenizer."""
    if not VENV.exists():
        pytest.skip(f"no {VENV}: make test-integrations installs TRL")
    sizes = (str(hidden), str(layers))
    subprocess.run(command("make", str(folder), *sizes), env=environment(), check=True, timeout=300)
    return folder


@dataclass(frozen=True)
class Run:
    """A running trainer."""

    folder: Path
    process: subprocess.Popen[bytes]

    def log_text(self) -> str:
        return (self.folder / "log").read_text()

    def end(self) -> dict[str, Any]:
        """Wait for the end of the run and return its output."""
        assert self.process.wait(RUN_S) == 0, self.log_text()[-6000:]
        found: dict[str, Any] = json.loads((self.folder / "out.json").read_text())
        return found


def start(
    folder: Path,
    model: Path,
    servers: Sequence[PlainServer],
    *,
    num_ranks: int = 1,
    **settings: Any,
) -> Run:
    """Start a run.

    Args:
        settings: fields of `trl_run.Settings`.
    """
    folder.mkdir()
    settings = {
        "model": str(model),
        "out": str(folder / "out.json"),
        "servers": [server.url for server in servers],
        **settings,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command("train", str(folder / "settings.json"), num_ranks=num_ranks),
            env=environment(), stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return Run(folder, process)
