"""Speed of each transport between two processes, compared with memcpy by one thread in the same run.

Every write alternates with two references: one memcpy of the same number of bytes in one block, and one memcpy per
region, for regions of the same size that are scattered in the same way. The two differ because libc's memcpy bypasses
the cache for large blocks only.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from harness import Row, median_p95, parser, report
from windlass.errors import TransportUnavailable
from windlass.testing.peer_process import PeerProcess, digest_of
from windlass.transfer.arena import Arena
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.cma import CmaConfig
from windlass.transports.mooncake.native import MooncakeProtocol
from windlass.transports.mooncake.transport import MooncakeConfig
from windlass.transports.peers import RemoteRegion
from windlass.transports.registry import TransportConfig, create_transport
from windlass.transports.shm import ShmConfig

CASES = ((16 << 10, 2048), (64 << 10, 1024), (1 << 20, 128), (16 << 20, 16), (256 << 20, 1))
"""Bytes per region and regions per batch of each case."""
ARENA_NBYTES = 256 << 20
EVICT_NBYTES = 128 << 20
CONFIGS: dict[str, TransportConfig] = {
    "cma": CmaConfig(),
    "shm": ShmConfig(),
    "mooncake": MooncakeConfig(protocol=MooncakeProtocol.TCP),
}


def scattered(nbytes: int, count: int, rng: np.random.Generator) -> npt.NDArray[np.uint64]:
    """Return offsets of `count` regions in random order, with gaps if the arena has room for them."""
    slots = ARENA_NBYTES // nbytes
    chosen = rng.permutation(slots)[:count]
    return chosen.astype(np.uint64) * np.uint64(nbytes)


def run_case(
    transport: OneSidedTransport,
    source: Arena,
    peer: PeerProcess,
    nbytes: int,
    count: int,
    runs: int,
) -> list[tuple[float, float, float]]:
    """Return GB/s of the write, of memcpy in one block, and of memcpy per region; one row per run."""
    rng = np.random.default_rng(nbytes)
    region: RemoteRegion = peer.region
    total = nbytes * count
    # Page-aligned like the arenas: numpy's own memory has an offset of 16 bytes, and memcpy between the two has a third
    # of the speed. The memory is touched first, because page faults would slow the reference down.
    target = np.frombuffer(mmap.mmap(-1, ARENA_NBYTES), np.uint8)
    target[:] = 1
    scratch = np.full((2, EVICT_NBYTES), 3, np.uint8)
    expected = np.frombuffer(peer.read(0, ARENA_NBYTES), np.uint8).copy()
    rates: list[tuple[float, float, float]] = []
    for run in range(runs + 1):
        local, remote = scattered(nbytes, count, rng), scattered(nbytes, count, rng)
        # Use new bytes in each run, so that the bytes of an earlier run cannot pass the check.
        source.bytes.view(np.uint64)[:] += np.uint64(0x9E3779B97F4A7C15)
        batch = WriteBatch(
            endpoint=region.endpoint,
            local_addresses=np.uint64(source.address) + local,
            remote_addresses=np.uint64(region.address) + remote,
            nbytes=np.full(count, nbytes, np.uint64),
            regions=(region,),
        )
        pairs = list(
            zip(
                batch.local_addresses.tolist(),
                (np.uint64(target.ctypes.data) + remote).tolist(),
                strict=True,
            )
        )

        def in_one_block() -> None:
            np.copyto(target[:total], source.bytes[:total])

        def per_region(pairs: list[tuple[int, int]] = pairs) -> None:
            for source_at, target_at in pairs:
                ctypes.memmove(target_at, source_at, nbytes)

        def by_transport(batch: WriteBatch = batch) -> None:
            transport.write(batch, deadline_s=120.0)

        parts = (by_transport, in_one_block, per_region)
        seconds = np.zeros(3)
        for turn in range(3):
            which = (run + turn) % 3
            # Start each measurement with a cold cache. Otherwise the first pays for writing the new bytes back, and the
            # second finds the source in the cache.
            np.copyto(*scratch)
            begin = time.perf_counter()
            parts[which]()
            seconds[which] = time.perf_counter() - begin
        for source_at, target_at in zip(local.tolist(), remote.tolist(), strict=True):
            expected[target_at : target_at + nbytes] = source.bytes[source_at : source_at + nbytes]
        if peer.digest() != digest_of(expected.data):
            raise SystemExit(
                f"{region.endpoint.transport}, {nbytes} bytes: wrong bytes in run {run}"
            )
        # The first run maps memory and connects.
        if run:
            rates.append(tuple((total / seconds / 1e9).tolist()))
    return rates


def measure(name: str, runs: int) -> list[Row]:
    rows: list[Row] = []
    with ExitStack() as stack:
        transport = create_transport(CONFIGS[name])
        stack.callback(transport.close)
        source = stack.enter_context(Arena(transport, ARENA_NBYTES))
        source.bytes.view(np.uint64)[:] = np.arange(ARENA_NBYTES // 8, dtype=np.uint64)
        peer = stack.enter_context(PeerProcess(CONFIGS[name], ARENA_NBYTES))
        for nbytes, count in CASES:
            rates = run_case(transport, source, peer, nbytes, count, runs)
            size = f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"
            median, _ = median_p95([rate for rate, _, _ in rates])
            _, slow = median_p95([-rate for rate, _, _ in rates])
            block, _ = median_p95([rate for _, rate, _ in rates])
            pieces, _ = median_p95([rate for _, _, rate in rates])
            for metric, value, reference, ceiling in (
                ("throughput, median", median, "memcpy per region", pieces),
                ("throughput, slow p95", -slow, "memcpy per region", pieces),
                ("throughput, median", median, "memcpy in one block", block),
            ):
                rows.append(
                    Row(f"{name} {count} x {size}", metric, value, "GB/s", reference, ceiling)
                )
    return rows


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--runs", type=int, default=9, help="number of counted runs per case, >= 5"
    )
    arguments.add_argument("--transport", choices=sorted(CONFIGS), action="append")
    args = arguments.parse_args()
    rows: list[Row] = []
    for name in args.transport or CONFIGS:
        try:
            rows.extend(measure(name, max(args.runs, 5)))
        except TransportUnavailable as error:
            print(f"{name}: left out: {error}")
    report(rows, args.json, "transports")


if __name__ == "__main__":
    main()
