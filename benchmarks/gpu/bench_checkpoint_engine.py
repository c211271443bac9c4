"""Time of updates by checkpoint-engine 0.4.2 with its own code: the same shapes from half of the GPUs to the other half.

    python benchmarks/gpu/bench_checkpoint_engine.py --json FILE [--layers 16]

As intended by checkpoint-engine, there is one `ParameterServer` and one worker process per GPU. The first half of the
servers registers full checkpoint tensors on their GPUs (as if a trainer had gathered them), which copies the tensors to
pinned memory. `update` broadcasts them to every worker. Workers on the second half are engines with TP: they copy their
slices from each bucket into their parameters. Every element is compared after every update. The process group is kept
between updates, in favour of checkpoint-engine.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from bench_nvlink import QWEN3_30B_A3B, hash_name

from harness import Row, median_p95, parser, report, save
from tools.plan.families import modules
from tools.plan.topology import parse_topology

RUNS = 10
WAIT_S = 200.0
ROWS = ("o_proj.weight", "down_proj.weight")
WHOLE = ("norm.weight", "mlp.gate.weight")
CHECKPOINT = "benchmark"


def shapes(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    text = QWEN3_30B_A3B.format(
        half=2, dtype="bfloat16", layers=layers, trainer='kind = "fsdp"\nworld_size = 2', ep=1
    )
    model = parse_topology(text).model
    return [(t.name, tuple(t.shape)) for module in modules(model) for t in module.tensors]


def cut(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the part of an engine rank."""
    if name.endswith(WHOLE):
        return tensor
    return tensor.chunk(size, 1 if name.endswith(ROWS) else 0)[rank]


def values(name: str, shape: tuple[int, ...], seed: int, device: str) -> torch.Tensor:
    """Return 16-bit units that depend on their position."""
    count = torch.Size(shape).numel()
    index = torch.arange(count, dtype=torch.int32, device=device).mul_(40503)
    return index.add_(hash_name(name) % (1 << 20) + seed * 77).to(torch.int16).reshape(shape)


def serve(rank: int, world: int, layers: int, main: Connection, worker: Connection) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    try:
        _serve(rank, world, layers, main, worker)
    except BaseException:
        main.send(("failed", traceback.format_exc()))
        raise


def _serve(rank: int, world: int, layers: int, main: Connection, worker: Connection) -> None:
    import checkpoint_engine.ps as source
    from checkpoint_engine.ps import ParameterServer
    from loguru import logger

    logger.remove()
    # The original needs a route to the internet.
    source.get_ip = lambda: "127.0.0.1"
    server = ParameterServer(rank=rank, world_size=world, auto_pg=False)
    device = server.device_manager.device_type
    server.init_process_group()
    owners = world // 2
    mine = [s for i, s in enumerate(shapes(layers)) if i % owners == rank] if rank < owners else []
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in mine
    }

    def request(paths: list[tuple[str, str]]) -> None:
        worker.send(("update", dict(paths)[server._device_uuid]))
        worker.recv()

    main.send(("ok", None))
    while (command := main.recv()) is not None:
        seed = command
        for name, shape in mine:
            tensors[name].view(torch.int16).copy_(values(name, shape, seed, device))
        server.device_manager.device_module.synchronize()
        server.store_based_barrier()
        began = time.perf_counter()
        if mine:
            # This call keeps the pinned memory.
            server.unregister_checkpoint(CHECKPOINT)
            server.register_checkpoint(
                CHECKPOINT, named_tensors=tensors, use_shared_memory_pool=True
            )
        server.device_manager.device_module.synchronize()
        registered = time.perf_counter()
        server.gather_metas(CHECKPOINT)
        worker.send(("barrier", None))
        worker.recv()
        updating = time.perf_counter()
        server.update(CHECKPOINT, request)
        done = time.perf_counter()
        worker.send(("check", seed))
        main.send(("ok", (registered - began, done - updating, worker.recv())))
    worker.send(None)


def work(rank: int, world: int, layers: int, pipe: Connection) -> None:
    """Run the inference process of a server."""
    import zmq
    from checkpoint_engine.device_utils import DeviceManager
    from checkpoint_engine.worker import update_weights_from_ipc

    manager = DeviceManager()
    device = manager.device_type
    manager.device_module.set_device(rank)
    context = zmq.Context()
    engines = world // 2
    parameters: dict[str, torch.Tensor] = {}
    if rank >= engines:
        for name, shape in shapes(layers):
            part = cut(name, torch.empty(shape, device="meta"), rank - engines, engines)
            parameters[name] = torch.empty(part.shape, dtype=torch.bfloat16, device=device)

    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        if rank >= engines:
            for name, tensor in weights:
                parameters[name].copy_(cut(name, tensor, rank - engines, engines))

    def wrong(seed: int) -> int:
        count = 0
        for name, shape in shapes(layers):
            if name in parameters:
                truth = cut(name, values(name, shape, seed, device), rank - engines, engines)
                count += int((parameters[name].view(torch.int16) != truth).sum())
        for parameter in parameters.values():
            parameter.zero_()
        return count

    while (command := pipe.recv()) is not None:
        kind, value = command
        if kind == "update":
            update_weights_from_ipc(context, value, rank, run=load)
            pipe.send("done")
        else:
            pipe.send(wrong(value) if kind == "check" else "ready")


