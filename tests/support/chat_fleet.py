"""An embedded engine with the agent's checkpoint, and raw requests to the endpoint for agents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agent_checkpoint import TOOL, write_agent_checkpoint

__all__ = ["QUESTION", "TOKEN", "Client", "post", "serving", "set_version", "tool_loop"]

TOKEN = "a-token"
QUESTION = {"role": "user", "content": "What is 17 + 25?"}


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve a checkpoint by an embedded engine of version 0; yield its URL and its process."""
    process = subprocess.Popen(
        (
            *(sys.executable, "-m", "windlass.engines.embedded", "--name", "engine"),
            *("--model", str(folder), "--max-positions", "4096", "--max-batch", "16", *options),
        ),
        env={**os.environ, "WINDLASS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = json.loads(process.stdout.readline())["url"]
        set_version(url, 0)
        yield url, process
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the agent's checkpoint. A module may override this fixture to serve another checkpoint."""
    return write_agent_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def embedded(folder: Path) -> Iterator[str]:
    """Serve the checkpoint by an embedded engine, and yield the engine's URL."""
    with serving(folder) as (url, _):
        yield url


def post(url: str, body: object) -> None:
    """Send a request of the engine's owner."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=60).close()


def set_version(url: str, version: int) -> None:
    """Label further tokens of an engine with `version`."""
    post(f"{url}/update_weight_version", {"new_version": version})


class Client:
    """Client that sends what a test says, with one key."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, key: str) -> None:
        self._http, self.base_url = http, base_url
        self.headers = {"Authorization": f"Bearer {key}"}

    async def ask(
        self,
        path: str,
        body: object,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Post JSON, and return the JSON of the answer, which must have this status."""
        sent = {**self.headers, **(headers or {})}
        async with self._http.post(self.base_url + path, json=body, headers=sent) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == status, answer
            return answer

    async def chat(self, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Ask for a chat completion with the tool, and return its only message."""
        body = {"model": "any", "messages": messages, "tools": [TOOL], **more}
        answer = await self.ask("/chat/completions", body)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message


async def tool_loop(
    client: Client, messages: list[dict[str, Any]], **more: Any
) -> list[dict[str, Any]]:
    """Ask until the model calls no tool; return all messages."""
    while True:
        message = await client.chat(messages, **more)
        messages = [*messages, message]
        if not message.get("tool_calls"):
            return messages
        for call in message["tool_calls"]:
            given = json.loads(call["function"]["arguments"])
            assert (call["function"]["name"], given) == ("add", {"a": 17, "b": 25})
            result = str(given["a"] + given["b"])
            messages = [*messages, {"role": "tool", "tool_call_id": call["id"], "content": result}]
