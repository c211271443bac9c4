"""A small checkpoint with a small real tokenizer, for `windlass demo --checkpoint`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

__all__ = ["byte_level_bpe", "write_checkpoint"]


def byte_level_bpe(
    texts: Sequence[str], *, vocab_size: int, special_tokens: Sequence[str]
) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer on texts."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special_tokens),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def write_checkpoint(folder: Path, *, chat_template: str = "", **changed: Any) -> Path:
    """Write a Qwen3 with random weights, and a byte-level BPE tokenizer that was trained on sums."""
    sums = [f"{a} + {b} = {a + b}" for a in range(0, 100, 3) for b in range(100)]
    bpe = byte_level_bpe(sums, vocab_size=300, special_tokens=["<end>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
    if chat_template:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(11)
    config = transformers.Qwen3Config(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            **changed,
        }
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(str(folder))
    return folder
