"""A Megatron-core (0.16 to 0.18) `TrainEngine`: Megatron's own wrapper, schedules and optimizers around the user's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    USING_PYTORCH_OPTIMIZER,
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from windlass.config import ReplicaPlace, take_name
from windlass.errors import ConfigError
from windlass.jobs.fsdp_engine import (
    LossMean,
    Samples,
    micro_batches,
    start_process_group,
)
from windlass.jobs.megatron_cpu import install, without_cuda_tensors
from windlass.jobs.train_worker import TrainContext, TrainEngine
from windlass.trainers.client import TrainerClient
from windlass.trainers.exporter import Exporter
from windlass.trainers.megatron import ROUTER_BIASES, connect_megatron_trainer, make_whole
from windlass.transports.registry import TransportConfig

_STATE = ("params", "step")
"""Keys of an optimizer's parameter groups that are no settings."""
_SHARDING = "dp_reshardable"
"""Megatron's name for the format in which `save` writes the state of a distributed optimizer."""
BuildChunk = Callable[[TransformerConfig, bool, bool, int | None], torch.nn.Module]
"""Function that builds a model chunk (`GPTModel`), called "model provider" in Megatron's scripts. Arguments: the
configuration, whether the chunk has the embedding, whether the chunk has the output layer, and the chunk's virtual
pipeline stage (None without virtual stages)."""

LossOf = Callable[[torch.Tensor], torch.Tensor]
"""Function that computes the scalar loss from the output of the last pipeline stage."""
Forward = Callable[[torch.nn.Module, Samples], tuple[torch.Tensor, LossOf]]
"""Function of a model chunk and the groups of a micro-batch. It returns the chunk's output, and a `LossOf`."""


