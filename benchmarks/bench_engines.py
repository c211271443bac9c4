"""Update of a live unmodified engine on CPU: Windlass against the engine's own API, in one run.

One trainer process sends the weights of two checkpoints, alternating, to the same server

- with Windlass (pause, write over `cma`, verify with digests, apply, resume), `in_place` or with `--mode staged`;
- with the engine's own API. SGLang: `update_weights_from_tensor` with a flattened bucket in shared memory, and
  `update_weights_from_distributed` over gloo. vLLM: `reload_weights` of a checkpoint in shared memory through
  `collective_rpc` (its weight transfers need CUDA).

No requests run. After every run the benchmark compares all weights of the engine with their digests. `make engines`
makes the engines' environments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch
from servers import CONFIGS, ROOT, TOKEN, VENVS, Layout, Server, engine_version, save, serving
from transformers import AutoModelForCausalLM

import windlass
from harness import Row, median_p95, parser, report
from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode
from windlass.control.report import UpdateReport

METHODS = {"sglang": ["tensor", "distributed"], "vllm": ["reload"]}
OWN_API = Path(__file__).with_name("engines") / "own_api.py"
CONFIGS["bench"] = {
    **CONFIGS["dense"],
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


class OwnApi:
    """Trainer process that uses the engine's own API."""

    def __init__(self, sent: IO[str], received: IO[str]) -> None:
        self._sent, self._received = sent, received

    def update(self, method: str, index: int) -> dict[str, float]:
        self._sent.write(f"{method} {index}\n")
        self._sent.flush()
        line = self._received.readline()
        assert line, "the engine's own API failed"
        seconds: dict[str, float] = json.loads(line)
        return seconds


@contextlib.contextmanager
def own_api(engine: str, url: str, folders: list[Path]) -> Iterator[OwnApi]:
    command = [str(VENVS[engine] / "bin/python"), str(OWN_API), engine, url, *map(str, folders)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield OwnApi(process.stdin, process.stdout)
        finally:
            process.stdin.close()
            process.wait(30)


def measure(
    engine: str, server: Server, controller: str, folders: list[Path], runs: int
) -> tuple[list[UpdateReport], dict[str, list[dict[str, float]]]]:
    """Run Windlass and the engine's methods alternately; discard the first round of each."""
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.bfloat16) for f in folders]
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.bfloat16)
    ours: list[UpdateReport] = []
    theirs: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS[engine]}
    expected: dict[int, list[dict[str, str]]] = {}
    with (
        windlass.connect_trainer(model, controller=controller, token=TOKEN) as trainer,
        own_api(engine, server.url, folders) as other,
    ):
        for run in range(runs + 1):
            for turn, method in enumerate(["windlass", *theirs]):
                # Never the checkpoint that the engine has.
                index = (run + turn) % 2
                if method == "windlass":
                    with torch.no_grad():
                        for mine, value in zip(
                            model.parameters(), models[index].parameters(), strict=True
                        ):
                            mine.copy_(value)
                    ours.append(trainer.publish(run + 1).result())
                else:
                    theirs[method].append(other.update(method, index))
                held = server.digests()
                assert held == expected.setdefault(index, held), f"{method} left other bytes"
    assert expected[0] != expected[1]
    return ours[1:], {method: seconds[1:] for method, seconds in theirs.items()}


def rows(
    engine: str, ours: list[UpdateReport], theirs: dict[str, list[dict[str, float]]]
) -> list[Row]:
    case = f"{engine} {engine_version(engine)} tp1, {ours[0].nbytes / 1e6:.0f} MB"
    own, own_p95 = median_p95([r.update_s for r in ours])
    pause, _ = median_p95([r.pause_s for r in ours])
    found = []
    for method, runs in theirs.items():
        total, total_p95 = median_p95([r["total"] for r in runs])
        stopped, _ = median_p95(
            [sum(v for k, v in r.items() if k in ("pause", "broadcast", "load", "resume")) for r in runs]
        )  # fmt: skip
        for metric, value, reference in (
            ("update, median", own, total),
            ("update, p95", own_p95, total_p95),
            ("engine stopped, median", pause, stopped),
        ):
            found.append(_row(case, metric, value, f"{method}: same", reference))
        for stage in runs[0]:
            if stage != "total":
                median, _ = median_p95([r[stage] for r in runs])
                found.append(_row(case, f"{method}: {stage}", median, f"{method}: total", total))
    for phase in ours[0].phase_s:
        median, _ = median_p95([r.phase_s[phase] for r in ours])
        found.append(_row(case, f"windlass: {phase}", median, "windlass: total", own))
    return found


def _row(case: str, metric: str, value: float, reference: str, reference_value: float) -> Row:
    return Row(case, metric, value * 1e3, "ms", reference, reference_value * 1e3)


async def bench(engine: str, mode: UpdateMode, runs: int, folder: Path) -> list[Row]:
    folders = [save("bench", seed, folder / str(seed)) for seed in (1, 2)]
    config = ControlConfig(mode=mode, deadlines=PhaseDeadlines(pause_s=120))
    async with windlass.Controller(token=TOKEN, config=config) as controller:

        def run() -> tuple[list[UpdateReport], dict[str, list[dict[str, float]]]]:
            log = folder / "server.log"
            with serving(
                engine, folders[0], log, layout=Layout(), controller=controller.url
            ) as server:
                return measure(engine, server, controller.url, folders, runs)

        ours, theirs = await asyncio.to_thread(run)
    return rows(engine, ours, theirs)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--engine", choices=sorted(METHODS), action="append")
    options.add_argument("--mode", default="in_place", choices=[m.value for m in UpdateMode])
    options.add_argument("--runs", type=int, default=7)
    args = options.parse_args()
    torch.set_num_threads(1)
    found: list[Row] = []
    for engine in args.engine or sorted(METHODS):
        if not (VENVS[engine] / "bin" / "python").exists():
            sys.stderr.write(f"{engine}: no environment {VENVS[engine]}; `make engines` makes it\n")
            continue
        with tempfile.TemporaryDirectory() as folder:
            found += asyncio.run(bench(engine, UpdateMode(args.mode), args.runs, Path(folder)))
    report(found, args.json, f"A live engine's update, {args.mode}")


if __name__ == "__main__":
    main()
