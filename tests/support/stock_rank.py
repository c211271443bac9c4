"""Ranks of the stock trainer in processes, for `test_stock_trainer.py`; each trains on its share of the same samples."""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from windlass.jobs.stock_trainer import StockTrainer
from windlass.jobs.train_worker import TrainContext
from windlass.jobs.training import TrainingSection
from windlass.rollout.messages import TrainingSample
from windlass.rollout.tensors import SampleTensor
from windlass.sampling import SamplingParams

WORLD_SIZE, NUM_GROUPS, GROUP_SIZE, VOCABULARY = 2, 4, 3, 48
TEMPERATURE = 0.8
DEADLINE_S = 120.0


def make_model(folder: Path, seed: int) -> Path:
    """Write a tiny Qwen2 checkpoint with a file of a tokenizer."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder


def groups_of(step: int) -> list[list[TrainingSample]]:
    """Return groups of samples of different lengths; some samples have tokens that are not trained."""
    generator = torch.Generator().manual_seed(step)

    def draw(high: int, size: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, high, (size,), generator=generator).tolist())

    found = []
    for group in range(NUM_GROUPS):
        prompt = draw(VOCABULARY, 2 + group)
        samples = []
        for number in range(GROUP_SIZE):
            length = 2 + (5 * group + 3 * number) % 9
            mask = tuple(not (number == 1 and 0 < token < length - 1) for token in range(length))
            noise = torch.rand(length, generator=generator)
            samples.append(
                TrainingSample(
                    prompt_ids=prompt,
                    output_ids=draw(VOCABULARY, length),
                    # The tiny model gives each token a probability of about 1/48.
                    logprobs=tuple((-3.9 + 0.5 * noise).tolist()),
                    versions=(step,) * length,
                    reward=((group + 2 * number * step + number * number) % 5) / 2,
                    group_id=10 * step + group,
                    engine="e",
                    loss_mask=mask,
                )
            )
        found.append(samples)
    return found


def masked(groups: list[list[TrainingSample]]) -> list[list[TrainingSample]]:
    """Return the groups without a trained token in those of rank 1, as if a recipe masks answers that were cut off."""
    return [
        [
            msgspec.structs.replace(each, loss_mask=(False,) * len(each.output_ids))
            if n % 2
            else each
            for each in group
        ]
        for n, group in enumerate(groups)
    ]


GRID = (1, 4, 4)
"""Patches of an image along time, height and width. Four patches become one token."""


def with_images(
    groups: list[list[TrainingSample]], image_token: int, start_token: int, patch_nbytes: int
) -> list[list[TrainingSample]]:
    """Return the groups with images in each prompt of rank 0, and in the second turn of one of its answers.

    One answer of rank 1 has the token of an image without an image.
    """
    one = (start_token, *(image_token,) * 4)
    found = []
    for n, group in enumerate(groups):
        samples = []
        for number, each in enumerate(group):
            generator = torch.Generator().manual_seed(100 * n)
            # The first tokens of the vocabulary have a special meaning.
            prompt, output = (
                tuple(t + 8 for t in ids) for ids in (each.prompt_ids, each.output_ids)
            )
            changed: dict[str, Any] = {"prompt_ids": prompt, "output_ids": output}
            if n == 1 and not number:
                changed["output_ids"] = (image_token, *output[1:])
            if n % 2 == 0:
                num_sets = 2 if number == 1 else 1
                changed["prompt_ids"] = (*one, *prompt)
                if num_sets == 2:
                    more = len(one)
                    changed |= {
                        "output_ids": (*output, *one, output[0]),
                        "logprobs": (*each.logprobs, *(0.0,) * more, -3.5),
                        "versions": (*each.versions, *(-1,) * more, 0),
                        "loss_mask": (*each.loss_mask, *(False,) * more, True),
                    }
                changed["tensors"] = {}
                for image in range(num_sets):
                    pixels = torch.rand(16, patch_nbytes, generator=generator)
                    tensors = {"pixel_values": pixels, "image_grid_thw": torch.tensor([GRID])}
                    for name, tensor in tensors.items():
                        made = SampleTensor.of(tensor, per_token=False)
                        changed["tensors"][f"images.{image}.{name}"] = made
            samples.append(msgspec.structs.replace(each, **changed))
        found.append(samples)
    return found


def work(
    rank: int, folder: Path, name: str, settings: dict[str, Any], port: int, rest: Any
) -> None:
    torch.set_num_threads(1)
    trainer = StockTrainer(
        msgspec.convert(settings, TrainingSection), transport="cma", publish_to_fleet=False
    )
    trainer.setup(
        TrainContext(
            rank=rank,
            world_size=WORLD_SIZE,
            store_host="127.0.0.1",
            store_port=port,
            controller="",
            token="",
            deadline_s=DEADLINE_S,
            sampling=SamplingParams(max_new_tokens=12, temperature=TEMPERATURE),
        )
    )
    sizes: list[int] = []

    def note(_: object, __: object, named: dict[str, torch.Tensor]) -> None:
        sizes.append(named["input_ids"].numel())

    trainer.engine.model.register_forward_pre_hook(note, with_kwargs=True)
    metrics = []
    for step in rest["steps"]:
        groups = masked(groups_of(step)) if rest.get("masked") else groups_of(step)
        if rest.get("images"):
            groups = with_images(groups, *rest["images"])
        metrics.append(dict(trainer.train_step(step, groups[rank::WORLD_SIZE])))
    if rest.get("save"):
        trainer.save(str(folder / name))
    weights = {
        key: p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for key, p in trainer.engine.model.named_parameters()
    }
    found = {"weights": weights, "metrics": metrics, "largest": max(sizes)}
    torch.save(found, folder / f"{name}-{rank}.pt")
    trainer.close()


if __name__ == "__main__":
    for arguments in json.loads(sys.argv[2]):
        ranks = [
            mp.get_context("fork").Process(target=work, args=(rank, Path(sys.argv[1]), *arguments))
            for rank in range(WORLD_SIZE)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE_S)
        assert [process.exitcode for process in ranks] == [0] * WORLD_SIZE
