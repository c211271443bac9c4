"""A receiver of bucket streams in a process of its own.

It prints its name, then reads commands: `connect ADDRESS`, `receive STOP_AT SECONDS`: it answers every one with a
line of JSON: for a stream the digests of what came, or why it ended and when.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import msgspec
import torch
import xxhash

from windlass.errors import WindlassError
from windlass.integrations.bucket_stream import BucketReceiver, StreamAddress, StreamSettings
from windlass.transports.registry import parse_transport


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def digest(tensor: torch.Tensor) -> list[object]:
    """Dtype, shape and a digest of every byte."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), xxhash.xxh3_64_hexdigest(raw)]


async def receive(receiver: BucketReceiver, stop_at: int, seconds: float) -> None:
    got: dict[str, list[object]] = {}
    try:
        async for name, tensor in receiver.receive():
            if len(got) == stop_at:
                say({"stopped": True})
                await asyncio.sleep(seconds)
            got[name] = digest(tensor)
    except WindlassError as error:
        say({"error": f"{type(error).__name__}: {error}", "at": time.monotonic()})
        return
    say({"got": got})


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1])
    settings["transport"] = parse_transport(settings["transport"])
    receiver = BucketReceiver(StreamSettings(**settings))
    say({"name": receiver.name})
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        if command == "connect":
            receiver.connect(msgspec.json.decode(rest, type=StreamAddress))
            say({"connected": True})
        elif command == "receive":
            stop_at, seconds = rest.split()
            asyncio.run(receive(receiver, int(stop_at), float(seconds)))


if __name__ == "__main__":
    main()
