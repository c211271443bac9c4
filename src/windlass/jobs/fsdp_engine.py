"""An FSDP2 `TrainEngine`: model, optimiser and loss are the user's callables."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import LRScheduler

from windlass.config import ReplicaPlace, check_numbers, take_name
from windlass.errors import ConfigError
from windlass.jobs.logprob_check import LogprobCheck
from windlass.jobs.train_worker import TrainContext, TrainEngine
from windlass.rollout.messages import TrainingSample
from windlass.sampling import SamplingParams
from windlass.trainers.client import TrainerClient
from windlass.trainers.fsdp import connect_trainer
from windlass.transports.registry import TransportConfig

Samples = Sequence[Sequence[TrainingSample]]
"""Groups that one rank gets in a training step; each group is a sequence of samples."""
LossResult = torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Scalar loss, or the loss with further scalars by name. A step reports the mean of each, weighted as the loss is."""


_SETTINGS = "settings"
"""Name of the optimizer's settings in a checkpoint."""


def start_process_group(context: TrainContext, backend: str, device: torch.device) -> None:
    """Start torch.distributed's default process group, and set this rank's CUDA device. Collective over all ranks.

    The ranks meet at the TCP store that rank 0 already serves (see `TrainContext.store_host`).

    Args:
        context: argument of `TrainEngine.setup`.
        backend: backend of torch.distributed.
        device: torch device of the model; a CUDA device without an index is the first GPU that this rank sees.
    """
    deadline = timedelta(seconds=context.deadline_s)
    timeout = timedelta(seconds=context.collective_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        context.store_host, context.store_port, is_master=False, timeout=deadline
    )
    dist.init_process_group(
        backend, store=store, rank=context.rank, world_size=context.world_size, timeout=timeout
    )
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


class LossMean(StrEnum):
    """Unit over which the user's loss is a mean: samples, samples with a trained token, or trained tokens.

    The weight of a micro-batch's loss is the number of units in it.

    Attributes:
        SAMPLES: all samples.
        TRAINED_SAMPLES: samples with at least one trained token.
        TOKENS: trained tokens, which are the tokens that `loss_mask` selects.
    """

    SAMPLES = "samples"
    TRAINED_SAMPLES = "trained_samples"
    TOKENS = "tokens"

    def weight(self, groups: Samples) -> int:
        """Return the number of units in these groups."""
        samples = [sample for group in groups for sample in group]
        match self:
            case LossMean.SAMPLES:
                return len(samples)
            case LossMean.TRAINED_SAMPLES:
                return sum(sample.num_trained > 0 for sample in samples)
            case LossMean.TOKENS:
                return sum(sample.num_trained for sample in samples)


_UNITS = {
    LossMean.SAMPLES: "sample",
    LossMean.TRAINED_SAMPLES: "trained sample",
    LossMean.TOKENS: "trained token",
}
"""Names of the units in error messages."""


