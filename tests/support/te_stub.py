"""Parameters of Transformer Engine's layers without its kernels, so that Megatron-core builds its TE specs on a CPU.

Transformer Engine needs CUDA. Exporters of Megatron models read the parameters of its layers: their names, shapes and
parallel marks. `install` provides a package `transformer_engine` with these parameters. No layer can compute.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch


class _Anything(type):
    """Metaclass of names that Megatron only imports."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unused(name)


def _unused(name: str) -> Any:
    return _Anything(name, (), {"__init__": lambda self, *_, **__: None})


class _Module(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _unused(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(f"{fullname}.".startswith(f"{package}.") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_CONTENT.get(module.__name__, {}))


def _marked(parameter: torch.nn.Parameter, dim: int) -> None:
    vars(parameter).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)


class _Base(torch.nn.Module):
    def set_tensor_parallel_group(self, group: object) -> None:
        pass

    def _linear(
        self,
        number: str,
        sizes: tuple[int, int],
        tp_size: int,
        parallel_mode: str | None,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        inside, outside = sizes
        if parallel_mode == "column":
            outside //= tp_size
        if parallel_mode == "row":
            inside //= tp_size
        weight = torch.nn.Parameter(torch.zeros(outside, inside, dtype=dtype))
        _marked(weight, int(parallel_mode == "row"))
        self.register_parameter(f"weight{number}", weight)
        if bias:
            held = torch.nn.Parameter(torch.zeros(outside, dtype=dtype))
            if parallel_mode == "column":
                _marked(held, 0)
            self.register_parameter(f"bias{number}", held)
        elif not number:
            # Transformer Engine has an empty tensor, which is no parameter.
            self.bias = torch.empty(0)


class Linear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype = torch.float32,
        **_: object,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.tp_size, self.parallel_mode = tp_size, parallel_mode
        self._linear("", (in_features, out_features), tp_size, parallel_mode, bias, params_dtype)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        normalization: str = "LayerNorm",
        params_dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **options)
        self.normalization = normalization
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype))
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=params_dtype))


class GroupedLinear(_Base):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype = torch.float32,
        **_: object,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        sizes = in_features, out_features
        for number in range(num_gemms):
            self._linear(str(number), sizes, tp_size, parallel_mode, bias, params_dtype)


class RMSNorm(torch.nn.Module):
    def __init__(
        self, hidden_size: int, params_dtype: torch.dtype = torch.float32, **_: object
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))


class LayerNorm(RMSNorm):
    def __init__(
        self, hidden_size: int, params_dtype: torch.dtype = torch.float32, **_: object
    ) -> None:
        super().__init__(hidden_size, params_dtype)
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=params_dtype))


class DotProductAttention(torch.nn.Module):
    def __init__(
        self, num_attention_heads: int, tp_size: int = 1, softmax_type: str = "vanilla", **_: object
    ) -> None:
        super().__init__()
        if softmax_type == "learnable":
            heads = num_attention_heads // tp_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads))


class _Nothing:
    """A context that does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_LAYERS = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)
_CONTENT: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": "2.9.0"},
    "transformer_engine.pytorch": {
        **{layer.__name__: layer for layer in _LAYERS},
        "fp8_model_init": _Nothing,
        "fp8_autocast": _Nothing,
    },
    "transformer_engine.pytorch.cpu_offload": {
        "get_cpu_offload_context": lambda *_, **__: (_Nothing(), None)
    },
}


def install(*others: str) -> None:
    """Provide the package in this process. Call this before Megatron-core is imported.

    `others`: names of packages that a converter imports and does not need to export; all their names are empty classes.
    """
    sys.meta_path.insert(0, _Finder(("transformer_engine", *others)))
    for name in (
        "transformer_engine.common.recipe",
        "transformer_engine.pytorch.attention.rope",
        "transformer_engine.pytorch.distributed",
        "transformer_engine.pytorch.ops",
        "transformer_engine.pytorch.utils",
    ):
        importlib.import_module(name)
