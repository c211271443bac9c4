"""GRPO in the environment FrozenLake of gymnasium. Each episode is one conversation, and one training sample.

pip install '.[embedded,examples]'
python examples/frozen_lake/frozen_lake.py build/frozen-lake    make a tiny chat model
windlass launch examples/frozen_lake/frozen_lake.toml           train it; set `model` in the TOML for another model

The environment knows nothing of Windlass. It applies the moves, ends the episode, and gives the reward.
"""

import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import gymnasium

from windlass.jobs import Recipe, Task
from windlass.rollout import RolloutGroup, Workflow, WorkflowContext, run_rollout_worker

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
MAX_MOVES = 10
SIZE = 4
WAY = "drdld.d.rrd..rr."  # first letters of the moves to the goal, by cell


def observed(cell: int) -> dict[str, str]:
    """Return the message that tells the player its place."""
    row, column = divmod(cell, SIZE)
    return {"role": "user", "content": f"row {row}, column {column}"}


async def play(context: WorkflowContext) -> float:
    """Play one episode, and return the sum of the environment's rewards. An unknown word ends the episode."""
    lake = gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=MAX_MOVES)
    cell, _ = lake.reset()
    messages, total, is_over = [observed(int(cell))], 0.0, False
    while not is_over:
        turn = await context.chat(messages)
        if (move := MOVES.get(turn.text.strip())) is None:
            break
        cell, reward, terminated, truncated, _ = lake.step(move)
        total, is_over = total + float(reward), terminated or truncated
        messages += [{"role": "assistant", "content": turn.text}, observed(int(cell))]
    return total


WORKFLOWS: Mapping[str, Workflow] = {"play": play}


class FrozenLake(Recipe):
    """Endless episodes. Samples of a group differ, because the engine samples the moves."""

    def tasks(self) -> Iterator[Task]:
        return itertools.repeat(Task(workflow="play"))

    def rewards(self, group: RolloutGroup) -> list[float]:
        return [float(rollout.value) for rollout in group.rollouts]  # type: ignore[arg-type]

    def evaluation_tasks(self) -> list[Task]:
        return [Task(workflow="play")]

    def workflows(self) -> Mapping[str, Workflow]:
        return WORKFLOWS


def make_model(folder: Path, num_steps: int = 120) -> None:
    """Write a chat model that knows a way to the goal, and takes it about half of the time."""
    sys.path.append(str(Path(__file__).parents[2]))
    from examples.tiny_chat_model import write_tiny_chat_model

    lake = gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=MAX_MOVES)
    words = {word[0]: word for word in MOVES}

    def episode(share_of_right: float) -> list[dict[str, str]]:
        cell, messages, is_over = int(lake.reset()[0]), [], False
        while not is_over:
            is_right = random.random() < share_of_right
            word = words[WAY[cell]] if is_right else random.choice(list(MOVES))
            messages += [observed(cell), {"role": "assistant", "content": word}]
            found, _, terminated, truncated, _ = lake.step(MOVES[word])
            cell, is_over = int(found), terminated or truncated
        return messages

    # Wrong moves in the last steps leave something to learn.
    write_tiny_chat_model(
        folder,
        lambda step: [episode(0.9 if step < num_steps - 30 else 0.6) for _ in range(24)],
        num_steps,
    )


if __name__ == "__main__":
    if "--controller" in sys.argv:
        sys.exit(run_rollout_worker(WORKFLOWS))
    make_model(Path(sys.argv[1]))
