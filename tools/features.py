"""Test which feature works on which memory, record the results, and write docs/features.md from the records.

    python tools/features.py run MEMORY --json benchmarks/results/features_MEMORY_MACHINE_DATE.json
    python tools/features.py render [--check]

MEMORY is `host` or `gpu`. Every test runs trainers and engines in separate processes and compares every element of every
parameter that an engine serves. The page shows the newest results of each memory.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "features.md"
DEADLINE_S = 120
"""Deadline of one case, in seconds."""
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"),
    *("-m", "not engines and not cluster"),
)
ON_GPU = "tests/transfer/test_backends_on_gpu.py"
BACKENDS = "tests/transfer/test_backends.py::test_every_backend_delivers_every_byte"
LIVE = "tests/control/test_live_update.py"
LINKS = "tests/control/test_link_transports.py"
MIXED = f"{LINKS}::test_links_take_the_fastest_transport_within_and_between_hosts"
BROADCASTS = f"{ON_GPU}::test_broadcasts_deliver_every_byte_from_gpu_to_gpu"
DRIVEN = f"{ON_GPU}::test_a_trainer_that_drives_its_updates_fills_gpu_memory"
CALLS = "tests/trainers/test_callback.py"
BUCKETS = f"{CALLS}::test_broadcast_buckets_arrive_whole_and_a_group_serves_several_updates"
RELAY = "tests/transfer/test_relay.py"
RESHARD = "tests/transfer/test_reshard.py"
LATE = f"{RESHARD}::test_engines_that_join_late_catch_up_from_a_peer_without_a_trainer"
REPLICA = "tests/transfer/test_replica.py"
COPIED = f"{REPLICA}::test_engines_serve_copied_weights_unchanged_by_later_training"
REPLICA_ON_GPU = "tests/transfer/test_replica_on_gpu.py"
FEATURES: dict[str, dict[str, tuple[str, str]]] = {
    "p2p within a host": {
        "host": (BACKENDS, "p2p"),
        "gpu": (f"{LIVE}::test_engines_hold_the_full_tensors_after_every_publish", ""),
    },
    "p2p over a network": {
        "host": (MIXED, ""),
        "gpu": (f"{LIVE}::test_engines_on_gpus_hold_the_full_tensors_over_network_transports", ""),
    },
    "xccl, gloo": {"host": (BACKENDS, "xccl"), "gpu": (BROADCASTS, "gloo")},
    "xccl, NCCL": {"gpu": (BROADCASTS, "nccl")},
    "disk": {
        "host": (BACKENDS, "disk"),
        "gpu": (f"{ON_GPU}::test_files_are_written_from_and_read_into_gpu_memory", ""),
    },
    "driven by the trainer, gloo and files": {"host": (BUCKETS, ""), "gpu": (DRIVEN, "gloo")},
    "driven by the trainer, NCCL and files": {"gpu": (DRIVEN, "nccl")},
    "relay": {
        "host": (f"{RELAY}::test_trainers_send_one_copy_and_every_engine_has_every_byte", ""),
        "gpu": (f"{ON_GPU}::test_engines_relay_verified_bytes_from_gpu_memory", ""),
    },
    "catch-up of a newcomer": {
        "host": (LATE, ""),
        "gpu": (f"{ON_GPU}::test_a_newcomer_on_a_gpu_catches_up_from_an_engine", ""),
    },
    "replica": {
        "host": (COPIED, ""),
        "gpu": (f"{REPLICA_ON_GPU}::test_engines_get_the_copy_although_the_weights_changed", ""),
    },
}
"""Feature -> memory -> test, and a word that selects the cases of the feature."""
HEAD = """# Which feature on which memory

`tools/features.py` writes this page from committed results; do not edit it. Each row is a test, with the number of cases that
passed and the number that ran. Cases are modes of updates, fabrics and wires. Every case compares every element of every parameter that an engine serves. *Not run* means
that the machine skipped the test, with the reason of the test if it gave one.

