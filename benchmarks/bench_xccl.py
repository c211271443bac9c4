"""xccl: buckets pipelined against buckets one after another, both against bare gloo broadcasts.

One trainer process and two engine processes on this host. The ceiling is the same number of
bytes in the same buckets, broadcast and nothing else. Bytes are checked after every run.

    python benchmarks/bench_xccl.py --json FILE

With `--fabric nccl` one engine on a second GPU; NCCL allows one rank per GPU.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch

from harness import Row, median_p95, parser, report
from windlass.config import CollectiveFabric, UpdateMode, XcclBackend
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import GroupOffer
from windlass.transfer.collective import CollectiveReceiver, CollectiveSender

ROWS, COLS, NUM_TENSORS = 4096, 1024, 24
"""Of fp32 in the trainer: 16 MiB each; engines hold bf16, so that loading casts."""
ENGINES = {CollectiveFabric.GLOO: 2, CollectiveFabric.NCCL: 1}
NUM_RUNS = 7
BUCKET_NBYTES = 16 << 20
DEADLINE_S = 120.0
CASES = {"serial": 1, "pipelined": 2}


def manifest(worker: str, role: Role, dtype: DType) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    for index in range(NUM_TENSORS):
        name = f"w{index}"
        builder.add_parameter(name, nbytes=ROWS * COLS * dtype.itemsize, dtype=dtype)
        builder.add_shard(name, (ROWS, COLS), Box((0, 0), (ROWS, COLS)), name)
    return builder.build()


def config_of(case: str, fabric: CollectiveFabric) -> XcclBackend:
    return XcclBackend(fabric=fabric, bucket_nbytes=BUCKET_NBYTES, num_buffers=CASES[case])


def set_up(fabric: CollectiveFabric, device: int) -> None:
    torch.set_num_threads(1)
    if fabric is CollectiveFabric.NCCL:
        torch.cuda.set_device(device)


def engine(pipe: Connection, index: int, fabric: CollectiveFabric) -> None:
    set_up(fabric, 1 + index)
    memory = [torch.zeros((ROWS, COLS), dtype=torch.bfloat16) for _ in range(NUM_TENSORS)]
    mine = manifest(f"engine/{index}", Role.ENGINE, DType.BFLOAT16)
    addresses = [tensor.data_ptr() for tensor in memory]
    receivers = {
        case: CollectiveReceiver(config_of(case, fabric), mine, addresses, "127.0.0.1")
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
            pipe.send(time.perf_counter())
        else:
            pipe.send(receiver.verify(0, argument))


def ask(pipes: list[Connection], what: str, case: str, arguments: list[object]) -> list[object]:
    for pipe, argument in zip(pipes, arguments, strict=True):
        pipe.send((what, case, argument))
    return [pipe.recv() for pipe in pipes]


def timed(pipes: list[Connection], what: str, case: str, mine: Callable[[], None]) -> float:
    """From the command until the last of all three has everything, seconds."""
    began = time.perf_counter()  # CLOCK_MONOTONIC: one clock for all processes of a host
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


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--fabric", type=CollectiveFabric, default=CollectiveFabric.GLOO)
    args = options.parse_args()
    fabric: CollectiveFabric = args.fabric
    num_engines = ENGINES[fabric]
    set_up(fabric, 0)
    processes = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for index in range(num_engines):
        here, there = processes.Pipe()
        child = processes.Process(target=engine, args=(there, index, fabric), daemon=True)
        child.start()
        pipes.append(here)
        children.append(child)
    mine = manifest("trainer/0", Role.TRAINER, DType.FLOAT32)
    memory = [
        torch.arange(i * ROWS * COLS, (i + 1) * ROWS * COLS).to(torch.float32).view(ROWS, COLS)
        for i in range(NUM_TENSORS)
    ]
    places = [ParameterMemory(tensor.data_ptr(), tensor.nbytes) for tensor in memory]
    engines = [manifest(f"engine/{i}", Role.ENGINE, DType.BFLOAT16) for i in range(num_engines)]
    plan = plan_transfer([mine], engines)
    names = [e.worker for e in engines]
    senders, offers = {}, {}
    for case in CASES:
        sender = CollectiveSender(config_of(case, fabric), mine, lambda: places, "127.0.0.1")
        parts = [plan.for_destination(e.worker).encode() for e in engines]
        bindings = ask(pipes, "connect", case, list(parts))
        offer = sender.connect(plan.for_source("trainer/0"), bindings)  # type: ignore[arg-type]
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
    for run in range(NUM_RUNS + 1):  # the first warms up
        ceiling = timed(pipes, "broadcast", "pipelined", bare_pipelined)
        if run:
            seconds["ceiling"].append(ceiling)
        for case, sender in senders.items():
            for tensor in memory:
                tensor.add_(1024.0)  # other bytes in every run
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
        case = f"{nbytes >> 20} MiB fp32 to {num_engines} bf16 engines, {name}"
        rows += [
            Row(case=case, metric="median", value=median, unit="s", reference=f"bare {fabric} broadcast", reference_value=ceiling_s, ratio=median / ceiling_s),
            Row(case=case, metric="p95", value=p95, unit="s", reference="serial, median", reference_value=serial_s, ratio=p95 / serial_s),
            Row(case=case, metric="rate", value=nbytes / median / 1e9, unit="GB/s", reference=f"bare {fabric} broadcast", reference_value=nbytes / ceiling_s / 1e9, ratio=ceiling_s / median),
        ]  # fmt: skip
    speedup = serial_s / median_p95(seconds["pipelined"])[0]
    rows.append(
        Row(
            case="pipelined over serial",
            metric="speed-up",
            value=speedup,
            unit="x",
            reference="serial",
            reference_value=1.0,
            ratio=speedup,
        )
    )
    report(rows, args.json, "xccl: pipelined and serial buckets")
    assert np.isfinite(speedup)


if __name__ == "__main__":
    main()
