"""Streams of whole tensors between real processes: every byte compared, deaths told at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from receiver_process import digest

from windlass.errors import ConfigError, PeerUnreachable, UnsupportedLayout
from windlass.integrations.bucket_stream import BucketSender, StreamAddress, StreamSettings
from windlass.transports.registry import parse_transport

Tensors = list[tuple[str, torch.Tensor]]
AT_ONCE_S = 3.0
"""Far below every deadline; this machine may be busy."""
DEADLINE_S = 60.0


def settings(bucket_nbytes: int, transport: str = "cma", mode: str = "in_place") -> dict[str, Any]:
    return {"bucket_nbytes": bucket_nbytes, "transport": transport, "mode": mode}


def made(given: dict[str, Any]) -> StreamSettings:
    return StreamSettings(**given | {"transport": parse_transport(given["transport"])})


def weights(step: int) -> Tensors:
    """Distinct elements of many dtypes and shapes; some larger than a bucket, none contiguous twice."""
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


async def each(tensors: Tensors, beats: float = 0.0) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        await asyncio.sleep(beats)


class Receiver:
    """Talks to a `receiver_process.py`."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("receiver_process.py")),
                json.dumps(given),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = self.answer()["name"]

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the receiver's process has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def connect(self, address: StreamAddress) -> None:
        self.say(f"connect {msgspec.json.encode(address).decode()}")

    def receive(self, stop_at: int = -1, seconds: float = 0.0) -> None:
        self.say(f"receive {stop_at} {seconds}")