def say_why_not_p2p() -> None:
    """Print why checkpoint-engine's path over Mooncake does not run: it needs an RDMA NIC."""
    from checkpoint_engine.device_utils import DeviceManager
    from checkpoint_engine.p2p_store import P2PStore

    os.environ.setdefault("RANK", "0")
    manager = DeviceManager()
    ways: tuple[Callable[[], Any], ...] = (
        lambda: manager.rdma_device(0),
        lambda: P2PStore(manager),
    )
    for what in ways:
        try:
            what()
        except Exception as error:  # noqa: BLE001 - told, whatever it is
            print(f"checkpoint-engine's p2p path: {type(error).__name__}: {error}", flush=True)
        else:
            print("checkpoint-engine's p2p path starts", flush=True)


def link_ceiling() -> float:
    """Return GB/s of a copy from the first GPU to the GPU of the first engine."""
    if not torch.cuda.is_available():
        return 1.0
    here = torch.ones(4 << 30, dtype=torch.uint8, device="cuda:0")
    there = torch.empty_like(here, device=f"cuda:{torch.cuda.device_count() // 2}")
    there.copy_(here)
    torch.cuda.synchronize()
    rates = []
    for _ in range(RUNS):
        began = time.perf_counter()
        for _ in range(4):
            there.copy_(here)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(there.device)
        rates.append(4 * here.nbytes / (time.perf_counter() - began) / 1e9)
    return median_p95(rates)[0]


def answers(pipes: list[Connection]) -> Iterator[Any]:
    for pipe in pipes:
        if not pipe.poll(WAIT_S):
            raise SystemExit("a server does not answer")
        status, value = pipe.recv()
        if status != "ok":
            raise SystemExit(value)
        yield value


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--layers", type=int, default=16, help="number of layers of Qwen3-30B-A3B"
    )
    arguments.add_argument("--ranks", type=int, default=torch.cuda.device_count() // 2 * 2)
    args = arguments.parse_args()
    world, layers = args.ranks, args.layers
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    ceiling = link_ceiling()
    torch.cuda.empty_cache()
    say_why_not_p2p()
    context = mp.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        left, right = context.Pipe()
        processes.append(context.Process(target=serve, args=(rank, world, layers, theirs, left)))
        processes.append(context.Process(target=work, args=(rank, world, layers, right)))
        pipes.append(ours)
    for process in processes:
        process.start()
    try:
        rows = measure(pipes, layers, ceiling, args.json)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
    report(rows, args.json, "checkpoint-engine")


def measure(pipes: list[Connection], layers: int, ceiling: float, path: Any) -> list[Row]:
    list(answers(pipes))
    print("servers and workers are up", flush=True)
    nbytes = sum(2 * torch.Size(shape).numel() for _, shape in shapes(layers))
    owners = len(pipes) // 2
    limit = nbytes / owners / ceiling / 1e9
    updates, registers = [], []
    rows: list[Row] = []
    for run in range(RUNS + 1):
        for pipe in pipes:
            pipe.send(run)
        found = list(answers(pipes))
        if bad := [wrong for _, _, wrong in found if wrong]:
            raise SystemExit(f"wrong elements in run {run}: {bad}")
        register, update = max(f[0] for f in found), max(f[1] for f in found)
        print(f"run {run}: register {register:.3f} s, update {update:.3f} s", flush=True)
        if not run:
            continue
        registers.append(register)
        updates.append(update)
        case = f"checkpoint-engine 0.4.2, broadcast, {layers} layers of Qwen3-30B-A3B ({nbytes / 1e9:.1f} GB)"
        rows = [
            Row(case, f"{metric}, {name}", value, "s", "bytes over one link per engine GPU", limit)
            for metric, spent in (
                ("update from pinned memory", updates),
                ("copy of gathered tensors to pinned memory", registers),
            )
            for name, value in zip(("median", "p95"), median_p95(spent), strict=True)
        ]  # fmt: skip
        save(rows, path)
    return rows


if __name__ == "__main__":
    main()