def micro_batches(
    groups: Samples,
    num_groups: int,
    loss_mean: LossMean,
    device: torch.device,
    cut: Callable[[Samples], Sequence[Samples]] | None = None,
) -> list[tuple[Samples, float]]:
    """Cut a rank's groups into micro-batches. Collective over all ranks.

    Every rank returns the same number of micro-batches, because training on a micro-batch runs collectives. So a rank with
    too few micro-batches repeats its last group, or the last piece of `cut`, with weight 0.

    Args:
        groups: groups of this rank.
        num_groups: largest number of groups in a micro-batch; 0 for one micro-batch of all groups.
        loss_mean: unit over which the loss is a mean. The weight of a micro-batch is its number of units, divided by the
            mean number of units per rank.
        device: device on which the process group can gather tensors.
        cut: function that cuts groups into micro-batches, in place of `num_groups`. The micro-batches must contain all
            units of the groups. With `cut`, all samples of a rank may lack trained tokens. Their micro-batches have
            weight 0, but the loss of these micro-batches must still be a finite number.

    Returns:
        Groups and weight of each micro-batch. To get the mean over the units of all ranks, sum the weighted losses
        on each rank and average the sums over data-parallel ranks.

    Raises:
        ConfigError: a rank has no unit (with `cut`: no sample), or `cut` does not return every unit once. Every rank
            raises.
    """
    own_pieces = list(cut(groups)) if cut is not None else None
    num_pieces = -(-len(groups) // num_groups) if num_groups else 1
    own_weight = cut_weight = loss_mean.weight(groups)
    if own_pieces is not None:
        num_pieces, cut_weight = len(own_pieces), sum(map(loss_mean.weight, own_pieces))
    # Do not fill with all groups of the rank, because they could need more memory than a micro-batch. A piece of `cut` may
    # be empty, so choose one with samples.
    filler = next((piece for piece in reversed(own_pieces or ()) if any(piece)), groups[-1:])
    can_run = own_weight > 0 or any(map(any, own_pieces or ()))
    own = torch.tensor(
        [num_pieces, own_weight, cut_weight, can_run], dtype=torch.float64, device=device
    )
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    counts = torch.stack(every)
    weights = counts[:, 1].tolist()
    unit = _UNITS[loss_mean]
    can_ranks_run = counts[:, 3].tolist()
    if 0 in can_ranks_run:
        raise ConfigError(
            f"train_step: every rank must have at least one {unit}, got none on rank {can_ranks_run.index(0)}; "
            f"give each step at least as many groups with a {unit} as there are data-parallel ranks"
        )
    for rank, (_, weight, in_pieces, _) in enumerate(counts.tolist()):
        if in_pieces != weight:
            raise ConfigError(
                f"train_step: cut must return every {unit} once, got {in_pieces:g} of {weight:g} {unit}s on rank {rank}"
            )
    num_pieces = int(counts[:, 0].max())
    mean_weight = sum(weights) / len(weights) or 1.0
    pieces: list[tuple[Samples, float]] = []
    for piece in range(num_pieces):
        if own_pieces is not None:
            found = own_pieces[piece] if piece < len(own_pieces) else ()
        else:
            begin, end = (len(groups) * n // num_pieces for n in (piece, piece + 1))
            found = groups[begin:end]
        pieces.append((found or filler, loss_mean.weight(found) / mean_weight))
    return pieces


@final
@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Sizes of the axes of the trainers' device mesh, named as in torchtitan.

    The size of the axis `dp_shard`, over which FSDP2 shards, is the world size divided by the product of these sizes.

    Attributes:
        dp_replicate: number of replicas of the shards (HSDP); gradients are averaged over the replicas.
        cp: number of ranks that share each sequence. FSDP2 shards parameters over these ranks too.
        tp: number of ranks that split the parameters, see `tensor_parallel` of `FsdpEngine`.

    Raises:
        ConfigError: a size is below 1.
    """

    dp_replicate: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        check_numbers(self, {"dp_replicate": 1, "cp": 1, "tp": 1})

    def axes(self, world_size: int) -> dict[str, int]:
        """Return the name and size of each axis of the mesh, outermost first, without axes of size 1.

        The axis `dp_shard` is always included. The mesh has `world_size` ranks.

        Raises:
            ConfigError: dp_replicate * cp * tp does not divide `world_size`.
        """
        others = self.dp_replicate * self.cp * self.tp
        if world_size % others:
            raise ConfigError(
                f"ParallelSizes: dp_replicate * cp * tp must divide the {world_size} ranks, got "
                f"{self.dp_replicate} * {self.cp} * {self.tp}"
            )
        sizes = {
            "dp_replicate": self.dp_replicate,
            "dp_shard": world_size // others,
            "cp": self.cp,
            "tp": self.tp,
        }
        return {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp_shard"}


@final
class FsdpEngine(TrainEngine):
    """`TrainEngine` of an FSDP2 rank.

    Tensor- and context-parallel ranks form one data-parallel rank and get the same samples. The loss of a step is the
    mean over the samples (or tokens) of all ranks, even if the ranks have different numbers of samples.

    Args:
        model: function that builds the module. It is called when the process group exists and torch's seed is set.
        optimizer: function that builds the optimizer from the sharded module.
        loss: function of the module and this rank's groups; returns a scalar, or a scalar and metrics, see `LossResult`.
            The scalar must depend on the module even without samples, because all ranks must enter the collectives of the
            backward pass. Samples may use different parameters of a unit (experts), but all ranks must run the same units.
            The names of the metrics must be the same on all ranks.
        prepare: function that is called once per step with all groups of this rank, and returns the groups for the loss,
            for example with advantages in their tensors. It may run collectives.
        units: function that returns the submodules to shard separately, usually decoder layers; None to shard the
            module as a whole.
        sizes: sizes of the mesh axes. With `cp`, the loss must cut sequences over `mesh["cp"]`.
        tensor_parallel: function that splits the module over `mesh["tp"]`, for example with torch's
            `parallelize_module`; called before FSDP2 shards the module. Required if `sizes.tp` > 1.
        loss_mean: unit over which `loss` is a mean.
        num_groups: largest number of groups in a micro-batch; 0 for one micro-batch of all groups. All ranks run the
            same number of micro-batches.
        cut: function that cuts the groups of this rank into micro-batches, in place of `num_groups`. It may split groups,
            but must return every sample once; `prepare` may drop samples.
        lr_schedule: function that builds the schedule from the optimizer. The schedule is stepped after the optimizer,
            and saved and loaded with it.
        mixed_precision: FSDP2's policy. Parameters are stored and published in the dtype that `model` gave them.
        backend: backend of torch.distributed, for example "cpu:gloo,cuda:nccl" on GPUs.
        device: device to which the model is moved before it is sharded; "cuda" is the first GPU that this rank sees.
        seed: torch's seed, set before `model` is called.
        max_grad_norm: norm to which gradients are clipped; 0 for no clipping.
        publish_to_fleet: whether to connect to the controller's fleet.
        transport: see `connect_trainer`.
        replica: see `connect_trainer`, and `TrainController.publish` for what a replica does.
        allow_unused: see `connect_trainer`.
        export: function that writes the module into a checkpoint's folder in another format, after each `save`. It runs
            on all ranks and may run collectives.

    Raises:
        ConfigError: `num_groups` is negative, `tensor_parallel` and `sizes.tp` contradict each other, or the value of
            `loss_mean` or `replica` is unknown.
    """

    def __init__(
        self,
        *,
        model: Callable[[], torch.nn.Module],
        optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        loss: Callable[[torch.nn.Module, Samples], LossResult],
        prepare: Callable[[Samples], Samples] | None = None,
        units: Callable[[torch.nn.Module], Sequence[torch.nn.Module]] | None = None,
        sizes: ParallelSizes = ParallelSizes(),
        tensor_parallel: Callable[[torch.nn.Module, DeviceMesh], object] | None = None,
        loss_mean: LossMean = LossMean.SAMPLES,
        num_groups: int = 0,
        cut: Callable[[Samples], Sequence[Samples]] | None = None,
        lr_schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        backend: str = "gloo",
        device: str = "cpu",
        seed: int = 0,
        max_grad_norm: float = 1.0,
        publish_to_fleet: bool = True,
        transport: str | TransportConfig = "auto",
        replica: ReplicaPlace = ReplicaPlace.OFF,
        allow_unused: Sequence[str] = (),
        export: Callable[[torch.nn.Module, Path], None] | None = None,
    ) -> None:
        self._build, self._build_optimizer, self._loss = model, optimizer, loss
        self._prepare, self._cut, self._export = prepare, cut, export
        if num_groups < 0:
            raise ConfigError(f"FsdpEngine: num_groups must be >= 0, got {num_groups}")
        if (sizes.tp > 1) != (tensor_parallel is not None):
            raise ConfigError(
                "FsdpEngine: tensor_parallel must be given if and only if sizes.tp > 1, "
                f"got {tensor_parallel} and sizes.tp={sizes.tp}"
            )
        self._loss_mean = take_name("FsdpEngine: loss_mean", loss_mean, LossMean)
        self._units, self._device = units, torch.device(device)
        self._sizes, self._tensor_parallel, self._num_groups = sizes, tensor_parallel, num_groups
        self._build_lr_schedule = lr_schedule
        self._mixed_precision = mixed_precision or MixedPrecisionPolicy()
        self._mesh: DeviceMesh | None = None
        self._shard_mesh: DeviceMesh | None = None
        self._lr_schedule: LRScheduler | None = None
        self._backend, self._seed, self._max_grad_norm = backend, seed, max_grad_norm
        self._publish_to_fleet, self._transport = publish_to_fleet, transport
        self._replica = take_name("replica", replica, ReplicaPlace)
        self._allow_unused = allow_unused
        self._model: torch.nn.Module | None = None
        self._used: _UsedParameters | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._settings: list[dict[str, Any]] = []
        self._client: TrainerClient | None = None
        self._sampling: SamplingParams | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The sharded module.

        Raises:
            ConfigError: `setup` was not called yet.
        """
        if self._model is None:
            raise ConfigError("FsdpEngine: no model yet; call setup first")
        return self._model

    @property
    def mesh(self) -> DeviceMesh:
        """Device mesh of all ranks, with the axes that `ParallelSizes.axes` returns.

        Raises:
            ConfigError: `setup` was not called yet.
        """
        if self._mesh is None:
            raise ConfigError("FsdpEngine: no mesh yet; call setup first")
        return self._mesh

    def setup(self, context: TrainContext) -> tuple[int, int]:
        """Start the process group, build and shard the module, build the optimizer, and connect to the fleet. Collective.

        Returns:
            Data-parallel rank of this rank, and number of data-parallel ranks.

        Raises:
            ConfigError: see `ParallelSizes.axes`.
            WindlassError: this rank could not connect to the fleet; see `connect_trainer`.
        """
        axes = self._sizes.axes(context.world_size)
        start_process_group(context, self._backend, self._device)
        torch.manual_seed(self._seed)
        model = self._build().to(self._device)
        mesh = self._mesh = init_device_mesh(
            self._device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
        )
        if self._tensor_parallel is not None:
            self._tensor_parallel(model, mesh["tp"])
        shard_axis = "dp_shard"
        if "cp" in axes:
            shard_axis = "dp_shard_cp"
            mesh["dp_shard", "cp"]._flatten(shard_axis)
        self._shard_mesh = (
            mesh["dp_replicate", shard_axis] if "dp_replicate" in axes else mesh[shard_axis]
        )
        self.shard(model)
        self._used = _UsedParameters(model, self._device)
        self._model, self._optimizer = model, self._build_optimizer(model)
        if self._build_lr_schedule is not None:
            self._lr_schedule = self._build_lr_schedule(self._optimizer)
        self._settings = _settings_of(self._optimizer)
        if self._publish_to_fleet:
            self._client = connect_trainer(
                model,
                controller=context.controller,
                token=context.token,
                transport=self._transport,
                replica=self._replica,
                allow_unused=self._allow_unused,
                connect_deadline_s=context.deadline_s,
            )
        self._sampling = context.sampling
        index = mesh.get_local_rank("dp_shard")
        if "dp_replicate" in axes:
            index += mesh.get_local_rank("dp_replicate") * axes["dp_shard"]
        return index, self._sizes.dp_replicate * axes["dp_shard"]

    def shard(self, model: torch.nn.Module) -> None:
        """Shard another module (for example a reference model) in place, in the same way as the trained module. Collective.

        This engine does not train, publish or save the other module.

        Raises:
            ConfigError: `setup` was not called yet.
        """
        if self._shard_mesh is None:
            raise ConfigError("FsdpEngine: no mesh yet; call setup first")
        for unit in self._units(model) if self._units is not None else ():
            fully_shard(unit, mesh=self._shard_mesh, mp_policy=self._mixed_precision)
        fully_shard(model, mesh=self._shard_mesh, mp_policy=self._mixed_precision)
        # FSDP2 reduces the gradients of a unit as one vector. Without this setting (torch below 2.13 lacks it), the vector
        # has no place for a parameter that this rank's samples do not use, such as an expert. FSDP2 would then
        # add the gradient of this parameter from other ranks to other parameters, without an error.
        is_known = "set_reduce_scatter_unused_params" in vars(FSDPModule)
        if is_known and isinstance(model, FSDPModule):
            model.set_reduce_scatter_unused_params(True)

    def train_step(self, step: int, groups: Samples) -> Mapping[str, float]:
        """Take one optimizer step, and advance the learning-rate schedule; see `TrainEngine.train_step`. Collective.

        Returns:
            The mean loss and the other scalars that the loss function returns. Also `grad_norm`, the gradient norm
            before clipping; `lr`, the learning rate of this step, if there is a schedule; and
            `LOGPROB_DIFFERENCE` in step 0, if the settings of sampling are known.

        Raises:
            ConfigError: `setup` was not called yet; or see `micro_batches`.
        """
        if self._prepare is not None:
            groups = self._prepare(groups)
        if step or self._sampling is None:
            return self._train_step(groups)
        # Compare in the first step only: the engines generated its samples with the weights that this rank has now.
        check = LogprobCheck([s for group in groups for s in group], self._sampling)
        with check.watching(self.model):
            metrics = self._train_step(groups)
        return {**metrics, **check.metrics()}

    def _train_step(self, groups: Samples) -> dict[str, float]:
        """Do the work of `train_step` on prepared groups, without the check of log-probabilities."""
        model, optimizer = self.model, self._existing_optimizer()
        optimizer.zero_grad()
        found: dict[str, list[torch.Tensor]] = defaultdict(list)
        pieces = micro_batches(
            groups, self._num_groups, self._loss_mean, self._device, cut=self._cut
        )
        for number, (micro_batch, weight) in enumerate(pieces, 1):
            # Reduce gradients over the shards in each micro-batch, but over the replicas only in the last micro-batch.
            if isinstance(model, FSDPModule):
                model.set_requires_all_reduce(number == len(pieces))
            result = self._loss(model, micro_batch)
            loss, others = result if isinstance(result, tuple) else (result, {})
            torch.autograd.backward(loss * weight)
            for name, value in {"loss": loss, **others}.items():
                found[name].append(value.detach().to(loss.dtype) * weight)
        if self._used is not None:
            self._used.drop_other_gradients()
        totals = torch.stack([torch.stack(found[name]).sum() for name in sorted(found)])
        dist.all_reduce(totals)
        # All ranks report the same values.
        means = dict(zip(sorted(found), (totals / dist.get_world_size()).tolist(), strict=True))
        metrics = {"loss": means.pop("loss"), **means}
        metrics["grad_norm"] = _clip(model.parameters(), self._max_grad_norm)
        optimizer.step()
        if self._lr_schedule is not None:
            metrics["lr"] = float(self._lr_schedule.get_last_lr()[0])
            self._lr_schedule.step()
        return metrics

    def prepare_publish(self, version: int) -> bool:
        """See `TrainEngine.prepare_publish`. Raise `ConfigError` if this rank is not connected to a fleet."""
        if self._client is None:
            raise ConfigError(
                "FsdpEngine: no connection to a fleet; set publish_to_fleet=True, and call setup before prepare_publish"
            )
        self._client.prepare_publish(version)
        return self._replica is not ReplicaPlace.OFF

    def save(self, path: str) -> None:
        """Save model, optimiser and schedule as a distributed checkpoint, then call `export`. Collective.

        A different number of ranks can load the checkpoint.
        """
        from torch.distributed.checkpoint.state_dict_saver import save

        Path(path).mkdir(parents=True, exist_ok=True)
        optimizer = self._existing_optimizer()
        has_stepped = bool(optimizer.state)
        state = self._state()
        if not has_stepped:
            # torch has run a step with gradients of zero to create the states. Such a step counts in Adam, so the first real
            # step would be smaller.
            optimizer.state.clear()
            state["optimizer"]["state"] = {}
        save(state, checkpoint_id=path)
        if self._export is not None:
            self._export(self.model, Path(path))

    def load(self, path: str) -> None:
        """Load model, optimizer and schedule in place from a checkpoint of `save`. Collective.

        If `optimizer` now gives other settings than in the job that wrote the checkpoint, the new settings hold. With a new
        learning rate, the rate of the checkpoint is scaled by the ratio of the two.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state, optimizer = self._state(), self._existing_optimizer()
        states = state["optimizer"]["state"]
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        # The optimizer has no state for a parameter that never had a gradient, so the checkpoint has none either. Load
        # the states of the other parameters, and remove the state that torch created for this parameter. A checkpoint
        # from before the first step has no states.
        kept = {
            name
            for name, values in states.items()
            if any(f"optimizer.state.{name}.{key}" in saved for key in values)
        }
        unsaved = {name: states.pop(name) for name in [*states] if name not in kept}
        # Checkpoints of earlier releases have no settings.
        if _SETTINGS not in saved:
            state.pop(_SETTINGS)
        load(state, checkpoint_id=path)
        states |= unsaved
        if self._lr_schedule is not None:
            self._lr_schedule.load_state_dict(state["lr_schedule"])
        set_state_dict(
            self.model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for name, parameter in self.model.named_parameters():
            if name in unsaved:
                optimizer.state.pop(parameter, None)
        if _SETTINGS in state:
            self._take_new_settings(json.loads(state[_SETTINGS]))

    def _take_new_settings(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer the settings of this job that differ from `saved`, the settings of the checkpoint's job."""
        groups = self._existing_optimizer().param_groups
        is_new_rate = False
        for group, new, old in zip(groups, self._settings, saved, strict=True):
            for name, value in new.items():
                if name != "lr" and name in old and old[name] != _as_json(value):
                    group[name] = value
            # A schedule stores the rate from which it computes others under this name.
            name = "initial_lr" if "initial_lr" in new else "lr"
            if new[name] != old[name]:
                is_new_rate = True
                rate = group["lr"] * (new[name] / old[name]) if old[name] else new[name]
                group["lr"] = rate
        if is_new_rate and self._lr_schedule is not None:
            for schedule in _single_schedules(self._lr_schedule):
                schedule.base_lrs = [float(group["initial_lr"]) for group in groups]
                schedule._last_lr = [float(group["lr"]) for group in groups]

    def _state(self) -> dict[str, Any]:
        """Return the sharded state of model, optimizer and schedule for a distributed checkpoint. Collective."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self._existing_optimizer())
        state = {"model": model, "optimizer": optimizer, _SETTINGS: _as_text(self._settings)}
        if self._lr_schedule is not None:
            state["lr_schedule"] = self._lr_schedule.state_dict()
        return state

    def _existing_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer; raise `ConfigError` before `setup`."""
        if self._optimizer is None:
            raise ConfigError("FsdpEngine: no optimizer yet; call setup first")
        return self._optimizer

    def close(self) -> None:
        """Close the connection to the fleet, and destroy torch's process groups. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, for example the learning rate. Tensors become numbers."""
    return [
        {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _as_text(settings: object) -> str:
    """Encode settings as JSON, and values that JSON does not know as their `repr`."""
    return json.dumps(settings, default=repr)


def _as_json(value: object) -> object:
    """Encode a setting as JSON, decode it again, and return the result."""
    return json.loads(_as_text(value))


def _single_schedules(schedule: Any) -> Iterator[Any]:
    """Yield a schedule and the schedules that it combines, as `SequentialLR` and `ChainedScheduler` do."""
    yield schedule
    for each in vars(schedule).get("_schedulers", ()):
        yield from _single_schedules(each)


@final
class _UsedParameters:
    """Record of the parameters of a sharded module to which autograd gives a gradient in a step.

    FSDP2 gives all other parameters a gradient of zero, and an optimizer with weight decay would change them.

    Args:
        model: module that `fully_shard` has sharded.
        device: device on which the process group can reduce tensors.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._sharded = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._device = device
        self._used = set[str]()
        self._watched = set[str]()
        units = {name for name, each in model.named_modules() if isinstance(each, FSDPModule)}
        for prefix, unit in model.named_modules():
            if prefix in units:
                unit.register_forward_pre_hook(partial(self._watch, f"{prefix}." if prefix else ""))

    def _watch(self, prefix: str, unit: torch.nn.Module, _: object) -> None:
        """Watch the parameters that FSDP2 has gathered for the forward pass of a unit. torch calls this before the pass."""
        if len(self._watched) == len(self._sharded):
            return
        for local_name, parameter in unit.named_parameters():
            name = prefix + local_name
            is_new = name in self._sharded and name not in self._watched
            if is_new and parameter is not self._sharded[name]:
                self._watched.add(name)
                watch: Any = parameter.register_post_accumulate_grad_hook
                watch(partial(self._note, name))

    def _note(self, name: str, _: torch.Tensor) -> None:
        """Record that autograd has given a parameter a gradient. torch calls this in the backward pass."""
        self._used.add(name)

    def drop_other_gradients(self) -> None:
        """Remove the gradients of parameters that no rank has used, and clear the record. Collective over all ranks."""
        flags = [n in self._used or _is_not_zero(p.grad) for n, p in self._sharded.items()]
        used = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for parameter, is_used in zip(self._sharded.values(), used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None
        self._used.clear()


def _is_not_zero(grad: torch.Tensor | None) -> bool:
    """Return whether this rank's part of a gradient has an element that is not zero."""
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return local is not None and bool(local.any())


def _clip(parameters: Iterator[torch.nn.Parameter], max_norm: float) -> float:
    """Scale the gradients so that their total norm is at most `max_norm`; return the total norm before the scaling.

    Scale nothing if `max_norm` is 0.

    `torch.nn.utils.clip_grad_norm_` accepts only gradients of one device mesh. So this function computes the norm of the
    gradients of each mesh, and combines these norms.
    """
    of_mesh: defaultdict[DeviceMesh | None, list[torch.nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            of_mesh[grad.device_mesh if isinstance(grad, DTensor) else None].append(parameter)
    norms = []
    for found in of_mesh.values():
        norm = get_total_norm([each.grad for each in found if each.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return 0.0
    total = torch.linalg.vector_norm(torch.stack(norms))
    for found in of_mesh.values() if max_norm else ():
        clip_grads_with_norm_(found, max_norm, total)
    return float(total)
