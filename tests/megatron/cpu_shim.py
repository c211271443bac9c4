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
    cuda.set_device = lambda *_: None
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment]
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as latent

    for name in ("TELinear", "TEColumnParallelLinear", "Linear"):
        if not isinstance(vars(latent)[name], type):
            setattr(latent, name, type(name, (), {}))
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    vars(moe_utils).setdefault("te_general_gemm", None)
