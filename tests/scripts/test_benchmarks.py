"""`make test-scripts` rehearses every script in benchmarks/ on a CPU at a small size.

Scripts that never run break unnoticed: an option disappears, a module moves, a namespace lacks a name. A rehearsal runs
the whole script and checks its exit status and its rows. Its figures have no meaning.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from servers import VENVS

pytestmark = [pytest.mark.scripts, pytest.mark.timeout(620)]

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
OUT = "OUT"
"""Placeholder for the folder of a rehearsal in its arguments."""
VLLM, SGLANG = "VLLM", "SGLANG"
"""Placeholders for the interpreters of the engines' environments."""


@dataclass(frozen=True)
class Rehearsal:
    """A run of a script at a small size.

    Attributes:
        script: path in benchmarks/.
        words: arguments of the script.
        engine: key in `VENVS` of the environment that the script needs; empty for none.
        gives: file in OUT that the script must write: a JSON object or a JSON list with entries; empty for none.
    """

    script: str
    words: tuple[str, ...] = ()
    engine: str = ""
    gives: str = "rows.json"


def row(script: str, *words: str, engine: str = "") -> Rehearsal:
    """Return a rehearsal that writes its rows to OUT."""
    return Rehearsal(script, (*words, "--json", f"{OUT}/rows.json"), engine)


LIVE = ("--on-cpu", "--python", VLLM, "--tp", "1", "--trainers", "2", "--updates", "1")
LIVE_BENCH = (*LIVE, "--model", "rehearsal", "--load", "2", "--log", f"{OUT}/engine.log")
LIVE_PROOF = (*LIVE, "--case", "dense", "--case-s", "400")
REHEARSALS = (
    row("bench_batches.py", "--gb", "0.01", "--runs", "1", "--inline-gb", "0.01"),
    row("bench_bind.py", "--engines", "4", "--repeats", "2"),
    row("bench_capture.py", "--layers", "2", "--experts", "4"),
    row("bench_cma.py", "--runs", "1"),
    row("bench_control.py", "--engines", "4", "--rounds", "3"),
    row("bench_engines.py", "--engine", "vllm", "--runs", "1", engine="vllm"),
    row("bench_first_version.py", "--layers", "2", "--experts", "4", "--runs", "1"),
    row("bench_heap.py", "--modules", "json", "--runs", "1"),
    row("bench_journal.py"),
    Rehearsal("bench_planner.py", ("--case", "0"), gives=""),
    row(
        "bench_queues.py", "--runs", "1", "--outstanding", "64", "--count", "200", "--paced", "100"
    ),
    row(
        "bench_registration.py",
        *("--transports", "cma", "--layouts", "own", "--runs", "1"),
        *("--hidden", "8", "--inter", "8", "--vocab", "64"),
    ),
    row("bench_relay.py", "--part", "real", "--engines", "1"),
    row("bench_replica.py", "--mib", "4", "--runs", "1"),
    row("bench_replicated.py", "--mib", "4", "--runs", "1"),
    row("bench_rollout.py", "--only", "idle"),
    row(
        "bench_routing.py",
        *("--turns", "1", "--tasks", "2", "--prompts", "2", "--samples", "2", "--shared", "256"),
        engine="vllm",
    ),
    row("bench_samples_per_hour.py", "--steps", "2", "--ways", "in_place", engine="vllm"),
    row("bench_scale.py", "--sizes", "1"),
    row("bench_sessions.py", "--outstanding", "64", "--count", "20", "--runs", "1"),
    row("bench_simulation.py"),
    row("bench_transports.py", "--runs", "5", "--transport", "shm"),
    row("bench_staged_pull.py", "--runs", "1"),
    row("bench_update.py"),
    row("bench_xccl.py", "--mib", "64", "--bucket-mib", "4"),
    row(
        "compare_checkouts.py",
        *("bench_heap", str(ROOT), "--turns", "2", "--commit", "this one"),
        # The script's own arguments end at `--`, see `command_of`.
    ),
    Rehearsal("run.py", ("journal", "--out", OUT), gives="bench_journal.json"),
    row("gpu/bench_live_engine.py", *LIVE_BENCH, engine="vllm"),
    row("gpu/bench_turns.py", "--on-cpu", "--gib", "0.1", "--turns", "2"),
    # Live scripts that run together need different ports, because vLLM lets several servers listen on one port.
    row(
        "gpu/prove_live_engine.py",
        *(*LIVE_PROOF, "--logs", f"{OUT}/logs", "--port", "21123"),
        engine="vllm",
    ),
    row(
        "gpu/prove_outside.py",
        *(
            "--on-cpu",
            "--python",
            SGLANG,
            "--engine-path",
            str(ROOT / "tests/support/cpu_allocator"),
        ),
        *("--model", "rehearsal", "--updates", "2", "--logs", f"{OUT}/logs"),
        engine="sglang",
    ),
    row(
        "gpu/prove_turns.py",
        *("--on-cpu", "--python", VLLM, "--case", "dense", "--trainers", "2", "--turns", "2"),
        *("--logs", f"{OUT}/logs", "--port", "27123", "--start-s", "300"),
        *("--engine-path", f"{ROOT}/tests/support/cpu_sleep:{ROOT}/tests/support"),
        engine="vllm",
    ),
    row(
        "gpu/prove_turns.py",
        *("--on-cpu", "--python", SGLANG, "--engine", "sglang", "--case", "dense", "--turns", "2"),
        *("--logs", f"{OUT}/logs", "--port", "31123", "--start-s", "300"),
        *("--engine-path", f"{ROOT}/tests/support/cpu_sleep:{ROOT}/tests/support"),
        engine="sglang",
    ),
    Rehearsal(
        "gpu/run_live_engine.sh",
        (OUT, *LIVE_BENCH, "--in-place-only", "--port", "24123"),
        "vllm",
        "bench_live_engine.json",
    ),
)
GIVEN = {"compare_checkouts.py": ("--", "--modules", "json", "--runs", "1")}
"""Script -> arguments after all others."""
STARTED_BY_OTHERS = {
    "batch_load.py": "the worker and the ranks of bench_batches.py",
    "harness.py": "imported by every benchmark",
    "limited_rank.py": "a rank of bench_relay.py",
    "own_transfer_trainer.py": "the trainer of bench_samples_per_hour.py for vLLM's own transfers",
    "rollout_load.py": "a worker of bench_rollout.py",
    "rollout_trainer.py": "a rank of bench_rollout.py --only update",
    "gpu/block_float8.py": "imported by live_engine",
    "gpu/megatron_model.py": "imported by bench_megatron.py and live_engine",
    "gpu/nixl_agent.py": "a peer of bench_nvlink.py --nixl",
    "gpu/gpu_environment.sh": "sourced by run_demo.sh, run_features.sh and run_samples_per_hour.sh",
}
GPU_ONLY = {
    "gpu/bench_checkpoint_engine.py": "checkpoint-engine moves bytes between GPUs only",
    "gpu/bench_megatron.py": "stores with kernels and compares with NCCL",
    "gpu/bench_network_gpu.py": "reads and writes GPU memory",
    "gpu/bench_nvlink.py": "stores with kernels over NVLink",
    "gpu/bench_replica_gpu.py": "copies inside GPU memory",
    "gpu/bench_sharing.py": "maps GPU memory of another process",
    "gpu/prove_block_float8.py": "engines quantise to float8 on GPUs only",
    "gpu/run_comparisons.sh": "starts scripts of this table",
    "gpu/run_expandable.sh": "expandable segments exist on GPUs only",
    "gpu/run_features.sh": "starts scripts of this table",
    "gpu/run_m2n.sh": "NVIDIA's benchmark",
    "gpu/run_on_gpu.sh": "starts scripts of this table; its tests are skipped without a GPU",
    "gpu/run_replica.sh": "starts scripts of this table",
}
"""Script -> why a CPU cannot rehearse it. Its `--help` must work, which also tests its imports."""
ELSEWHERE = {
    "bench_trl.py": "needs TRL beside vLLM: `make test-integrations` installs them",
    "run_compare_reference.sh": "starts compare_checkouts.py, which is rehearsed",
    "gpu/prove_trl_colocated.py": "needs TRL beside vLLM: `make test-integrations` installs them",
    "gpu/prove_vllm_plugin.py": "vLLM's plugin is tested live by `make test-integrations`",
    "gpu/run_demo.sh": "`windlass demo` is tested by tests/jobs",
    "gpu/run_prove_live_engine.sh": "starts prove_live_engine.py, which is rehearsed",
    "gpu/run_prove_turns.sh": "starts prove_turns.py, which is rehearsed",
    "gpu/run_prove_vllm_plugin.sh": "starts prove_vllm_plugin.py",
    "gpu/run_samples_per_hour.sh": "starts bench_samples_per_hour.py, which is rehearsed",
    "gpu/run_trl_colocated.sh": "starts prove_trl_colocated.py",
}


