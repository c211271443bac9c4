"""Effect of pages and cores on the speed of `cma` on one host, compared with memcpy on the same kind of pages.

Source and target are in two processes, on pages of 4 KiB or on huge pages (`MADV_HUGEPAGE`). `CmaTransport` writes
every batch with 1 and with 2 threads, alternating with one memcpy by one thread in this process. At the end the
benchmark compares the received bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import xxhash

from harness import Row, median_p95, parser, report
from windlass.transports.base import MemoryRegion, WriteBatch
from windlass.transports.cma import CmaTransport

TOTAL_NBYTES = 128 << 20
EVICT_NBYTES = 64 << 20
CASES = (64 << 10, 1 << 20, 16 << 20)
"""Bytes per region. The regions of a batch fill `TOTAL_NBYTES`, in random order."""
PAGES = {"4 KiB": mmap.MADV_NOHUGEPAGE, "2 MiB": mmap.MADV_HUGEPAGE}
HUGE_NBYTES = 2 << 20
GOAL = 0.9

Bytes = npt.NDArray[np.uint8]


def memory(pages: str) -> Bytes:
    """Return touched memory that is aligned for huge pages."""
    mapping = mmap.mmap(-1, TOTAL_NBYTES + HUGE_NBYTES)
    mapping.madvise(PAGES[pages])
    whole = np.frombuffer(mapping, np.uint8)
    start = -int(whole.ctypes.data) % HUGE_NBYTES
    found = whole[start : start + TOTAL_NBYTES]
    found[:] = 0
    return found


def run_peer(pipe: Connection) -> None:
    """Run the other process: offer memory and report the received bytes."""
    with ExitStack() as stack:
        transport = CmaTransport()
        stack.callback(transport.close)
        targets = {pages: memory(pages) for pages in PAGES}
        regions = {p: transport.register(t.ctypes.data, t.nbytes) for p, t in targets.items()}
        pipe.send(regions)
        while (pages := pipe.recv()) is not None:
            pipe.send(xxhash.xxh3_128_hexdigest(targets[pages].data))


def measure(
    transport: dict[int, CmaTransport],
    region: MemoryRegion,
    pages: str,
    nbytes: int,
    runs: int,
) -> tuple[dict[str, list[float]], str]:
    """Return GB/s per turn of memcpy and of each number of threads, and the expected bytes."""
    source, copy = memory(pages), memory(pages)
    source[:] = np.random.default_rng(nbytes).integers(0, 256, TOTAL_NBYTES, np.uint8)
    evict = np.zeros(EVICT_NBYTES, np.uint8)
    count = TOTAL_NBYTES // nbytes
    order = np.random.default_rng(1).permutation(count).astype(np.uint64) * np.uint64(nbytes)
    (remote,) = region.remotes
    batch = WriteBatch(
        endpoint=remote.endpoint,
        local_addresses=np.uint64(source.ctypes.data) + order,
        remote_addresses=np.uint64(remote.address) + order,
        nbytes=np.full(count, nbytes, np.uint64),
        regions=(remote,),
    )
    found: dict[str, list[float]] = {"memcpy": [], **{str(n): [] for n in transport}}
    owned = {n: t.register(source.ctypes.data, TOTAL_NBYTES) for n, t in transport.items()}
    # The first run is not counted.
    for _ in range(runs + 1):
        evict += 1
        began = time.perf_counter()
        ctypes.memmove(copy.ctypes.data, source.ctypes.data, TOTAL_NBYTES)
        found["memcpy"].append(TOTAL_NBYTES / (time.perf_counter() - began) / 1e9)
        for threads, way in transport.items():
            evict += 1
            began = time.perf_counter()
            way.write(batch, deadline_s=30.0)
            found[str(threads)].append(TOTAL_NBYTES / (time.perf_counter() - began) / 1e9)
    for threads, way in transport.items():
        way.unregister(owned[threads])
    return {name: rates[1:] for name, rates in found.items()}, xxhash.xxh3_128_hexdigest(
        source.data
    )


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--runs", type=int, default=15)
    options = made.parse_args(argv)
    ours, theirs = multiprocessing.Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=run_peer, args=(theirs,))
    peer.start()
    rows = []
    with ExitStack() as stack:
        stack.callback(peer.join, 30)
        stack.callback(ours.send, None)
        transports = {threads: CmaTransport(threads) for threads in (1, 2)}
        for transport in transports.values():
            stack.callback(transport.close)
        regions = ours.recv()
        for pages in PAGES:
            for nbytes in CASES:
                rates, wanted = measure(transports, regions[pages], pages, nbytes, options.runs)
                ours.send(pages)
                assert ours.recv() == wanted, "what arrived is not what was sent"
                rows += rows_of(pages, nbytes, rates)
    report(rows, options.json, "cma")


def rows_of(pages: str, nbytes: int, rates: dict[str, list[float]]) -> list[Row]:
    found = []
    size = f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
    for threads in rates.keys() - {"memcpy"}:
        ratios = [a / b for a, b in zip(rates[threads], rates["memcpy"], strict=True)]
        case = f"pages of {pages}, pieces of {size}, threads: {threads}"
        value, reference = median_p95(rates[threads])[0], median_p95(rates["memcpy"])[0]
        found.append(
            Row(
                case,
                "throughput, median",
                value,
                "GB/s",
                "memcpy by one thread, same pages",
                reference,
            )
        )
        middle = median_p95(ratios)[0]
        found.append(Row(case, "of the memcpy just before, median", middle, "", "goal", GOAL))
    return sorted(found, key=lambda row: row.case)


if __name__ == "__main__":
    main()
