"""Stores into GPU memory through CUDA IPC: strided, cast, hashed. These tests need a GPU."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from position_digest import PositionDigest

from windlass.errors import PeerUnreachable, RegionError
from windlass.layout.dtypes import DType
from windlass.memory.cuda.kernels import PIECE, PieceTable
from windlass.memory.cuda.pieces import block_tables
from windlass.memory.host import pack_quantized
from windlass.planning.plan import CopyMode, Transform
from windlass.planning.program import BoundOp, DirectRuns, LinkProgram
from windlass.transports.base import WriteBatch
from windlass.transports.cuda_ipc import CudaIpcTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


NOTHING = np.zeros(0, np.int64)
NO_RUNS = DirectRuns.empty(0)


@pytest.fixture
def transport() -> Iterator[CudaIpcTransport]:
    torch.zeros(1, device="cuda")
    opened = CudaIpcTransport(0)
    yield opened
    opened.close()


def piece(source: int, target: int, rows: int, elems: int, pitches: tuple[int, int], pos_pitch: int) -> np.ndarray:  # fmt: skip
    made = np.zeros(1, PIECE)
    made[0] = (source, target, *pitches, 0, pos_pitch, rows, elems)
    return made


def read(transport: CudaIpcTransport, address: int) -> tuple[int, int]:
    a, b = np.frombuffer(transport.gpu.device.download(address, 16), "<u8").tolist()
    return a, b


@pytest.mark.parametrize("row_nbytes", [16, 48, 24, 20, 18, 7, 4096])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_rows_land_at_their_places_and_both_digests_equal_numpys(
    transport: CudaIpcTransport, row_nbytes: int, shift: int
) -> None:
    rows, pitches = 37, (row_nbytes + 16, row_nbytes + 32)
    source = torch.arange(rows * pitches[0] + 64, device="cuda").mul(7).to(torch.uint8)
    target = torch.full((rows * pitches[1] + 64,), 0xAA, dtype=torch.uint8, device="cuda")
    made = piece(
        source.data_ptr() + shift, target.data_ptr() + shift, rows, row_nbytes, pitches, row_nbytes
    )
    table = PieceTable(transport.gpu.device, made, "put_1", 1)
    words = torch.zeros(4, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    transport.gpu.kernels.put(table, transport.gpu.stream, words.data_ptr())
    transport.gpu.kernels.hash(table, transport.gpu.stream, words.data_ptr() + 16)
    transport.gpu.wait(transport.gpu.stream.record(), 10.0)
    table.close()
    expected = torch.full_like(target, 0xAA)
    digest = PositionDigest()
    for row in range(rows):
        held = source[shift + row * pitches[0] :][:row_nbytes]
        expected[shift + row * pitches[1] :][:row_nbytes] = held
        digest.add_row(held.cpu().numpy(), row * row_nbytes)
    assert torch.equal(target, expected)
    assert read(transport, words.data_ptr()) == digest.words()
    assert read(transport, words.data_ptr() + 16) == digest.words()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 384), (200, 136), (128, 130), (1, 7)])
def test_block_float8_equals_that_of_the_cpu_bit_for_bit(
    transport: CudaIpcTransport, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    rows, columns = shape
    weight = (torch.randn(rows, columns, dtype=torch.float32) * 3).to(dtype)
    weight[0, 0] = 0.0
    source = weight.cuda()
    itemsize = weight.element_size()
    grid = (-(-rows // 128), -(-columns // 128))
    values = torch.full((rows, columns + 8), 0xAA, dtype=torch.uint8, device="cuda")
    scales = torch.zeros(grid, device="cuda")
    words = torch.zeros(4, dtype=torch.int64, device="cuda")
    name = "bfloat16" if dtype is torch.bfloat16 else "float32"
    for kind, target in ((Transform.FP8_BLOCK_VALUES, values), (Transform.FP8_BLOCK_SCALES, scales)):  # fmt: skip
        is_values = kind is Transform.FP8_BLOCK_VALUES
        op = BoundOp(
            mode=CopyMode.PACKED,
            src_parameter=0,
            dst_parameter=0,
            sizes=shape if is_values else grid,
            src_offset=0,
            src_strides=(columns * itemsize, itemsize),
            src_dtype=DType(name),
            dst_offset=0,
            dst_strides=(columns + 8, 1) if is_values else (grid[1] * 4, 4),
            dst_dtype=DType.FLOAT8_E4M3 if is_values else DType.FLOAT32,
            nbytes=rows * columns if is_values else 4 * grid[0] * grid[1],
            staging_offset=-1,
            src_sizes=shape,
            transform=kind,
        )
        program = LinkProgram(peer="engine", ops=(op,), direct=NO_RUNS, nbytes=op.nbytes)
        at = np.array([target.data_ptr()], np.uint64)
        kernel = f"fp8_{'values' if is_values else 'scales'}_{name}"
        words.zero_()
        torch.cuda.synchronize()
        for sources, run in ((np.array([source.data_ptr()], np.uint64), "put"), (None, "hash")):  # fmt: skip
            ((_, pieces),) = block_tables(program, sources, at).items()
            table = PieceTable(transport.gpu.device, pieces, kernel, op.dst_dtype.itemsize)
            if run == "put":
                transport.gpu.kernels.put(table, transport.gpu.stream, words.data_ptr())
            else:
                transport.gpu.kernels.hash(table, transport.gpu.stream, words.data_ptr() + 16)
            transport.gpu.wait(transport.gpu.stream.record(), 10.0)
            table.close()
        want = torch.zeros(op.nbytes, dtype=torch.uint8)
        pack_quantized(
            transform=kind,
            sizes=shape,
            src_address=weight.data_ptr(),
            src_strides=op.src_strides,
            src_dtype=op.src_dtype,
            dst_address=want.data_ptr(),
        )
        got = target[:, :columns] if is_values else target
        assert torch.equal(got.cpu().contiguous().view(torch.uint8).reshape(-1), want)
        assert read(transport, words.data_ptr()) == read(transport, words.data_ptr() + 16)
    assert bool((values[:, columns:] == 0xAA).all())


# --- two processes --------------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    torch.zeros(1, device="cuda")
    transport = CudaIpcTransport(0)
    # The tensor is inside a larger allocation of torch's caching allocator.
    keep = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    memory = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    pipe.send(transport.register(memory.data_ptr(), memory.nbytes).remote)
    while pipe.recv():
        torch.cuda.synchronize()
        pipe.send((memory.cpu().numpy().tobytes(), int(keep.sum())))


def lend(pipe: Connection) -> None:
    """Free memory on command while a peer still has it mapped."""
    transport = CudaIpcTransport(0)
    address = transport.gpu.device.allocate(1 << 30)
    region = transport.register(address, 1 << 30)
    pipe.send(region.remote)
    pipe.recv()
    transport.unregister(region)
    transport.gpu.device.free(address)
    pipe.send("freed")
    pipe.recv()


def test_unmapping_frees_memory_that_the_peer_has_freed(transport: CudaIpcTransport) -> None:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=lend, args=(theirs,))
    process.start()
    region = ours.recv()
    transport.map_region(region)
    transport.keep_mapped([region])
    ours.send("free it")
    assert ours.recv() == "freed"
    mapped, _ = torch.cuda.mem_get_info()
    transport.keep_mapped(())
    unmapped, _ = torch.cuda.mem_get_info()
    ours.send("end")
    process.join(20)
    assert process.exitcode == 0
    assert unmapped - mapped == 1 << 30


@pytest.fixture
def peer() -> Iterator[tuple[mp.process.BaseProcess, Connection]]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    yield process, ours
    process.kill()
    process.join()
    ours.close()
    theirs.close()


def batch(region, local, remote, nbytes) -> WriteBatch:  # type: ignore[no-untyped-def]
    return WriteBatch(
        endpoint=region.endpoint,
        local_addresses=np.array(local, np.uint64),
        remote_addresses=np.array(remote, np.uint64),
        nbytes=np.array(nbytes, np.uint64),
        regions=(region,),
    )


def test_a_peer_of_torchs_allocator_gets_exactly_the_written_bytes(
    transport: CudaIpcTransport, peer: tuple[mp.process.BaseProcess, Connection]
) -> None:
    process, pipe = peer
    region = pipe.recv()
    source = torch.arange(1 << 20, device="cuda").mul(11).to(torch.uint8)
    torch.cuda.synchronize()
    transport.register(source.data_ptr(), source.nbytes)
    base, there = source.data_ptr(), region.address
    transport.write(
        batch(region, [base + 5, base + 4096], [there + 300_000, there + 64], [200_001, 8192]),
        deadline_s=10.0,
    )
    pipe.send(True)
    got, beside = pipe.recv()
    expected = np.zeros(1 << 20, np.uint8)
    held = source.cpu().numpy()
    expected[300_000:500_001] = held[5:200_006]
    expected[64 : 64 + 8192] = held[4096 : 4096 + 8192]
    assert got == expected.tobytes()
    assert beside == 0
    with pytest.raises(RegionError, match="must be inside published regions"):
        transport.write(batch(region, [base], [there + (1 << 20) - 8], [16]), deadline_s=1.0)
    with pytest.raises(RegionError, match="must be inside local registered memory"):
        transport.write(batch(region, [base - 512], [there], [16]), deadline_s=1.0)
    process.kill()
    process.join()
    with pytest.raises(PeerUnreachable):
        transport.write(batch(region, [base], [there], [16]), deadline_s=1.0)


def test_host_memory_is_refused(transport: CudaIpcTransport) -> None:
    memory = np.zeros(64, np.uint8)
    with pytest.raises(RegionError, match="is not in GPU memory"):
        transport.register(memory.ctypes.data, memory.nbytes)
