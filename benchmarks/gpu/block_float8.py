"""Block float8 checkpoints for `bench_live_engine.py`: tensors, quantisers and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

BLOCK = 128
FILE_NBYTES = 4 << 30
PROJECTIONS = (
    *(f".{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")),
    *(".q_a_proj.weight", ".q_b_proj.weight", ".kv_a_proj_with_mqa.weight", ".kv_b_proj.weight"),
)

Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Matrix in bfloat16 -> values in e4m3, and a float32 scale per block."""


def is_quantised(name: str) -> bool:
    """Return whether published checkpoints quantise this tensor: only projections without `eh_proj`."""
    return name.endswith(PROJECTIONS)


DEEPSEEK: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""`quantization_config` of DeepSeek-V3 and Kimi-K2."""


def settings(num_layers: int, *, routed: bool) -> dict[str, Any]:
    """Return `quantization_config` of Qwen3's config.json."""
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(num_layers)] if routed else []
    return {**DEEPSEEK, "modules_to_not_convert": ["lm_head", *routers]}


def entries(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield name, safetensors type, shape and bytes of each entry of a checkpoint for one tensor."""
    numel = 1
    for size in shape:
        numel *= size
    if not is_quantised(name):
        yield name, "BF16", shape, 2 * numel
        return
    blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    yield name, "F8_E4M3", shape, numel
    yield f"{name}_scale_inv", "F32", blocks, 4 * blocks[0] * blocks[1]


def engines_own(engine: str) -> tuple[str, Quantise]:
    """Return the name of the engine's quantiser, and the quantiser.

    vLLM compiles its quantiser with torch.compile, and the compiled kernels divide approximately; here it runs
    uncompiled. SGLang 0.5.16 only has a quantiser for scales that are powers of two; DeepGEMM's formula replaces it.
    """
    if engine == "vllm":
        from vllm.utils.deep_gemm import per_block_cast_to_fp8

        def as_written(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.compiler.set_stance("force_eager"):
                values, scales = per_block_cast_to_fp8(weight)
            return values, scales

        return "vllm.utils.deep_gemm.per_block_cast_to_fp8, not compiled", as_written
    return "per_block_cast_to_fp8 of DeepGEMM", _deepgemm


def _deepgemm(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    padded = weight.new_zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = weight
    view = padded.view(-1, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    amax = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    scales = amax / 448.0
    values = (view * (1.0 / scales)).to(torch.float8_e4m3fn).view_as(padded)
    return values[:rows, :columns].contiguous(), scales.view(view.shape[0], view.shape[2])


def windlass_own(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise like a trainer with its weights in host memory."""
    from windlass.layout.dtypes import DType
    from windlass.memory.host import pack_quantized
    from windlass.planning.plan import Transform

    blocks = [-(-size // BLOCK) for size in weight.shape]
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(blocks, dtype=torch.float32)
    for transform, out in (
        (Transform.FP8_BLOCK_VALUES, values),
        (Transform.FP8_BLOCK_SCALES, scales),
    ):
        pack_quantized(
            transform=transform,
            sizes=weight.shape,
            src_address=weight.data_ptr(),
            src_strides=[2 * step for step in weight.stride()],
            src_dtype=DType.BFLOAT16,
            dst_address=out.data_ptr(),
        )
    return values, scales


class Writer:
    """Writer of a checkpoint, tensor by tensor, in files of some gigabytes."""

    def __init__(self, folder: Path, quantise: Quantise) -> None:
        self._folder, self._quantise = folder, quantise
        self._pending: dict[str, torch.Tensor] = {}
        self._nbytes = self._number = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor in bfloat16, on any device."""
        if is_quantised(name):
            values, scales = self._quantise(tensor)
            self._keep(name, values)
            self._keep(f"{name}_scale_inv", scales)
        else:
            self._keep(name, tensor)
        if self._nbytes >= FILE_NBYTES:
            self.flush()

    def flush(self) -> None:
        """Write the pending tensors."""
        from safetensors.torch import save_file

        if self._pending:
            path = self._folder / f"model-{self._number:05}.safetensors"
            save_file(self._pending, path, metadata={"format": "pt"})
        self._pending, self._nbytes, self._number = {}, 0, self._number + 1

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self._pending[name] = tensor.detach().contiguous().cpu()
        self._nbytes += tensor.nbytes
