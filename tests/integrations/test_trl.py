"""On CPUs, a real `AsyncGRPOTrainer` of TRL updates plain vLLM servers through Windlass.

`trl_run.py` describes the replacement for kernels that do not exist for CPUs. At the end of every run, the servers' answers
equal the answers of the trainer's own weights, token by token.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_vllm import HTTP_S, PlainServer, serving_plain
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl_fleet import RUN_S, Run, command, environment, make_model, server_flags, start

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPTS = [[2, 5 + i, 5 + (7 * i) % 56, 3] for i in range(8)]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("trl") / "model")


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[PlainServer]]:
    logs = tmp_path_factory.mktemp("servers")
    with ExitStack() as running:
        yield [running.enter_context(serve(model, logs / f"{number}.log")) for number in range(2)]


def serve(model: Path, log: Path) -> AbstractContextManager[PlainServer]:
    return serving_plain(model, log, flags=server_flags(model))


def rewards(found: dict[str, Any]) -> list[float]:
    return [entry["reward"] for entry in found["log"] if "reward" in entry]


def assert_serve_final(run: Run, model: Path, servers: Sequence[PlainServer], version: int) -> None:
    """Check that all servers answer with the final weights of the trainer."""
    final = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    untrained = [_greedy(final, prompt) for prompt in PROMPTS]
    final.load_state_dict(load_file(run.folder / "final.safetensors"))
    expected = [_greedy(final, prompt) for prompt in PROMPTS]
    assert expected != untrained
    for server in servers:
        assert server.version() == str(version)
        assert not server.is_paused()
        assert [_served(server, model, prompt) for prompt in PROMPTS] == expected


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    said = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
    )
    tokens: list[int] = said[0, len(prompt) :].tolist()
    return tokens


def _served(server: PlainServer, model: Path, prompt: list[int]) -> list[int]:
    body = {
        "model": str(model), "prompt": prompt, "max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS,
        "temperature": 0, "return_token_ids": True,
    }  # fmt: skip
    said = json.loads(server.http.post("/v1/completions", body, HTTP_S))
    tokens: list[int] = said["choices"][0]["token_ids"]
    return tokens


def num_answers(server: PlainServer) -> int:
    return server.log.read_text().count('"POST /v1/completions HTTP/1.1" 200')


def test_the_reward_of_a_trl_run_rises_with_one_changed_argument(
    model: Path, servers: list[PlainServer], tmp_path: Path
) -> None:
    run = start(tmp_path / "run", model, servers[:1], transfer="whole", steps=30)
    found = run.end()
    first, last = statistics.mean(rewards(found)[:5]), statistics.mean(rewards(found)[-5:])
    assert last > first + 0.2, (first, last)
    assert found["model_version"] == 31
    assert_serve_final(run, model, servers[:1], 31)


def test_fsdp_ranks_send_their_shards_to_two_servers_and_gather_nothing(
    model: Path, servers: list[PlainServer], tmp_path: Path
) -> None:
    before = [num_answers(server) for server in servers]
    run = start(tmp_path / "run", model, servers, num_ranks=2, transfer="shards", steps=8)
    found = run.end()
    assert found["num_sharded"] == found["num_parameters"] > 0
    assert found["num_gathers"] == 0
    assert found["model_version"] == 9
    assert_serve_final(run, model, servers, 9)
    answered = [num_answers(server) - was for server, was in zip(servers, before, strict=True)]
    assert min(answered) > sum(answered) / 4, answered
    paused = [row["perf/weight_sync_paused_s"] for row in found["log"] if "reward" in row]
    assert all(seconds > 0 for seconds in paused)


def test_a_merged_adapter_is_served(
    model: Path, servers: list[PlainServer], tmp_path: Path
) -> None:
    run = start(tmp_path / "run", model, servers[:1], transfer="shards", steps=4, lora=True)
    assert run.end()["model_version"] == 5
    assert_serve_final(run, model, servers[:1], 5)


def test_training_continues_when_a_server_is_killed(
    model: Path, servers: list[PlainServer], tmp_path: Path
) -> None:
    with ExitStack() as running:
        other = running.enter_context(serve(model, tmp_path / "other.log"))
        fleet = [servers[0], other]
        run = start(tmp_path / "run", model, fleet, transfer="shards", steps=24)
        deadline = time.monotonic() + RUN_S
        while "'reward'" not in run.log_text():
            assert run.process.poll() is None, run.log_text()[-6000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for pid in other.family():
            os.kill(pid, signal.SIGKILL)
        assert run.end()["model_version"] == 25
        assert_serve_final(run, model, fleet[:1], 25)
        assert f"{other.url} does not serve version" in run.log_text()


def test_wrong_settings_are_refused_with_the_reason(model: Path) -> None:
    said = subprocess.run(
        command("refusals", "-", num_ranks=2),
        env=environment(), capture_output=True, text=True, check=True, timeout=200,
    ).stdout  # fmt: skip
    refused = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert refused == {
        "servers": "servers: must be a sequence of one URL or more, got []",
        "twice": "servers: each URL must occur once, got ['http://a:1', 'http://a:1']",
        "ranks": "weight_transfer: a trainer of 2 ranks must be attached: call attach(trainer) on every rank "
        "before train()",
    }
