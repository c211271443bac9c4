"""Agents of frameworks that know nothing of Windlass: `python agent_run.py FRAMEWORK` prints the agent's answer.

The framework reads OPENAI_BASE_URL and OPENAI_API_KEY. The agent has one tool, `add`, and one question.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

QUESTION = "What is 17 + 25?"
SYSTEM = "Use the tool."


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def openai_chat() -> str:
    """Run the loop with the client's own objects, and check the types of errors."""
    import openai

    client = openai.OpenAI()
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages: list[object] = [{"role": "user", "content": QUESTION}]
    while True:
        answer = client.chat.completions.create(
            model="policy", messages=messages, tools=tools, logprobs=True
        )
        (choice,) = answer.choices
        assert choice.logprobs is not None
        assert answer.usage.completion_tokens == len(choice.logprobs.content)
        messages.append(choice.message)
        if not choice.message.tool_calls:
            check_errors(client)
            return str(choice.message.content)
        for call in choice.message.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def check_errors(client: object) -> None:
    import openai

    assert isinstance(client, openai.OpenAI)
    assert [model.id for model in client.models.list()] == ["policy"]
    foreign = client.with_options(api_key="sk-windlass-0-0", max_retries=0)
    messages = [{"role": "user", "content": QUESTION}]
    for caller, kind in ((foreign, openai.AuthenticationError), (client, openai.BadRequestError)):
        try:
            caller.chat.completions.create(model="m", messages=messages, frequency_penalty=1.0)
        except kind:
            continue
        raise AssertionError(kind)


def openai_stream() -> str:
    """Run the loop with streams."""
    import openai

    client = openai.OpenAI()
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages: list[object] = [{"role": "user", "content": QUESTION}]
    while True:
        with client.chat.completions.stream(
            model="policy", messages=messages, tools=tools, stream_options={"include_usage": True}
        ) as stream:
            answer = stream.get_final_completion()
        assert answer.usage is not None
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude={"parsed"}, exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_responses() -> str:
    """Run the loop with the Responses API."""
    import openai

    client = openai.OpenAI()
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    answer = client.responses.create(model="policy", input=QUESTION, tools=tools)
    while calls := [item for item in answer.output if item.type == "function_call"]:
        results = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": str(add(**json.loads(call.arguments))),
            }
            for call in calls
        ]
        with client.responses.stream(
            model="policy", input=results, tools=tools, previous_response_id=answer.id
        ) as stream:
            answer = stream.get_final_response()
    return str(answer.output_text)


def _openai_agents(model: object, streamed: bool) -> str:
    import agents

    agents.set_tracing_disabled(True)
    agent = agents.Agent(
        name="adder", instructions=SYSTEM, tools=[agents.function_tool(add)], model=model
    )

    async def run() -> str:
        if not streamed:
            return str((await agents.Runner.run(agent, QUESTION)).final_output)
        found = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in found.stream_events():
            pass
        return str(found.final_output)

    return asyncio.run(run())


def agents_responses() -> str:
    """OpenAI's Agents SDK with its default, the Responses API."""
    return _openai_agents("policy", streamed=False)


def agents_responses_stream() -> str:
    return _openai_agents("policy", streamed=True)


def agents_chat() -> str:
    """OpenAI's Agents SDK with chat completions."""
    import agents
    import openai

    model = agents.OpenAIChatCompletionsModel("policy", openai.AsyncOpenAI())
    return _openai_agents(model, streamed=True)


def pydantic_ai() -> str:
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = pydantic_ai.Agent(OpenAIChatModel("policy"), instructions=SYSTEM, tools=[add])
    return str(agent.run_sync(QUESTION).output)


def langgraph() -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="policy"), [add], prompt=SYSTEM)
    found = agent.invoke({"messages": [("user", QUESTION)]})
    return str(found["messages"][-1].content)


AGENTS: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (
        *(openai_chat, openai_stream, openai_responses),
        *(agents_responses, agents_responses_stream, agents_chat, pydantic_ai, langgraph),
    )
}

if __name__ == "__main__":
    print(AGENTS[sys.argv[1]]())
