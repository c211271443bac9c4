"""Each transport between two processes, against the memcpy of the same run."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from harness import Row, median_p95, parser, report
from windlass.errors import TransportUnavailable
from windlass.memory.arena import Arena
from windlass.testing.peer_process import PeerProcess, digest_of
from windlass.transports.base import OneSidedTransport, RemoteRegion, WriteBatch
from windlass.transports.configs import (
    CmaConfig,
    MooncakeConfig,
    MooncakeProtocol,
    ShmConfig,
    TransportConfig,
)
from windlass.transports.registry import create_transport

CASES = ((16 << 10, 2048), (64 << 10, 1024), (1 << 20, 128), (16 << 20, 16), (256 << 20, 1))
"""Bytes of a region, regions of a batch."""
ARENA_NBYTES = 256 << 20
CONFIGS: dict[str, TransportConfig] = {
    "cma": CmaConfig(),
    "shm": ShmConfig(),
    "mooncake": MooncakeConfig(protocol=MooncakeProtocol.TCP),
}


def scattered(nbytes: int, count: int, rng: np.random.Generator) -> npt.NDArray[np.uint64]:
    """Offsets of `count` regions in random order, with gaps where there is room: none follow."""
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
) -> tuple[list[float], list[float]]:
    """GB/s of the writes, and of plain copies of as many bytes taken in turns with them."""
    rng = np.random.default_rng(nbytes)
    region: RemoteRegion = peer.region
    total = nbytes * count
    ceiling_source = np.ones(total, np.uint8)
    ceiling_target = np.zeros(total, np.uint8)
    np.copyto(ceiling_target, ceiling_source)
    ceilings: list[float] = []
    rates: list[float] = []
    expected = np.frombuffer(peer.read(0, ARENA_NBYTES), np.uint8).copy()
    for run in range(runs + 1):
        local, remote = scattered(nbytes, count, rng), scattered(nbytes, count, rng)
        # New bytes in each run: what an earlier run left behind must not look like success.
        source.bytes.view(np.uint64)[:] += np.uint64(0x9E3779B97F4A7C15)
        batch = WriteBatch(
            endpoint=region.endpoint,
            local_addresses=np.uint64(source.address) + local,
            remote_addresses=np.uint64(region.address) + remote,
            nbytes=np.full(count, nbytes, np.uint64),
            regions=(region,),
        )
        begin = time.perf_counter()
        np.copyto(ceiling_target, ceiling_source)
        middle = time.perf_counter()
        transport.write(batch, deadline_s=120.0)
        end = time.perf_counter()
        for source_at, target_at in zip(local.tolist(), remote.tolist(), strict=True):
            expected[target_at : target_at + nbytes] = source.bytes[source_at : source_at + nbytes]
        if peer.digest() != digest_of(expected.data):
            raise SystemExit(
                f"{region.endpoint.transport}, {nbytes} bytes: wrong bytes in run {run}"
            )
        if run:  # the first one maps and connects
            ceilings.append(total / (middle - begin) / 1e9)
            rates.append(total / (end - middle) / 1e9)
    return rates, ceilings


def measure(name: str, runs: int) -> list[Row]:
    rows: list[Row] = []
    with ExitStack() as stack:
        transport = create_transport(CONFIGS[name])
        stack.callback(transport.close)
        source = stack.enter_context(Arena(transport, ARENA_NBYTES))
        source.bytes.view(np.uint64)[:] = np.arange(ARENA_NBYTES // 8, dtype=np.uint64)
        peer = stack.enter_context(PeerProcess(CONFIGS[name], ARENA_NBYTES))
        for nbytes, count in CASES:
            rates, ceilings = run_case(transport, source, peer, nbytes, count, runs)
            ceiling, _ = median_p95(ceilings)
            size = f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"
            median, _ = median_p95(rates)
            _, slowest = median_p95([-rate for rate in rates])
            for metric, value in (("median", median), ("p95 (slow side)", -slowest)):
                rows.append(
                    Row(
                        case=f"{name} {count} x {size}",
                        metric=f"throughput {metric}",
                        value=value,
                        unit="GB/s",
                        reference="memcpy, 1 thread, in turns with it (median)",
                        reference_value=ceiling,
                        ratio=value / ceiling,
                    )
                )
    return rows


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=9, help="counted runs per case, >= 5")
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
