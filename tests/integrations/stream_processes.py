"""Both ends of a bucket stream in separate processes that a test can kill."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash

from windlass.errors import WindlassError
from windlass.integrations.bucket_stream import (
    BucketReceiver,
    BucketSender,
    StreamAddress,
    StreamSettings,
)
from windlass.transports.registry import parse_transport

Tensors = list[tuple[str, torch.Tensor]]
HOST = "127.0.0.1"
ANSWER_S = 60.0
STOPPED = "stopped"


def settings(bucket_nbytes: int, transport: str = "cma", mode: str = "in_place") -> StreamSettings:
    return StreamSettings(
        bucket_nbytes=bucket_nbytes,
        transport=parse_transport(transport),
        mode=mode,  # type: ignore[arg-type]  # a name is taken
    )


def weights(step: int) -> Tensors:
    """Return tensors of many dtypes and shapes with mostly distinct elements; the first and the last exceed a bucket."""
    begin = 1_000_003 * step
    flat = torch.arange(begin, begin + 150_000, dtype=torch.int32)
    return [
        ("large", flat.view(torch.float32).view(300, 500)),
        ("scalar", torch.tensor(begin + 0.5, dtype=torch.float64)),
        ("empty", torch.empty(0, 7)),
        ("transposed", (flat[:6000] + 1).view(60, 100).t()),
        ("halves", (flat[:20_001] + 2).view(torch.bfloat16)[1:]),
        ("mask", torch.tensor([True, False, True])),
        ("float8", (flat[:1001] + 3).view(torch.float8_e4m3fn)),
        *((f"small.{n}", flat[n * 10 : n * 10 + 10] + 4) for n in range(200)),
        ("large.again", (flat + 5).view(2, 3, 25_000)),
    ]


async def one_by_one(tensors: Tensors) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, tensor


def digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """Return dtype, shape and a digest of all bytes."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), xxhash.xxh3_64_hexdigest(raw)


async def _receive(
    receiver: BucketReceiver, pipe: Connection, stop_at: int, seconds: float
) -> object:
    got: dict[str, object] = {}
    try:
        async for bucket in receiver.receive():
            for name, tensor in bucket:
                if len(got) == stop_at:
                    pipe.send(STOPPED)
                    await asyncio.sleep(seconds)
                got[name] = digest(tensor)
    except WindlassError as error:
        return error, time.monotonic()
    return got


def _be_receiver(pipe: Connection, given: StreamSettings) -> None:
    receiver = BucketReceiver(given)
    pipe.send(receiver.name)
    while True:
        match pipe.recv():
            case StreamAddress() as address:
                receiver.connect(address)
                pipe.send(address)
            case int(stop_at), float(seconds):
                pipe.send(asyncio.run(_receive(receiver, pipe, stop_at, seconds)))
            case _:
                return


def _be_sender(pipe: Connection, given: StreamSettings, tensors: Tensors) -> None:
    sender = BucketSender(given)
    pipe.send(sender.open(HOST))
    sender.wait_for(pipe.recv())
    asyncio.run(sender.send(one_by_one(tensors)))


class Peer:
    """A process with a pipe to the test."""

    def __init__(self, target: Any, *args: object) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        assert self.pipe.poll(ANSWER_S), "no answer"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Receiver(Peer):
    def __init__(self, given: StreamSettings) -> None:
        super().__init__(_be_receiver, given)
        self.name: str = self.answer()

    def receive(self, stop_at: int = -1, seconds: float = 0.0) -> None:
        """Read one stream; before tensor `stop_at`, report it and wait for `seconds`."""
        self.pipe.send((stop_at, seconds))


class Sender(Peer):
    def __init__(self, given: StreamSettings, tensors: Tensors) -> None:
        super().__init__(_be_sender, given, tensors)
        self.address: StreamAddress = self.answer()

    def send_to(self, names: Sequence[str]) -> None:
        self.pipe.send(list(names))
