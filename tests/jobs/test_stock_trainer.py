"""Steps of the stock trainer on two real ranks equal the same steps in one process, computed sample by sample."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from stock_rank import (
    DEADLINE_S,
    TEMPERATURE,
    VOCABULARY,
    groups_of,
    make_model,
    masked,
    with_images,
)
from vision_checkpoint import write_vision_checkpoint

from windlass.backends.collective_group import Rendezvous
from windlass.errors import ConfigError
from windlass.jobs.stock_trainer import checkpoint_layers, decoder_layers
from windlass.jobs.training import TrainingSection
from windlass.rollout.messages import TrainingSample
from windlass.sampling import SamplingParams

RANKS = str(Path(__file__).parents[1] / "support" / "stock_rank.py")
RATE, NORM, KL = 1e-3, 0.05, 0.3
COMMON = {"learning_rate": RATE, "max_grad_norm": NORM, "warmup_steps": 1, "weight_decay": 0.01}
WAYS: dict[str, dict[str, Any]] = {
    "dapo": {"loss": "dapo", "kl_coefficient": KL, "max_tokens": 40},
    "gspo": {"loss": "gspo", "advantages": "rloo", "gradient_checkpointing": True},
    # One rank has three micro-batches, and the other has four.
    "grpo": {"max_tokens": 24},
    "grpo_masked": {},
    "dapo_masked": {"loss": "dapo", "kl_coefficient": KL},
    "dr_grpo": {"loss": "dr_grpo", "old_policy": "trainer", "correction": "truncate"},
    "reinforce_pp": {"loss": "ppo", "advantages": "reinforce_pp", "max_tokens": 17},
}
STEPS = [0, 1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "initial", 1), make_model(folder / "reference", 2)


@pytest.fixture(scope="module")
def found(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Provide the results of both ranks for each way, and leave a checkpoint of the first in the folder `saved`."""
    folder = tmp_path_factory.mktemp("ranks")
    stores = {name: Rendezvous("127.0.0.1", DEADLINE_S) for name in WAYS}
    model, reference = map(str, models)
    work = [
        (
            name,
            {"model": model, "reference": reference, **COMMON, **way},
            stores[name].port,
            {"steps": STEPS, "save": name == "dapo", "masked": name.endswith("masked")},
        )
        for name, way in WAYS.items()
    ]
    subprocess.run(
        (sys.executable, RANKS, str(folder), json.dumps(work)), check=True, timeout=DEADLINE_S
    )
    ranks = {name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)] for name in WAYS}
    return ranks | {"folder": [{"path": folder}]}


def logprobs_of(model: Any, sample: TrainingSample) -> torch.Tensor:
    """Return the log-probability of each trained token, from the logits of this sample alone."""
    tokens = torch.tensor([sample.prompt_ids + sample.output_ids])
    logits = model(tokens).logits[0, len(sample.prompt_ids) - 1 : -1] / TEMPERATURE
    every: torch.Tensor = logits.log_softmax(-1)[
        range(len(sample.output_ids)), list(sample.output_ids)
    ]
    return every[list(sample.loss_mask)]


def advantages_of(name: str, groups: list[list[TrainingSample]]) -> list[torch.Tensor]:
    """Return the advantage of each sample, in order."""
    found = []
    for group in groups:
        rewards = torch.tensor([sample.reward for sample in group])
        if name == "gspo":
            found += [r - (rewards.sum() - r) / (len(rewards) - 1) for r in rewards]
        elif name == "dr_grpo":
            found += [*(rewards - rewards.mean())]
        elif name == "reinforce_pp":
            found += [*rewards]
        else:
            found += [*((rewards - rewards.mean()) / (rewards.std() + 1e-4))]
    if name == "reinforce_pp":
        per_token = [
            advantage
            for sample, advantage in zip([*itertools.chain(*groups)], found, strict=True)
            for _ in range(sample.num_trained)
        ]
        every = torch.stack(per_token)
        found = [(advantage - every.mean()) / every.std() for advantage in found]
    return found


