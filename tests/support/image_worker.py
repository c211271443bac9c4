"""Rollout worker with workflows that talk about images, for `test_live_images.py`."""

from __future__ import annotations

from typing import Any

import aiohttp

from windlass.rollout import WorkflowContext, run_rollout_worker


async def talk(context: WorkflowContext) -> list[str]:
    """Ask each question after the answers to the questions before it, and return the answers."""
    questions: Any = context.arguments
    messages: list[Any] = []
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        turn = await context.chat(messages)
        messages.append({"role": "assistant", "content": turn.text})
        answers.append(turn.text)
    return answers


async def agent(context: WorkflowContext) -> list[str]:
    """Ask the same questions as `talk` at the endpoint for agents."""
    questions: Any = context.arguments
    messages: list[Any] = []
    answers = []
    async with context.chat_endpoint() as session, aiohttp.ClientSession() as http:
        for question in questions:
            messages.append({"role": "user", "content": question})
            url = f"{session.base_url}/chat/completions"
            key = {"Authorization": f"Bearer {session.api_key}"}
            async with http.post(url, json={"messages": messages}, headers=key) as response:
                answer = await response.json()
                if response.status != 200:
                    raise RuntimeError(answer)
            message = answer["choices"][0]["message"]
            messages.append({"role": "assistant", "content": message["content"]})
            answers.append(message["content"])
    return answers


if __name__ == "__main__":
    run_rollout_worker({"talk": talk, "agent": agent})
