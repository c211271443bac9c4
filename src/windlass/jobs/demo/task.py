"""The task: attend to the operator and repeat the token it points at.

A prompt is `[operator, a, b, go]`; the answer is `a` repeated when the operator is FIRST and
`b` repeated when it is SECOND. Attention is needed, the reward is dense enough to learn
from scratch, and a right answer cannot be given without reading the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["NUM_SYMBOLS", "reward", "sample_prompt"]

NUM_SYMBOLS = 10
FIRST, SECOND, GO = NUM_SYMBOLS, NUM_SYMBOLS + 1, NUM_SYMBOLS + 2
WRONG_OPERAND_CREDIT = 0.2


def sample_prompt(generator: random.Random) -> tuple[int, ...]:
    """A prompt of four tokens with two different symbols."""
    first, second = generator.sample(range(NUM_SYMBOLS), 2)
    return (generator.choice((FIRST, SECOND)), first, second, GO)


def reward(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:
    """Mean credit per token, in [0, 1]: 1 for the right symbol, a little for the other operand."""
    operator, first, second, _ = prompt_ids
    wanted, other = (first, second) if operator == FIRST else (second, first)
    credit = sum(
        1.0 if token == wanted else WRONG_OPERAND_CREDIT if token == other else 0.0
        for token in output_ids
    )
    return credit / max(len(output_ids), 1)
