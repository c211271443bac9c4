"""Tests for every implementation of casts, in host memory and on a GPU. Subclass them in a test
module:

    class TestHost(CastConformance):
        def pack(self, op, source): ...

They cover `CASTS` and the source dtypes of block float8. The expected values come from torch on a
CPU, bit for bit. Only the bits of a NaN may differ, because torch's differ between machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from windlass.errors import TransferFailed
from windlass.layout.dtypes import CASTS, DType, can_overflow
from windlass.layout.quantization import BLOCK, CAPABILITIES, Scheme, scale_shape
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.links import WORDS_NBYTES, load_table, read_digest, read_sent
from windlass.memory.cuda.pieces import cut_link, kind_of, store_packed
from windlass.memory.host import pack_op
from windlass.memory.torch_dtypes import torch_dtype
from windlass.planning.plan import CopyMode, Transform
from windlass.planning.program import BoundOp, DirectRuns, LinkProgram
from windlass.testing.transport_conformance import check

__all__ = ["QUANTISED_FROM", "CastConformance", "HostCasts", "KernelCasts", "Packed", "cast_op"]

QUANTISED_FROM = next(c.source_dtypes for c in CAPABILITIES if c.scheme is Scheme.FP8_BLOCK)
NAME = "model.layers.3.mlp.gate.weight"
LOW_HALVES = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""Lower halves of float32 values around the ties of rounding to float16 and to bfloat16."""
NOTHING = np.zeros(0, np.int64)


class Packed(NamedTuple):
    """A payload and its error; the error is empty if the payload may be used."""

    payload: bytes
    error: str


class Layout(NamedTuple):
    """A matrix in memory: elements of a row, between two rows, and before the first row."""

    columns: int
    gap: int
    shift: int


LAYOUTS = {
    "contiguous": Layout(64, 0, 0),
    "strided": Layout(1000, 8, 0),
    "odd rows": Layout(1007, 2, 0),
    "behind each other, not aligned": Layout(64, 0, 1),
}
MATRICES = {"whole blocks": (256, 384), "cut blocks": (200, 136), "odd columns": (130, 131), "one row": (1, 7)}  # fmt: skip


def patterns(dtype: DType) -> torch.Tensor:
    """Return every bit pattern of a 16-bit dtype; for float32, every upper half with each of `LOW_HALVES`."""
    halves = torch.arange(1 << 16, dtype=torch.int64)
    if dtype is not DType.FLOAT32:
        return halves.to(torch.uint16).view(torch_dtype(dtype))
    bits = (halves[:, None] << 16 | torch.tensor(LOW_HALVES)).flatten()
    return bits.to(torch.uint32).view(torch.float32)


def cast_op(source: DType, target: DType, rows: int, layout: Layout) -> BoundOp:
    """Return an op that packs a matrix of `layout`."""
    size = source.itemsize
    return BoundOp(
        mode=CopyMode.PACKED,
        src_parameter=0,
        dst_parameter=0,
        sizes=(rows, layout.columns),
        src_offset=layout.shift * size,
        src_strides=((layout.columns + layout.gap) * size, size),
        src_dtype=source,
        dst_offset=0,
        dst_strides=(layout.columns * target.itemsize, target.itemsize),
        dst_dtype=target,
        nbytes=rows * layout.columns * target.itemsize,
        staging_offset=-1,
        src_sizes=(rows, layout.columns),
        tensor=NAME,
    )


