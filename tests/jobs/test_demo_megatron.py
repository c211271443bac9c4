"""The demo's Megatron-core model computes the logits of transformers, and its gathered weights are exact."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_settings import SMALL
from needs import need_package

from windlass.jobs.demo.trainer import build_model

need_package("megatron")

MODEL = {**SMALL, "vocab_size": 16, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**MODEL, "model_type": "qwen3"},
    "llama": {**MODEL, "model_type": "llama", "tie_word_embeddings": False},
    # Megatron pads 17 rows to 18, and tensor-parallel ranks have 9 each.
    "qwen2": {**MODEL, "model_type": "qwen2", "vocab_size": 17},
}
DEADLINE_S = 120.0
TOKENS = [[1, 5, 9, 2, 7, 3], [0, 15, 4, 4, 8, 11]]


def build(folder: str, name: str) -> Any:
    torch.manual_seed(1)
    model = build_model(Path(folder) / f"{name}.json")
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases also need distinct values.
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def rank_main(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from windlass.jobs.demo.megatron_trainer import (
        build_chunk,
        fill,
        gathered,
        logits_of,
        megatron_config,
    )
    from windlass.jobs.megatron_cpu import install, without_cuda_tensors

    install()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    model_parallel_cuda_manual_seed(7)
    for name in MODELS:
        start = build(folder, name)
        weights = {n: p.detach() for n, p in start.named_parameters()}
        with without_cuda_tensors(), torch.no_grad():
            settings = megatron_config(start.config, world_size)
            model = build_chunk(start.config, settings, first=True, last=True)
            fill(model, start.config, weights)
            logits = logits_of(model, start.config, torch.tensor(TOKENS))
            whole = gathered(model, start.config, {n: w.shape for n, w in weights.items()})
        torch.save((logits, whole), f"{folder}/{name}-{rank}.pt")
    parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
def test_logits_and_gathered_weights_equal_those_of_transformers(
    tmp_path: Path, world_size: int
) -> None:
    for name, config in MODELS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    spawning = multiprocessing.get_context("spawn")
    ranks = [
        spawning.Process(target=rank_main, args=(rank, world_size, str(tmp_path)))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(DEADLINE_S)
        assert rank.exitcode == 0
    for name in MODELS:
        start = build(str(tmp_path), name)
        with torch.no_grad():
            expected = start(torch.tensor(TOKENS)).logits
        for number in range(world_size):
            logits, whole = torch.load(tmp_path / f"{name}-{number}.pt")
            assert torch.allclose(logits, expected, atol=1e-5), (name, number)
            for tensor, weight in start.named_parameters():
                assert torch.equal(whole[tensor], weight), (name, number, tensor)
            assert whole.keys() == dict(start.named_parameters()).keys()
