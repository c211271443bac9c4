"""Time of a weight sync of TRL's `AsyncGRPOTrainer`, from TRL's own log: Windlass against the alternative on CPU.

The same script trains the same model with the same servers, once for each `weight_transfer`:

- a checkpoint in shared memory and vLLM's own `reload_weights` (TRL's own transfer uses NCCL, which needs GPUs);
- Windlass, of one rank;
- Windlass, attached.

Rollouts run all the time. The first two syncs of a run are not counted, because they connect. The environments are
WINDLASS_VLLM_VENV and WINDLASS_TRL_VENV, see `make test-integrations`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain_vllm import serving_plain
from trl_fleet import make_model, server_flags, start

from harness import Row, median_p95, parser, report

METRICS = ("perf/weight_sync_s", "perf/weight_sync_pause_s", "perf/weight_sync_transfer_s")
BEFORE = "disk"
CASES = {
    BEFORE: "reload_weights of a checkpoint in shared memory",
    "whole": "Windlass",
    "shards": "Windlass, attached",
}


def main() -> None:
    arguments = parser(str(__doc__).partition("\n")[0])
    arguments.add_argument("--steps", type=int, default=14)
    arguments.add_argument("--servers", type=int, default=1)
    arguments.add_argument("--hidden", type=int, default=512)
    arguments.add_argument("--layers", type=int, default=6)
    given = arguments.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, ExitStack() as running:
        folder = Path(memory)
        model = make_model(folder / "model", hidden=given.hidden, layers=given.layers)
        nbytes = (model / "model.safetensors").stat().st_size
        servers = [
            running.enter_context(
                serving_plain(model, folder / f"{i}.log", flags=server_flags(model))
            )
            for i in range(given.servers)
        ]
        for case in CASES:
            run = start(folder / case, model, servers, transfer=case, steps=given.steps)
            log = [row for row in run.end()["log"] if "reward" in row][2:]
            seconds[case] = {metric: [row[metric] for row in log] for metric in METRICS}
    rows = []
    for case in CASES:
        for metric in METRICS:
            before, _ = median_p95(seconds[BEFORE][metric])
            for name, value in zip(
                ("median", "p95"), median_p95(seconds[case][metric]), strict=True
            ):
                rows.append(
                    Row(
                        f"{CASES[case]}, {nbytes / 1e6:.0f} MB, {given.servers} server(s)",
                        f"{metric} {name}",
                        value * 1e3,
                        "ms",
                        f"{CASES[BEFORE]}, median",
                        before * 1e3,
                        ratio=value / before if before else 0.0,
                    )
                )
    report(rows, given.json, f"TRL's weight sync, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