def test_every_script_has_a_row() -> None:
    found = {
        str(path.relative_to(BENCHMARKS))
        for pattern in ("*.py", "*.sh", "gpu/*.py", "gpu/*.sh")
        for path in BENCHMARKS.glob(pattern)
    }
    rehearsed = {each.script for each in REHEARSALS}
    tables = (rehearsed, STARTED_BY_OTHERS.keys(), GPU_ONLY.keys(), ELSEWHERE.keys())
    assert sum(map(len, tables)) == len(found), "a script is in one table"
    assert set[str]().union(*tables) == found


def command_of(each: Rehearsal, out: Path) -> list[str]:
    words = [*each.words, *GIVEN.get(each.script, ())]
    words = [w.replace(OUT, str(out)) for w in words]
    pythons = {key.upper(): str(venv / "bin/python") for key, venv in VENVS.items()}
    words = [pythons.get(w, w) for w in words]
    script = str(BENCHMARKS / each.script)
    return ["bash" if script.endswith(".sh") else sys.executable, script, *words]


def environment_of(folder: Path) -> dict[str, str]:
    """Return variables that let shell scripts find this interpreter as python3, and no GPU."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text("#!/bin/sh\n")
    (programs / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}/src{os.pathsep}{BENCHMARKS}{os.pathsep}{ROOT}/tests/support",
    }


def run(command: list[str], folder: Path, timeout_s: float) -> None:
    """Run a script to its end; on failure, show the end of its output."""
    log = folder / "output.txt"
    with log.open("w") as sink:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment_of(folder),
            stdout=sink,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    assert done.returncode == 0, f"status {done.returncode}\n{log.read_text()[-4000:]}"


@pytest.mark.parametrize("each", REHEARSALS, ids=lambda each: each.script)
def test_script_runs_on_a_cpu(each: Rehearsal, tmp_path: Path) -> None:
    if each.engine and not (VENVS[each.engine] / "bin/python").exists():
        pytest.skip(f"{each.engine}: no environment; `make engines` makes it")
    out = tmp_path / "out"
    out.mkdir()
    run(command_of(each, out), tmp_path, 600)
    if each.gives:
        assert json.loads((out / each.gives).read_text()), "the script wrote no rows"


@pytest.mark.parametrize("script", sorted(name for name in GPU_ONLY if name.endswith(".py")))
def test_script_of_a_gpu_is_imported(script: str, tmp_path: Path) -> None:
    run([sys.executable, str(BENCHMARKS / script), "--help"], tmp_path, 110)
