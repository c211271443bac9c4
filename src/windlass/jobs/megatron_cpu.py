"""Replacements for CUDA calls of Megatron-core, so that it builds and trains models on a CPU.

Megatron-core 0.16.1 asks for the current CUDA device, for streams and for random states of CUDA, and creates some tensors
on CUDA devices. The replacements answer with the CPU. They change no weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Stream:
    """Stream, or event, that is always done: work on a CPU ends before the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def synchronize(self) -> None:
        """Return at once."""


def install() -> None:
    """Replace CUDA functions of torch and Megatron-core in this process by functions that use the CPU. Idempotent.

    Call this function only in a process that computes on a CPU: the process cannot use a GPU afterwards.
    """
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
    cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.multi_latent_attention as latent

    for name in ("TELinear", "TEColumnParallelLinear", "Linear"):
        if not isinstance(vars(latent)[name], type):
            setattr(latent, name, type(name, (), {}))
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    name_te_gemm()


def name_te_gemm() -> None:
    """Define `te_general_gemm` as None in Megatron's router module (0.16.1), unless Transformer Engine defines it.

    Without this, the router fails: it reads the name even if Transformer Engine is not installed.
    """
    import megatron.core.transformer.moe.moe_utils as moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)


class _OnCpu(TorchFunctionMode):
    """Function mode that creates tensors for CUDA devices, and pinned tensors, as plain CPU tensors."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with the device "cpu" in place of CUDA devices, and without pinned memory."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        args = tuple("cpu" if isinstance(a, str) and a == "cuda" else a for a in args)
        return func(*args, **kwargs)


@contextlib.contextmanager
def without_cuda_tensors() -> Iterator[None]:
    """Inside the block, create tensors for CUDA devices on the CPU, and let `Tensor.type()` return names of CUDA types.

    Megatron's schedules create tensors on "cuda", and its optimizers accept only parameters of CUDA types.
    """
    kind = torch.Tensor.type

    def _as_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return kind(tensor, *args, **kwargs)
        name = str(kind(tensor))
        return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = _as_on_cuda  # type: ignore[method-assign,assignment]
    try:
        with _OnCpu():
            yield
    finally:
        torch.Tensor.type = kind  # type: ignore[method-assign]
