"""Updates of weights on GPUs over a network transport, compared with the same bytes over NVLink.

    python benchmarks/gpu/bench_network_gpu.py --json FILE [--transport nixl] [--layers 48] [--arena-gib 0]

Like `bench_nvlink.py`, but NIXL or Mooncake moves the bytes. Kernels pack bytes if necessary, the transport reads and
writes GPU memory, kernels hash at both ends, and the engine unpacks. On one host UCX uses CUDA IPC, and Mooncake TCP.
The ceiling is a copy by a copy engine. The same run also measures the transport alone, with writes of 1 GiB of the same
memory without packing.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_nvlink import QWEN3_30B_A3B, Host, Rank, bench_topology

from harness import Row, median_p95, parser, report, save
from tools.plan.topology import parse_topology
from windlass.config import UpdateMode
from windlass.planning.plan import TransferPlan
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.peers import RemoteRegion
from windlass.transports.registry import create_transport, parse_transport

RAW_NBYTES = 1 << 30
RAW_RUNS = 5
DEADLINE_S = 120.0


class NetworkRank(Rank):
    """Rank with memory that is also registered with a network transport."""

    def open_wire(self, name: str, arena_nbytes: int) -> str:
        self.arena_nbytes = arena_nbytes
        self.wire: OneSidedTransport = create_transport(
            parse_transport(name), towards="http://127.0.0.1:1", memory_at=self.probe()
        )
        return self.wire.report().detail

    def probe(self) -> int:
        self.one = torch.zeros(1, device="cuda")
        return self.one.data_ptr()

    def connect_engine(self, encoded: bytes) -> DestinationBinding:
        addresses = [self.address + offset for offset in self.offsets]
        self.wired = self.wire.register(self.address, self.nbytes)
        self.receiver = Receiver(self.wire, self.manifest, addresses, (self.wired,))
        return self.receiver.connect(TransferPlan.decode(encoded), UpdateMode.IN_PLACE)

    def connect_trainer(self, encoded: bytes, bindings: list[DestinationBinding]) -> int:
        free, _ = torch.cuda.mem_get_info()
        self.wired = self.wire.register(self.address, self.nbytes)
        self.wired_sender = Sender(
            self.wire,
            self.manifest,
            self.located,
            arena_nbytes=self.arena_nbytes,
            registered=(self.wired,),
        )
        self.wired_sender.connect(TransferPlan.decode(encoded), bindings)
        self.wired_sender.prepare()
        self.spent: list[float] = []
        return free - torch.cuda.mem_get_info()[0]

    def write(self, destinations: list[str]) -> tuple[float, dict[str, str]]:
        """Write the links; return the seconds without packing before the pause (see `packing`), and digests."""
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.wired_sender.prepare()
        self.spent.append(time.perf_counter() - began)
        sent = self.wired_sender.write(0, destinations, DEADLINE_S)
        for link in sent.links:
            if link.error:
                raise RuntimeError(link.error)
        return sent.wire_s, {link.destination: link.digest for link in sent.links}

    def verify(self, expected: dict[str, str]) -> tuple[float, tuple[str, ...], int]:
        seconds, mismatched, late = super().verify(expected)
        self.receiver.apply()
        return seconds, mismatched, late

    def packing(self) -> tuple[list[float], int]:
        """Return the seconds of each `prepare`, and the arena's bytes."""
        return self.spent[1:], self.wired_sender.packer.slot.nbytes

    def region_of_wire(self) -> RemoteRegion:
        return self.wired.remote

    def raw(self, target: RemoteRegion) -> float:
        """Return the seconds of one write of `RAW_NBYTES`."""
        torch.cuda.synchronize()
        batch = WriteBatch(
            endpoint=target.endpoint,
            local_addresses=array(self.address),
            remote_addresses=array(target.address),
            nbytes=array(RAW_NBYTES),
            regions=(target,),
        )
        began = time.perf_counter()
        self.wire.write(batch, deadline_s=DEADLINE_S)
        return time.perf_counter() - began

    def what_wire(self) -> str:
        return self.wire.report().protocol

    def disconnect(self) -> None:
        if self.ordinal < dist.get_world_size() // 2:
            self.wired_sender.close()
        else:
            self.receiver.close()
        self.wire.unregister(self.wired)

    def finish(self) -> None:
        self.wire.close()
        super().finish()


def array(value: int) -> Any:
    return np.array([value], np.uint64)


def beside_the_wire(host: Host, found: list[Row]) -> None:
    """Add rows for plain writes of the transport and for the time before the pause."""
    regions = host.call(host.engines, "region_of_wire")
    peers = dict(zip(host.trainers, regions, strict=True))
    raw_s = [max(host.call(host.trainers, "raw", peers)) for _ in range(RAW_RUNS + 1)][1:]
    protocol = host.call(host.trainers, "what_wire")[0]
    packing = host.call(host.trainers, "packing")
    pack_s = [max(each) for each in zip(*(seconds for seconds, _ in packing), strict=True)]
    rate = next(row.value for row in found if row.metric == "median")
    wire_s = next(row.value for row in found if row.metric == "wire, median")
    for metric, value, unit, reference, reference_value in (
        (f"median, over {protocol}", rate, "GB/s", "the same wire, pieces of 1 GiB",
         RAW_NBYTES / median_p95(raw_s)[0] / 1e9),
        ("pack and hash before the pause, median", median_p95(pack_s)[0], "s",
         "wire, median", wire_s),
        ("arena", max(nbytes for _, nbytes in packing) / 1e9, "GB",
         "bytes sent per rank", rate * wire_s),
    ):  # fmt: skip
        found.append(Row(found[0].case, metric, value, unit, reference, reference_value))


def bench(host: Host, options: argparse.Namespace) -> list[Row]:
    fsdp = f'kind = "fsdp"\nworld_size = {host.half}'
    rows: list[Row] = []
    for dtype, layers, label in (
        ("bfloat16", options.layers, "Qwen3-30B-A3B bf16, FSDP -> TP"),
        ("float32", options.layers // 2, "half of Qwen3-30B-A3B, fp32 masters -> bf16, FSDP -> TP"),
    ):
        text = QWEN3_30B_A3B.format(half=host.half, dtype=dtype, layers=layers, trainer=fsdp, ep=1)
        case = f"{options.transport}, {label}"
        rows += bench_topology(
            host, parse_topology(text), case, functools.partial(beside_the_wire, host)
        )
        save(rows, options.json)
    return rows


def options_of() -> argparse.Namespace:
    options = parser(__doc__ or "")
    options.add_argument("--transport", default="nixl")
    options.add_argument("--layers", type=int, default=48)
    options.add_argument(
        "--arena-gib", type=float, default=0.0, help="0 for no limit; otherwise size of a ring"
    )
    return options.parse_args()


def main() -> None:
    options = options_of()
    host = Host(torch.cuda.device_count() // 2 * 2, NetworkRank)
    everyone: Sequence[int] = range(host.world_size)
    print(
        host.call(everyone, "open_wire", options.transport, int(options.arena_gib * (1 << 30)))[0]
    )
    rows = bench(host, options)
    host.close()
    report(rows, options.json, f"GPUs over a network wire: {torch.cuda.get_device_name(0)}")


if __name__ == "__main__":
    main()
