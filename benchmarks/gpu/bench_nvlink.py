"""NVLink on one host: speed of the put kernel per piece size, and a whole update of real shapes.

    python benchmarks/gpu/bench_nvlink.py --json FILE [--topology FILE] [--engines 2]

Half of the GPUs are trainer ranks, half are engine ranks, with one process each. The ceiling (a plain copy between GPUs
by the copy engines) and the alternatives (cudaMemcpyBatchAsync, NCCL broadcast of full tensors that are already
gathered, NCCL send and receive of packed bytes) run in the same processes, alternating with the kernel. Every run moves
new bytes, and after every run each byte of every engine parameter is checked.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from nixl_agent import NixlAgent

from harness import Row, median_p95, parser, report, save
from tools.plan.synthesis import engine_manifests, trainer_manifests
from tools.plan.topology import Topology, parse_topology
from windlass.config import UpdateMode
from windlass.layout.manifest import ShardManifest, TensorSpec
from windlass.memory.cuda.kernels import PIECE, Kernels, PieceTable
from windlass.memory.cuda.links import WORDS_NBYTES
from windlass.planning.order import staggered
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.cuda_ipc import CudaIpcTransport
from windlass.transports.peers import MappedRegion, RemoteRegion

PIECE_BYTES = (2 << 10, 16 << 10, 128 << 10, 1 << 20, 16 << 20, 1 << 30)
SUITE_BYTES = 2 << 30
FP8_ROWS = 8192
ALIGNMENT = 256
RUNS = 11
BUDGET_PIECE = 128 << 10
BUDGETS = (2, 4, 8, 16, 32, 64)
"""Numbers of multiprocessors that a write may occupy."""
MAX_NIXL_PIECES = 16384
"""Maximum of pieces in a pass of NIXL, since more take seconds. The kernel writes the rest, outside the timing."""
BUCKET_NBYTES = 1 << 30
QWEN3_30B_A3B = """
name = "qwen3-30b-a3b"
[model]
family = "qwen3_moe"
num_hidden_layers = {layers}
hidden_size = 2048
vocab_size = 151936
num_attention_heads = 32
num_key_value_heads = 4
head_dim = 128
n_routed_experts = 128
moe_intermediate_size = 768
[trainer]
{trainer}
dtype = "{dtype}"
[engine]
tp = {half}
ep = {ep}
dtype = "bfloat16"
[fabric]
nic_gbytes_per_s = 390.0
"""


class Rank:
    """Rank with one process and one GPU. The host calls its methods by name through a pipe."""

    bind_device = True

    def __init__(self, ordinal: int, world_size: int, store: str) -> None:
        self.ordinal = ordinal
        torch.cuda.set_device(ordinal)
        self.transport = CudaIpcTransport(ordinal)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        dist.init_process_group(
            "nccl",
            init_method=f"file://{store}",
            rank=ordinal,
            world_size=world_size,
            device_id=torch.device("cuda", ordinal) if self.bind_device else None,
        )
        self.memory = torch.empty(0, dtype=torch.int16, device="cuda")
        self.bucket = torch.empty(0, dtype=torch.uint8, device="cuda")
        self.mapped_start = 0
        self.round = 0

    # --- memory: one buffer for all parameters, outside torch's pool --------------------------

    def lay_out(self, encoded: bytes) -> RemoteRegion:
        self.manifest = ShardManifest.decode(encoded)
        self.offsets: list[int] = []
        total = 0
        for parameter in self.manifest.parameters:
            self.offsets.append(total)
            total += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
        self.take(total)
        self.float32 = any(p.dtype.value == "float32" for p in self.manifest.parameters)
        return self.region.remote

    def take(self, nbytes: int) -> None:
        self.release()
        self.nbytes = nbytes
        self.address = self.transport.gpu.device.allocate(nbytes)
        self.region = self.transport.register(self.address, nbytes)
        self.memory = as_tensor(self.address, nbytes, self.ordinal)
        self.memory.zero_()
        torch.cuda.synchronize()

    def release(self) -> None:
        if len(self.memory):
            self.transport.unregister(self.region)
            self.memory = torch.empty(0, dtype=torch.int16, device="cuda")
            torch.cuda.synchronize()
            self.transport.gpu.device.free(self.address)

    def take_suite(self, nbytes: int) -> RemoteRegion:
        self.take(nbytes)
        return self.region.remote

    # --- the whole update ---------------------------------------------------------------------

    def fill(self) -> None:
        """Fill parameters with values that depend on tensor and position, exact in float32."""
        for view, values in self._expected():
            view.copy_(values.float() if self.float32 else values)
        torch.cuda.synchronize()

    def advance(self) -> None:
        """Change all bytes, like an optimiser step."""
        self.round += 1
        if self.float32:
            self.fill()
        else:
            self.memory += 1
        torch.cuda.synchronize()

    def advance_round(self) -> None:
        self.round += 1

    def map_self(self) -> RemoteRegion:
        return self.region.remote

    def disconnect(self) -> None:
        """Free the piece tables of a trainer or an engine."""
        if self.ordinal < dist.get_world_size() // 2:
            self.sender.close()
        else:
            self.receiver.close()

    def spoil(self) -> None:
        self.memory.fill_(-21846)
        torch.cuda.synchronize()

    def _expected(self) -> Any:
        index_of = {p.name: index for index, p in enumerate(self.manifest.parameters)}
        for shard, spec in zip(self.manifest.shards(), self._specs(), strict=True):
            index = torch.zeros(1, dtype=torch.int64, device="cuda")
            for size, start, extent in zip(
                shard.box.sizes, shard.box.offsets, spec.shape, strict=True
            ):
                index = index[..., None] * extent + torch.arange(start, start + size, device="cuda")
            values = index.reshape(shard.box.sizes) * 40503 + hash_name(spec.name)
            number = index_of[shard.parameter]
            memory, start = self.elements(number)
            itemsize = self.manifest.parameters[number].dtype.itemsize
            base = memory.view(torch.float32) if itemsize == 4 else memory
            strides = [s // itemsize for s in shard.strides_bytes]
            view = base.as_strided(
                shard.box.sizes, strides, (start + shard.offset_bytes) // itemsize
            )
            if self.float32 or self.casting:
                # Integers up to 256 are exact in bfloat16, so the cast can be checked exactly.
                yield view, ((values >> 2) + self.round) % 256
            else:
                yield view, ((values >> 2) + self.round).to(torch.int16)

    def _specs(self) -> list[TensorSpec]:
        """Return the checkpoint tensor of every shard."""
        return [self.manifest.tensors[int(index)] for index in self.manifest.table.tensor]

    def elements(self, parameter: int) -> tuple[torch.Tensor, int]:
        """Return the flat memory of a parameter and its offset there, in bytes."""
        return self.memory, self.offsets[parameter]

    def located(self) -> Sequence[ParameterMemory]:
        return [
            ParameterMemory(self.address + offset, parameter.nbytes)
            for offset, parameter in zip(self.offsets, self.manifest.parameters, strict=True)
        ]

    casting = False

    def set_casting(self, casting: bool) -> None:
        self.casting = casting

    def check(self) -> int:
        """Return the number of wrong elements."""
        wrong = 0
        for view, values in self._expected():
            truth = values.to(torch.bfloat16).view(torch.int16) if self.casting else values
            wrong += int((view != truth).sum())
        return wrong

    def connect_engine(self, encoded: bytes) -> DestinationBinding:
        addresses = [self.address + offset for offset in self.offsets]
        self.receiver = Receiver(self.transport, self.manifest, addresses, (self.region,))
        return self.receiver.connect(TransferPlan.decode(encoded), UpdateMode.IN_PLACE)

    def connect_trainer(self, encoded: bytes, bindings: list[DestinationBinding]) -> int:
        free, _ = torch.cuda.mem_get_info()
        self.sender = Sender(self.transport, self.manifest, self.located)
        self.sender.connect(TransferPlan.decode(encoded), bindings)
        self.sender.prepare(0)
        return free - torch.cuda.mem_get_info()[0]

    def write(self, destinations: list[str]) -> tuple[float, dict[str, str]]:
        dist.barrier()
        torch.cuda.synchronize()
        sent = self.sender.write(0, destinations, 60.0)
        return sent.wire_s, {link.destination: link.digest for link in sent.links}

    def wait(self) -> None:
        dist.barrier()
        torch.cuda.synchronize()

    def verify(self, expected: dict[str, str]) -> tuple[float, tuple[str, ...], int]:
        """Return the seconds, sources with different bytes, and bytes that were not hashed on arrival."""
        began = time.perf_counter()
        mismatched = self.receiver.verify(0, expected)
        return time.perf_counter() - began, mismatched, self.receiver.late_nbytes

    # --- alternatives and the ceiling ---------------------------------------------------------

    def map_peer(self, region: RemoteRegion) -> None:
        self.mapped: MappedRegion = self.transport.map_region(region)
        self.mapped_start = self.mapped.start + self.mapped.shift

    def copy_engine(self, nbytes: int, active: bool) -> float:
        """Return the seconds per copy, from eight consecutive copies after a first one."""
        stream, target = self.transport.gpu.stream, self.mapped_start
        dist.barrier()
        torch.cuda.synchronize()
        if not active:
            return 0.0
        self.transport.gpu.device.copy(target, self.address, nbytes, stream)
        stream.record().wait()
        began = time.perf_counter()
        for _ in range(8):
            self.transport.gpu.device.copy(target, self.address, nbytes, stream)
        stream.record().wait()
        return (time.perf_counter() - began) / 8

    def broadcast(self, source: int, nbytes: int, buckets: int) -> float:
        """Run `buckets` broadcasts to every rank, as if one rank had gathered all tensors; return the seconds."""
        if self.bucket.numel() != nbytes:
            self.bucket = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
            dist.broadcast(self.bucket, source)
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(buckets):
            dist.broadcast(self.bucket, source)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def send_receive(self, peers: list[int], sending: bool, nbytes: int, repeats: int) -> float:
        """Send packed bytes to all peers at once, or receive them; return the seconds."""
        buffers = [self.bucket[i * nbytes : (i + 1) * nbytes] for i in range(len(peers))]
        call: Any = dist.isend if sending else dist.irecv

        def exchange() -> None:
            ops = [dist.P2POp(call, b, p) for b, p in zip(buffers, peers, strict=True)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        exchange()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            exchange()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def drop_bucket(self) -> None:
        self.bucket = torch.empty(0, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()

    # --- pieces -------------------------------------------------------------------------------

    def load_pieces(self, kind: str, piece: int) -> tuple[list[str], int]:
        """Prepare one case; return the methods that support it, and the bytes over the link."""
        target = self.mapped.shift + self.mapped.start
        source = self.address
        if kind == "host":
            self.host = torch.empty_like(self.memory, device="cpu", pin_memory=True)
            source = self.transport.gpu.device.device_pointer(self.host.data_ptr())
        pieces, nbytes = suite_pieces(kind, piece, source, target)
        kernel, itemsize = {
            "cast": ("put_float32_bfloat16", 2),
            "fp8": ("fp8_values_bfloat16", 1),
        }.get(kind, ("put_1", 1))
        table = PieceTable(self.transport.gpu.device, pieces, kernel, itemsize)
        digest = self.transport.gpu.device.allocate(WORDS_NBYTES)
        stream, kernels = self.transport.gpu.stream, self.transport.gpu.kernels
        self.methods: dict[str, Callable[[], None]] = {
            "kernel": lambda: kernels.put(table, stream),
            "kernel with digest": lambda: kernels.put(table, stream, digest),
        }
        self.shares: dict[str, tuple[int, Callable[[], None]]] = {}
        others: list[PieceTable] = []
        if kind == "contiguous":
            self.methods["cudaMemcpyBatchAsync"] = batch_copy(piece, pieces, stream)
            if self.nixl is not None:
                whole = pieces[:: max(piece // (64 << 10), 1)]
                first = whole[:MAX_NIXL_PIECES]
                there = first["dst"].astype(np.int64) - self.mapped.shift
                self.methods["NIXL"] = self.nixl.put(first["src"], there, piece)
                if len(first) < len(whole):
                    rest = PieceTable(
                        self.transport.gpu.device, pieces[len(first) :], kernel, itemsize
                    )
                    others.append(rest)
                    put_rest = functools.partial(kernels.put, rest, stream)
                    self.shares["NIXL"] = (len(first) * piece, put_rest)
        if kind == "contiguous" and piece == BUDGET_PIECE:
            for budget in BUDGETS:
                few = Kernels(self.transport.gpu.device, budget)
                self.methods[f"kernel with digest on {budget} multiprocessors"] = functools.partial(
                    few.put, table, stream, digest
                )

        def unload() -> None:
            for one in (table, *others):
                one.close()
            self.transport.gpu.device.free(digest)

        self.unload = unload
        return list(self.methods), nbytes

    def refill(self, kind: str, seed: int) -> None:
        suite_source(self.memory, kind, seed)
        if kind == "host":
            self.host.copy_(self.memory)
        torch.cuda.synchronize()

    def copy_from_host(self, nbytes: int) -> float:
        """Return the seconds per upload by a copy engine, from four uploads of existing bytes."""
        stream = self.transport.gpu.stream
        began = time.perf_counter()
        for _ in range(4):
            self.transport.gpu.device.copy(self.address, self.host.data_ptr(), nbytes, stream)
        stream.record().wait()
        return (time.perf_counter() - began) / 4

    def start_nixl(self) -> str:
        """Start NIXL's own agent for this GPU; return an empty string, or the reason of a failure."""
        try:
            self.nixl = NixlAgent(self.ordinal)
        except Exception as error:  # noqa: BLE001 - its classes derive from nothing common
            return f"{type(error).__name__}: {error}"
        return ""

    nixl: NixlAgent | None = None

    def publish_nixl(self) -> bytes:
        assert self.nixl is not None
        return self.nixl.register(self.address, self.nbytes)

    def join_nixl(self, metadata: bytes, peer_ordinal: int) -> None:
        assert self.nixl is not None
        self.nixl.join(metadata, peer_ordinal)

    def put_pieces(self, name: str, nbytes: int) -> float:
        """Return GB/s over three passes."""
        method = self.methods[name]
        method()
        self.transport.gpu.stream.record().wait()
        began = time.perf_counter()
        for _ in range(3):
            method()
        self.transport.gpu.stream.record().wait()
        seconds = (time.perf_counter() - began) / 3
        if name in self.shares:
            nbytes, finish = self.shares[name]
            finish()
            self.transport.gpu.stream.record().wait()
        return nbytes / seconds / 1e9

    def unload_pieces(self) -> None:
        self.unload()

    def expect_pieces(self, kind: str, piece: int, seed: int) -> None:
        """Compute the expected memory after the peer's pieces arrive in memory filled by `spoil`."""
        source = torch.empty_like(self.memory)
        suite_source(source, kind, seed)
        expected = torch.full_like(self.memory, -21846).view(torch.uint8)
        if kind == "fp8":
            blocks = source.view(torch.bfloat16).view(FP8_ROWS // 128, 128, -1, 128).float()
            scales = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
            values = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn).view(torch.uint8)
            # (R/128, 128, C/128, 128) is row-major.
            expected[: values.numel()] = values.reshape(-1)
        elif kind == "cast":
            rows = source.view(torch.float32).view(-1, piece // 2).bfloat16()
            order = permutation(len(rows)).cuda()
            placed = expected[: rows.numel() * 2].view(-1, piece)
            placed[order] = rows.view(torch.uint8).view(-1, piece)
        else:
            pitch = 4 * piece if kind == "strided" else piece
            rows = source.view(torch.uint8).view(-1, pitch)[:, :piece]
            expected.view(-1, pitch)[permutation(len(rows)).cuda(), :piece] = rows
        self.expected = expected

    def check_pieces(self) -> int:
        """Return the number of wrong bytes, including gaps between pieces."""
        return int((self.memory.view(torch.uint8) != self.expected).sum())

    def finish(self) -> None:
        dist.destroy_process_group()


def permutation(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(7).permutation(count))


def suite_source(memory: torch.Tensor, kind: str, seed: int) -> None:
    """Fill memory with the same values on every GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    if kind in ("cast", "fp8"):
        values = memory.view(torch.float32 if kind == "cast" else torch.bfloat16)
        values.normal_(generator=generator)
    else:
        memory.random_(-20000, 20000, generator=generator)


def suite_pieces(kind: str, piece: int, source: int, target: int) -> tuple[Any, int]:
    """Return pieces of `piece` bytes with shuffled targets, split for the kernel, and the bytes over the link."""
    if kind == "fp8":
        columns = SUITE_BYTES // 2 // FP8_ROWS
        row = np.arange(0, FP8_ROWS, 128, dtype=np.uint64)[:, None]
        col = np.arange(0, columns, 128, dtype=np.uint64)[None, :]
        blocks = np.zeros((len(row), col.shape[1]), PIECE)
        blocks["src"] = source + (row * np.uint64(columns) + col) * np.uint64(2)
        blocks["dst"] = target + row * np.uint64(columns) + col
        blocks["src_pitch"], blocks["dst_pitch"], blocks["pos_pitch"] = (
            2 * columns,
            columns,
            columns,
        )
        blocks["pos"] = row * np.uint64(columns) + col
        blocks["rows"] = blocks["row_elems"] = 128
        return blocks.reshape(-1), FP8_ROWS * columns
    scale = 2 if kind == "cast" else 1
    pitch = 4 * piece if kind == "strided" else piece
    count = SUITE_BYTES // (pitch * scale)
    order = permutation(count).numpy().astype(np.uint64)
    steps = np.arange(0, piece, 64 << 10, dtype=np.uint64)
    places = np.arange(count, dtype=np.uint64)
    made = np.zeros((count, len(steps)), PIECE)
    made["src"] = source + places[:, None] * np.uint64(pitch * scale) + steps * np.uint64(scale)
    made["dst"] = target + order[:, None] * np.uint64(pitch) + steps
    made["rows"] = 1
    sizes = np.minimum(piece - steps.astype(np.int64), 64 << 10)
    made["row_elems"] = sizes // 2 if kind == "cast" else sizes
    return made.reshape(-1), count * piece


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", ctypes.c_int * 2),
        ("dstLocHint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def batch_copy(piece: int, pieces: Any, stream: Any) -> Callable[[], None]:
    """Return a call that copies all pieces with one cudaMemcpyBatchAsync (CUDA 13's signature)."""
    runtime = ctypes.CDLL("libcudart.so.13")
    whole = pieces[:: max(piece // (64 << 10), 1)]
    count = len(whole)
    targets, sources = np.ascontiguousarray(whole["dst"]), np.ascontiguousarray(whole["src"])
    sizes = np.full(count, piece, np.uint64)
    # 1: the copies read their sources in stream order.
    attributes = _CopyAttributes(srcAccessOrder=1)
    first = ctypes.c_size_t(0)

    def call() -> None:
        code = runtime.cudaMemcpyBatchAsync(
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream.handle),
        )
        assert code == 0, code

    return call


def hash_name(name: str) -> int:
    return sum((i + 1) * 7919 * ord(c) for i, c in enumerate(name))


class _Interface:
    """Raw device memory for torch. Torch does not free it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes // 2,),
            "typestr": "<i2",
            "data": (address, False),
            "version": 3,
        }


def as_tensor(address: int, nbytes: int, ordinal: int) -> torch.Tensor:
    return torch.as_tensor(_Interface(address, nbytes), device=f"cuda:{ordinal}")


# --- processes ------------------------------------------------------------------------------------


def serve(kind: type[Rank], ordinal: int, world_size: int, store: str, pipe: Connection) -> None:
    try:
        rank = kind(ordinal, world_size, store)
        pipe.send(("ok", None))
        while (request := pipe.recv()) is not None:
            name, arguments = request
            pipe.send(("ok", getattr(rank, name)(*arguments)))
        rank.finish()
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise


class Host:
    """All ranks. The first half trains, the second half serves."""

    def __init__(self, world_size: int, kind: type[Rank] = Rank) -> None:
        self.world_size, self.half = world_size, world_size // 2
        context = mp.get_context("spawn")
        store = f"/tmp/windlass-nvlink-{os.getpid()}"
        self.pipes: list[Connection] = []
        self.processes = []
        for ordinal in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(kind, ordinal, world_size, store, theirs))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.collect(range(world_size))

    def collect(self, ranks: Any) -> list[Any]:
        answers = []
        for rank in ranks:
            if not self.pipes[rank].poll(240):
                raise SystemExit(f"rank {rank} does not answer")
            status, value = self.pipes[rank].recv()
            if status != "ok":
                raise SystemExit(f"rank {rank}: {value}")
            answers.append(value)
        return answers

    def call(self, ranks: Any, name: str, *arguments: Any) -> list[Any]:
        """Make the same call in several ranks; a dict argument has one value per rank."""
        ranks = list(ranks)
        for rank in ranks:
            mine = [a[rank] if isinstance(a, dict) else a for a in arguments]
            self.pipes[rank].send((name, mine))
        return self.collect(ranks)

    def everywhere(self, calls: dict[int, tuple[str, list[Any]]]) -> dict[int, Any]:
        for rank, call in calls.items():
            self.pipes[rank].send(call)
        return dict(zip(calls, self.collect(calls), strict=True))

    @property
    def trainers(self) -> range:
        return range(self.half)

    @property
    def engines(self) -> range:
        return range(self.half, self.world_size)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(60)


def ceiling(host: Host, nbytes: int, pairs: int = 0) -> float:
    """Return GB/s per pair while `pairs` trainers (all by default) copy to their engines at once."""
    active = range(pairs or host.half)
    calls = {r: ("copy_engine", [nbytes, r in active]) for r in range(host.world_size)}
    seconds: list[float] = [s for r, s in host.everywhere(calls).items() if r in active]
    return nbytes / max(seconds) / 1e9


def bench_pieces(host: Host, kinds: Sequence[str], *, with_nixl: bool) -> list[Row]:
    everyone = range(host.world_size)
    regions = host.call(everyone, "take_suite", SUITE_BYTES)
    host.call(host.trainers, "map_peer", {t: regions[t + host.half] for t in host.trainers})
    sender, receiver = [0], [host.half]
    if with_nixl:
        if any(why := host.call([*sender, *receiver], "start_nixl")):
            raise SystemExit(f"NIXL does not start: {why}")
        host.call(sender, "publish_nixl")
        metadata = host.call(receiver, "publish_nixl")[0]
        host.call(sender, "join_nixl", metadata, host.half)
        print("NIXL's agents know each other", flush=True)
    rows = []
    cases = [("contiguous", piece) for piece in PIECE_BYTES]
    cases += [(kind, piece) for kind in ("strided", "cast") for piece in PIECE_BYTES[:4]]
    cases += [("host", piece) for piece in PIECE_BYTES[:4:2]]
    cases += [("fp8", 128 * 128)]
    for kind, piece in [case for case in cases if case[0] in kinds]:
        names, nbytes = host.call(sender, "load_pieces", kind, piece)[0]
        found: dict[str, list[float]] = {name: [] for name in names}
        tops = []
        for run in range(RUNS):
            host.call(sender, "refill", kind, run)
            if kind == "host":
                tops.append(SUITE_BYTES / host.call(sender, "copy_from_host", SUITE_BYTES)[0] / 1e9)
            else:
                tops.append(ceiling(host, SUITE_BYTES, pairs=1))
            host.call(receiver, "expect_pieces", kind, piece, run)
            for name in names:
                host.call(receiver, "spoil")
                found[name] += host.call(sender, "put_pieces", name, nbytes)
                if wrong := host.call(receiver, "check_pieces")[0]:
                    raise SystemExit(f"{kind} {piece} {name}: {wrong} wrong bytes in run {run}")
        host.call(sender, "unload_pieces")
        top, _ = median_p95(tops)
        size = f"{piece >> 10} KiB" if piece < 1 << 20 else f"{piece >> 20} MiB"
        for name, rates in found.items():
            print(
                f"{kind} {size}, {name}: {median_p95(rates)[0]:.1f} of {top:.1f} GB/s", flush=True
            )
            reference = "copy engine, host to own GPU" if kind == "host" else "copy engine"
            rows += rates_rows(f"{kind} pieces of {size}, {name}", rates, reference, top)
    return rows


def rates_rows(case: str, rates: list[float], reference: str, value: float) -> list[Row]:
    median, _ = median_p95(rates)
    slow = -median_p95([-rate for rate in rates])[1]
    return [
        Row(case, metric, rate, "GB/s", reference, value)
        for metric, rate in (("median", median), ("slow p95", slow))
    ]


def bench_topology(
    host: Host, topology: Topology, label: str, last: Callable[[list[Row]], None] | None = None
) -> list[Row]:
    casting = topology.trainer.dtype != topology.engine.dtype
    sources, targets = trainer_manifests(topology), engine_manifests(topology)
    return bench_update(host, sources, targets, label, casting=casting, last=last)


def bench_update(
    host: Host,
    sources: Sequence[ShardManifest],
    targets: Sequence[ShardManifest],
    label: str,
    *,
    casting: bool,
    last: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """Measure updates of a whole model; `last` gets the rows at the end, while all ranks are connected."""
    began = time.perf_counter()
    plan = plan_transfer(sources, targets)
    planned_s = time.perf_counter() - began
    by_rank = {r: m.encode() for r, m in enumerate((*sources, *targets))}
    host.call(range(host.world_size), "lay_out", by_rank)
    host.call(range(host.world_size), "set_casting", casting)
    began = time.perf_counter()
    parts = {
        r + host.half: plan.parts(sending=False, all_names=True)[m.worker].encode()
        for r, m in enumerate(targets)
    }
    bindings = host.call(host.engines, "connect_engine", parts)
    parts = {
        r: plan.parts(sending=True, all_names=True)[m.worker].encode()
        for r, m in enumerate(sources)
    }
    extra = host.call(host.trainers, "connect_trainer", parts, bindings)
    connect_s = time.perf_counter() - began
    host.call(host.trainers, "fill")
    links: dict[str, list[str]] = {name: [] for name in plan.sources}
    for link in plan.links():
        links[plan.sources[link.src]].append(plan.destinations[link.dst])
    orders = staggered(links)
    destinations = {rank: list(orders[plan.sources[rank]]) for rank in host.trainers}
    regions = host.call(host.engines, "map_self")
    host.call(host.trainers, "map_peer", dict(zip(host.trainers, regions, strict=True)))
    least = min(m.nbytes for m in (*sources, *targets))
    wires, verifies, hashes, lates, tops = [], [], [], [], []
    for run in range(RUNS + 1):
        host.call(host.trainers, "advance")
        host.call(host.engines, "advance_round")
        host.call(host.engines, "spoil")
        calls: dict[int, tuple[str, list[Any]]] = {
            r: ("write", [destinations[r]]) for r in host.trainers
        }
        calls |= {r: ("wait", []) for r in host.engines}
        sent = host.everywhere(calls)
        expected: dict[int, dict[str, str]] = {r: {} for r in host.engines}
        names = {m.worker: r + host.half for r, m in enumerate(targets)}
        for rank in host.trainers:
            for worker, digest in sent[rank][1].items():
                expected[names[worker]][sources[rank].worker] = digest
        checks: dict[int, tuple[str, list[Any]]] = {
            r: ("verify", [expected[r]]) for r in host.engines
        }
        verified = host.everywhere(checks)
        # The first call used the digests of arrival, so the second call hashes everything.
        hashed = host.everywhere(checks)
        if bad := [v[1] for v in (*verified.values(), *hashed.values()) if v[1]]:
            raise SystemExit(f"{label}: digests differ: {bad}")
        if sum(wrong := host.call(host.engines, "check")):
            raise SystemExit(f"{label}: wrong elements {wrong} in run {run}")
        if run:
            wires.append(max(sent[r][0] for r in host.trainers))
            verifies.append(max(v[0] for v in verified.values()))
            hashes.append(max(v[0] for v in hashed.values()))
            lates.append(sum(v[2] for v in verified.values()))
        tops.append(ceiling(host, min(least, 4 << 30)))
    top, _ = median_p95(tops)
    per_link = plan.nbytes / host.half
    rates = [per_link / s / 1e9 for s in wires]
    case = f"{label}: {plan.nbytes / 1e9:.1f} GB, {host.half} -> {host.half} GPUs"
    print(f"{case}: plan {planned_s:.2f} s, connect {connect_s:.1f} s, extra bytes {extra}")
    print(f"{case}: bytes hashed after the wire, per run: {sorted(lates)}")
    rows = rates_rows(f"{case}, per GPU, digests on", rates, "copy engine, pairs at once", top)
    wire, slow_wire = median_p95(wires)
    verify, slow_verify = median_p95(verifies)
    for metric, value, other in (
        ("wire, median", wire, per_link / top / 1e9),
        ("wire, p95", slow_wire, per_link / top / 1e9),
        ("verify, median", verify, wire),
        ("verify, p95", slow_verify, wire),
        ("verify if all is hashed after the wire, median", median_p95(hashes)[0], wire),
        ("extra trainer memory (tables)", max(extra) / 1e9, per_link / 1e9),
    ):
        reference = "bytes at the ceiling" if metric.startswith("wire") else (
            "wire, median" if metric.startswith("verify") else "bytes sent per rank")  # fmt: skip
        unit = "GB" if "memory" in metric else "s"
        rows.append(Row(case, metric, value, unit, reference, other))
    if last is not None:
        last(rows)
    host.call(range(host.world_size), "disconnect")
    host.call(range(host.world_size), "release")
    return rows + bench_collectives(host, plan.nbytes, case, wire)


def bench_collectives(host: Host, nbytes: int, case: str, wire: float) -> list[Row]:
    everyone = range(host.world_size)
    buckets = -(-nbytes // BUCKET_NBYTES)
    repeats = -(-nbytes // (host.half * BUCKET_NBYTES))
    # Use a multiple of 512: with unaligned buffers NCCL has half the speed.
    piece = -(-nbytes // (host.half * host.half * repeats * 512)) * 512
    bucket_nbytes = max(-(-nbytes // (buckets * 512)) * 512, host.half * piece)
    broadcast, exchange = [], []
    for run in range(RUNS):
        seconds = max(host.call(everyone, "broadcast", 0, bucket_nbytes, buckets))
        calls: dict[int, tuple[str, list[Any]]] = {}
        for rank in everyone:
            peers = list(host.engines if rank in host.trainers else host.trainers)
            calls[rank] = ("send_receive", [peers, rank in host.trainers, piece, repeats])
        other = max(host.everywhere(calls).values())
        if run:
            broadcast.append(seconds)
            exchange.append(other)
    host.call(everyone, "drop_bucket")
    return [
        Row(case, f"wire, {what}, {name}", value, "s", "windlass wire, median", wire)
        for what, spent in (
            ("NCCL broadcast of gathered tensors", broadcast),
            ("NCCL send/recv of packed bytes", exchange),
        )
        for name, value in zip(("median", "p95"), median_p95(spent), strict=True)
    ]  # fmt: skip


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--layers", type=int, default=48, help="number of layers of Qwen3-30B-A3B"
    )
    arguments.add_argument("--skip-pieces", action="store_true")
    arguments.add_argument(
        "--kinds", default="contiguous,strided,cast,host,fp8", help="kinds of pieces"
    )
    arguments.add_argument("--skip-updates", action="store_true")
    arguments.add_argument("--nixl", action="store_true", help="compare with NIXL, if installed")
    args = arguments.parse_args()
    host = Host(torch.cuda.device_count() // 2 * 2)
    rows: list[Row] = []
    if not args.skip_pieces:
        rows += bench_pieces(host, args.kinds.split(","), with_nixl=args.nixl)
        save(rows, args.json)
    if args.skip_updates:
        host.close()
        report(rows, args.json, f"NVLink: {torch.cuda.get_device_name(0)} x {host.world_size}")
        return
    half = host.half
    fsdp = f'kind = "fsdp"\nworld_size = {half}'
    megatron = f'kind = "megatron"\nworld_size = {half}\ntp = {half}\nep = {half}'
    for dtype, layers, trainer, ep, label in (
        ("bfloat16", args.layers, fsdp, 1, "Qwen3-30B-A3B bf16, FSDP -> TP"),
        ("bfloat16", args.layers, fsdp, half, "Qwen3-30B-A3B bf16, FSDP -> EP"),
        ("bfloat16", args.layers, megatron, 1, "Qwen3-30B-A3B bf16, Megatron TP EP -> TP"),
        ("bfloat16", args.layers, megatron, half, "Qwen3-30B-A3B bf16, Megatron TP EP -> EP"),
        (
            "float32",
            args.layers // 2,
            fsdp,
            1,
            "half of Qwen3-30B-A3B, fp32 masters -> bf16, FSDP -> TP",
        ),
    ):
        text = QWEN3_30B_A3B.format(half=half, dtype=dtype, layers=layers, trainer=trainer, ep=ep)
        rows += bench_topology(host, parse_topology(text), label)
        # Save now, because a later case may fail.
        save(rows, args.json)
    host.close()
    report(rows, args.json, f"NVLink: {torch.cuda.get_device_name(0)} x {host.world_size}")


if __name__ == "__main__":
    main()
