"""An agent that uses the `openai` client. Each of its conversations becomes one training sample.

Start an engine with a model that has a tokenizer and a chat template with tools, and then this script:

    export WINDLASS_TOKEN=a-secret-of-yours
    python -m windlass.engines.embedded --name engine-a --model FOLDER --port 8100 --max-positions 4096
    python agent_openai.py run --engine http://127.0.0.1:8100 --model FOLDER --version 0

The agent is the function `agent`, in a process of its own. It knows nothing of Windlass: `OPENAI_BASE_URL` and
`OPENAI_API_KEY` lead it to the endpoint. `--python` names the interpreter of an environment that has `openai`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
MAX_TURNS = 8


def agent(question: str) -> str:
    """Answer a question with a tool; this is how any agent uses OpenAI's API."""
    import openai

    client, messages = openai.OpenAI(), [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            result = str(int(given.get("a", 0)) + int(given.get("b", 0)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def run(engine: str, model: str, version: int, python: str, num_samples: int) -> None:
    """Run the agent several times, and print the training sample of each conversation."""
    from windlass.rollout import (
        ChatSettings,
        RolloutController,
        SamplingParams,
        StalenessPolicy,
        StaticEngines,
        WorkflowContext,
        training_samples,
    )

    async def solve(context: WorkflowContext) -> float:
        """Run the agent's process, and return its reward."""
        given: Any = context.arguments
        first, second = given
        async with context.chat_endpoint() as session:
            process = await asyncio.create_subprocess_exec(
                *(python, __file__, "agent", f"What is {first} + {second}?"),
                env={"PATH": os.environ["PATH"], **session.environment},
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                answer, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
        print(answer.decode().strip())
        return float(str(first + second) in answer.decode())

    policy = StalenessPolicy(max_staleness=1, batch_size=num_samples, max_concurrent=num_samples)
    engines = StaticEngines([("engine-a", engine, version)])
    async with RolloutController(engines, policy, token=os.environ["WINDLASS_TOKEN"]) as rollouts:
        rollouts.run_here({"solve": solve}, chat=ChatSettings(tokenizer=model))
        rollouts.submit_workflow_group(
            "solve", [17, 25], num_samples, SamplingParams(max_new_tokens=256)
        )
        (group,) = await rollouts.next_batch(1, deadline_s=600)
        for sample in training_samples(group, [rollout.value for rollout in group.rollouts]):
            print(
                f"reward {sample.reward}: {len(sample.prompt_ids)} prompt tokens, then "
                f"{sum(sample.loss_mask)} generated of {len(sample.output_ids)}"
            )


def main() -> None:
    """Run the agent, or the rollouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    roles = parser.add_subparsers(dest="role", required=True)
    roles.add_parser("agent").add_argument("question")
    options = roles.add_parser("run")
    options.add_argument("--engine", required=True, help="URL of an engine")
    options.add_argument("--model", required=True, help="folder with the tokenizer")
    options.add_argument("--version", type=int, default=0, help="version that the engine serves")
    options.add_argument("--python", default=sys.executable, help="interpreter with `openai`")
    options.add_argument("--num-samples", type=int, default=4)
    args = parser.parse_args()
    if args.role == "agent":
        print(agent(args.question))
    else:
        asyncio.run(run(args.engine, args.model, args.version, args.python, args.num_samples))


if __name__ == "__main__":
    main()
