"""Modules for Megatron-core's layer specs, in place of modules that need CUDA. Tests only.

Megatron's local core attention supports neither the head sizes of latent attention nor context
parallelism, and its local norm does not support sequence parallelism. A layer spec names the
modules of a layer, and users may insert their own. Except for the norms, all modules with weights
are Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class CoreAttention(torch.nn.Module):
    """Causal scaled dot product attention of torch; keys and values are gathered over context
    ranks.

    Heads of values may have another size than heads of queries and keys. There may be fewer groups
    than heads.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object = None,
    ) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: object = None,
        attention_bias: object = None,
        packed_seq_params: object = None,
    ) -> torch.Tensor:
        """Return (sequence, batch, heads * size of values); each input is (sequence, batch, heads, size)."""
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        places = torch.arange(query.shape[0])
        if group.size() > 1:
            places = zigzag(query.shape[0] * group.size(), group.size())[group.rank()]
            key, value = gathered(key, group), gathered(value, group)
        all_places = torch.arange(key.shape[0])
        out = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=places[:, None] >= all_places[None, :],
            scale=self._scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def zigzag(length: int, num_ranks: int) -> list[torch.Tensor]:
    """Return the positions of each context rank: one part from the front, one from the back."""
    parts = torch.arange(length).chunk(2 * num_ranks)
    return [torch.cat([parts[rank], parts[-1 - rank]]) for rank in range(num_ranks)]


class Gathered(torch.autograd.Function):
    """The whole sequence in order, gathered from the parts of all context ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        places = torch.cat(zigzag(len(part) * group.size(), group.size()))
        return torch.cat(parts)[places.argsort()]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradient.contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole[zigzag(len(whole), ctx.group.size())[ctx.group.rank()]], None


def gathered(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole: torch.Tensor = Gathered.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


class Norm(torch.nn.Module):
    """Root mean square norm that records whether its gradient is of a part of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self._eps = eps
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self._eps)


def with_attention(layers: Any) -> None:
    """Use `CoreAttention` in every layer of a block's spec."""
    for layer in layers:
        layer.submodules.self_attention.submodules.core_attention = CoreAttention


def with_norms(block: Any) -> None:
    """Use `Norm` for every norm of a block's spec."""
    block.layer_norm = Norm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = Norm
        layer.submodules.pre_mlp_layernorm = Norm
        attention = layer.submodules.self_attention.submodules
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if name in vars(attention):
                vars(attention)[name] = Norm
