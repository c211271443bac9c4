"""Sizes of Qwen3 models, and entries of their checkpoints."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import block_float8
import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model. `num_experts` 0: dense."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    num_experts: int = 0


COMMON: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Settings of all models of this module."""
SHAPES = {
    "rehearsal": Shape(64, 64, 2, 4, 2, 8),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8),
    "qwen3-30b-a3b": Shape(2048, 768, 48, 32, 4, 128),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8),
    "qwen3-32b": Shape(5120, 25600, 64, 64, 8),
}


def model_config(name: str) -> dict[str, Any]:
    shape = SHAPES[name]
    common = COMMON | {
        "architectures": ["Qwen3MoeForCausalLM" if shape.num_experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if shape.num_experts else "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": 3 * shape.hidden if shape.num_experts else shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "use_sliding_window": False,
    }
    if not shape.num_experts:
        return common
    return common | {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": shape.inner,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    }


def checkpoint_names(model: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape, config = SHAPES[model], model_config(model)
    hidden, vocab, head = shape.hidden, config["vocab_size"], config["head_dim"]
    q, kv = shape.heads * head, shape.key_value_heads * head
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "self_attn.q_proj.weight", (q, hidden)
        yield at + "self_attn.k_proj.weight", (kv, hidden)
        yield at + "self_attn.v_proj.weight", (kv, hidden)
        yield at + "self_attn.o_proj.weight", (hidden, q)
        yield at + "self_attn.q_norm.weight", (head,)
        yield at + "self_attn.k_norm.weight", (head,)
        blocks = [f"{at}mlp.experts.{expert}." for expert in range(shape.num_experts)]
        if blocks:
            yield at + "mlp.gate.weight", (shape.num_experts, hidden)
        for block in blocks or [at + "mlp."]:
            yield block + "gate_proj.weight", (shape.inner, hidden)
            yield block + "up_proj.weight", (shape.inner, hidden)
            yield block + "down_proj.weight", (hidden, shape.inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def checkpoint_entries(
    model: str, *, quantised: bool
) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield name, safetensors type, shape and bytes of each entry."""
    for name, shape in checkpoint_names(model):
        if quantised:
            yield from block_float8.entries(name, shape)
        else:
            yield name, "BF16", shape, 2 * _numel(shape)


def write_config(model: str, folder: Path, *, quantised: bool) -> None:
    folder.mkdir(exist_ok=True)
    config, shape = model_config(model), SHAPES[model]
    if quantised:
        settings = block_float8.settings(shape.layers, routed=bool(shape.num_experts))
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def write_checkpoint(model: str, folder: Path, device: torch.device, num_files: int = 16) -> None:
    """Write config.json and random weights, made on `device`, in several files that threads write in parallel."""
    write_config(model, folder, quantised=False)
    entries = list(checkpoint_entries(model, quantised=False))

    def write(number: int) -> None:
        generator = torch.Generator(device)
        generator.manual_seed(number)
        made = {
            name: torch.empty(shape, dtype=torch.bfloat16, device=device)
            .normal_(0, 0.02, generator=generator)
            .cpu()
            for name, _, shape, _ in entries[number::num_files]
        }
        save_file(made, folder / f"model-{number:05}.safetensors")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(num_files)))
    torch.cuda.empty_cache()


def write_model_folder(model: str, folder: Path) -> None:
    """Write config.json and a sparse safetensors file: names, shapes and types, and zeros that use no disk space."""
    write_config(model, folder, quantised=False)
    header: dict[str, Any] = {}
    at = 0
    for name, dtype, shape, nbytes in checkpoint_entries(model, quantised=False):
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(file.tell() + at)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
