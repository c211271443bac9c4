"""On CPUs, AReaL's own FSDP actor and rollout update plain vLLM and SGLang servers through Windlass."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from fresh_servers import checksums, serving_fresh
from plain_vllm import PlainServer, checkpoint, serving_plain
from servers import ADAPTER, ENVIRONMENT, ROOT, TOKEN, VENVS, Server, adapted, build, family
from sglang_servers import check_answer, install, launched, token_file, variables

from tools.entry_points import write_entry_points
from windlass.net.addresses import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

VENV = Path(os.environ.get("WINDLASS_AREAL_VENV", "") or ROOT / ".venv-areal")
SCRIPT = ROOT / "tests" / "integrations" / "areal_run.py"
MEGATRON_SCRIPT = SCRIPT.with_name("areal_megatron_run.py")
PATHS = f"{ROOT / 'src'}:{SCRIPT.parent}:{ROOT / 'tests' / 'support'}"
NUM_RANKS = 2
NUM_STEPS = 2
RUN_S = 900.0
NUM_VERSIONS = 4
KILL_AT = 4
NUM_TOKENS = 200
ROUNDING = 0.06
"""Rounding difference of a bfloat16 logit between the kernels of vLLM and transformers."""


def run_ranks(
    num_ranks: int, *arguments: str, log: Path, script: str = str(SCRIPT), **variables: str
) -> str:
    ranks = ("--nproc-per-node", str(num_ranks), "--master-port", str(free_port()))
    command = ("-m", "torch.distributed.run", *ranks, script, *arguments)
    return run(*command, log=log, AREAL_SPMD_MODE="1", **variables)


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


def test_fsdp_ranks_update_two_vllm_servers_and_continue_when_one_is_killed(tmp_path: Path) -> None:
    source = checkpoint(1, tmp_path / "source")
    with ExitStack() as running:
        live, killed = (
            running.enter_context(serving_plain(source, tmp_path / f"{name}.log"))
            for name in ("live", "killed")
        )
        train("vllm", tmp_path, live, killed)
        require_fresh(live, saved(tmp_path)[-1], tmp_path / "fresh.log")


def test_fsdp_ranks_update_two_sglang_servers_and_continue_when_one_is_killed(
    tmp_path: Path,
) -> None:
    source, token = checkpoint(1, tmp_path / "source"), token_file(tmp_path, TOKEN)
    given = variables(
        install(tmp_path / "site"), WINDLASS_CONTROLLER="wait", WINDLASS_TOKEN_FILE=str(token)
    )
    with ExitStack() as running:
        live, killed = (
            running.enter_context(launched(source, tmp_path / f"{name}.log", free_port(), given))
            for name in ("live", "killed")
        )
        train("sglang", tmp_path, live, killed, WINDLASS_TOKEN_FILE=str(token))
        weights = saved(tmp_path)[-1]
        assert live.digests() == live.digests_of_fresh_load(weights)
        check_answer(live, weights, NUM_VERSIONS)


def train(
    engine: str,
    folder: Path,
    live: PlainServer | Server,
    killed: PlainServer | Server,
    **variables: str,
) -> None:
    """Run a job that kills a server in the last update, and check what its ranks and their answers say."""
    addresses = [server.url.removeprefix("http://") for server in (live, killed)]
    settings = folder / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "engine": engine, "model": str(folder / "source"), "out": str(folder), "servers": addresses,
                "num_versions": NUM_VERSIONS, "num_tokens": NUM_TOKENS,
                "kill": family(killed.process.pid), "kill_at": KILL_AT,
            }
        )
    )  # fmt: skip
    said = run_ranks(NUM_RANKS, "train", str(settings), log=folder / "log", **variables)
    assert f"http://{addresses[1]} does not serve version {KILL_AT}" in said
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    for found in ranks:
        assert found["num_sharded"] == found["num_parameters"] > 0
        assert found["num_gathers"] == 0
        assert [sorted(each) for each in found["serving"]] == [
            *[sorted(addresses)] * (KILL_AT - 1),
            *[addresses[:1]] * (NUM_VERSIONS - KILL_AT + 1),
        ]
    answers = [answer for found in ranks for answer in found["answers"]]
    require_versions_are_true(answers, [folder / "source", *saved(folder)])


@pytest.mark.parametrize(("backend", "kind"), [("archon:d1t2", "dense"), ("archon:d2", "tied")])
def test_archon_ranks_update_a_vllm_server(backend: str, kind: str, tmp_path: Path) -> None:
    source = checkpoint(1, tmp_path / "source", kind)
    with serving_plain(source, tmp_path / "server.log") as server:
        train_one(backend, NUM_RANKS, tmp_path, server)
        require_fresh(server, saved(tmp_path)[-1], tmp_path / "fresh.log")


def test_megatron_ranks_update_a_vllm_server(tmp_path: Path) -> None:
    source = checkpoint(1, tmp_path / "source")
    with serving_plain(source, tmp_path / "server.log") as server:
        train_one("megatron:d2t2", 4, tmp_path, server)
        require_fresh(server, saved(tmp_path)[-1], tmp_path / "fresh.log")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp_ranks_update_an_adapter_of_a_vllm_server(tmp_path: Path) -> None:
    source = checkpoint(1, tmp_path / "source")
    first = tmp_path / "first"
    adapted(build("dense", 1), seed=2).save_pretrained(first)
    with serving_plain(source, tmp_path / "server.log", flags=lora_flags(first)) as server:
        train_one("", NUM_RANKS, tmp_path, server, adapter=ADAPTER)
        updated = server.digests()
        assert server.version() == str(NUM_VERSIONS)
    flags = lora_flags(saved(tmp_path)[-1])
    with serving_plain(source, tmp_path / "fresh.log", flags=flags) as fresh:
        assert fresh.digests() == updated


def lora_flags(folder: Path) -> tuple[str, ...]:
    """Return vLLM's options for an adapter, by the name that AReaL gives to its first version."""
    return ("--enable-lora", "--lora-modules", f"{ADAPTER}-v0={folder}", "--max-lora-rank", "8")