def loss_of(
    name: str, model: Any, reference: Any, groups: list[list[TrainingSample]]
) -> tuple[torch.Tensor, float, float]:
    """Return the loss of a whole batch, and the mean divergences of the model from the reference and from the engine."""
    tokens, sequences, divergences, gaps = [], [], [], []
    samples = [*itertools.chain(*groups)]
    for sample, a in zip(samples, advantages_of(name, groups), strict=True):
        if not sample.num_trained:
            continue
        new = logprobs_of(model, sample)
        old = torch.tensor(sample.logprobs)[list(sample.loss_mask)]
        ratio = (new - old).exp()
        with torch.no_grad():
            gap = logprobs_of(reference, sample) - new
        divergences.append((gap.exp() - gap - 1).detach())
        gap = (new - old).detach()
        gaps.append(gap.exp() - gap - 1)
        if name == "gspo":
            ratio = (new - old).mean().exp()
            sequences.append(-torch.minimum(ratio * a, ratio.clamp(1 - 3e-4, 1 + 4e-4) * a))
        elif name == "dr_grpo":
            weight = ratio.detach().clamp(max=2.0)
            sequences.append(-((new - new.detach()).exp() * a * weight).sum() / 12)
        else:
            high = 1.28 if name == "dapo" else 1.2
            losses = -torch.minimum(ratio * a, ratio.clamp(0.8, high) * a)
            if name == "grpo":
                sequences.append(losses.mean())
                continue
            if name == "dapo":
                with torch.no_grad():
                    fixed = logprobs_of(reference, sample)
                losses = losses + KL * ((fixed - new).exp() - (fixed - new) - 1)
            tokens.append(losses)
    every = torch.cat(tokens) if tokens else torch.stack(sequences)
    # A loss that is a mean over sequences has metrics that are means over sequences.
    of_engine = torch.cat(gaps) if tokens else torch.stack([each.mean() for each in gaps])
    return every.mean(), float(torch.cat(divergences).mean()), float(of_engine.mean())


