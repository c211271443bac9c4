"""A small Qwen2-VL with random weights, a real tokenizer and a processor of images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import PIL.Image
import torch
import transformers
from demo_checkpoint import byte_level_bpe

__all__ = ["IMAGE_TOKEN", "MERGED", "png", "write_vision_checkpoint"]

PATCH, MERGE = 14, 2
MERGED = PATCH * MERGE
"""Side in pixels of the part of an image that one token stands for."""
IMAGE_TOKEN = "<|image_pad|>"
_SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    IMAGE_TOKEN,
    "<|video_pad|>",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
"""The template of Qwen2-VL, without its numbers of images and its default system message."""


def png(side: int, seed: int, *, height: int = 0) -> bytes:
    """Return a PNG of `side` times `height` (default `side`) pixels. The pixels depend on the seed."""
    torch.manual_seed(seed)
    pixels = torch.randint(256, (height or side, side, 3), dtype=torch.uint8)
    stored = io.BytesIO()
    PIL.Image.fromarray(pixels.numpy()).save(stored, "PNG")
    return stored.getvalue()


def write_vision_checkpoint(folder: Path, seed: int) -> Any:
    """Write the checkpoint, and return the model."""
    questions = [f"What is in image {n} ?" for n in range(100)]
    bpe = byte_level_bpe(questions, vocab_size=320, special_tokens=_SPECIAL)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    ids = dict(zip(_SPECIAL, tokenizer.convert_tokens_to_ids(_SPECIAL), strict=True))
    sizes = {"shortest_edge": MERGED**2, "longest_edge": 64 * MERGED**2}
    patches = {
        "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE, "size": sizes,
        "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4],
        "processor_class": "Qwen2VLProcessor",
    }  # fmt: skip
    for name, kind in (("preprocessor", "image"), ("video_preprocessor", "video")):
        known = {f"{kind}_processor_type": f"Qwen2VL{kind.capitalize()}Processor", **patches}
        (folder / f"{name}_config.json").write_text(json.dumps(known))
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0,
            },
        },
        vision_config={
            "depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2,
        },
        image_token_id=ids[IMAGE_TOKEN], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Qwen2VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(str(folder))
    return model
