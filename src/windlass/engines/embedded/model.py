"""Model of one rank: built by transformers, sharded by torch's tensor parallelism, and stored in one arena."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from windlass.engines.embedded.scheduler import Step
from windlass.errors import ConfigError
from windlass.layout.dtypes import DType
from windlass.layout.manifest import Role, ShardManifest
from windlass.memory.packing import ALIGNMENT
from windlass.memory.torch_dtypes import torch_dtype
from windlass.transfer.arena import Arena, aligned_offsets
from windlass.transfer.dtensor import (
    describe_module,
    held_tensors,
    local_tensor,
    parameter_addresses,
)
from windlass.transports.base import OneSidedTransport

TENSOR_PARALLEL_STYLES: dict[str, type[ColwiseParallel | RowwiseParallel]] = {
    "q_proj": ColwiseParallel,
    "k_proj": ColwiseParallel,
    "v_proj": ColwiseParallel,
    "gate_proj": ColwiseParallel,
    "up_proj": ColwiseParallel,
    "o_proj": RowwiseParallel,
    "down_proj": RowwiseParallel,
}
"""Module name of a decoder's linear layer -> its sharding; every other parameter is replicated on every rank."""


@dataclass(frozen=True, slots=True)
class ModelShard:
    """Model of one rank.

    Attributes:
        module: model, with this rank's shards as plain tensors.
        manifest: manifest of this rank.
        arena: registered memory that contains all parameters and persistent buffers.
        addresses: addresses of the tensors in the manifest, in manifest order; they never change.
    """

    module: transformers.PreTrainedModel
    manifest: ShardManifest
    arena: Arena
    addresses: tuple[int, ...]


def load_model(
    source: Path,
    *,
    worker: str,
    dtype: DType,
    seed: int,
    transport: OneSidedTransport,
) -> ModelShard:
    """Build this rank's shard of the model. Collective over the engine's ranks if there are several.

    `source` is a checkpoint folder, or a transformers configuration (JSON) for random weights. `worker` is the identity
    ENGINE/RANK of this rank. `transport` allocates and registers the parameters' memory.

    Raises:
        ConfigError: `source` is neither a checkpoint of a causal LM nor a transformers configuration, or a size of the
            model is not divisible by the number of ranks.
        UnsupportedLayout, ManifestError: see `describe_module`.
        PlanError: see `describe_module`.
    """
    torch.manual_seed(seed)
    module = _build(source).to(torch_dtype(dtype)).eval().requires_grad_(requires_grad=False)
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size > 1:
        _parallelize(module, init_device_mesh("cpu", (size,)))
    arena = _move_into_arena(module, transport)
    manifest = describe_module(module, worker, Role.ENGINE)
    addresses = parameter_addresses(module)
    _run_locally(module)
    return ModelShard(module, manifest, arena, addresses)


