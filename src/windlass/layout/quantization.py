"""Quantised parameters: the schemes that an engine may request, and their declaration in a manifest.

A destination declares a quantised weight in its manifest: the weight's shards are in float8
parameters, its scales are in float32 parameters, and a `QuantizedTensor` connects the two names. A
source that holds the weight in bfloat16 then quantises while it packs.

The only supported scheme is DeepSeek-V3's: blocks of 128 x 128 elements of the checkpoint tensor
(smaller at its ends), `scale = max(amax, 1e-4) * (1 / 448)` in float32, `value = e4m3(w * (1 /
scale))`. Weights in float32 or float16 are rounded to bfloat16 first, so that the result is
the same as from a bfloat16 checkpoint.

The result equals `per_block_cast_to_fp8` of DeepGEMM and vLLM as torch runs it on a GPU, operation by
operation. On a GPU, torch replaces the division by 448 by a product with its reciprocal. On a CPU,
torch divides, and half of the scales then differ in their last bit. Windlass rounds `1 / scale`
correctly, but vLLM's torch.compile kernels divide approximately.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from windlass.errors import UnsupportedLayout
from windlass.layout.dtypes import DType

BLOCK = 128
"""Rows and columns of one block."""


class Scheme(StrEnum):
    """Quantisation of a weight, including the form in which the engine's kernel needs the scales."""

    FP8_BLOCK = "fp8_block_128x128"
    FP8_BLOCK_UE8M0 = "fp8_block_128x128_ue8m0"
    FP8_TENSOR = "fp8_per_tensor"
    FP8_CHANNEL = "fp8_per_channel"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    INT8 = "int8"
    INT4_GROUPED = "int4_grouped"


@dataclass(frozen=True, slots=True)
class Capability:
    """One row of the capability table; `reason` is empty if the scheme is supported."""

    scheme: Scheme
    source_dtypes: tuple[DType, ...]
    reason: str

    @property
    def supported(self) -> bool:
        """True if trainers can quantise to the scheme."""
        return not self.reason


CAPABILITIES = (
    Capability(Scheme.FP8_BLOCK, (DType.BFLOAT16, DType.FLOAT32, DType.FLOAT16), ""),
    Capability(
        Scheme.FP8_BLOCK_UE8M0,
        (),
        "its scales are rounded to powers of two and packed and transposed after loading",
    ),
    Capability(
        Scheme.FP8_TENSOR,
        (),
        "its scale depends on the whole tensor, and each rank of a sharded model has only a part",
    ),
    Capability(
        Scheme.FP8_CHANNEL,
        (),
        "its scale depends on a whole row, and shards that are cut by columns have only a part",
    ),
    Capability(Scheme.MXFP4, (), "two values share a byte, and kernels shuffle them after loading"),
    Capability(
        Scheme.NVFP4,
        (),
        "it needs a scale for the whole tensor in addition to the scales of its blocks",
    ),
    Capability(Scheme.INT8, (), "no engine's quantiser has been reproduced bit for bit"),
    Capability(
        Scheme.INT4_GROUPED, (), "values share a byte and are calibrated, not computed from weights"
    ),
)
"""All schemes; a refused scheme has the reason for the refusal."""


class QuantizedTensor(msgspec.Struct, frozen=True):
    """Declaration that the shards of `weight` hold quantised values, and the shards of `scale` hold the scales.

    Attributes:
        weight: checkpoint name of a matrix.
        scale: checkpoint name of its scales (`..._scale_inv`), of shape `scale_shape`.
        scheme: quantisation of the weight.
    """

    weight: str
    scale: str
    scheme: Scheme = Scheme.FP8_BLOCK


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a matrix's scales, one per block. `shape` is the shape of the matrix."""
    return tuple(-(-size // BLOCK) for size in shape)


def require_supported(quantized: QuantizedTensor) -> None:
    """Raise `UnsupportedLayout` if trainers cannot quantise to the tensor's scheme. The error names the reason."""
    for capability in CAPABILITIES:
        if capability.scheme is quantized.scheme and capability.reason:
            raise UnsupportedLayout(
                f"tensor {quantized.weight!r}: scheme {quantized.scheme} is not supported: "
                f"{capability.reason}"
            )