@pytest.mark.parametrize("name", WAYS)
def test_two_ranks_train_as_one_process_without_batches(
    name: str, models: tuple[Path, Path], found: dict[str, list[dict[str, Any]]]
) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, reference = (load(str(folder), dtype=torch.float32) for folder in models)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE / 2, weight_decay=0.01)
    for step in STEPS:
        groups = masked(groups_of(step)) if name.endswith("masked") else groups_of(step)
        loss, divergence, of_engine = loss_of(
            name.removesuffix("_masked"), model, reference, groups
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        # The learning rate rises over one step of warm-up.
        optimizer.param_groups[0]["lr"] = RATE / 2 if step == 0 else RATE
        optimizer.step()
        for number, rank in enumerate(found[name]):
            metrics = rank["metrics"][step]
            assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
            assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
            assert metrics["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
            assert ("kl" in metrics) == name.startswith("dapo")
            assert metrics.get("kl", divergence) == pytest.approx(divergence, rel=1e-3)
            assert metrics["rollout_kl"] == pytest.approx(of_engine, rel=1e-3)
            has_trained = not (number and name.endswith("masked"))
            assert ("logprob_difference" in metrics) == (step == 0 and has_trained)
    for rank in found[name]:
        # A rank with fewer micro-batches than another repeats one of them, and not its whole batch.
        assert rank["largest"] <= WAYS[name].get("max_tokens", 100)
        for key, weight in model.named_parameters():
            assert torch.allclose(rank["weights"][key], weight, atol=2e-5), key


def test_a_checkpoint_contains_a_folder_that_transformers_loads(
    models: tuple[Path, Path], found: dict[str, list[dict[str, Any]]]
) -> None:
    folder = found["folder"][0]["path"] / "dapo" / "hf"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    copied = "tokenizer_config.json"
    assert (folder / copied).read_bytes() == (models[0] / copied).read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    for key, weight in loaded.named_parameters():
        assert torch.equal(weight, found["dapo"][0]["weights"][key]), key


SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("starcoder2", {"residual_dropout": 0.1, "attention_dropout": 0.1}),
        ("mixtral", {"router_jitter_noise": 0.1}),
        # The layers themselves apply this dropout.
        ("falcon", {"hidden_dropout": 0.1}),
    ],
)
def test_checkpointed_layers_compute_twice_what_they_compute_in_evaluation_mode(
    kind: str, settings: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **SMALL, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(1, 13)[None]

    def step() -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        model.zero_grad()
        logits = model(tokens).logits
        logits.log_softmax(-1)[..., 0].sum().backward()
        return logits.detach(), [each.grad for each in model.parameters()]

    expected = step()
    checkpoint_layers(model)
    num_passes = 0

    def count(*_: object) -> None:
        nonlocal num_passes
        num_passes += 1

    (layer, *_) = decoder_layers(model)
    next(layer.children()).register_forward_hook(count)
    found = step()
    assert num_passes == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "sampling", "says"),
    [
        ({"loss": "grop"}, {}, "training.loss must be one of ['ppo', 'grpo', 'dr_grpo', 'dapo', "),
        (
            {"correction": "mask"},
            {},
            "training.correction must be 'none' with old_policy 'rollout'",
        ),
        (
            {},
            {"top_p": 0.9},
            "rollout.sampling.top_p must be 1.0, got 0.9: the loss uses the engine",
        ),
        (
            {},
            {"temperature": 0.0},
            "rollout.sampling.temperature must be > 0 with [training], got 0",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], sampling: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainingSection(model="m", **settings).check_sampling(
            SamplingParams(max_new_tokens=4, **sampling)
        )
    assert says in str(refused.value)


def test_two_ranks_train_on_images_as_one_process(tmp_path: Path) -> None:
    """Rank 0 has images, also in the second turn of a conversation, and rank 1 has none."""
    folder, name = tmp_path / "model", "images"
    model = write_vision_checkpoint(folder, 1)
    ids = model.config.image_token_id, model.config.vision_start_token_id, 3 * 2 * 14 * 14
    settings = {"model": str(folder), "learning_rate": RATE, "max_tokens": 40, "loss": "dapo"}
    rest = {"steps": STEPS, "save": True, "images": ids}
    store = Rendezvous("127.0.0.1", DEADLINE_S)
    arguments = json.dumps([(name, settings, store.port, rest)])
    subprocess.run(
        (sys.executable, RANKS, str(tmp_path), arguments), check=True, timeout=DEADLINE_S
    )
    ranks = [torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    num_left_out, image_token = 0, ids[0]
    for step in STEPS:
        groups = with_images(groups_of(step), *ids)
        samples = [*itertools.chain(*groups)]
        losses = []
        for sample, advantage in zip(samples, advantages_of("dapo", groups), strict=True):
            tokens = torch.tensor([sample.prompt_ids + sample.output_ids])
            named = {key: tensor.to_torch() for key, tensor in sample.image_tensors.items()}
            if not named and image_token in tokens:
                num_left_out += 1
                continue
            kinds = (tokens == image_token).int()
            logits = model(input_ids=tokens, mm_token_type_ids=kinds, **named).logits[0]
            logits = logits[len(sample.prompt_ids) - 1 : -1] / TEMPERATURE
            every = logits.log_softmax(-1)[range(len(sample.output_ids)), list(sample.output_ids)]
            mask = list(sample.loss_mask)
            ratio = (every - torch.tensor(sample.logprobs)).exp()[mask]
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
        optimizer.zero_grad()
        loss = torch.cat(losses).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for rank in ranks:
            assert rank["metrics"][step]["loss"] == pytest.approx(loss.item(), abs=1e-5)
            assert rank["metrics"][step]["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert num_left_out == len(STEPS)
    changed = {key for key, weight in model.named_parameters() if weight.grad is not None}
    assert any("visual" in key for key in changed)
    for rank in ranks:
        for key, weight in model.named_parameters():
            torch.testing.assert_close(rank["weights"][key], weight.detach(), atol=2e-5, rtol=0)
    saved = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / name / "hf")
    for key, weight in saved.named_parameters():
        assert torch.equal(weight, ranks[0]["weights"][key]), key