def _build(source: Path) -> Any:
    """Build the whole model on the CPU, from a checkpoint folder or with random weights.

    Raises:
        ConfigError: `source` is no checkpoint folder of a causal LM and no file with a configuration of transformers.
    """
    if source.is_dir():
        try:
            return transformers.AutoModelForCausalLM.from_pretrained(source, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"model: must be a checkpoint of a causal LM, got {source}: {error}"
            ) from error
    try:
        config = transformers.AutoConfig.for_model(**json.loads(source.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"model: must be a transformers configuration, got {source}: {error}"
        ) from error
    return transformers.AutoModelForCausalLM.from_config(config)


def _parallelize(module: Any, mesh: DeviceMesh) -> None:
    """Shard every module whose last name is in `TENSOR_PARALLEL_STYLES` over the mesh, in place. Collective.

    Raises:
        ConfigError: a size of the model is not divisible by the number of ranks.
    """
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = int(module.config.to_dict()[name])
        if value % mesh.size():
            raise ConfigError(f"tp: {name} must be divisible by tp {mesh.size()}, got {value}")
    styles = {
        n: TENSOR_PARALLEL_STYLES.get(n.rpartition(".")[2]) for n, _ in module.named_modules()
    }
    plan: dict[str, ParallelStyle] = {n: style() for n, style in styles.items() if style}
    parallelize_module(module, mesh, plan)


class _CutLinear(torch.nn.Module):
    """Linear layer with this rank's share of the output features, or (`by_inputs`) of the input features.

    With `by_inputs`, `forward` sums the outputs of all ranks.
    """

    def __init__(self, linear: torch.nn.Linear, *, by_inputs: bool) -> None:
        super().__init__()
        bias: torch.Tensor | None = linear.bias
        self.weight = _local_parameter(linear.weight)
        self.bias = None if bias is None else _local_parameter(bias)
        self._by_inputs = by_inputs

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's output features, if the layer is split by outputs.

        If the layer is split by inputs, return all output features: the sum over the ranks (collective).
        """
        if not self._by_inputs:
            return functional.linear(inputs, self.weight, self.bias)
        outputs = functional.linear(inputs, self.weight)
        dist.all_reduce(outputs)
        return outputs if self.bias is None else outputs + self.bias


def _local_parameter(parameter: torch.Tensor) -> torch.nn.Parameter:
    """Return this rank's shard of a DTensor as a plain parameter that shares memory with the DTensor."""
    return torch.nn.Parameter(local_tensor(parameter), requires_grad=False)


def _run_locally(module: torch.nn.Module) -> None:
    """Replace each linear layer of DTensors by a layer of plain tensors with the same name and memory.

    This saves time, because the dispatch of a DTensor operation takes longer than the computation of a small layer.
    """
    for name, linear in list(module.named_modules()):
        if isinstance(linear, torch.nn.Linear) and isinstance(linear.weight, DTensor):
            parent, _, child = name.rpartition(".")
            by_inputs = TENSOR_PARALLEL_STYLES[child] is RowwiseParallel
            setattr(module.get_submodule(parent), child, _CutLinear(linear, by_inputs=by_inputs))


def _move_into_arena(module: torch.nn.Module, transport: OneSidedTransport) -> Arena:
    """Move every parameter and persistent buffer of this rank into one registered arena, and return the arena."""
    parameters = list({id(held.tensor): held.tensor for held in held_tensors(module)}.values())
    offsets, total = aligned_offsets(local_tensor(parameter).nbytes for parameter in parameters)
    arena = Arena(transport, max(total, ALIGNMENT))
    memory = torch.from_numpy(arena.bytes)
    for parameter, offset in zip(parameters, offsets, strict=True):
        old = local_tensor(parameter).contiguous()
        new = memory[offset : offset + old.nbytes].view(old.dtype).view(old.shape)
        new.copy_(old)
        if isinstance(parameter, DTensor):
            parameter._local_tensor.data = new
        else:
            parameter.data = new
    return arena


@final
class _SlotCache:
    """KV cache with the methods of transformers' `Cache` that a decoder calls.

    Each layer has keys and values of shape (slots, positions, heads, head dim). A slot is the row of one request.

    Attributes:
        slots: (B,) rows that the next forward pass writes.
        positions: (B, T) positions that the next forward pass writes.
        span: number of positions that the next forward pass reads.
    """

    is_compileable = False
    slots: torch.Tensor
    positions: torch.Tensor
    span: int

    def __init__(self, num_slots: int, max_positions: int) -> None:
        self._num_slots, self._max_positions = num_slots, max_positions
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def free(self) -> None:
        """Free the keys and values of all layers."""
        self._layers.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return 0: transformers does not use this length if the caller passes positions and a mask."""
        return 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_unused: object,
        kwargs: object = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values (B, heads, T, D); return all keys and values of the slots, each (B, heads, span, D).

        transformers 5.24 and later pass `kwargs`; this function ignores it.
        """
        del kwargs
        if layer_idx not in self._layers:
            _, heads, _, dim = key_states.shape
            shape = (self._num_slots, self._max_positions, heads, dim)
            self._layers[layer_idx] = key_states.new_zeros(shape), value_states.new_zeros(shape)
        keys, values = self._layers[layer_idx]
        keys[self.slots[:, None], self.positions] = key_states.transpose(1, 2)
        values[self.slots[:, None], self.positions] = value_states.transpose(1, 2)
        found = (store[self.slots, : self.span].transpose(1, 2) for store in (keys, values))
        return next(found), next(found)


@final
class ForwardRunner:
    """Forward passes of one rank. Every rank of the engine runs the same passes."""

    def __init__(self, module: torch.nn.Module, *, num_slots: int, max_positions: int) -> None:
        self._module: Any = module
        self._cache = _SlotCache(num_slots, max_positions)
        self._num_slots, self._max_positions = num_slots, max_positions

    @property
    def cache_nbytes(self) -> int:
        """Size in bytes of the KV cache of all ranks together."""
        config: dict[str, Any] = self._module.config.to_dict()
        heads, width = config["num_attention_heads"], config["hidden_size"]
        kept = int(config.get("num_key_value_heads") or heads)
        kept *= int(config.get("head_dim") or width // heads)
        itemsize = int(next(self._module.parameters()).element_size())
        per_layer = self._num_slots * self._max_positions * kept * itemsize
        return 2 * int(config["num_hidden_layers"]) * per_layer

    def free_cache(self) -> None:
        """Free the KV cache. The next forward pass allocates it again."""
        self._cache.free()

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """Run one forward pass, and return float32 logits (B, V) for the next token of each row of the step."""
        tokens = torch.tensor(step.tokens)
        start = torch.tensor(step.start)[:, None]
        lengths = torch.tensor(step.lengths)
        steps = torch.arange(tokens.shape[1])[None, :]
        positions = (start + steps).clamp(max=self._max_positions - 1)
        span = int(positions.max()) + 1
        cache = self._cache
        cache.slots, cache.positions, cache.span = torch.tensor(step.slots), positions, span
        hidden = torch.arange(span)[None, None, None, :] > positions[:, None, :, None]
        dtype = next(self._module.parameters()).dtype
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
        # Pass the cache by position, because transformers 5.24 renamed the parameter for the cache.
        states = self._module.model(tokens, mask, positions, cache, use_cache=True)
        last = states.last_hidden_state[torch.arange(len(lengths)), lengths - 1]
        logits: torch.Tensor = self._module.lm_head(last)
        return logits.float()
