"""Live updates of models with checkpoints that differ from their modules: renamed, fused, or with unread tensors.

The trainer gets only the model. After an update, the engine has the same bytes as after a load of a checkpoint that
`save_pretrained` wrote.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from servers import CONFIGS, MTP, TOKEN, Layout, build, save, serving

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

More = dict[str, torch.Tensor | str]
"""Additional tensor of a checkpoint -> its values, or the name of the tensor that it copies."""

MASKS: More = {
    f"h.{layer}.attn.{name}": value
    for layer in range(2)
    for name, value in (
        ("bias", torch.tril(torch.ones(1, 1, 256, 256, dtype=torch.uint8))),
        ("masked_bias", torch.tensor(-1e4)),
    )
}
"""Attention masks that older checkpoints of GPT-2 contain."""
VOCAB, HIDDEN = (int(str(CONFIGS["tied"][name])) for name in ("vocab_size", "hidden_size"))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
OTHER_HEAD: More = {
    HEAD: torch.full((VOCAB, HIDDEN), 0.5).bfloat16(),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32),
}
REDUNDANT_HEAD: More = {HEAD: EMBEDDING}


def with_more(folder: Path, more: More) -> Path:
    """Add tensors, or copies of existing tensors, to a checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    named = {
        prefix * name.startswith("h.") + name: tensors[tensor].clone()
        if isinstance(tensor, str)
        else tensor
        for name, tensor in more.items()
    }
    save_file({**tensors, **named}, file, metadata={"format": "pt"})
    return folder


def require_tied(held: list[dict[str, str]], fresh: list[dict[str, str]]) -> None:
    """Check that each live head equals the trainer's tied embedding, and remove heads from both dictionaries.

    vLLM 0.32 has a separate head if its first checkpoint had a head.
    """
    for live, loaded in zip(held, fresh, strict=True):
        assert live.pop(HEAD, live[EMBEDDING]) == live[EMBEDDING]
        loaded.pop(HEAD, None)


@pytest.mark.parametrize(
    ("engine", "kind", "more"),
    [
        ("vllm", "mixtral", {}),
        ("sglang", "mixtral", {}),
        ("vllm", "neox", {}),
        ("vllm", "gpt2", MASKS),
        ("vllm", "gpt_oss", {}),
        ("vllm", "minimax_m2", {}),
        ("vllm", "tied", OTHER_HEAD),
        ("vllm", "tied", REDUNDANT_HEAD),
        ("sglang", "tied", OTHER_HEAD),
        ("vllm", "mtp", {}),
    ],
)
async def test_a_trainer_publishes_a_model_without_a_name_map(
    engine: str, kind: str, more: More, tmp_path: Path
) -> None:
    own = save(kind, 1, tmp_path / "own")
    if more:
        with_more(own, more)
    config = ControlConfig(
        mode=UpdateMode.IN_PLACE,
        pause_mode=PauseMode.ABORT,
        deadlines=PhaseDeadlines(pause_s=120),
    )
    model = build(kind, 3)
    model.save_pretrained(tmp_path / "3")
    drafting = MTP if kind == "mtp" else ()
    with serving(engine, own, tmp_path / "live.log", layout=Layout(1), flags=drafting) as server:
        async with windlass.Controller(token=TOKEN, config=config) as controller:
            await asyncio.to_thread(server.join, controller.url, "cma")

            def update() -> None:
                with windlass.connect_trainer(
                    model, controller=controller.url, token=TOKEN
                ) as client:
                    assert client.publish(1).result().digest_ok

            await asyncio.to_thread(update)
            held, fresh = server.digests(), server.digests_of_fresh_load(tmp_path / "3")
            if kind == "mtp":
                assert [name for name in held[0] if name.startswith("draft.")]
                assert server.sample([5, 9, 33], 8).versions == [1] * 8
            if kind == "tied":
                require_tied(held, fresh)
            assert held == fresh
