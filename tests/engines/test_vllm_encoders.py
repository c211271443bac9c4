"""A live vLLM server with new weights never answers from encoder outputs of old weights.

vLLM finds an encoder output by the image alone, whatever the prompt. Two prompts around one image that share no prefix
would therefore still use an output of older weights.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import transformers
from safetensors.torch import save_file
from servers import TOKEN, VENVS, Layout, Server, serving
from test_vllm_caches import vocabulary

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

MODEL = "model"
SIDE, PATCH = 56, 14
IMAGE_TOKEN = 250
NUM_TOKENS = 8
FLAGS = ("--max-model-len", "1024", "--no-skip-tokenizer-init", "--served-model-name", MODEL)
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'text' %} {{ c['text'] }} {% else %} <image> {% endif %}"
    "{% endfor %}{% endfor %}"
)


def build(seed: int) -> Any:
    """Return a small LLaVA with random weights that depend on the seed."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            image_size=SIDE, patch_size=PATCH,
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
            bos_token_id=None, eos_token_id=None,
        ),
        image_token_index=IMAGE_TOKEN, vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.05)
    return model


def checkpoint_name(name: str) -> str | None:
    """Return the name in a published LLaVA checkpoint, which vLLM reads; None for tensors that vLLM does not load."""
    if "post_layernorm" in name:
        return None
    return (
        f"model.{name}".replace("model.model.", "", 1)
        .replace("model.lm_head.", "language_model.lm_head.")
        .replace("vision_tower.", "vision_tower.vision_model.")
        .replace("language_model.embed", "language_model.model.embed")
        .replace("language_model.layers", "language_model.model.layers")
        .replace("language_model.norm", "language_model.model.norm")
    )


def checkpoint(model: Any, folder: Path) -> Path:
    """Save a checkpoint with a tokenizer of one word per token, and a processor."""
    folder.mkdir()
    named = {checkpoint_name(n): p.detach().clone() for n, p in model.named_parameters()}
    tensors = {name: tensor for name, tensor in named.items() if name is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["LlavaForConditionalGeneration"]
    model.config.save_pretrained(folder)
    tokenizer = vocabulary({**{f"w{n}": n for n in range(IMAGE_TOKEN)}, "<image>": IMAGE_TOKEN})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "w0"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor",
                "size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE},
            }
        )
    )  # fmt: skip
    (folder / "processor_config.json").write_text(
        json.dumps(
            {
                "processor_class": "LlavaProcessor", "patch_size": PATCH, "image_token": "<image>",
                "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
            }
        )
    )  # fmt: skip
    return folder


def image() -> str:
    pixels = torch.arange(SIDE * SIDE * 3).mul(7919).remainder(251).to(torch.uint8)
    stored = io.BytesIO()
    PIL.Image.frombytes("RGB", (SIDE, SIDE), pixels.numpy().tobytes()).save(stored, "PNG")
    return "data:image/png;base64," + base64.b64encode(stored.getvalue()).decode()


def ask(server: Server, number: int) -> tuple[list[str], list[float]]:
    """Return greedy tokens and logprobs about the image, after a text that differs for every number."""
    text = " ".join(f"w{(position * 7 + number) % 240 + 5}" for position in range(40))
    answer = server.post(
        "/v1/chat/completions",
        {
            "model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "logprobs": True, "messages": [{"role": "user", "content": [
                {"type": "text", "text": text},
                {"type": "image_url", "image_url": {"url": image()}},
            ]}],
        },
    )  # fmt: skip
    content = answer["choices"][0]["logprobs"]["content"]
    return [entry["token"] for entry in content], [entry["logprob"] for entry in content]


async def test_an_image_is_encoded_again_after_an_update(
    tmp_path: Path, compared: Callable[[str, int], None]
) -> None:
    if not list(VENVS["vllm"].glob("lib/python*/site-packages/torchvision")):
        pytest.skip("vLLM's models with encoders need torchvision (tools/engines/install.sh)")
    config = ControlConfig(
        mode=UpdateMode.IN_PLACE,
        pause_mode=PauseMode.IN_PLACE,
        deadlines=PhaseDeadlines(pause_s=120),
    )
    first, second = build(1), build(2)
    old, new = checkpoint(first, tmp_path / "1"), checkpoint(second, tmp_path / "2")
    layout = Layout()
    with serving("vllm", old, tmp_path / "live.log", layout=layout, flags=FLAGS) as server:
        # The loads of capture make vLLM's workers drop this encoder output.
        before = ask(server, 0)
        async with windlass.Controller(token=TOKEN, config=config) as controller:
            await asyncio.to_thread(server.join, controller.url, "cma")
            with await asyncio.to_thread(
                lambda: windlass.connect_trainer(
                    first, controller=controller.url, token=TOKEN, name_map=checkpoint_name
                )
            ) as trainer:
                assert ask(server, 0) == before
                ask(server, 1)
                first.load_state_dict(second.state_dict())
                await asyncio.to_thread(trainer.publish, 1)
                answers = [ask(server, number) for number in (2, 3)]
    with serving("vllm", new, tmp_path / "fresh.log", layout=layout, flags=FLAGS) as server:
        fresh = [ask(server, number) for number in (2, 3)]
        assert ask(server, 0)[0] != before[0]
    assert answers == fresh
    compared("answers after updates with a fresh server's", len(answers))
    compared("greedy tokens with a fresh server's", NUM_TOKENS * len(answers))
    compared("logprobs with a fresh server's", NUM_TOKENS * len(answers))