def laid_out(values: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory that contains `values` as the rows of a matrix, and that matrix."""
    rows = -(-len(values) // layout.columns)
    filled = values.repeat(2)[: rows * layout.columns].view(rows, layout.columns)
    memory = torch.full((layout.shift + rows * (layout.columns + layout.gap),), 3.0).to(
        values.dtype
    )
    memory[layout.shift :].view(rows, -1)[:, : layout.columns] = filled
    return memory, filled


class CastConformance(ABC):
    """Tests that a subclass inherits; see the module."""

    @abstractmethod
    def pack(self, op: BoundOp, source: torch.Tensor) -> Packed:
        """Pack an op whose parameter is `source`, a flat tensor of host memory."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(("source", "target"), CASTS)
    def test_every_number_is_rounded_as_torch_rounds_it(
        self, source: DType, target: DType, layout: str
    ) -> None:
        """Subnormal numbers, zeros of both signs, infinities and NaNs are among the values."""
        values = patterns(source)
        cast = values.to(torch_dtype(target))
        values = values[~(cast.isinf() & values.isfinite())]
        memory, matrix = laid_out(values, LAYOUTS[layout])
        found = self.pack(cast_op(source, target, len(matrix), LAYOUTS[layout]), memory)
        check(found.error == "", found.error)
        require_equal(found.payload, matrix.to(torch_dtype(target)))

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(("source", "target"), [c for c in CASTS if can_overflow(*c)])
    def test_a_number_that_would_become_infinite_is_an_error_with_the_tensors_name(
        self, source: DType, target: DType, layout: str
    ) -> None:
        """Try the smallest such number, with both signs, at several places between infinities and NaNs."""
        values = patterns(source)
        lost = values[values.to(torch_dtype(target)).isinf() & values.isfinite()]
        least = lost.float().abs().min().to(values.dtype)
        kept = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.5]).to(values.dtype)
        memory, matrix = laid_out(kept.repeat(5000), LAYOUTS[layout])
        op = cast_op(source, target, len(matrix), LAYOUTS[layout])
        check(
            self.pack(op, memory).error == "", "infinities and NaNs of the source are no overflow"
        )
        size = source.itemsize
        for place in (0, 7, len(matrix) * matrix.shape[1] - 1, matrix.shape[1] + 3):
            row, column = divmod(place, matrix.shape[1])
            at = (op.src_offset + row * op.src_strides[0]) // size + column
            for wrong in (least, -least):
                bad = memory.clone()
                bad[at] = wrong
                wanted = f"tensor {NAME!r}: a finite {source} is too large for {target}"
                found = self.pack(op, bad).error
                check(found.startswith(wanted), f"element {place}: {found!r}")

    @pytest.mark.parametrize("matrix", MATRICES)
    @pytest.mark.parametrize("source", QUANTISED_FROM)
    def test_block_float8_equals_that_of_torch(self, source: DType, matrix: str) -> None:
        """The matrix has blocks of zeros and of subnormal numbers, an outlier, an infinity and a NaN."""
        rows, columns = MATRICES[matrix]
        generator = torch.Generator().manual_seed(rows)
        weight = torch.randn(rows, columns, generator=generator)
        weight[:BLOCK, BLOCK : 2 * BLOCK] = 0
        weight[BLOCK:, :BLOCK] *= 1e-6
        weight[0, 0] = 3000.0
        if rows > BLOCK:
            weight[-1, -1], weight[-1, 0] = float("nan"), float("inf")
        weight = weight.to(torch_dtype(source))
        values, scales = quantised(weight)
        for transform, wanted in ((Transform.FP8_BLOCK_VALUES, values), (Transform.FP8_BLOCK_SCALES, scales)):  # fmt: skip
            found = self.pack(quantising_op(source, rows, columns, transform), weight.flatten())
            check(found.error == "", found.error)
            require_equal(found.payload, wanted)

    def test_a_weight_that_bfloat16_cannot_hold_is_not_quantised(self) -> None:
        """Float32 is rounded to bfloat16 before it is quantised."""
        weight = torch.full((130, 140), 2.0)
        weight[129, 139] = -3.4e38
        for transform in (Transform.FP8_BLOCK_VALUES, Transform.FP8_BLOCK_SCALES):
            op = quantising_op(DType.FLOAT32, 130, 140, transform)
            found = self.pack(op, weight.flatten()).error
            check(found.startswith(f"tensor {NAME!r}: a finite float32"), found)


class HostCasts(CastConformance):
    """Casts in host memory."""

    def pack(self, op: BoundOp, source: torch.Tensor) -> Packed:
        """See `CastConformance.pack`."""
        payload = torch.zeros(op.nbytes, dtype=torch.uint8)
        try:
            pack_op(op, source.data_ptr(), payload.data_ptr())
        except TransferFailed as error:
            return Packed(b"", str(error))
        return Packed(payload.numpy().tobytes(), "")


