"""GRPO for an agent that calls a tool with the `openai` client. Each of its conversations is one training sample.

pip install '.[embedded,examples]'
python examples/tool_agent/tool_agent.py build/tool-agent    make a tiny chat model
windlass launch examples/tool_agent/tool_agent.toml          train it; set `model` in the TOML for another model
"""

import itertools
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai

from windlass.jobs import Recipe, Task
from windlass.rollout import RolloutGroup, Workflow, WorkflowContext, run_rollout_worker

ITEMS = ("pen", "cup", "hat", "map", "bag", "key")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Return the price of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
}
MAX_TURNS = 4
# All sessions share the connections of this client. Each session has its address and key.
CLIENT = openai.AsyncOpenAI(api_key="none")


def question(item: str) -> dict[str, str]:
    return {"role": "user", "content": f"What does a {item} cost?"}


async def agent(client: openai.AsyncOpenAI, item: str, prices: dict[str, int]) -> str:
    """Answer a question with a tool. This function knows nothing of Windlass."""
    messages: list[Any] = [question(item)]
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL]
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            wanted = json.loads(call.function.arguments).get("item")
            price = str(prices.get(wanted, "unknown"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": price})
    return ""


async def shop(context: WorkflowContext) -> float:
    """Run the agent, and return its reward: 1 for the right price."""
    given: Any = context.arguments
    item, prices = given
    async with context.chat_endpoint() as session:
        client = CLIENT.with_options(base_url=session.base_url, api_key=session.api_key)
        answer = await agent(client, item, prices)
    return float(answer == str(prices[item]))


WORKFLOWS: Mapping[str, Workflow] = {"shop": shop}


class ToolAgent(Recipe):
    """Questions about items. Their prices change with each task, so that only the tool knows them."""

    def tasks(self) -> Iterator[Task]:
        return (self.task(number) for number in itertools.count())

    def task(self, number: int) -> Task:
        prices = {item: random.Random(f"{number}/{item}").randrange(10) for item in ITEMS}
        return Task(workflow="shop", arguments=[ITEMS[number % len(ITEMS)], prices])

    def rewards(self, group: RolloutGroup) -> list[float]:
        return [float(rollout.value) for rollout in group.rollouts]  # type: ignore[arg-type]

    def evaluation_tasks(self) -> list[Task]:
        return [self.task(number) for number in range(len(ITEMS))]

    def workflows(self) -> Mapping[str, Workflow]:
        return WORKFLOWS


def make_model(folder: Path, num_steps: int = 300) -> None:
    """Write a chat model that calls the tool, half of the time with a wrong item."""
    sys.path.append(str(Path(__file__).parents[2]))
    from examples.tiny_chat_model import write_tiny_chat_model

    def conversation(item: str, step: int) -> list[dict[str, str]]:
        # Wrong items in the last steps leave something to learn.
        is_right = step < num_steps - 40 or random.random() < 0.4
        call = {"name": "price", "arguments": {"item": item if is_right else random.choice(ITEMS)}}
        price = str(random.randrange(10))
        return [
            question(item),
            {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
            {"role": "tool", "content": price},
            {"role": "assistant", "content": price},
        ]

    write_tiny_chat_model(
        folder, lambda step: [conversation(item, step) for item in ITEMS * 8], num_steps
    )


if __name__ == "__main__":
    if "--controller" in sys.argv:
        sys.exit(run_rollout_worker(WORKFLOWS))
    make_model(Path(sys.argv[1]))
