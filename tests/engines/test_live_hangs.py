"""Processes of a live engine that hang while the engine's HTTP server and ranks still answer the controller.

Each test stops one process of a job's engine with SIGSTOP. The job must notice this, and start the engine again.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from launched_jobs import Job, launched, write
from plain_vllm import add_tokenizer
from servers import ENVIRONMENT, ROOT, VENVS

from tools.entry_points import write_entry_points
from windlass.engines.spec import ENGINES
from windlass.net.addresses import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1100)]

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


def job_of(engine: str, folder: Path, *arguments: str) -> Path:
    """Write a job with one live engine and a trainer of the same model."""
    (folder / "model.json").write_text(json.dumps(MODEL))
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**MODEL))
    made.to(torch.bfloat16).save_pretrained(folder / "model")
    add_tokenizer(folder / "model")
    installed = write_entry_points(folder / "installed")
    # The folder of the model has a tokenizer.
    options = [w for w in ENGINES.find(engine).cpu_arguments if w != "--skip-tokenizer-init"]
    variables = {
        **ENVIRONMENT[engine],
        "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests/support:{installed}",
    }
    environment = ", ".join(f"{name} = {json.dumps(value)}" for name, value in variables.items())
    section = (
        f'kind = "{engine}"\nport = {free_port()}\npython = "{VENVS[engine]}/bin/python"\n'
        f"arguments = {json.dumps([*options, *arguments])}\n"
        f"environment = {{ {environment} }}\n"
    )
    path = write(
        folder,
        steps=1000,
        groups=8,
        rollout="batch_deadline_s = 600.0",
        top="max_silence_s = 40.0\nshutdown_s = 10.0",
    )
    text = path.read_text()
    example = f'"{ROOT}/examples/launch/model.json"'
    text = text.replace(f"arguments = [{example}]", f'arguments = ["{folder}/model.json"]')
    text = text.replace(f"model = {example}", f'model = "{folder}/model"')
    text = text.replace('arguments = ["--max-positions", "32"]\n', section)
    path.write_text(text)
    return path


def processes_of(job: Job, title: str) -> list[int]:
    """Return the processes below the job whose command line contains `title`."""
    found = []
    for process in psutil.Process(job.process.pid).children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if title in line:
            found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("engine", "arguments", "title"),
    [
        # With two ranks, the EngineCore has a process without a rank.
        ("vllm", ("--tp", "2"), "VLLM::EngineCore"),
    ],
)
def test_a_job_starts_an_engine_again_whose_core_hangs(
    tmp_path: Path, engine: str, arguments: tuple[str, ...], title: str
) -> None:
    if not (VENVS[engine] / "bin/python").exists():
        pytest.skip(f"{engine} is not installed: {VENVS[engine]}")
    with launched(job_of(engine, tmp_path, *arguments)) as job:
        job.read_until("step 2: reward")
        (pid,) = processes_of(job, title)
        os.kill(pid, signal.SIGSTOP)
        said = job.read_until("engine-0 did not answer within max_silence_s=40: ")
        assert "/windlass/alive: no answer within 10 s" in said
        assert "after 0 restarts; starting it again" in said
        # The engine that was started again has the weights, and answers.
        last = [line for line in job.lines if line.startswith("step ")][-1]
        job.read_until(f"step {int(last[5:].partition(':')[0]) + 1}: reward")
        assert pid not in processes_of(job, title)
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130, job.text
