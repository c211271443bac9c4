"""Problem of the demo for a checkpoint with a tokenizer: sums of two numbers, as text."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from windlass.errors import ConfigError
from windlass.jobs.demo.recipe import Problem

LARGEST = 99
"""Largest number of a question."""
SAMPLE = "47 + 85 ="
"""Text that a tokenizer must not change by encoding and decoding."""
DIGIT_CREDIT = 0.2
"""Credit of an answer that has only digits, but not the sum. A model with random weights can learn from it."""


def load_tokenizer(checkpoint: Path) -> Any:
    """Load the tokenizer of a checkpoint.

    Raises:
        ConfigError: transformers cannot load the tokenizer, or the tokenizer cannot encode and decode a sample text. For
            example, transformers makes an empty tokenizer if the folder has no tokenizer files.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(checkpoint), local_files_only=True
        )
        text = tokenizer.decode(tokenizer.encode(SAMPLE))
    # The files of the user may raise any error in transformers.
    except Exception as error:
        raise _no_tokenizer(checkpoint, f"{type(error).__name__}: {error}") from error
    if SAMPLE not in text:
        raise _no_tokenizer(checkpoint, f"the tokenizer turns {SAMPLE!r} into {text!r}")
    return tokenizer


def _no_tokenizer(checkpoint: Path, reason: str) -> ConfigError:
    """Return the error for a checkpoint without a usable tokenizer."""
    return ConfigError(
        f"demo: --checkpoint must be a folder with a tokenizer of transformers (tokenizer.json), got {checkpoint}: "
        f"{reason}"
    )


def render(tokenizer: Any, first: int, second: int) -> tuple[int, ...]:
    """Return the token ids of a question, in the tokenizer's chat template if it has one."""
    if tokenizer.chat_template is None:
        return tuple(tokenizer.encode(f"{first} + {second} ="))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"What is {first} + {second}? Answer with the number only."}],
        add_generation_prompt=True,
        tokenize=False,
        # Qwen3's template needs this for answers without a thinking part. Other templates ignore it.
        enable_thinking=False,
    )
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def longest_prompt(tokenizer: Any) -> int:
    """Return the number of tokens of the longest prompt that `arithmetic` makes."""
    numbers = range(LARGEST + 1)
    longest = max(numbers, key=lambda number: len(render(tokenizer, number, number)))
    # Use the longest number as the first operand, and try every number as the second. A tokenizer may merge digits with
    # neighbouring characters, so the same number may need more tokens as the second operand.
    return max(len(render(tokenizer, longest, second)) for second in numbers)


def reward(text: str, total: int) -> float:
    """Return 1 if the first number in `text` is `total`, else `DIGIT_CREDIT` times the share of digits in `text`."""
    found = re.search(r"[0-9]+", text)
    if found is not None and found.group() == str(total):
        return 1.0
    return DIGIT_CREDIT * sum(c in "0123456789" for c in text) / max(len(text), 1)


def arithmetic(tokenizer: Any) -> Problem:
    """Return the problem "add two numbers up to `LARGEST`", with prompts and answers as this tokenizer's tokens."""
    totals: dict[tuple[int, ...], int] = {}

    def prompt(generator: random.Random) -> tuple[int, ...]:
        first, second = (generator.randint(0, LARGEST) for _ in range(2))
        prompt_ids = render(tokenizer, first, second)
        totals[prompt_ids] = first + second
        return prompt_ids

    def reward_of(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:
        text = tokenizer.decode(list(output_ids), skip_special_tokens=True)
        return reward(text, totals[tuple(prompt_ids)])

    return Problem(prompt, reward_of)
