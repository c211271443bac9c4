"""Training steps with the wrapper, schedules and optimizers of Megatron-core. Tests only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from local_modules import zigzag

NUM_MICROBATCHES = 2

Reduce = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, Any]]]
"""Function from the last stage's output to a scalar and a report."""
Compute = Callable[..., tuple[torch.Tensor, Reduce]]
"""Function from a model and its inputs to its output."""


class RealTraining:
    """AdamW over the chunks of one rank.

    Args:
        ddp, optimizer: further arguments of Megatron's two configurations.

    Attributes:
        models: the chunks in `DistributedDataParallel`. A distributed optimizer moves their
            parameters into its own buffers.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        *,
        num_tokens: int,
        lr: float,
        distributed: bool = False,
        ddp: Mapping[str, Any] = MappingProxyType({}),
        optimizer: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._config, self._num_tokens = chunks[0].config, num_tokens
        bf16 = bool(self._config.bf16)
        wrapping = DistributedDataParallelConfig(use_distributed_optimizer=distributed, **ddp)
        self.models = [DistributedDataParallel(self._config, wrapping, chunk) for chunk in chunks]
        options = OptimizerConfig(
            optimizer="adam", lr=lr, weight_decay=0.0, clip_grad=0.0, bf16=bf16,
            use_distributed_optimizer=distributed, params_dtype=self._config.params_dtype, **optimizer,
        )  # fmt: skip
        self._optimizer = get_megatron_optimizer(options, self.models)
        self._config.finalize_model_grads_func = finalize_model_grads
        self._config.grad_scale_func = self._optimizer.scale_loss
        self._schedule = get_forward_backward_func()

    def step(self) -> None:
        """Train one step. Collective."""
        for model in self.models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._run(self._losses, forward_only=False)
        done, _, _ = self._optimizer.step()
        assert done

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean over all micro-batches; nan except on the last stage. Collective."""
        losses = [report["loss"] for report in self._run(self._losses, forward_only=True)]
        return sum(losses) / len(losses) if losses else float("nan")

    @torch.no_grad()
    def logits(self) -> list[torch.Tensor]:
        """Return (tokens, padded vocabulary) of every micro-batch; empty except on the last stage.
        Collective."""
        return [report["logits"] for report in self._run(self._logits, forward_only=True)]

    def _run(self, compute: Compute, *, forward_only: bool) -> list[dict[str, Any]]:
        from megatron.core import parallel_state

        reports: list[dict[str, Any]] = self._schedule(
            forward_step_func=functools.partial(self._forward, compute),
            data_iterator=[microbatches(self._num_tokens) for _ in self.models],
            model=self.models,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=self._num_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return reports if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else []

    def _forward(self, compute: Compute, batches: Iterator[torch.Tensor], model: Any) -> Any:
        """Return a stage's output and the last stage's reduction, as Megatron's schedules expect them."""
        ids = next(batches)
        group = context_group()
        mine = zigzag(self._num_tokens, group.size())[group.rank()]
        place = torch.arange(self._num_tokens).reshape(1, -1)
        mask = torch.triu(torch.ones(1, 1, self._num_tokens, self._num_tokens, dtype=torch.bool), 1)
        return compute(model, ids[:, mine], place[:, mine], mask, ids.roll(-1)[:, mine])

    def _losses(self, model: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, Reduce]:
        output: torch.Tensor = model(*inputs[:3], labels=inputs[3])

        def reduce(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            mean, group = losses.detach().mean(), context_group()
            dist.all_reduce(mean, group=group)
            return losses.mean(), {"loss": float(mean) / group.size()}

        return output, reduce

    def _logits(self, model: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, Reduce]:
        output: torch.Tensor = model(*inputs[:3], runtime_gather_output=True)

        def reduce(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            group = context_group()
            parts = [torch.empty_like(logits) for _ in range(group.size())]
            dist.all_gather(parts, logits.contiguous(), group=group)
            places = torch.cat(zigzag(self._num_tokens, group.size()))
            return logits.sum(), {"logits": torch.cat(parts, 1)[0, places.argsort()].float()}

        return output, reduce


def context_group() -> dist.ProcessGroup:
    """Return the ranks that share a sequence."""
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    return group


def microbatches(num_tokens: int) -> Iterator[torch.Tensor]:
    """Yield (1, tokens) without end, because interleaved stages take inputs more than once."""
    number = 0
    while True:
        yield (
            torch.arange(num_tokens).reshape(1, -1) * (3 + number % NUM_MICROBATCHES * 4) + 1
        ) % 60
        number += 1
