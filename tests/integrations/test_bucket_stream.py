"""Streams of whole tensors between real processes, compared byte by byte; deaths are reported at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from stream_processes import (
    HOST,
    STOPPED,
    Receiver,
    Sender,
    Tensors,
    digest,
    one_by_one,
    settings,
    weights,
)

from windlass.errors import ConfigError, PeerUnreachable, UnsupportedLayout
from windlass.integrations.bucket_stream import (
    BucketSender,
    StreamAddress,
    StreamReport,
    StreamSettings,
)

SMALL = 64 << 10
AT_ONCE_S = 3.0
"""Limit for a prompt report: far below every deadline, with time for a busy machine."""


@pytest.fixture
def receivers() -> Iterator[list[Receiver]]:
    started: list[Receiver] = []
    yield started
    for receiver in started:
        receiver.kill()
        receiver.pipe.close()


def open_sender(given: StreamSettings) -> closing[BucketSender]:
    return closing(BucketSender(given))


def connect(sender: BucketSender, receivers: list[Receiver]) -> StreamAddress:
    address = sender.open(HOST)
    for receiver in receivers:
        receiver.pipe.send(address)
    sender.wait_for([receiver.name for receiver in receivers])
    assert [receiver.answer() for receiver in receivers] == [address] * len(receivers)
    return address


def send(sender: BucketSender, tensors: Tensors) -> StreamReport:
    return asyncio.run(sender.send(one_by_one(tensors)))


def send_and_compare(sender: BucketSender, receivers: list[Receiver], step: int) -> StreamReport:
    connect(sender, receivers)
    for receiver in receivers:
        receiver.receive()
    report = send(sender, weights(step))
    expected = {name: digest(tensor) for name, tensor in weights(step)}
    for receiver in receivers:
        assert receiver.answer() == expected
    return report


@pytest.mark.parametrize(("transport", "mode"), [("cma", "in_place"), ("shm", "staged")])
def test_every_byte_of_every_step_arrives(
    receivers: list[Receiver], transport: str, mode: str
) -> None:
    given = settings(SMALL, transport, mode)
    receivers += [Receiver(given), Receiver(given)]
    with open_sender(given) as sender:
        for step in range(3):
            report = send_and_compare(sender, receivers, step)
            assert report.num_tensors == len(weights(step))
            assert report.num_buckets > 18
            assert report.transports == {transport: 2}


def test_a_bucket_shrinks_to_the_size_of_its_stream(receivers: list[Receiver]) -> None:
    given = settings(8 << 20)
    receivers.append(Receiver(given))
    with open_sender(given) as sender:
        first, second, third = (
            send_and_compare(sender, receivers, step).nbytes for step in range(3)
        )
    assert first == 8 << 20
    payload = sum(tensor.nbytes for _, tensor in weights(0))
    assert payload < second < 1.05 * payload
    assert third == second


def test_a_receiver_may_skip_a_step_and_come_back(receivers: list[Receiver]) -> None:
    given = settings(SMALL)
    receivers += [Receiver(given), Receiver(given)]
    with open_sender(given) as sender:
        for step, members in enumerate((receivers, receivers[:1], receivers)):
            send_and_compare(sender, members, step)


def test_the_sender_and_other_receivers_fail_at_once_for_a_killed_receiver(
    receivers: list[Receiver],
) -> None:
    given = settings(SMALL)
    receivers += [Receiver(given), Receiver(given)]
    left, killed = receivers
    killed_at: list[float] = []

    def kill() -> None:
        assert killed.answer() == STOPPED
        killed_at.append(time.monotonic())
        killed.kill()

    with open_sender(given) as sender:
        connect(sender, receivers)
        left.receive()
        killed.receive(stop_at=3, seconds=60.0)
        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(PeerUnreachable, match=killed.name):
            send(sender, weights(0))
        sender_told_at = time.monotonic()
        thread.join()
        error, told_at = left.answer()
        assert isinstance(error, PeerUnreachable)
        assert max(sender_told_at, told_at) - killed_at[0] < AT_ONCE_S
        # The remaining receiver gets the next stream.
        send_and_compare(sender, [left], 1)


def test_a_receiver_that_died_before_the_stream_is_reported_at_once(
    receivers: list[Receiver],
) -> None:
    given = settings(SMALL)
    receivers += [Receiver(given), Receiver(given)]
    left, killed = receivers
    with open_sender(given) as sender:
        connect(sender, receivers)
        left.receive()
        killed.kill()
        began = time.monotonic()
        with pytest.raises(PeerUnreachable, match=killed.name):
            send(sender, weights(0))
        error, _ = left.answer()
        assert isinstance(error, PeerUnreachable)
        assert time.monotonic() - began < AT_ONCE_S


def test_every_receiver_fails_at_once_when_the_sender_is_killed(receivers: list[Receiver]) -> None:
    given = settings(SMALL)
    receivers += [Receiver(given), Receiver(given)]
    waiting, reading = receivers
    sender = Sender(given, weights(0))
    for receiver in receivers:
        receiver.pipe.send(sender.address)
        assert receiver.answer() == sender.address
    waiting.receive()
    reading.receive(stop_at=3, seconds=1.0)
    sender.send_to([receiver.name for receiver in receivers])
    assert reading.answer() == STOPPED
    killed_at = time.monotonic()
    sender.kill()
    for receiver in receivers:
        error, told_at = receiver.answer()
        assert isinstance(error, PeerUnreachable)
        assert told_at - killed_at < AT_ONCE_S


def test_a_tensor_that_cannot_be_sent_ends_the_stream_for_all_receivers(
    receivers: list[Receiver],
) -> None:
    given = settings(SMALL)
    receivers.append(Receiver(given))
    with open_sender(given) as sender:
        connect(sender, receivers)
        receivers[0].receive()
        with pytest.raises(UnsupportedLayout, match="complex64"):
            send(sender, [("w", torch.zeros(3, dtype=torch.complex64))])
        error, _ = receivers[0].answer()
        assert isinstance(error, PeerUnreachable)


def test_arguments_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="bucket_nbytes must be >= 65536, got 1000"):
        settings(1000)
    with open_sender(settings(SMALL)) as sender:
        with pytest.raises(ConfigError, match="call open and wait_for first"):
            send(sender, [])
        sender.open(HOST)
        with pytest.raises(ConfigError, match="members must name at least one receiver"):
            sender.wait_for([])
