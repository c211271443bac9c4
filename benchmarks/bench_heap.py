"""Time of a full garbage collection of Python in a process of an engine, before and after freezing the heap.

    PYTHON_OF_AN_ENGINE benchmarks/bench_heap.py --modules vllm.v1.worker.gpu_worker --json FILE

Run it with the interpreter of the engine's environment, which must have `rich`. The benchmark only imports the
modules: no model, no requests. A collection holds the interpreter lock, so it pauses the whole process.
"""

from __future__ import annotations

import gc
import importlib
import time

from harness import Row, median_p95, parser, report


def collections(count: int) -> list[float]:
    """Return the seconds of each of `count` full collections."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        gc.collect()
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--modules", required=True, help="modules to import, separated by commas"
    )
    arguments.add_argument("--runs", type=int, default=7)
    args = arguments.parse_args()
    for name in args.modules.split(","):
        importlib.import_module(name)
    gc.collect()
    num_objects = len(gc.get_objects())
    whole = median_p95(collections(args.runs))
    gc.freeze()
    frozen = median_p95(collections(args.runs))
    case = f"{args.modules}, {num_objects} objects"
    rows = [
        Row(
            case,
            f"full collection, {name}",
            1e3 * value,
            "ms",
            "the same, heap frozen",
            1e3 * beside,
        )
        for name, value, beside in zip(("median", "p95"), whole, frozen, strict=True)
    ]
    report(rows, args.json, "Collections of garbage")


if __name__ == "__main__":
    main()