def with_triton(folder: Path) -> str:
    """Return a PYTHONPATH with the triton of vLLM's environment. AReaL's Archon and Megatron engines import it."""
    (found,) = (VENVS["vllm"] / "lib").glob("python3*/site-packages/triton")
    site = folder / "triton"
    site.mkdir()
    (site / "triton").symlink_to(found)
    return f"{PATHS}:{site}"


def train_one(
    backend: str, num_ranks: int, folder: Path, server: PlainServer, adapter: str = ""
) -> None:
    """Run a job that updates one vLLM server, and check what its ranks and their answers say."""
    address = server.url.removeprefix("http://")
    settings = folder / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "engine": "vllm", "model": str(folder / "source"), "out": str(folder), "servers": [address],
                "num_versions": NUM_VERSIONS, "num_tokens": NUM_TOKENS, "backend": backend,
                "adapter": adapter,
            }
        )
    )  # fmt: skip
    script = str(MEGATRON_SCRIPT if backend.startswith("megatron") else SCRIPT)
    run_ranks(
        num_ranks, "train", str(settings), log=folder / "log", script=script,
        PYTHONPATH=with_triton(folder),
    )  # fmt: skip
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    for found in ranks:
        assert found["num_gathers"] == 0
        assert found["serving"] == [[address]] * NUM_VERSIONS
    answers = [answer for found in ranks for answer in found["answers"]]
    # The versions of an adapter, or of a small model with tied embeddings, have more tokens in common.
    weights = [folder / ("first" if adapter else "source"), *saved(folder)]
    require_versions_are_true(answers, weights, told_apart=0.05)


