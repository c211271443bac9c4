"""A checkpoint that calls a tool after a question, and answers after the tool's result.

The model is a chain: attention and MLP add nothing, and the output layer maps the current token to its successor. The
chat template ends the prompt with a token that begins the right chain. The tokens of both chains are not those that the
tokenizer makes of the same text, so text that is tokenised again gives other ids.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

__all__ = ["ANSWER", "CALL", "END", "TOOL", "add", "write_agent_checkpoint"]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
END = "<|im_end|>"
CALL = (
    *("<tool_call>", '\n{"name": "', "ad", 'd", "arguments": {"a": ', "17, "),
    *('"b": ', "25}", "}\n", "</tool_call>"),
)
ANSWER = ("The sum", " is", " 42.")
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
{{ '# Tools' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif -%}
{%- set ns = namespace(last='', question=-1) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + ('<|say|>' if ns.last == 'tool' else '<|call|>') }}
{%- if message.reasoning_content and loop.index0 > ns.question %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{% if message.role != 'system' %}{% set ns.last = message.role %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('<|say|>' if ns.last == 'tool' else '<|call|>') }}{% endif %}
"""


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def write_agent_checkpoint(
    folder: Path, *, call: tuple[str, ...] = CALL, answer: tuple[str, ...] = ANSWER
) -> Path:
    """Write the model, its tokenizer and its chat template; `call` and `answer` are the tokens of both chains."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chains = [("<|call|>", *call, END), ("<|say|>", *answer, END)]
    special = ["<|im_start|>", END, "<|call|>", "<|say|>"]
    words = [word for chain in chains for word in chain if word not in special]
    assert len({*words, *alphabet}) == len(words) + len(alphabet), "one successor for each token"
    names = {word: level.pre_tokenize_str(word)[0][0] for word in words}
    # No merge leads to these words, so the tokenizer never makes them.
    vocabulary = {name: index for index, name in enumerate([*alphabet, *names.values()])}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = level
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(str(folder))
    config = transformers.Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = {word: vocabulary[name] for word, name in names.items()}
    ids |= {word: tokenizer.convert_tokens_to_ids(word) for word in special}
    pairs = [pair for chain in chains for pair in pairwise(chain)]
    directions, _ = torch.linalg.qr(torch.randn(128, 128))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.mul_(0.1)
        for direction, (current, successor) in zip(directions, pairs, strict=False):
            model.model.embed_tokens.weight[ids[current]] = direction
            model.lm_head.weight[ids[successor]] += 4.0 * direction
    model.to(torch.bfloat16).save_pretrained(str(folder))
    return folder