@pytest.fixture
def started() -> Iterator[list[Receiver]]:
    receivers: list[Receiver] = []
    yield receivers
    for receiver in receivers:
        receiver.process.kill()
        receiver.process.wait()
        for pipe in (receiver.process.stdin, receiver.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def together(sender: BucketSender, receivers: list[Receiver]) -> StreamAddress:
    address = sender.open()
    for receiver in receivers:
        receiver.connect(address)
    sender.wait_for([receiver.name for receiver in receivers])
    for receiver in receivers:
        assert receiver.answer() == {"connected": True}
    return address


def check(receivers: list[Receiver], tensors: Tensors) -> None:
    expected = {name: digest(tensor) for name, tensor in tensors}
    for receiver in receivers:
        assert receiver.answer()["got"] == expected


@pytest.mark.parametrize("transport", ["cma", "shm"])
@pytest.mark.parametrize("mode", ["in_place", "staged"])
def test_every_byte_of_every_step_arrives(
    started: list[Receiver], transport: str, mode: str
) -> None:
    given = settings(64 << 10, transport, mode)
    started += [Receiver(given), Receiver(given)]
    with closing(BucketSender(made(given), host="127.0.0.1")) as sender:
        for step in range(3):
            together(sender, started)
            for receiver in started:
                receiver.receive()
            report = asyncio.run(sender.send(each(weights(step))))
            check(started, weights(step))
            assert report.num_tensors == len(weights(step))
            assert report.num_buckets > 18
            assert report.transports == {transport: 2}


def test_a_bucket_shrinks_to_what_a_stream_needs(started: list[Receiver]) -> None:
    given = settings(8 << 20)
    started.append(Receiver(given))
    with closing(BucketSender(made(given), host="127.0.0.1")) as sender:
        sizes, nbytes = [], []
        for step in range(3):
            sizes.append(together(sender, started).bucket_nbytes)
            started[0].receive()
            nbytes.append(asyncio.run(sender.send(each(weights(step)))).nbytes)
            check(started, weights(step))
    assert sizes[0] == nbytes[0] == 8 << 20
    assert sizes[1:] == nbytes[1:] == [nbytes[1]] * 2
    payload = sum(tensor.nbytes for _, tensor in weights(0))
    assert payload < nbytes[1] < 1.05 * payload


def test_who_takes_no_part_any_more_gets_nothing_and_may_come_back(started: list[Receiver]) -> None:
    given = settings(64 << 10)
    started += [Receiver(given), Receiver(given)]
    with closing(BucketSender(made(given), host="127.0.0.1")) as sender:
        for step, members in enumerate((started, started[:1], started)):
            together(sender, members)
            for receiver in members:
                receiver.receive()
            asyncio.run(sender.send(each(weights(step))))
            check(members, weights(step))


def test_a_killed_receiver_is_told_to_the_sender_and_to_the_others_at_once(
    started: list[Receiver],
) -> None:
    given = settings(64 << 10)
    started += [Receiver(given), Receiver(given)]
    killed_at: list[float] = []

    def kill() -> None:
        assert started[1].answer() == {"stopped": True}
        killed_at.append(time.monotonic())
        started[1].process.kill()

    with closing(BucketSender(made(given), host="127.0.0.1")) as sender:
        together(sender, started)
        started[0].receive()
        started[1].receive(stop_at=3, seconds=DEADLINE_S)
        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(PeerUnreachable, match=started[1].name):
            asyncio.run(sender.send(each(weights(0))))
        told_at = time.monotonic()
        thread.join()
        answer = started[0].answer()
        assert "PeerUnreachable" in answer["error"]
        assert max(told_at, answer["at"]) - killed_at[0] < AT_ONCE_S
        # Who is left goes on.
        together(sender, started[:1])
        started[0].receive()
        asyncio.run(sender.send(each(weights(1))))
        check(started[:1], weights(1))


def test_a_receiver_that_is_gone_before_the_stream_is_told_at_once(started: list[Receiver]) -> None:
    given = settings(64 << 10)
    started += [Receiver(given), Receiver(given)]
    with closing(BucketSender(made(given), host="127.0.0.1")) as sender:
        together(sender, started)
        started[0].receive()
        started[1].process.kill()
        began = time.monotonic()
        with pytest.raises(PeerUnreachable, match=started[1].name):
            asyncio.run(sender.send(each(weights(0))))
        assert "PeerUnreachable" in started[0].answer()["error"]
        assert time.monotonic() - began < AT_ONCE_S


SENDER = """
import asyncio, json, sys, msgspec
from test_bucket_stream import made, weights, each, settings
from windlass.integrations.bucket_stream import BucketSender
sender = BucketSender(made(settings(64 << 10)), host="127.0.0.1")
print(msgspec.json.encode(sender.open()).decode(), flush=True)
sender.wait_for(sys.argv[1:])
asyncio.run(sender.send(each(weights(0))))
"""


def test_a_killed_sender_is_told_to_every_receiver_at_once(started: list[Receiver]) -> None:
    given = settings(64 << 10)
    started += [Receiver(given), Receiver(given)]
    names = [receiver.name for receiver in started]
    here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, *names],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": here},
    ) as sender:
        assert sender.stdout is not None
        address = msgspec.json.decode(sender.stdout.readline(), type=StreamAddress)
        for receiver in started:
            receiver.connect(address)
            assert receiver.answer() == {"connected": True}
        started[0].receive()
        started[1].receive(stop_at=3, seconds=1.0)
        assert started[1].answer() == {"stopped": True}
        killed_at = time.monotonic()
        os.kill(sender.pid, signal.SIGKILL)
        answers = [receiver.answer() for receiver in started]
        assert all("PeerUnreachable" in answer["error"] for answer in answers)
        assert max(answer["at"] for answer in answers) - killed_at < AT_ONCE_S


def test_a_tensor_that_cannot_be_sent_ends_the_stream_for_all(started: list[Receiver]) -> None:
    given = settings(64 << 10)
    started.append(Receiver(given))
    with closing(BucketSender(made(given), host="127.0.0.1")) as sender:
        together(sender, started)
        started[0].receive()
        with pytest.raises(UnsupportedLayout, match="complex64"):
            asyncio.run(sender.send(each([("w", torch.zeros(3, dtype=torch.complex64))])))
        assert "PeerUnreachable" in started[0].answer()["error"]


def test_arguments_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="bucket_nbytes must be >= 65536, got 1000"):
        made(settings(1000))
    with closing(BucketSender(made(settings(64 << 10)), host="127.0.0.1")) as sender:
        with pytest.raises(ConfigError, match="wait_for must have been called"):
            asyncio.run(sender.send(each([])))
        sender.open()
        with pytest.raises(ConfigError, match="members must name one receiver at least"):
            sender.wait_for([])
