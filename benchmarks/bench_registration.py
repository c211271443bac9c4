"""Time to register a trainer's parameters: one registration per tensor, or per allocation.

The tensors are the 18 867 of Qwen3-30B-A3B in host memory; the arguments set their widths. In one layout each tensor
has its own storage, as with FSDP2. In the other layout the tensors of a layer are views of one buffer, as with
Megatron-core. "Each" is one call of `register` per tensor. After every registration the benchmark writes a sample of
the tensors to another process and compares it there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from harness import Row, median_p95, parser, report
from windlass.memory.host import HostMemory
from windlass.testing.peer_process import PeerProcess, digest_of
from windlass.transfer.base import ParameterMemory
from windlass.transfer.registration import RegisteredMemory
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.registry import TransportConfig, create_transport, parse_transport

LAYERS, EXPERTS = 48, 128
SAMPLE = 512
CONFIGS = {
    "cma": "cma",
    "nixl": '{"type": "nixl", "host": "127.0.0.1"}',
    "mooncake": '{"type": "mooncake", "host": "127.0.0.1", "protocol": "tcp"}',
}


def layers_of(hidden: int, inter: int, vocab: int) -> list[list[int]]:
    """Return the elements of every tensor, layer by layer; the last item is for tensors outside of layers."""
    attention = [32 * hidden, 4 * hidden, 4 * hidden, 32 * hidden, 128, 128, hidden, hidden]
    layer = [*attention, EXPERTS * hidden, *[inter * hidden] * (3 * EXPERTS)]
    return [*([layer] * LAYERS), [vocab * hidden, vocab * hidden, hidden]]


def tensors_of(sizes: Sequence[Sequence[int]], *, flat: bool) -> list[torch.Tensor]:
    """Return tensors with distinct values; with `flat`, they are views of one buffer per layer."""
    made: list[torch.Tensor] = []
    for layer in sizes:
        buffer = torch.empty(sum(layer) if flat else 0, dtype=torch.bfloat16)
        parts = buffer.split(list(layer)) if flat else [buffer.new_empty(n) for n in layer]  # type: ignore[no-untyped-call]
        made += parts
    for index, tensor in enumerate(made):
        values = torch.arange(index, index + len(tensor), dtype=torch.int32) % 32749
        tensor.view(torch.int16).copy_(values)
    return made


def located(tensors: Sequence[torch.Tensor]) -> tuple[ParameterMemory, ...]:
    """Return the memory of the tensors, as a trainer's adapter describes it."""
    return tuple(
        ParameterMemory(
            t.data_ptr(), t.nbytes, (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
        )
        for t in tensors
    )


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Bench:
    """Transport, peer, and the tensors of one layout."""

    def __init__(self, config: TransportConfig, tensors: list[torch.Tensor]) -> None:
        step = max(len(tensors) // SAMPLE, 1)
        self.sample = tensors[::step]
        self.places = located(tensors)
        self.transport: OneSidedTransport = create_transport(config)
        self.peer = PeerProcess(config, sum(t.nbytes for t in self.sample))
        expected = b"".join(t.view(torch.uint8).numpy().tobytes() for t in self.sample)
        self.digest = digest_of(expected)

    def write(self) -> float:
        """Write the sample, check it at the peer, and return the seconds of the write."""
        self.peer.fill(0)
        nbytes = np.array([t.nbytes for t in self.sample], np.uint64)
        region = self.peer.region
        batch = WriteBatch(
            endpoint=region.endpoint,
            local_addresses=np.array([t.data_ptr() for t in self.sample], np.uint64),
            remote_addresses=np.cumsum(nbytes) - nbytes + np.uint64(region.address),
            nbytes=nbytes,
            regions=(region,),
        )
        took = seconds(lambda: self.transport.write(batch, deadline_s=60.0))
        if self.peer.digest() != self.digest:
            raise SystemExit("the peer holds other bytes than were written")
        return took

    def each(self) -> tuple[int, float, float, float]:
        """Register each tensor; return the number of regions and the seconds to register, write and unregister."""
        spans = [(place.address, place.nbytes) for place in self.places]
        began = time.perf_counter()
        regions = [self.transport.register(*span) for span in spans]
        register_s = time.perf_counter() - began
        write_s = self.write()
        began = time.perf_counter()
        for region in regions:
            self.transport.unregister(region)
        unregister_s = time.perf_counter() - began
        return len(regions), register_s, write_s, unregister_s

    def allocations(self) -> tuple[int, float, float, float, float]:
        """Register allocations; return the results of `each`, and the seconds of an update without moved memory."""
        memory = RegisteredMemory("trainer/0", self.transport, HostMemory(), ())
        register_s = seconds(lambda: memory.cover(self.places))
        again_s = seconds(lambda: memory.cover(self.places))
        write_s, num_regions = self.write(), len(memory.regions)
        unregister_s = seconds(lambda: memory.cover(()))
        return num_regions, register_s, write_s, unregister_s, again_s

    def close(self) -> None:
        """Close the transport and the peer."""
        self.transport.close()
        self.peer.close()


def rows_of(case: str, bench: Bench, runs: int) -> list[Row]:
    """Measure both ways alternately, so that other load on the machine affects both."""
    each, ours = [], []
    for _ in range(runs):
        each.append(bench.each())
        ours.append(bench.allocations())
    rows = [row_of(case, "regions", "count", [found[0][0] for found in (ours, each)])]
    for column, what in enumerate(("register", "write a sample", "unregister"), 1):
        figures = [median_p95([run[column] for run in found]) for found in (ours, each)]
        for name, values in zip(("median", "p95"), zip(*figures, strict=True), strict=True):
            rows.append(row_of(case, f"{what}, {name}", "s", values))
    again = [run[4] for run in ours]
    rows.append(
        row_of(case, "an update without moves, median", "s", [median_p95(again)[0], rows[1].value])
    )
    return rows


def row_of(case: str, metric: str, unit: str, values: Sequence[float]) -> Row:
    """Return a row. `values`: with one registration per allocation, and with one per tensor."""
    value, beside = values
    named = "each tensor by itself" if "without" not in metric else "registering allocations"
    return Row(case, metric, value, unit, named, beside)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--transports", nargs="+", choices=CONFIGS, default=["cma", "nixl"])
    arguments.add_argument("--layouts", nargs="+", choices=["own", "flat"], default=["own", "flat"])
    arguments.add_argument("--hidden", type=int, default=64)
    arguments.add_argument("--inter", type=int, default=48)
    arguments.add_argument("--vocab", type=int, default=4096)
    arguments.add_argument("--runs", type=int, default=5)
    args = arguments.parse_args()
    rows: list[Row] = []
    for layout in args.layouts:
        tensors = tensors_of(layers_of(args.hidden, args.inter, args.vocab), flat=layout == "flat")
        where = "views of one storage per layer" if layout == "flat" else "a storage each"
        nbytes = sum(t.nbytes for t in tensors)
        for name in args.transports:
            bench = Bench(parse_transport(CONFIGS[name]), tensors)
            case = f"{name}, {len(tensors)} tensors, {nbytes >> 20} MiB, {where}"
            rows += rows_of(case, bench, args.runs)
            bench.close()
    report(rows, args.json, "Registering a trainer's parameters")


if __name__ == "__main__":
    main()
