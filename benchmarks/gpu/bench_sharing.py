"""Mapping of another process's GPU memory: CUDA IPC handles, and chunks whose descriptors travel over a socket.

    python benchmarks/gpu/bench_sharing.py [--repeats 5] [--json FILE]

The owner has the same number of bytes as allocations from cudaMalloc, as chunks of 20 MiB (torch's expandable segments for
tensors above 1 MiB), and as chunks of 2 MiB (for smaller tensors). In each repetition the owner exports the memory, and the peer
maps it and unmaps it, as an engine does in an update with the transport `pull`. Needs one GPU.
"""

from __future__ import annotations

import multiprocessing as mp
import socket
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from harness import Row, median_p95, parser, report
from windlass.memory.cuda.driver import Device, driver
from windlass.net.clock import Deadline
from windlass.transports.gpu_sharing import (
    Exported,
    export_memory,
    open_handle,
    receive_chunks,
    send_chunks,
)

MIB = 1 << 20
NBYTES = 4000 * MIB
CASES = {"cudaMalloc of 100 MiB": 0, "chunks of 20 MiB": 20 * MIB, "chunks of 2 MiB": 2 * MIB}
"""Name of a case, and size of its chunks."""
ALLOCATION_NBYTES = 100 * MIB


def chunks(device: Device, nbytes: int, size: int) -> int:
    """Return the address of memory that is made as torch makes expandable segments."""
    cuda = driver()
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device.ordinal
    kinds = cuda.CUmemAllocationHandleType
    prop.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    address = device.reserve(nbytes)
    for at in range(0, nbytes, size):
        chunk = device.call("cuMemCreate", size, prop, 0)
        device.call("cuMemMap", address + at, size, 0, chunk, 0)
        device.call("cuMemRelease", chunk)
    device.allow_access(address, nbytes)
    return address


def run_peer(pipe: Connection) -> None:
    """Map and unmap what the owner exports; answer with the seconds of both."""
    device = Device(0)
    with socket.socket(fileno=recv_handle(pipe)) as line:
        pipe.send("ready")
        while (exported := pipe.recv()) is not None:
            began = time.perf_counter()
            deadline = Deadline.after(60.0, "a benchmark")
            found = [
                open_handle(device, one.handle)
                if one.handle
                else receive_chunks(line, device, one.nbytes, one.num_chunks, deadline)
                for one in exported
            ]
            mapped = time.perf_counter()
            for memory in found:
                memory.close()
            pipe.send((mapped - began, time.perf_counter() - mapped))


def main() -> None:
    """Run all cases, and write the rows."""
    made = parser(__doc__ or "")
    made.add_argument("--repeats", type=int, default=5)
    options = made.parse_args()
    device, rows = Device(0), list[Row]()
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=run_peer, args=(theirs,), daemon=True)
    process.start()
    line, other = socket.socketpair()
    assert process.pid is not None
    send_handle(pipe, other.fileno(), process.pid)
    assert pipe.recv() == "ready"
    for name, size in CASES.items():
        starts = (
            [chunks(device, NBYTES, size)]
            if size
            else [device.allocate(ALLOCATION_NBYTES) for _ in range(NBYTES // ALLOCATION_NBYTES)]
        )
        each = NBYTES // len(starts)
        seconds: dict[str, list[float]] = {"export": [], "map": [], "unmap": []}
        exported = list[Exported]()
        for _ in range(options.repeats + 1):
            began = time.perf_counter()
            exported = export_memory(
                device, np.array(starts, np.uint64), np.array([each] * len(starts), np.uint64)
            )
            seconds["export"].append(time.perf_counter() - began)
            pipe.send(exported)
            for one in exported:
                send_chunks(line, device, one)
            map_s, unmap_s = pipe.recv()
            seconds["map"].append(map_s)
            seconds["unmap"].append(unmap_s)
        num = sum(max(one.num_chunks, 1) for one in exported)
        for part, series in seconds.items():
            median = median_p95(series[1:])[0]
            rows.append(Row(f"{name}, {NBYTES >> 20} MiB", part, median, "s", "each", median / num))
    pipe.send(None)
    process.join(20)
    report(rows, options.json, "Mapping of another process's GPU memory")


if __name__ == "__main__":
    main()
