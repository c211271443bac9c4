"""Backend `xccl`: pipelined buckets against buckets one after another, both compared with bare gloo broadcasts.

One trainer process and two engine processes run on this host. The reference only broadcasts the same number of bytes in
the same buckets. The benchmark checks the bytes after every run.

    python benchmarks/bench_xccl.py --json FILE

With `--fabric nccl` there is one engine, on a second GPU, because NCCL allows one rank per GPU. With `--device cuda`
weights are in GPU memory at both ends, otherwise in host memory:

    python benchmarks/bench_xccl.py --fabric nccl --device cuda --mib 16384 --bucket-mib 256 --dtype bfloat16
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch

from harness import Row, median_p95, parser, report
from windlass.backends.xccl import CollectiveReceiver, CollectiveSender
from windlass.config import CollectiveFabric, UpdateMode, XcclBackend
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory.torch_dtypes import torch_dtype
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import GroupOffer

ROWS, COLS = 4096, 1024
ENGINES = {CollectiveFabric.GLOO: 2, CollectiveFabric.NCCL: 1}
NUM_RUNS = 7
DEADLINE_S = 120.0
CASES = {"serial": 1, "pipelined": 2}


@dataclass(frozen=True)
class Setting:
    """Setting of a measurement. Engines have bfloat16, so loading float32 casts."""

    fabric: CollectiveFabric
    device: str
    num_tensors: int
    bucket_nbytes: int
    dtype: DType

    def config(self, case: str) -> XcclBackend:
        return XcclBackend(
            fabric=self.fabric, bucket_nbytes=self.bucket_nbytes, num_buffers=CASES[case]
        )

    def gpu(self, index: int) -> str:
        return f"cuda:{index}" if self.device == "cuda" else "cpu"


def manifest(worker: str, role: Role, dtype: DType, num_tensors: int) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    for index in range(num_tensors):
        name = f"w{index}"
        builder.add_parameter(name, nbytes=ROWS * COLS * dtype.itemsize, dtype=dtype)
        builder.add_shard(name, (ROWS, COLS), Box((0, 0), (ROWS, COLS)), name)
    return builder.build()


def set_up(fabric: CollectiveFabric, device: int) -> None:
    torch.set_num_threads(1)
    if fabric is CollectiveFabric.NCCL:
        torch.cuda.set_device(device)


def engine(pipe: Connection, index: int, setting: Setting) -> None:
    fabric = setting.fabric
    set_up(fabric, 1 + index)
    memory = [
        torch.zeros((ROWS, COLS), dtype=torch.bfloat16, device=setting.gpu(1 + index))
        for _ in range(setting.num_tensors)
    ]
    mine = manifest(f"engine/{index}", Role.ENGINE, DType.BFLOAT16, setting.num_tensors)
    addresses = [tensor.data_ptr() for tensor in memory]
    receivers = {
        case: CollectiveReceiver(setting.config(case), mine, addresses, "127.0.0.1")
        for case in CASES
    }
    while (asked := pipe.recv()) is not None:
        what, case, argument = asked
        receiver = receivers[case]
        if what == "connect":
            pipe.send(receiver.connect(TransferPlan.decode(argument), UpdateMode.IN_PLACE))
        elif what == "join":
            receiver.join([argument], DEADLINE_S)
            pipe.send(None)
        elif what == "receive":
            members = tuple(f"engine/{i}" for i in range(ENGINES[fabric]))
            receiver.receive({"trainer/0": members}, DEADLINE_S)
            pipe.send(time.perf_counter())
        elif what == "broadcast":
            offer, group = receiver._groups["trainer/0"]
            for bucket, nbytes in enumerate(offer.bucket_nbytes):
                slot = bucket % CASES[case]
                group.finish(slot, DEADLINE_S)
                group.start(slot, nbytes, DEADLINE_S)
            for slot in range(CASES[case]):
                group.finish(slot, DEADLINE_S)
            group.drain(DEADLINE_S)
            pipe.send(time.perf_counter())
        else:
            pipe.send(receiver.verify(0, argument))


def ask(pipes: list[Connection], what: str, case: str, arguments: list[object]) -> list[object]:
    for pipe, argument in zip(pipes, arguments, strict=True):
        pipe.send((what, case, argument))
    return [pipe.recv() for pipe in pipes]


def timed(pipes: list[Connection], what: str, case: str, mine: Callable[[], None]) -> float:
    """Return the seconds from the command until all three processes have all bytes."""
    # CLOCK_MONOTONIC: all processes of a host share this clock.
    began = time.perf_counter()
    for pipe in pipes:
        pipe.send((what, case, None))
    mine()
    own = time.perf_counter()
    ended = [float(pipe.recv()) for pipe in pipes]
    return max(own, *ended) - began


def write(sender: CollectiveSender, run: int, names: list[str], digests: list[str]) -> None:
    digests += [link.digest for link in sender.write(run, names, DEADLINE_S).links]


def bare(sender: CollectiveSender, case: str, offer: GroupOffer) -> None:
    group = sender._group
    assert group is not None
    for bucket, nbytes in enumerate(offer.bucket_nbytes):
        slot = bucket % CASES[case]
        group.finish(slot, DEADLINE_S)
        group.start(slot, nbytes, DEADLINE_S)
    for slot in range(CASES[case]):
        group.finish(slot, DEADLINE_S)
    group.drain(DEADLINE_S)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--fabric", type=CollectiveFabric, default=CollectiveFabric.GLOO)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--mib", type=int, default=384)
    options.add_argument("--bucket-mib", type=int, default=16)
    options.add_argument("--dtype", type=DType, default=DType.FLOAT32)
    args = options.parse_args()
    fabric: CollectiveFabric = args.fabric
    dtype = torch_dtype(args.dtype)
    num_tensors = (args.mib << 20) // (ROWS * COLS * dtype.itemsize)
    setting = Setting(fabric, args.device, num_tensors, args.bucket_mib << 20, args.dtype)
    num_engines = ENGINES[fabric]
    set_up(fabric, 0)
    processes = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for index in range(num_engines):
        here, there = processes.Pipe()
        child = processes.Process(target=engine, args=(there, index, setting), daemon=True)
        child.start()
        pipes.append(here)
        children.append(child)
    mine = manifest("trainer/0", Role.TRAINER, args.dtype, num_tensors)
    memory = [
        torch.empty((ROWS, COLS), dtype=dtype, device=setting.gpu(0)) for _ in range(num_tensors)
    ]
    places = [ParameterMemory(tensor.data_ptr(), tensor.nbytes) for tensor in memory]
    engines = [
        manifest(f"engine/{i}", Role.ENGINE, DType.BFLOAT16, num_tensors)
        for i in range(num_engines)
    ]
    plan = plan_transfer([mine], engines)
    names = [e.worker for e in engines]
    senders, offers = {}, {}
    for case in CASES:
        sender = CollectiveSender(setting.config(case), mine, lambda: places, "127.0.0.1")
        parts = [plan.parts(sending=False, all_names=True)[e.worker].encode() for e in engines]
        bindings = ask(pipes, "connect", case, list(parts))
        offer = sender.connect(plan.parts(sending=True, all_names=True)["trainer/0"], bindings)  # type: ignore[arg-type]
        assert offer is not None
        for pipe in pipes:
            pipe.send(("join", case, offer))
        sender.join([offer], DEADLINE_S)
        for pipe in pipes:
            pipe.recv()
        senders[case], offers[case] = sender, offer

    def bare_pipelined() -> None:
        bare(senders["pipelined"], "pipelined", offers["pipelined"])

    seconds: dict[str, list[float]] = {"ceiling": [], **{case: [] for case in CASES}}
    # The first run is a warm-up.
    for run in range(NUM_RUNS + 1):
        ceiling = timed(pipes, "broadcast", "pipelined", bare_pipelined)
        if run:
            seconds["ceiling"].append(ceiling)
        for case, sender in senders.items():
            for tensor in memory:
                # Different bytes in every run.
                tensor.normal_()
            sender.prepare(run)
            links: list[str] = []
            took = timed(pipes, "receive", case, partial(write, sender, run, names, links))
            wrong = ask(pipes, "verify", case, [{"trainer/0": digest} for digest in links])
            assert wrong == [()] * num_engines, f"{case}: wrong bytes from {wrong}"
            if run:
                seconds[case].append(took)
    for pipe in pipes:
        pipe.send(None)
    for child in children:
        child.join(10)
    nbytes = sum(tensor.nbytes for tensor in memory)
    ceiling_s = median_p95(seconds["ceiling"])[0]
    serial_s = median_p95(seconds["serial"])[0]
    rows = []
    for name, values in seconds.items():
        median, p95 = median_p95(values)
        where = "GPU" if args.device == "cuda" else "host"
        case = (
            f"{nbytes >> 20} MiB {args.dtype} in {where} memory to {num_engines} bfloat16 engines, "
            f"buckets of {args.bucket_mib} MiB, {name}"
        )
        rows += [
            Row(case, "median", median, "s", f"bare {fabric} broadcast", ceiling_s),
            Row(case, "p95", p95, "s", "serial, median", serial_s),
            Row(
                case,
                "rate",
                nbytes / median / 1e9,
                "GB/s",
                f"bare {fabric} broadcast",
                nbytes / ceiling_s / 1e9,
            ),
        ]
    speedup = serial_s / median_p95(seconds["pipelined"])[0]
    rows.append(Row("pipelined over serial", "speed-up", speedup, "x", "serial", 1.0))
    report(rows, args.json, "xccl: pipelined and serial buckets")
    assert np.isfinite(speedup)


if __name__ == "__main__":
    main()
