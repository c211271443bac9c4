"""On CPUs, AReaL's own FSDP actor and rollout update plain vLLM servers through Windlass."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plain_vllm import PlainServer, checkpoint, serving_plain
from servers import ENVIRONMENT, ROOT, VENVS

from tools.entry_points import write_entry_points
from windlass.net.addresses import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

VENV = Path(os.environ.get("WINDLASS_AREAL_VENV", "") or ROOT / ".venv-areal")
SCRIPT = ROOT / "tests" / "integrations" / "areal_run.py"
PATHS = f"{ROOT / 'src'}:{SCRIPT.parent}"
NUM_RANKS = 2
NUM_STEPS = 2
RUN_S = 400.0
NUM_VERSIONS = 4
KILL_AT = 4
NUM_TOKENS = 200
ROUNDING = 0.06
"""Rounding difference of a bfloat16 logit between the kernels of vLLM and transformers."""


def run_ranks(num_ranks: int, *arguments: str, log: Path) -> str:
    ranks = ("--nproc-per-node", str(num_ranks), "--master-port", str(free_port()))
    command = ("-m", "torch.distributed.run", *ranks, str(SCRIPT), *arguments)
    return run(*command, log=log, AREAL_SPMD_MODE="1")


def run(*arguments: str, log: Path, **variables: str) -> str:
    """Run AReaL's interpreter and return its output."""
    if not VENV.exists():
        pytest.skip(f"no {VENV}: make test-integrations installs AReaL")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'support'}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    command = [str(VENV / "bin/python"), *arguments]
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
        try:
            assert process.wait(RUN_S) == 0, log.read_text()[-6000:]
        finally:
            process.kill()
            process.wait(30)
    return log.read_text()


def test_fsdp_ranks_update_two_servers_and_continue_when_one_is_killed(tmp_path: Path) -> None:
    source = checkpoint(1, tmp_path / "source")
    with ExitStack() as running:
        live, killed = (
            running.enter_context(serving_plain(source, tmp_path / f"{name}.log"))
            for name in ("live", "killed")
        )
        addresses = [server.url.removeprefix("http://") for server in (live, killed)]
        settings = tmp_path / "settings.json"
        settings.write_text(
            json.dumps(
                {
                    "model": str(source), "out": str(tmp_path), "servers": addresses,
                    "num_versions": NUM_VERSIONS, "num_tokens": NUM_TOKENS,
                    "kill": killed.family(), "kill_at": KILL_AT,
                }
            )
        )  # fmt: skip
        said = run_ranks(NUM_RANKS, "train", str(settings), log=tmp_path / "log")
        assert f"http://{addresses[1]} does not serve version {KILL_AT}" in said
        ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
        for found in ranks:
            assert found["num_sharded"] == found["num_parameters"] > 0
            assert found["num_gathers"] == 0
            assert [sorted(each) for each in found["serving"]] == [
                *[sorted(addresses)] * (KILL_AT - 1),
                *[addresses[:1]] * (NUM_VERSIONS - KILL_AT + 1),
            ]
        answers = [answer for found in ranks for answer in found["answers"]]
        require_versions_are_true(answers, [source, *saved(tmp_path)])
        require_fresh(live, saved(tmp_path)[-1], tmp_path / "fresh.log")


def test_areals_trainer_runs_with_two_changed_lines(tmp_path: Path) -> None:
    """Check `PPOTrainer` with its controllers, its worker processes and a vLLM server that it starts."""
    source = checkpoint(1, tmp_path / "source")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.eos_token, tokenizer.pad_token = "w248", "w249"
    tokenizer.save_pretrained(source)
    variables = {
        **ENVIRONMENT["vllm"],
        "PYTHONPATH": f"{PATHS}:{write_entry_points(tmp_path / 'site')}",
    }
    settings = tmp_path / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "model": str(source), "out": str(tmp_path), "num_steps": NUM_STEPS, "variables": variables,
                "vllm_python": str(VENVS["vllm"] / "bin/python"),
            }
        )
    )  # fmt: skip
    run(str(SCRIPT), "ppo", str(settings), log=tmp_path / "log", PYTHONPATH=PATHS)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["version"] == str(NUM_STEPS)
    with serving_plain(tmp_path / "saved", tmp_path / "fresh.log") as fresh:
        assert fresh.checksums() == found["checksums"]
    with serving_plain(source, tmp_path / "untrained.log") as untrained:
        assert untrained.checksums() != found["checksums"]


