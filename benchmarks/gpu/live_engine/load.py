"""Clients that stream tokens from an engine."""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection
from typing import Any

import aiohttp

from live_engine.arrivals import Arrivals

WARM_TOKENS = 100
"""Number of tokens after which all kernels of a stream are compiled."""


def load(url: str, engine: str, streams: int, vocab: int, pipe: Connection) -> None:
    """Stream tokens until a command ends it; then send arrival times per stream and request."""
    asyncio.run(_load(url, engine, streams, vocab, pipe))


def generate_request(
    engine: str, prompt: list[int], count: int, temperature: float, *, stream: bool
) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request."""
    if engine == "vllm":
        sampling = {"max_tokens": count, "temperature": temperature, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": stream}
        return "/inference/v1/generate", body
    sampling = {"max_new_tokens": count, "temperature": temperature, "ignore_eos": True}
    return "/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": stream}


async def _meet(
    url: str, engine: str, streams: int, vocab: int, session: aiohttp.ClientSession
) -> None:
    """Send batches that mix prompts and decoding requests in several proportions.

    Engines compile kernels for each shape of a batch at its first use, for about a second. An update can split the
    requests of a batch, and the compilation would then count as a gap of the update.
    """

    async def answer(index: int, count: int) -> None:
        prompt = [(index * 7919 + k * 31) % vocab for k in range(64)]
        path, body = generate_request(engine, prompt, count, 1.0, stream=False)
        async with session.post(url + path, json=body) as response:
            await response.read()

    async def late(indices: range) -> None:
        await answer(streams, 4)
        await asyncio.gather(*(answer(index, 8) for index in indices))

    for early in (1, streams // 5, streams // 2, streams - 2):
        decoding = [answer(index, 64) for index in range(early)]
        await asyncio.gather(*decoding, late(range(early, streams)))


async def _load(url: str, engine: str, streams: int, vocab: int, pipe: Connection) -> None:
    ended, warm = asyncio.Event(), asyncio.Event()
    arrivals: Arrivals = [[] for _ in range(streams)]
    errors: list[str] = []

    async def client(index: int, session: aiohttp.ClientSession) -> None:
        number = 0
        while not ended.is_set():
            number += 1
            prompt = [(index * 7919 + number * 104729 + k * 31) % vocab for k in range(64)]
            path, body = generate_request(engine, prompt, 512, 1.0, stream=True)
            times: list[float] = []
            arrivals[index].append(times)
            try:
                async with session.post(url + path, json=body) as response:
                    if response.status != 200:
                        errors.append(f"{response.status}: {(await response.text())[:200]}")
                        return
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            times.append(time.monotonic())
                            if min(len(requests[0]) for requests in arrivals) >= WARM_TOKENS:
                                warm.set()
                        if ended.is_set():
                            return
            except aiohttp.ClientError as error:
                errors.append(f"{type(error).__name__}: {error}")

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        await _meet(url, engine, streams, vocab, session)
        clients = [asyncio.create_task(client(index, session)) for index in range(streams)]
        await warm.wait()
        pipe.send("warm")
        await asyncio.to_thread(pipe.recv)
        ended.set()
        await asyncio.wait(clients, timeout=10)
        for task in clients:
            task.cancel()
    pipe.send((arrivals, errors))
