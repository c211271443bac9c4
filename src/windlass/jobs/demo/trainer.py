"""Trainer rank of the demo: the model, the loss, and a copy of every version for the checker.

The job starts `trainer.py MODEL VERSIONS_DIR [SEED [DEVICE [LEARNING_RATE]]]` once per rank. MODEL is a transformers
configuration or a checkpoint folder.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

import msgspec
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from windlass.envs import environment_value
from windlass.jobs.fsdp_engine import FsdpEngine, Samples
from windlass.jobs.train_worker import TrainEngine, WrappedEngine, run_train_worker
from windlass.rollout.messages import TrainingSample

CLIP = 0.2
"""Largest distance from 1 of a ratio of probabilities that the loss does not clip."""
NUM_GROUPS = 4
"""Largest number of groups in a micro-batch of a checkpoint folder's model."""
LEARNING_RATE, OF_HIDDEN_SIZE = 2e-3, 128
"""Learning rate, and the largest hidden size with this rate. For larger models the rate is proportional to
1 / hidden size (muP, arXiv:2203.03466)."""


def build_model(source: Path) -> torch.nn.Module:
    """Return a causal LM in float32. `source` is a checkpoint folder, or a configuration file for random weights."""
    if source.is_dir():
        transformers.logging.disable_progress_bar()
        loaded: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            str(source), dtype=torch.float32, local_files_only=True
        )
        return loaded
    fields = msgspec.json.decode(source.read_bytes())
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**fields)
    )
    return model


def tokens_of(samples: Sequence[TrainingSample], device: torch.device) -> torch.Tensor:
    """Return the token ids (B, L) of prompts and answers, padded with 0 at the end.

    No attention mask is needed: the models are causal, so tokens do not attend to the padding after them.
    """
    return _padded([s.prompt_ids + s.output_ids for s in samples], device)


def _padded(rows: Sequence[Sequence[float]], device: torch.device) -> torch.Tensor:
    """Return the rows as a tensor (B, L) of the longest row's length, padded with 0 at the end."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


def grpo_loss(logits: torch.Tensor, samples: Sequence[TrainingSample]) -> torch.Tensor:
    """Return the clipped policy-gradient loss with group-normalised advantages (GRPO, arXiv:2402.03300).

    The importance ratio is the model's probability of a token, divided by the engine's. It corrects for tokens that older
    versions generated.

    Args:
        logits: logits (B, L, V) or (B, L - 1, V) of the model for `tokens_of(samples)`.
        samples: B samples.
    """
    device = logits.device
    outputs = _padded([s.output_ids for s in samples], device)
    behaviour = _padded([s.logprobs for s in samples], device)
    advantages = torch.tensor(_advantages(samples), device=device)[:, None]
    steps = torch.arange(outputs.shape[1], device=device)
    first = torch.tensor([len(s.prompt_ids) - 1 for s in samples], device=device)[:, None]
    is_trained = _padded([s.loss_mask for s in samples], device)
    places = (first + steps).clamp(max=logits.shape[1] - 1)
    following = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[2]))
    logprobs = following.float().log_softmax(-1).gather(2, outputs[..., None])[..., 0]
    ratio = (logprobs - behaviour).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    return -(gain * is_trained).sum() / is_trained.sum()


def default_learning_rate(hidden_size: int) -> float:
    """Return Adam's learning rate for a model with this hidden size; see `LEARNING_RATE`."""
    return LEARNING_RATE * min(1.0, OF_HIDDEN_SIZE / hidden_size)


def _advantages(samples: Sequence[TrainingSample]) -> list[float]:
    """Return each sample's reward, normalised with the mean and the standard deviation of its group."""
    groups: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample.reward)
    moments = {
        group: (mean := sum(r) / len(r), (sum((x - mean) ** 2 for x in r) / len(r)) ** 0.5)
        for group, r in groups.items()
    }
    return [(s.reward - moments[s.group_id][0]) / (moments[s.group_id][1] + 1e-4) for s in samples]


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the whole weights of an FSDP2 module, by name. Collective over all ranks.

    Only the checker needs this gather; a weight update of Windlass gathers nothing.
    """
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


@final
class SavingEngine(WrappedEngine[TrainEngine]):
    """`TrainEngine` that saves every version for the checker. It passes all calls to another engine.

    Args:
        engine: engine that trains.
        whole: collective function that gathers the weights of the whole model.
        versions_dir: folder of the files.
    """

    def __init__(
        self,
        engine: TrainEngine,
        whole: Callable[[], dict[str, torch.Tensor]],
        versions_dir: Path,
    ) -> None:
        super().__init__(engine)
        self.whole, self._folder = whole, versions_dir
        self._versions = itertools.count()

    def train_step(self, step: int, groups: Samples) -> Mapping[str, float]:
        # At the beginning of a step, the model has the weights of the newest published version.
        weights, version = self.whole(), next(self._versions)
        if dist.get_rank() == 0:
            save_file(weights, self._folder / f"{version}.safetensors")
        return self.engine.train_step(step, groups)


def groups_at_once(model: Path) -> int:
    """Return the number of groups in a micro-batch; 0 for all groups.

    Only a checkpoint folder needs small micro-batches: its model has a large vocabulary, so its logits are large.
    """
    return NUM_GROUPS if model.is_dir() else 0


def make_engine(
    config: Path,
    seed: int,
    device: str,
    learning_rate: float = 0.0,
    *,
    publish_to_fleet: bool = True,
) -> FsdpEngine:
    """Return a rank's `TrainEngine`. For `publish_to_fleet` see `FsdpEngine`. Learning rate 0 selects the default."""
    torch.set_num_threads(1)

    def loss(model: torch.nn.Module, groups: Samples) -> torch.Tensor:
        samples = [sample for group in groups for sample in group]
        tokens = tokens_of(samples, next(model.parameters()).device)
        return grpo_loss(model(tokens[:, :-1]).logits, samples)

    return FsdpEngine(
        model=lambda: build_model(config),
        optimizer=lambda model: torch.optim.AdamW(
            model.parameters(),
            lr=learning_rate
            or default_learning_rate(model.get_parameter("model.embed_tokens.weight").shape[1]),
            weight_decay=0.0,
        ),
        loss=loss,
        units=lambda model: list(model.get_submodule("model.layers").children()),
        num_groups=groups_at_once(config),
        backend="gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl",
        device=device,
        seed=seed,
        publish_to_fleet=publish_to_fleet,
        transport=environment_value("WINDLASS_TRANSPORT") or "auto",
    )


def saving_engine(
    model: Path,
    versions_dir: Path,
    seed: int,
    device: str,
    learning_rate: float,
    *,
    publish_to_fleet: bool = True,
) -> SavingEngine:
    """Return a rank's `TrainEngine`, which saves versions in `versions_dir`. For other arguments see `make_engine`."""
    engine = make_engine(model, seed, device, learning_rate, publish_to_fleet=publish_to_fleet)
    return SavingEngine(engine, lambda: whole_weights(engine.model), versions_dir)


def run_rank(
    make: Callable[[Path, Path, int, str, float], SavingEngine],
    model: str,
    versions_dir: str,
    seed: str = "0",
    device: str = "cpu",
    learning_rate: str = "0",
) -> None:
    """Run commands of the job's train controller until it sends `Stop`.

    `make` returns the rank's `TrainEngine`, as `saving_engine` of this file does. The other arguments are the words of
    the script's command line. For the errors, see `run_train_worker`.
    """
    run_train_worker(make(Path(model), Path(versions_dir), int(seed), device, float(learning_rate)))


if __name__ == "__main__":
    run_rank(saving_engine, *sys.argv[1:])
