"""Stock trainer of launched jobs: an FSDP2 rank that trains a model of transformers as `[training]` says.

A job without `trainer.script` runs `python -m windlass.jobs.stock_trainer SETTINGS` for each rank. SETTINGS is the table
`[training]` as JSON.
"""

from __future__ import annotations

import importlib
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR

from windlass.config import ReplicaPlace
from windlass.envs import environment_value
from windlass.jobs.fsdp_engine import FsdpEngine, LossMean, LossResult, Samples
from windlass.jobs.train_worker import TrainContext, WrappedEngine, run_train_worker
from windlass.jobs.training import ComputeType, TrainingSection
from windlass.rollout.messages import TrainingSample
from windlass.rollout.packing import divide
from windlass.training.batches import (
    VisionConfig,
    VisionModel,
    only_attends,
    token_batch,
    with_advantages,
)
from windlass.training.losses import policy_loss, token_logprobs
from windlass.training.settings import TokenMean

_log = logging.getLogger(__name__)
EXPORTED = "hf"
"""Name of a folder inside a checkpoint. transformers and engines load this folder."""
COPIED = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
"""Endings of the files of a checkpoint that belong to its tokenizer, its chat template, or its model's code."""


@final
class StockTrainer(WrappedEngine[FsdpEngine]):
    """`TrainEngine` with a model, an optimizer and a loss that settings describe.

    Args:
        settings: table `[training]` of the job's file.
        transport: see `FsdpEngine`.
        replica: see `FsdpEngine`.
        publish_to_fleet: see `FsdpEngine`.
    """

    def __init__(
        self,
        settings: TrainingSection,
        *,
        transport: str = "auto",
        replica: ReplicaPlace = ReplicaPlace.OFF,
        publish_to_fleet: bool = True,
    ) -> None:
        self._settings, self._config = settings, settings.loss_config()
        self._packed = "flash" in settings.attention
        self._temperature = 1.0
        self._reference: torch.nn.Module | None = None
        self._vision: VisionModel | None = None
        on_gpu = torch.cuda.is_available()
        narrow = settings.compute is ComputeType.BFLOAT16 or (
            settings.compute is ComputeType.AUTO and on_gpu
        )
        by_tokens = self._config.mean is TokenMean.TOKENS
        engine = FsdpEngine(
            model=lambda: self._load(settings.model),
            optimizer=lambda model: torch.optim.AdamW(
                model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
            ),
            loss=self._loss,
            prepare=self._prepare,
            units=decoder_layers,
            loss_mean=LossMean.TOKENS if by_tokens else LossMean.TRAINED_SAMPLES,
            cut=self._cut,
            lr_schedule=lambda optimizer: LambdaLR(
                optimizer, lambda step: min(1.0, (step + 1) / (settings.warmup_steps + 1))
            ),
            mixed_precision=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if narrow else None, reduce_dtype=torch.float32
            ),
            backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            device="cuda" if on_gpu else "cpu",
            seed=settings.seed,
            max_grad_norm=settings.max_grad_norm,
            publish_to_fleet=publish_to_fleet,
            transport=transport,
            replica=replica,
            export=self._save_whole if settings.export else None,
        )
        super().__init__(engine)

    def setup(self, context: TrainContext) -> tuple[int, int]:
        """Set up the engine, and load a reference model if `kl_coefficient` is not 0.

        Also set the temperature to that of the job's sampling parameters. If the settings have no `constant` for the
        loss, use `max_new_tokens` of the sampling parameters.

        Returns:
            See `FsdpEngine.setup`.
        """
        if context.sampling is not None:
            self._temperature = context.sampling.temperature
            if self._settings.constant is None:
                constant = float(context.sampling.max_new_tokens)
                self._config = msgspec.structs.replace(self._config, constant=constant)
        place = self.engine.setup(context)
        if self._config.kl_coefficient:
            reference = self._load(self._settings.reference or self._settings.model)
            reference.eval().requires_grad_(False)
            device = next(self.engine.model.parameters()).device
            self.engine.shard(reference.to(device))
            self._reference = reference
        return place

    def _load(self, folder: str) -> torch.nn.Module:
        """Load a checkpoint's model in float32. Apply the settings `attention` and `gradient_checkpointing`."""
        settings = self._settings
        transformers: Any = importlib.import_module("transformers")
        transformers.logging.disable_progress_bar()
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = transformers.AutoModelForCausalLM
        if isinstance(config, VisionConfig):
            kind = transformers.AutoModelForImageTextToText
        model: Any = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=settings.attention,
            local_files_only=True,
        )
        model.config.use_cache = False
        if self._packed and not only_attends(model):
            _log.warning(
                "training: samples are padded, because layers of %s would mix packed samples",
                folder,
            )
            self._packed = False
        if isinstance(config, VisionConfig):
            self._vision = VisionModel(model)
            if self._packed:
                _log.warning(
                    "training: samples are padded, because %s computes positions from images",
                    folder,
                )
                self._packed = False
        if settings.gradient_checkpointing:
            checkpoint_layers(model)
        found: torch.nn.Module = model
        return found

    def _prepare(self, groups: Samples) -> Samples:
        """Add advantages to the samples, and leave out samples without a trained token.

        If no sample has a trained token, keep the shortest one: this rank must run the same collectives as others.
        """

        def total(tensor: torch.Tensor) -> torch.Tensor:
            device = next(self.engine.model.parameters()).device
            summed = tensor.to(device)
            dist.all_reduce(summed)
            return summed.to(tensor.device)

        samples = [sample for group in groups for sample in group]
        found = with_advantages(samples, self._settings.advantage(), sum_over_ranks=total)
        if self._vision is not None:
            found = _without_image_tokens(found, self._vision)
        trained = [sample for sample in found if sample.num_trained]
        if not trained and found:
            trained = [min(found, key=lambda each: len(each.prompt_ids) + len(each.output_ids))]
        return [trained]

    def _cut(self, groups: Samples) -> list[Samples]:
        """Cut samples into micro-batches of at most `max_tokens` tokens; return each micro-batch as one group."""
        samples = [sample for group in groups for sample in group]
        lengths = [len(sample.prompt_ids) + len(sample.output_ids) for sample in samples]
        pieces = divide(lengths, self._settings.max_tokens, padded=not self._packed)
        return [[[samples[index] for index in piece]] for piece in pieces]

    def _loss(self, model: torch.nn.Module, groups: Samples) -> LossResult:
        """Run the forward passes of the model and the reference model; return the loss and its metrics."""
        device = next(model.parameters()).device
        batch = token_batch([s for group in groups for s in group], device, packed=self._packed)

        def logprobs_of(module: torch.nn.Module) -> torch.Tensor:
            vision = self._vision
            given = batch.model_arguments() if vision is None else vision.arguments(batch)
            logits = module(**given).logits
            return token_logprobs(logits, batch.targets, temperature=self._temperature)

        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = logprobs_of(self._reference)
        found = policy_loss(
            self._config,
            logprobs=logprobs_of(model),
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            mask=batch.mask,
            sequences=batch.sequences,
            reference=reference,
        )
        return found.loss, found.metrics

    def _save_whole(self, model: torch.nn.Module, folder: Path) -> None:
        """Write a checkpoint that transformers and engines can load, including the tokenizer's files."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: Mapping[str, Any] = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            write_checkpoint(model, whole, Path(self._settings.model), folder / EXPORTED)


def _without_image_tokens(
    samples: Sequence[TrainingSample], vision: VisionModel
) -> list[TrainingSample]:
    """Return the samples. Samples with a token of an image and without its image are blanked, so they are not trained."""
    found = []
    for sample in samples:
        if vision.is_trainable(sample):
            found.append(sample)
            continue
        _log.warning(
            "training: sample of group %d (rollout %s) is not trained: it has the token of an image, %d, without its image",
            *(sample.group_id, sample.task_id, vision.image_token_id),
        )
        found.append(vision.blanked(sample))
    return found


def checkpoint_layers(model: Any) -> None:
    """Let the layers of a model compute their activations again in the backward pass. The model stays in evaluation mode.

    Layers of the library transformers do this only if their attribute `training` is True. But dropout, noise in routers and
    skipped layers would then change the log-probabilities. So this function sets the attribute of the layers, and each
    forward pass of a layer runs in evaluation mode.

    Args:
        model: model of transformers.
    """
    layers: Any = importlib.import_module("transformers.modeling_layers")
    # Older releases of transformers 5 have only the second name.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable()
    model.eval()
    for layer in model.modules():
        if isinstance(layer, layers.GradientCheckpointingLayer):
            layer.training = True
            layer._gradient_checkpointing_func = partial(
                _in_evaluation_mode, layer, layer._gradient_checkpointing_func
            )


def _in_evaluation_mode(
    layer: torch.nn.Module, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any
) -> Any:
    """Run `checkpoint(forward, *args)`. While `forward` runs, also in the backward pass, the layer is not in training mode."""

    def evaluated(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(evaluated, *args)


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Return the modules that transformers keeps on one device, usually decoder layers; see `units` of `FsdpEngine`.

    Leave out modules that only images use: a rank without images would not run them, and all ranks must run the same units.

    Args:
        model: model of transformers.
    """
    names = set(model._no_split_modules or ())
    whole = model.get_decoder() if isinstance(model.config, VisionConfig) else model
    return [module for module in whole.modules() if type(module).__name__ in names]


