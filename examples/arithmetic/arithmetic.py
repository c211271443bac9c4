"""GRPO on arithmetic with a chat template and a stop text. This file has the reward and makes the model and the data.

python examples/arithmetic/arithmetic.py MODEL_FOLDER    make a tiny chat model and a file of questions
windlass launch examples/arithmetic/arithmetic.toml      train it; set `model` in the TOML for another model
"""

import json
import random
import re
import sys
from pathlib import Path

from windlass.jobs import DatasetRecipe
from windlass.rollout import Rollout


def reward(rollout: Rollout) -> float:
    """Return 1 for the right number, 0.1 for another number in the right form, and otherwise 0."""
    found = re.search(r"<answer>(\d+)</answer>", rollout.text)
    if found is None:
        return 0.0
    return 1.0 if found[1] == rollout.metadata["answer"] else 0.1  # type: ignore[index]


class Arithmetic(DatasetRecipe):
    """Each row of `[data]` is a task, and `[rewards]` calls `reward`. So nothing is left to write here."""


def make_data(folder: Path) -> list[dict[str, str]]:
    """Write questions and their answers as JSON lines, and return them."""
    rows = [
        {"question": f"What is {a} + {b}?", "answer": str(a + b)}
        for a in range(6)
        for b in range(6)
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return rows


def make_model(folder: Path, num_steps: int = 200) -> None:
    """Write a chat model that knows the form of an answer, and gives the right number about a third of the time."""
    sys.path.append(str(Path(__file__).parents[2]))
    from examples.tiny_chat_model import write_tiny_chat_model

    folder.mkdir(parents=True, exist_ok=True)
    rows = make_data(folder)

    def conversation(row: dict[str, str], step: int) -> list[dict[str, str]]:
        # Wrong answers in the last steps leave something to learn.
        is_right = step < num_steps - 40 or random.random() < 0.35
        answer = row["answer"] if is_right else str(random.randrange(11))
        return [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": f"<answer>{answer}</answer> I am sure."},
        ]

    write_tiny_chat_model(folder, lambda step: [conversation(row, step) for row in rows], num_steps)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