class KernelCasts(CastConformance):
    """Casts by the kernels of a GPU, or by the simulated kernels of `numpy_gpu`."""

    @abstractmethod
    def gpu(self) -> Gpu:
        """Return the GPU that runs the kernels."""

    def pack(self, op: BoundOp, source: torch.Tensor) -> Packed:
        """See `CastConformance.pack`. Also compare the digest of the sender with a digest of the
        stored bytes."""
        gpu, device = self.gpu(), self.gpu().device
        # The link starts with another op, so that the positions of this op do not start at 0.
        before = replace(op, sizes=(1,), src_sizes=(1,), src_strides=(1,), dst_strides=(1,), nbytes=8, tensor="before")  # fmt: skip
        program = LinkProgram(peer="engine", ops=(op,), direct=NO_RUNS, nbytes=op.nbytes)
        ((_, _, pieces),) = cut_link(program, at_source=True).by_op()
        raw = source.view(torch.uint8).numpy().tobytes()
        addresses = [device.allocate(n) for n in (len(raw), op.nbytes, WORDS_NBYTES, WORDS_NBYTES)]
        given, payload, words, again = addresses
        try:
            device.upload(given, raw)
            device.upload(payload, bytes([0xAA]) * op.nbytes)
            pieces["src"] += np.uint64(given)
            store_packed(pieces, 0, payload)
            pieces["pos"] += np.uint64(before.nbytes)
            ((_, _, landed),) = cut_link(program, at_source=False).by_op()
            store_packed(landed, 0, payload)
            landed["pos"] += np.uint64(before.nbytes)
            put = load_table(gpu, kind_of(op), pieces)
            held = load_table(gpu, kind_of(op), landed)
            for address in (words, again):
                device.clear(address, WORDS_NBYTES, gpu.stream)
            gpu.kernels.put(put, gpu.stream, words)
            gpu.kernels.hash(held, gpu.stream, again)
            gpu.finish(30.0)
            put.close()
            held.close()
            whole = replace(program, ops=(before, op))
            digest, error = read_sent(gpu, words, whole)
            check(digest == read_digest(gpu, again), "what was stored has another digest")
            return Packed(device.download(payload, op.nbytes), error)
        finally:
            for address in addresses:
                device.free(address)


NO_RUNS = DirectRuns.empty(0)


def quantising_op(source: DType, rows: int, columns: int, transform: Transform) -> BoundOp:
    """Return an op that quantises a contiguous matrix."""
    values = transform is Transform.FP8_BLOCK_VALUES
    target = DType.FLOAT8_E4M3 if values else DType.FLOAT32
    sizes = (rows, columns) if values else scale_shape((rows, columns))
    plain = cast_op(source, target, rows, Layout(columns, 0, 0))
    strides = (sizes[1] * target.itemsize, target.itemsize)
    nbytes = sizes[0] * strides[0]
    return replace(plain, sizes=sizes, dst_strides=strides, nbytes=nbytes, transform=transform)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and scales of a whole matrix as DeepGEMM and vLLM compute them on a GPU."""
    rows, columns = weight.shape
    grid = scale_shape((rows, columns))
    padded = torch.zeros(grid[0] * BLOCK, grid[1] * BLOCK, dtype=torch.bfloat16)
    padded[:rows, :columns] = weight
    blocks = padded.view(grid[0], BLOCK, grid[1], BLOCK).float()
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4) * torch.tensor(1.0).div(448.0)
    values = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:rows, :columns].contiguous(), scales.view(grid)


def require_equal(payload: bytes, wanted: torch.Tensor) -> None:
    """Check that the bits are equal, or that both values are NaN."""
    found = torch.frombuffer(bytearray(payload), dtype=wanted.dtype).view(wanted.shape)
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[wanted.element_size()]
    same = (found.view(unsigned) == wanted.view(unsigned)) | (
        found.float().isnan() & wanted.float().isnan()
    )
    if not bool(same.all()):
        at = int((~same).flatten().nonzero()[0])
        got, want = found.flatten()[at], wanted.flatten()[at]
        check(False, f"{int((~same).sum())} elements differ, the first is {at}: {got}, not {want}")
