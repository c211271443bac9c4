"""Lets Megatron-core build models where there is no CUDA device. Tests only.

Megatron asks for the current device, streams and random states when it builds mixtures of
experts; none of it touches a weight.
"""

from __future__ import annotations

import contextlib

import torch


class _Stream:
    """A stream that is always done."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def install() -> None:
    """Patch this process."""
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    cuda.Stream = _Stream  # type: ignore[assignment,misc]
    cuda.Event = _Stream  # type: ignore[assignment,misc]
    cuda.current_stream = lambda *_: _Stream()  # type: ignore[assignment]
    cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as latent

    for name in ("TELinear", "TEColumnParallelLinear", "Linear"):
        if not isinstance(vars(latent)[name], type):
            setattr(latent, name, type(name, (), {}))
    vars(moe_utils).setdefault("te_general_gemm", None)
