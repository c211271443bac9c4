"""Memory and latency of very many outstanding sessions, each a conversation of 50 turns.

A real worker process holds the sessions before their last turn. Sessions end at random moments (Poisson), and each is
replaced by a new one. Every turn of every session is checked.

    python benchmarks/bench_sessions.py --json FILE [--outstanding 100000] [--rate 300] [--runs N]
"""

from __future__ import annotations

import asyncio
import os

import bench_rollout
from bench_rollout import DEADLINE_S, machine_row, row, static_rig
from harness import Row, median_p95, parser, report
from rollout_load import SESSION_TURNS, TURN_TOKENS, SessionCollector


def resident_nbytes(pid: int) -> int:
    """Return the resident memory of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def measure(outstanding: int, rate: float, count: int, runs: int) -> list[Row]:
    case = f"{outstanding} sessions of {SESSION_TURNS} turns with {TURN_TOKENS} tokens"
    before = resident_nbytes(os.getpid())
    async with static_rig(SessionCollector, "session", outstanding) as rig:
        await rig.worker.ask("until 1 0")
        worker_before = resident_nbytes(rig.worker.process.pid)
        await rig.worker.ask(f"until {outstanding} 0")
        ours = (resident_nbytes(os.getpid()) - before) / outstanding
        theirs = (resident_nbytes(rig.worker.process.pid) - worker_before) / outstanding
        found = [await rig.run(count, rate=rate) for _ in range(runs + 1)][1:]
        after = (resident_nbytes(os.getpid()) - before) / outstanding
    rows = [
        row(case, "controller's memory per session", "bytes", ours, "after the runs", after),
        row(case, "worker's memory per session", "bytes", theirs, "controller's", ours),
    ]
    for share in (0.50, 0.99):
        median, p95 = median_p95([each.quantile_ms(share) for each in found])
        name = f"completion latency p{share * 100:.0f} at {rate:g}/s, median of {runs} runs"
        rows.append(row(case, name, "ms", median, "p95 of the runs", p95))
    cpu, worst = median_p95([each.cpu_us_each() for each in found])
    rows.append(row(case, "controller CPU per completion", "us", cpu, "p95 of the runs", worst))
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--outstanding", type=int, default=100_000)
    options.add_argument("--rate", type=float, default=300.0)
    options.add_argument("--count", type=int, default=3000)
    options.add_argument("--runs", type=int, default=5)
    arguments = options.parse_args()
    rows = [machine_row("before")]
    bench_rollout.DEADLINE_S = max(DEADLINE_S, 600.0)
    rows += asyncio.run(
        measure(arguments.outstanding, arguments.rate, arguments.count, arguments.runs)
    )
    rows.append(machine_row("after"))
    report(rows, arguments.json, "outstanding sessions")


if __name__ == "__main__":
    main()