"""


def run(memory: str, path: Path, at_once: int, go_on: bool) -> int:
    """Run the tests of one memory and write the result of each case; return 0 if none failed.

    If `go_on` is set, keep the cases that `path` already has and do not run them again.
    """
    chosen = {
        test for ways in FEATURES.values() for kind, (test, _) in ways.items() if kind == memory
    }
    listed = subprocess.run(
        [*PYTEST, "--collect-only", *sorted(chosen)],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    gpus = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.splitlines() if memory == "gpu" else []  # fmt: skip
    found = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{len(gpus)} x {gpus[0]}" if gpus else f"{platform.machine()}, no GPU",
    }
    cases: list[dict[str, str]] = json.loads(path.read_text())["cases"] if go_on else []
    tests = [line for line in listed if "::" in line]
    kept = {case["test"] for case in cases}
    with ThreadPoolExecutor(at_once) as pool:
        begun = [pool.submit(_run_case, test) for test in tests if test not in kept]
        for ended in as_completed(begun):
            cases.append(ended.result())
            # Write after each case, because the run may be interrupted.
            path.write_text(
                json.dumps({**found, "of": len(tests), "cases": cases}, indent=1) + "\n"
            )
    outcomes = Counter(case["outcome"] for case in cases)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    return 0 if cases and not outcomes["failed"] else 1


def _run_case(test: str) -> dict[str, str]:
    """Run one case of a test in a separate process, and print its output if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        try:
            ended = subprocess.run(
                [*PYTEST, f"--junit-xml={report}", test],
                cwd=ROOT, timeout=DEADLINE_S, check=False, capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"test": test, "outcome": "failed", "reason": f"did not end in {DEADLINE_S} s"}
        if ended.returncode:
            print(ended.stdout[-6000:], ended.stderr[-2000:])
        told_of = ET.parse(report).getroot()
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (told := told_of.find(f".//{tag}")) is not None:
            return {"test": test, "outcome": outcome, "reason": told.attrib.get("message", "")}
    return {"test": test, "outcome": "passed", "reason": ""}


def render() -> str:
    """Return the page with the newest results of each memory."""
    machines, rows, reasons = [], [], Counter[str]()
    newest = {memory: _newest(memory) for memory in ("host", "gpu")}
    for memory, (path, found) in newest.items():
        machines.append(
            f"- {'GPU' if memory == 'gpu' else memory} memory: {found['machine']}, {found['date']} (`{path.name}`)"
        )
    for feature, ways in FEATURES.items():
        for memory, (_, found) in newest.items():
            if memory not in ways:
                rows.append(f"| {feature} | {memory} | no test | NCCL needs GPUs |")
                continue
            test, word = ways[memory]
            cases = [
                case for case in found["cases"]
                if case["test"].partition("[")[0] == test and word in case["test"].partition("[")[2]
            ]  # fmt: skip
            passed = sum(case["outcome"] == "passed" for case in cases)
            skipped = [case for case in cases if case["outcome"] == "skipped"]
            for case in skipped:
                reasons[f"{feature}, {memory} memory: {case['reason']}"] += 1
            ran = len(cases) - len(skipped)
            file, _, name = test.partition("::")
            shown = f"{passed} of {ran}" if ran else "not run"
            label = "GPU" if memory == "gpu" else memory
            rows.append(f"| {feature} | {label} | {shown} | `{name}` (`{file}`) |")
    lines = [*machines, "", "| feature | memory | passed | test |", "|---|---|---|---|", *rows]
    if reasons:
        lines += ["", "Not run:", ""]
        lines += [f"- {count} of {reason}" for reason, count in sorted(reasons.items())]
    return HEAD + "\n".join(lines) + "\n"


def _newest(memory: str) -> tuple[Path, dict[str, object]]:
    """Return the newest results of one memory.

    Raises:
        SystemExit: the memory has no results.
    """
    files = [(json.loads(p.read_text()), p) for p in RESULTS.glob(f"features_{memory}_*.json")]
    if not files:
        raise SystemExit(f"features: {RESULTS} has no features_{memory}_*.json")
    found, path = max(files, key=lambda item: (item[0]["date"], item[1].name))
    return path, found


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run the tests of one memory")
    runs.add_argument("memory", choices=["host", "gpu"])
    runs.add_argument("--json", type=Path, required=True)
    runs.add_argument(
        "--at-once", type=int, default=1, help="number of cases at a time (default 1)"
    )
    runs.add_argument(
        "--go-on",
        action="store_true",
        help="continue an interrupted run: keep the cases in its file",
    )
    commands.add_parser("render", help="write the page").add_argument(
        "--check", action="store_true"
    )
    args = parser.parse_args()
    if args.command == "run":
        return run(args.memory, args.json, args.at_once, args.go_on)
    page = render()
    if args.check:
        return 0 if PAGE.read_text() == page else 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
