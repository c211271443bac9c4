"""The quantising pack kernel: strided bfloat16, float16 or float32 in, contiguous float8 or scales out.

Works through a matrix by rows of blocks, so scratch memory is some 128 rows of float32. The values
are those of `per_block_cast_to_fp8` (DeepGEMM) on the whole matrix on a GPU, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from windlass.errors import TransferFailed
from windlass.layout.dtypes import DType
from windlass.layout.quantization import BLOCK, scale_shape
from windlass.memory.packing import overflow_text, strided_view
from windlass.planning.plan import Transform

if TYPE_CHECKING:
    import torch

__all__ = ["pack_quantized"]

_PER_MAX = 1.0 / 448.0
_FLOOR = 1e-4


def pack_quantized(
    *,
    transform: Transform,
    sizes: Sequence[int],
    src_address: int,
    src_strides: Sequence[int],
    src_dtype: DType,
    dst_address: int,
    tensor: str = "",
) -> None:
    """Quantise a matrix of whole blocks.

    Args:
        transform: values or scales.
        sizes: rows and columns of the source.
        src_address: of the first element, in host memory.
        src_strides: bytes per dim.
        src_dtype: element type.
        dst_address: of the payload: float8 of `sizes`, or float32 of `scale_shape(sizes)`,
            row-major.
        tensor: its name, for errors.

    Raises:
        TransferFailed: a finite weight is too large for bfloat16.
    """
    import torch

    rows, columns = sizes
    source = strided_view(src_address, sizes, src_strides, src_dtype)
    scaled = transform is Transform.FP8_BLOCK_VALUES
    out_sizes = (rows, columns) if scaled else scale_shape((rows, columns))
    out_dtype = DType.FLOAT8_E4M3 if scaled else DType.FLOAT32
    step = out_dtype.itemsize
    out = strided_view(dst_address, out_sizes, (out_sizes[1] * step, step), out_dtype)
    for index, first in enumerate(range(0, rows, BLOCK)):
        given = source[first : first + BLOCK]
        part = given.to(torch.bfloat16).float()
        scales = _scales(part)
        if not bool(scales.isfinite().all()) and bool((part.isinf() & given.isfinite()).any()):
            raise TransferFailed(overflow_text(tensor, src_dtype, DType.BFLOAT16))
        if scaled:
            factor = (1.0 / scales).repeat_interleave(BLOCK)[:columns]
            out[first : first + BLOCK].copy_(part.mul_(factor).to(torch.float8_e4m3fn))
        else:
            out[index].copy_(scales)


def _scales(part: torch.Tensor) -> torch.Tensor:
    """Scales of one row of blocks, (columns / 128,) float32."""
    import torch

    columns = part.shape[1]
    amax = part.abs().amax(dim=0)
    padded = torch.nn.functional.pad(amax, (0, -columns % BLOCK))
    return padded.view(-1, BLOCK).amax(dim=1).clamp(_FLOOR) * _PER_MAX