def write_checkpoint(
    model: Any, weights: Mapping[str, torch.Tensor], source: Path, folder: Path
) -> None:
    """Write a checkpoint folder: the weights, the configuration of `model`, and the tokenizer's files from `source`.

    Args:
        model: model of transformers.
        weights: whole weights by name.
        source: folder of the initial checkpoint. Its files whose ending is in `COPIED` are copied.
        folder: folder to write.
    """
    model.save_pretrained(folder, state_dict=dict(weights))
    for file in source.iterdir():
        is_copied = file.suffix in COPIED and not file.name.endswith(".index.json")
        if file.is_file() and is_copied and not (folder / file.name).exists():
            shutil.copy2(file, folder / file.name)


def main(arguments: Sequence[str]) -> None:
    """Run commands of the job's train controller until it sends `Stop`. Use one thread if OMP_NUM_THREADS is not set.

    For the errors, see `run_train_worker`.
    """
    if not environment_value("OMP_NUM_THREADS"):
        torch.set_num_threads(1)
    (settings,) = arguments
    run_train_worker(
        StockTrainer(
            msgspec.json.decode(settings, type=TrainingSection),
            transport=environment_value("WINDLASS_TRANSPORT") or "auto",
            replica=ReplicaPlace(environment_value("WINDLASS_REPLICA") or ReplicaPlace.OFF.value),
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