@final
class MegatronEngine(TrainEngine):
    """`TrainEngine` of a Megatron-core rank.

    Tensor-, pipeline- and context-parallel ranks get the same samples. The loss of a step is the mean over the samples
    (or tokens) of all ranks. Megatron sums the gradients of context-parallel ranks. So the loss on such a rank must
    contain only the terms of this rank's part of the sequence.

    Args:
        config: Megatron's configuration of the model, including the sizes of parallel groups.
        model: see `BuildChunk`. Called once per virtual stage, after Megatron's groups exist and seeds are set.
        optimizer: Megatron's configuration of the optimizer, including gradient clipping.
        forward: see `Forward`.
        vocab_size: vocabulary size of the checkpoint that engines serve.
        family: family of that checkpoint; see `connect_megatron_trainer`.
        exporter: exporter of a checkpoint converter such as mbridge; see `connect_megatron_trainer`. The function is not
            called before Megatron's groups exist, so it may create the converter.
        ddp: configuration of Megatron's data-parallel wrapper.
        lr_schedule: function that builds Megatron's schedule for the optimizer. The schedule is stepped by 1 after each
            optimizer step, and saved and loaded with the optimizer.
        loss_mean: unit over which the loss is a mean.
        num_groups: largest number of groups in a micro-batch; 0 for one micro-batch of all groups. All ranks run the
            same number of micro-batches.
        seq_length: sequence length of every micro-batch. Needed with pipeline stages, unless
            `config.variable_seq_lengths` is set: the stages exchange tensors of this size.
        micro_batch_size: number of sequences in every micro-batch, needed in the same cases as `seq_length`.
        seed: seed of pipeline stage 0; stage N uses `seed + 100 * N`, as Megatron's scripts do.
        backend: backend of torch.distributed.
        device: torch device of the model; "cuda" is the first GPU that this rank sees. With "cpu", `setup` replaces
            Megatron's calls of CUDA in this process (`windlass.jobs.megatron_cpu`).
        publish_to_fleet: whether to connect to the controller's fleet.
        transport: see `connect_megatron_trainer`.
        replica: see `connect_megatron_trainer`.
        allow_unused: see `connect_trainer`.
        use_main_params: see `connect_megatron_trainer`.
        ignore: see `connect_megatron_trainer`.

    Raises:
        ConfigError: `num_groups` is below 0, or there are pipeline stages and `seq_length` or `micro_batch_size` is
            missing.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        model: BuildChunk,
        optimizer: OptimizerConfig,
        forward: Forward,
        vocab_size: int,
        family: str | None = None,
        exporter: Exporter | None = None,
        ddp: DistributedDataParallelConfig | None = None,
        lr_schedule: Callable[[MegatronOptimizer], OptimizerParamScheduler] | None = None,
        loss_mean: LossMean = LossMean.SAMPLES,
        num_groups: int = 0,
        seq_length: int = 0,
        micro_batch_size: int = 0,
        seed: int = 1234,
        backend: str = "cpu:gloo,cuda:nccl",
        device: str = "cuda",
        publish_to_fleet: bool = True,
        transport: str | TransportConfig = "auto",
        replica: ReplicaPlace = ReplicaPlace.OFF,
        allow_unused: Sequence[str] = (),
        use_main_params: bool = False,
        ignore: Sequence[str] = (),
    ) -> None:
        if num_groups < 0:
            raise ConfigError(f"MegatronEngine: num_groups must be >= 0, got {num_groups}")
        stages = config.pipeline_model_parallel_size
        if stages > 1 and not config.variable_seq_lengths and not (seq_length and micro_batch_size):
            raise ConfigError(
                f"MegatronEngine: seq_length and micro_batch_size must be > 0 with {stages} pipeline stages, got {seq_length} "
                f"and {micro_batch_size}; or set config.variable_seq_lengths"
            )
        self._config, self._build, self._forward = config, model, forward
        self._family, self._exporter, self._vocab_size = family, exporter, vocab_size
        self._ddp = ddp or DistributedDataParallelConfig()
        self._options, self._build_lr_schedule = optimizer, lr_schedule
        self._loss_mean = take_name("MegatronEngine: loss_mean", loss_mean, LossMean)
        self._num_groups, self._seq_length, self._rows = num_groups, seq_length, micro_batch_size
        self._seed, self._backend, self._device = seed, backend, torch.device(device)
        self._publish_to_fleet, self._transport = publish_to_fleet, transport
        self._replica = take_name("replica", replica, ReplicaPlace)
        self._allow_unused = allow_unused
        self._use_main_params, self._ignore = use_main_params, tuple(ignore)
        self._chunks: list[DistributedDataParallel] = []
        self._optimizer: MegatronOptimizer | None = None
        self._lr_schedule: OptimizerParamScheduler | None = None
        self._num_steps = 0
        self._is_frozen = False
        self._client: TrainerClient | None = None
        self._on_cpu = ExitStack()

    @property
    def chunks(self) -> Sequence[DistributedDataParallel]:
        """Model chunks of this rank, one per virtual pipeline stage; empty before `setup`."""
        return tuple(self._chunks)

    def setup(self, context: TrainContext) -> tuple[int, int]:
        """Start all process groups, build the chunks and the optimizer, and connect to the fleet. Collective.

        Set the random seeds. Set the callbacks in Megatron's configuration: they scale and finalise gradients, and defer
        the reduction of gradients. Also set `calculate_per_token_loss` to False, because `loss_mean` determines the mean.
        With virtual stages on two pipeline stages, also set `overlap_p2p_comm`.

        Returns:
            Data-parallel rank of this rank, and number of data-parallel ranks.
        """
        config = self._config
        if self._device.type == "cpu":
            install()
            self._on_cpu.enter_context(without_cuda_tensors())
        start_process_group(context, self._backend, self._device)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        )
        seed = self._seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        if config.virtual_pipeline_model_parallel_size and config.pipeline_model_parallel_size == 2:
            # Otherwise two ranks exchange several tensors in one batch of messages. Each rank then receives an activation in
            # place of a gradient, or of another activation, without an error. Megatron's scripts refuse this setting.
            config.overlap_p2p_comm, config.batch_p2p_comm = True, False
        # If this were True, Megatron would add the gradients of data-parallel ranks, and expect sums of losses.
        config.calculate_per_token_loss = False
        self._chunks = [self._chunk(stage) for stage in self._stages()]
        self._optimizer = get_megatron_optimizer(self._options, list(self._chunks))
        if self._options.optimizer == "sgd" and not self._options.optimizer_cpu_offload:
            # Megatron (0.16.1) calls this function before it loads a checkpoint, but has none for SGD.
            for each in self._single_optimizers():
                each.init_state_fn = _add_momentum
        self._is_frozen = self._freezes_on_any_rank()
        config.grad_scale_func = self._optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        # Reduce gradients in the last micro-batch only.
        if self._ddp.overlap_grad_reduce:
            waiting = [chunk.no_sync for chunk in self._chunks]
            config.no_sync_func = waiting if len(waiting) > 1 else waiting[0]
        if self._build_lr_schedule is not None:
            self._lr_schedule = self._build_lr_schedule(self._optimizer)
        if self._publish_to_fleet:
            self._client = connect_megatron_trainer(
                self._chunks,
                family=self._family,
                exporter=self._exporter,
                vocab_size=self._vocab_size,
                controller=context.controller,
                token=context.token,
                transport=self._transport,
                use_main_params=self._use_main_params,
                ignore=self._ignore,
                replica=self._replica,
                allow_unused=self._allow_unused,
                connect_deadline_s=context.deadline_s,
            )
        return (
            int(parallel_state.get_data_parallel_rank()),
            int(parallel_state.get_data_parallel_world_size()),
        )

    def _freezes_on_any_rank(self) -> bool:
        """Return whether a rank has parameters that are not trained. Collective over all ranks."""
        parameters = [p for chunk in self._chunks for p in chunk.parameters()]
        found = torch.tensor(int(not all(p.requires_grad for p in parameters)), device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def _stages(self) -> Sequence[int | None]:
        """Return the numbers of this rank's virtual pipeline stages, or one None if there are no virtual stages."""
        number = self._config.virtual_pipeline_model_parallel_size
        return [None] if number is None else range(number)

    def _chunk(self, stage: int | None) -> DistributedDataParallel:
        """Build the model chunk of a virtual stage on the device, in Megatron's wrappers."""
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        chunk = self._build(self._config, first, last, stage).to(self._device)
        if self._config.bf16 or self._config.fp16:
            biases = {n: b.data for n, b in chunk.named_buffers() if n.endswith(ROUTER_BIASES)}
            chunk = Float16Module(self._config, chunk)
            # The wrapper rounds the biases of routers. Megatron's routers convert them back, but cannot undo the rounding.
            for name, buffer in chunk.module.named_buffers():
                if name in biases:
                    buffer.data = biases[name]
        return DistributedDataParallel(self._config, self._ddp, chunk)

    def train_step(self, step: int, groups: Samples) -> Mapping[str, float]:  # noqa: ARG002
        """Take one optimizer step, and advance the learning-rate schedule; see `TrainEngine.train_step`. Collective.

        With float16, Megatron skips the step if a gradient is not finite. The schedule then does not advance either.

        Returns:
            The mean loss and `skipped` (1 for a skipped step, otherwise 0). Also `grad_norm`, the gradient norm, if
            Megatron computes it, and `lr`, the learning rate of this step, if there is a schedule.

        Raises:
            ConfigError: `setup` was not called yet; or see `micro_batches`.
        """
        optimizer = self._existing_optimizer()
        pieces = micro_batches(groups, self._num_groups, self._loss_mean, self._device)
        pieces += [(pieces[-1][0], 0.0)] * self._num_missing(len(pieces))
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, len(pieces)),
            data_iterator=[iter(pieces) for _ in self._chunks],
            model=list(self._chunks),
            num_microbatches=len(pieces),
            seq_length=self._seq_length,
            micro_batch_size=self._rows,
            forward_only=False,
        )
        is_stepped, norm, _ = optimizer.step()
        self._num_steps += bool(is_stepped)
        metrics = {"loss": self._loss(losses), "skipped": float(not is_stepped)}
        if norm is not None:
            metrics["grad_norm"] = float(norm)
        if self._lr_schedule is not None:
            metrics["lr"] = float(optimizer.param_groups[0]["lr"])
            if is_stepped:
                self._lr_schedule.step(increment=1)
        return metrics

    def _num_missing(self, num_pieces: int) -> int:
        """Return the number of micro-batches that Megatron's schedule of virtual stages needs in addition to `num_pieces`.

        The schedule divides the micro-batches into equal groups, and the last group may be smaller. But every group must have
        at least one micro-batch per pipeline stage.
        """
        config = self._config
        if config.virtual_pipeline_model_parallel_size is None:
            return 0
        largest, least = (
            config.microbatch_group_size_per_vp_stage,
            config.pipeline_model_parallel_size,
        )
        in_last = num_pieces % largest
        if num_pieces < largest:
            return int(largest - num_pieces)
        return max(0, int(least - in_last)) if in_last else 0

    def _forward_step(
        self, num_pieces: int, pieces: Iterator[tuple[Samples, float]], chunk: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
        """Run the forward pass of the next micro-batch. Megatron's schedule calls this with its iterator and model chunk.

        Args:
            num_pieces: number of micro-batches of the step. The schedule divides each loss by this number, so this
                method first multiplies the loss by it.
            pieces: iterator over (groups, weight) of the micro-batches.
            chunk: model chunk that computes.

        Returns:
            Output of the chunk, and a function that computes the loss from the output of the last pipeline stage.
        """
        groups, weight = next(pieces)
        output, loss_of = self._forward(chunk, groups)
        if output.requires_grad:
            # This hook runs at the beginning of the backward pass of this micro-batch.
            register: Any = output.register_hook
            register(partial(self._weight_auxiliary_losses, weight))

        def weighted(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = loss_of(output) * weight
            return loss * num_pieces, loss.detach()

        return output, weighted

    def _weight_auxiliary_losses(self, weight: float, _: torch.Tensor) -> None:
        """Give the auxiliary losses of routers, and the losses of MTP layers, the weight of the micro-batch.

        Megatron adds the gradients of these losses in the backward pass, where it gives all micro-batches the same weight.
        """
        scale = self._existing_optimizer().scale_loss(torch.full((1,), weight, device=self._device))
        # Megatron (0.16.1) multiplies the losses of routers by the number of context-parallel ranks, because it averages
        # gradients over these ranks. It does not multiply the losses of MTP layers by this number.
        size = parallel_state.get_context_parallel_world_size()
        MoEAuxLossAutoScaler.set_loss_scale(scale * size)
        MTPLossAutoScaler.set_loss_scale(scale)

    def _loss(self, losses: Sequence[torch.Tensor]) -> float:
        """Return the loss of the step on every rank. Collective over all ranks.

        `losses` has one loss per micro-batch on ranks of the last pipeline stage. The loss of the step is their sum,
        summed over context-parallel ranks and averaged over data-parallel ranks.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        total = torch.zeros((), device=self._device)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            total += sum(loss.float() for loss in losses)
            dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            total /= parallel_state.get_data_parallel_world_size()
        dist.broadcast(total, dist.get_process_group_ranks(group)[-1], group=group)
        return float(total)

    def prepare_publish(self, version: int) -> bool:
        """See `TrainEngine.prepare_publish`. Raise `ConfigError` if this rank is not connected to a fleet."""
        if self._client is None:
            raise ConfigError(
                "MegatronEngine: no connection to a fleet; set publish_to_fleet=True, and call setup before "
                "prepare_publish"
            )
        self._client.prepare_publish(version)
        return self._replica is not ReplicaPlace.OFF

    def save(self, path: str) -> None:
        """Save model, optimizer and schedule as Megatron's distributed checkpoint, without states of random generators.

        A job with different parallel sizes can load the checkpoint. With a distributed optimizer, all sizes except the
        number of data-parallel ranks must be equal, because Megatron 0.16.1 with torch's Adam cannot load the
        checkpoint format that allows different sizes.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        # With `overlap_param_gather`, this rank still has old values of the parameters that other ranks have updated.
        make_whole(self._chunks)
        if not self._num_steps and not self._options.optimizer_cpu_offload:
            self._create_states()
        dist_checkpointing.save(self._state(is_loading=False), path)

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Load models, optimizer, number of steps and schedule in place from a checkpoint of `save`. Collective.

        The settings of the optimizer, such as the learning rate, stay as its configuration says. The arguments
        `use_checkpoint_opt_param_scheduler` and `override_opt_param_scheduler` of Megatron's schedule say which of the
        schedule's settings come from the checkpoint.
        """
        optimizer = self._existing_optimizer()
        kept = [
            {name: value for name, value in group.items() if name not in _STATE}
            for group in optimizer.param_groups
        ]
        self._set_steps()
        found = dist_checkpointing.load(self._state(is_loading=True), path)
        for name, model in self._models():
            model.load_state_dict(found[name])
        if self._counts_steps():
            _add_steps(found["optimizer"], found["num_steps"])
        if self._has_saved_state():
            _add_sharding(found["optimizer"])
            optimizer.load_state_dict(found["optimizer"])
        for group, settings in zip(optimizer.param_groups, kept, strict=True):
            group.update(settings)
        self._num_steps = found["num_steps"]
        self._set_steps()
        if self._lr_schedule is not None:
            # Megatron's `load_state_dict` adds the saved number of steps to the schedule's `num_steps`.
            self._lr_schedule.num_steps = 0
            self._lr_schedule.load_state_dict(found["lr_schedule"])

    def _set_steps(self) -> None:
        """Create torch's Adam states, and give every parameter its own step counter with the value `_num_steps`.

        Do nothing if Megatron uses an optimizer other than torch's Adam. `load` calls this before it loads, because
        Megatron's distributed optimizer (0.16.1) can only load into existing states. After loading, all parameters share
        one counter tensor, which each step would increase once per parameter. So `load` then calls this again.
        """
        if not self._counts_steps():
            return
        for each in self._single_optimizers():
            each.init_state_fn(each.optimizer, each.config)
            for state in each.optimizer.state.values():
                state["step"] = torch.tensor(float(self._num_steps))

    def _create_states(self) -> None:
        """Create the states of all optimizers with the values that they have before the first step.

        Without states, Megatron's distributed optimizer (0.16.1) cannot be saved, and the checkpoint of any other optimizer cannot
        be loaded.
        """
        for each in self._single_optimizers():
            each.init_state_fn(each.optimizer, each.config)
        self._set_steps()

    def _has_saved_state(self) -> bool:
        """Return whether a checkpoint has a state of this rank's optimizer.

        Megatron's distributed optimizer (0.16.1) cannot save the state of a pipeline stage without trained parameters.
        """
        parameters = [p for chunk in self._chunks for p in chunk.parameters()]
        is_trained = any(p.requires_grad for p in parameters)
        return is_trained or not self._options.use_distributed_optimizer

    def _counts_steps(self) -> bool:
        """Return whether the optimizer is torch's Adam, which has a step counter per parameter."""
        return bool(USING_PYTORCH_OPTIMIZER) and self._options.optimizer == "adam"

    def _single_optimizers(self) -> Sequence[Any]:
        """Return the optimizers that Megatron has chained, or the only one."""
        optimizer = self._existing_optimizer()
        if isinstance(optimizer, ChainedOptimizer):
            return tuple(optimizer.chained_optimizers)
        return (optimizer,)

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        """Return the sharded state to save; with `is_loading`, return a description of the state to load. Collective."""
        sharding = {"distrib_optim_sharding_type": _SHARDING}
        # By default, Megatron stacks the layers' tensors in a checkpoint. But frozen layers have no state of the optimizer.
        apart = {"non_homogeneous_layers": True} if self._is_frozen else None
        state: dict[str, Any] = {
            name: model.sharded_state_dict(metadata=apart) for name, model in self._models()
        }
        optimizer: dict[str, Any] = {}
        if self._has_saved_state():
            optimizer = self._existing_optimizer().sharded_state_dict(
                dict(state),
                is_loading=is_loading,
                metadata=sharding if self._options.use_distributed_optimizer else None,
            )
        state |= {"optimizer": optimizer, "num_steps": self._num_steps}
        if self._lr_schedule is not None:
            state["lr_schedule"] = self._lr_schedule.state_dict()
        return state

    def _models(self) -> Iterator[tuple[str, Any]]:
        """Yield (name in a checkpoint, model without Megatron's data-parallel wrapper) of each chunk."""
        for number, chunk in enumerate(self._chunks):
            yield (f"model{number}" if len(self._chunks) > 1 else "model"), chunk.module

    def _existing_optimizer(self) -> MegatronOptimizer:
        """Return the optimizer; raise `ConfigError` before `setup`."""
        if self._optimizer is None:
            raise ConfigError("MegatronEngine: no optimizer yet; call setup first")
        return self._optimizer

    def close(self) -> None:
        """Close the connection to the fleet, and destroy the process groups of Megatron and torch. Idempotent.

        On a CPU, also undo `without_cuda_tensors`; the effects of `install` stay.
        """
        if self._client is not None:
            self._client.close()
            self._client = None
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        self._on_cpu.close()


def _add_steps(state: object, num_steps: int) -> None:
    """Add the number of steps to loaded states of optimizers, where it is missing.

    Rank 0 saves this number for all ranks. It does not if its pipeline stage has no trained parameters.
    """
    if not isinstance(state, dict):
        return
    if "param_groups" in state and state.get("state"):
        state["state"].setdefault("common_step", torch.tensor(float(num_steps)))
        return
    for each in state.values():
        _add_steps(each, num_steps)


def _add_sharding(state: object) -> None:
    """Add the name of the format to loaded states of distributed optimizers, where it is missing.

    Rank 0 saves this name for all ranks. It does not if its pipeline stage has no trained parameters.
    """
    if not isinstance(state, dict):
        return
    if "param_state" in state:
        state.setdefault("param_state_sharding_type", _SHARDING)
        return
    for each in state.values():
        _add_sharding(each)


def _add_momentum(optimizer: torch.optim.Optimizer, _: OptimizerConfig) -> None:
    """Create the states of an SGD optimizer with momentum, so that a checkpoint can be loaded into them."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