def saved(folder: Path) -> list[Path]:
    """Return the checkpoint folder that AReaL wrote for each version."""
    return [folder / str(version) for version in range(1, NUM_VERSIONS + 1)]


def require_fresh(server: PlainServer, weights: Path, log: Path) -> None:
    """Check that all tensors of a server equal those in a server that loads AReaL's checkpoint."""
    assert server.version() == str(NUM_VERSIONS)
    assert not server.is_paused()
    with serving_plain(weights, log) as fresh:
        assert fresh.checksums() == server.checksums()


def require_versions_are_true(answers: Sequence[dict[str, Any]], weights: Sequence[Path]) -> None:
    """Check that the weights of a token's version predict this token, and that other versions often do not."""
    gaps = [_gaps(answers, folder) for folder in weights]
    others: list[bool] = []
    for place, answer in enumerate(answers):
        versions = answer["versions"]
        assert len(versions) == len(answer["tokens"]) == NUM_TOKENS
        assert versions == sorted(versions)
        for token, version in enumerate(versions):
            assert gaps[version][place][token] < ROUNDING, (answer, token)
            others += [
                gaps[other][place][token] < ROUNDING
                for other in {version - 1, version + 1} & {*range(len(weights))}
            ]
    crossed = sum(len({*answer["versions"]}) > 1 for answer in answers)
    assert crossed > len(answers) / 4, crossed
    assert others.count(False) > len(others) / 4, "the versions say too much alike to tell"


def _gaps(answers: Sequence[dict[str, Any]], folder: Path) -> list[list[float]]:
    """Return the difference between each token's logit and the largest logit."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = []
    for answer in answers:
        ids = torch.tensor([answer["prompt"] + answer["tokens"]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(answer["prompt"]) - 1 : -1].float()
        given = logits.gather(1, ids[0, len(answer["prompt"]) :, None])[:, 0]
        found.append((logits.max(1).values - given).tolist())
    return found


def test_wrong_settings_are_refused_with_the_reason(tmp_path: Path) -> None:
    source = checkpoint(1, tmp_path / "source")
    said = run_ranks(1, "refusals", str(source), log=tmp_path / "log")
    refused = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    rollout = (
        "rollout: must be RemotevLLMEngine of windlass.integrations.areal (call install() before "
        "PPOTrainer), got "
    )
    trainer = (
        "actor: must be FSDPPPOActor or FSDPEngine of windlass.integrations.areal with this rollout, got an "
        "engine that sends weights by itself; Windlass does not support AReaL's Megatron and Archon engines"
    )
    assert refused == {
        "offload": "enable_offload: must be False with Windlass, got True",
        "lora": "use_lora: must be False with Windlass, got True",
        "disk": "weight_update_mode: must be xccl with Windlass, got disk",
        "sglang": rollout + "areal.engine.sglang_remote.RemoteSGLangEngine",
        "callback": rollout + "areal.infra.controller.rollout_callback.RolloutCallback",
        "v2": "_version: must be v1 with Windlass, got v2",
        "own group": trainer,
        "own buckets": trainer,
        "own files": trainer,
    }


def test_doctor_reports_that_areal_finds_windlass(tmp_path: Path) -> None:
    doctor = ("-m", "windlass.cli.main", "doctor", "--framework", "areal", "--json")
    said = run(*doctor, log=tmp_path / "log").splitlines()
    (findings,) = json.loads(next(line for line in said if line.startswith("{"))).values()
    states = {finding["name"]: finding["status"] for finding in findings}
    assert (states["areal"], states["windlass.integrations.areal.engines"]) == ("works", "works")