def test_actor_that_frees_its_memory_between_steps_updates_a_server(tmp_path: Path) -> None:
    source, token = checkpoint(1, tmp_path / "source"), token_file(tmp_path, TOKEN)
    told = {"WINDLASS_CONTROLLER": "wait", "WINDLASS_TOKEN_FILE": str(token)}
    given = variables(install(tmp_path / "site"), **told)
    with launched(source, tmp_path / "server.log", free_port(), given) as server:
        settings = {
            "engine": "sglang", "model": str(source), "out": str(tmp_path), "offloads": True,
            "servers": [server.url.removeprefix("http://")], "num_versions": 2, "num_tokens": 20,
        }  # fmt: skip
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(settings))
        run_ranks(
            NUM_RANKS, "train", str(path), log=tmp_path / "log",
            WINDLASS_TOKEN_FILE=str(token), TMS_INIT_ENABLE="1",
        )  # fmt: skip
        weights = tmp_path / "2"
        assert server.digests() == server.digests_of_fresh_load(weights)
        check_answer(server, weights, 2)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_areals_trainer_runs_with_two_changed_lines(engine: str, tmp_path: Path) -> None:
    """Check `PPOTrainer` with its controllers, its worker processes and a server that it starts."""
    source, token = checkpoint(1, tmp_path / "source"), token_file(tmp_path, TOKEN)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.eos_token, tokenizer.pad_token = "w248", "w249"
    tokenizer.save_pretrained(source)
    site = write_entry_points(tmp_path / "site")
    # AReaL's trainer requires the metadata of the release that it pins.
    (site / "sglang-0.5.10.post1.dist-info").mkdir()
    (site / "sglang-0.5.10.post1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.10.post1\n"
    )
    python = tmp_path / "python"
    options = "--device cpu --max-total-tokens 4096" if engine == "sglang" else ""
    python.write_text(f'#!/bin/sh\nexec {VENVS[engine] / "bin/python"} "$@" {options}\n')
    python.chmod(0o700)
    served = write_entry_points(tmp_path / "served")
    settings = tmp_path / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "engine": engine, "model": str(source), "out": str(tmp_path), "num_steps": NUM_STEPS,
                "python": str(python),
                "variables": {**ENVIRONMENT[engine], "PYTHONPATH": f"{PATHS}:{served}"},
            }
        )
    )  # fmt: skip
    run(
        *(str(SCRIPT), "ppo", str(settings)),
        log=tmp_path / "log",
        PYTHONPATH=f"{PATHS}:{site}",
        WINDLASS_TOKEN_FILE=str(token),
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["version"] == str(NUM_STEPS)
    for weights, is_served in ((tmp_path / "saved", True), (source, False)):
        with serving_fresh(
            engine, weights, tmp_path / f"{weights.name}.log", dtype="bfloat16"
        ) as fresh:
            loaded = checksums(engine, fresh.post)
        assert loaded
        assert all(found["checksums"][name] == loaded[name] for name in loaded) == is_served


def saved(folder: Path) -> list[Path]:
    """Return the checkpoint folder that AReaL wrote for each version."""
    return [folder / str(version) for version in range(1, NUM_VERSIONS + 1)]


def require_fresh(server: PlainServer, weights: Path, log: Path) -> None:
    """Check that all tensors of a server equal those in a server that loads AReaL's checkpoint."""
    assert server.version() == str(NUM_VERSIONS)
    assert not server.is_paused()
    with serving_plain(weights, log) as fresh:
        assert fresh.checksums() == server.checksums()


def require_versions_are_true(
    answers: Sequence[dict[str, Any]], weights: Sequence[Path], told_apart: float = 0.25
) -> None:
    """Check that the weights of a token's version predict it, and that other versions do not for a share of tokens."""
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
    assert others.count(False) > len(others) * told_apart, "the versions say too much alike to tell"


def _gaps(answers: Sequence[dict[str, Any]], folder: Path) -> list[list[float]]:
    """Return the difference between each token's logit and the largest logit.

    The spacing of bfloat16 grows with the numbers. So differences below large logits are scaled to the spacing at 4.
    """
    has_adapter = (folder / "adapter_config.json").exists()
    base = folder.parent / "source" if has_adapter else folder
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    if has_adapter:
        model = peft.PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
    found = []
    for answer in answers:
        ids = torch.tensor([answer["prompt"] + answer["tokens"]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(answer["prompt"]) - 1 : -1].float()
        given = logits.gather(1, ids[0, len(answer["prompt"]) :, None])[:, 0]
        largest = logits.max(1).values
        found.append(((largest - given) / (largest.abs() / 4).clamp(min=1)).tolist())
    return found


def test_wrong_settings_are_refused_with_the_reason(tmp_path: Path) -> None:
    source = checkpoint(1, tmp_path / "source")
    said = run_ranks(1, "refusals", str(source), log=tmp_path / "log")
    refused = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    rollout = (
        "rollout: must be RemotevLLMEngine or RemoteSGLangEngine of windlass.integrations.areal (call install() "
        "before PPOTrainer), got "
    )
    trainer = (
        "actor: must be an engine of windlass.integrations.areal with this rollout, got an engine that sends weights by "
        "itself; call install() before PPOTrainer"
    )
    lora = (
        "use_lora: must be False with this actor and these servers, got True; Windlass updates adapters from FSDP actors "
        "in vLLM servers only. Use both, train all weights, or leave out install() and set weight_update_mode to disk"
    )
    disk = (
        "weight_update_mode: must be xccl with Windlass, got disk; AReaL demands disk if the actor shares GPUs with the "
        "servers (a scheduling `target`). Give them separate GPUs and set weight_update_mode to xccl, or leave out "
        "install()"
    )
    assert refused == {
        "lora": lora,
        "disk": disk,
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
