"""Hints about landed parts between real processes, and the parts of a table."""

from __future__ import annotations

import multiprocessing as mp
import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.memory.cuda import kernels
from windlass.memory.cuda.kernels import cut_parts
from windlass.transfer.write_progress import PartWritten, ProgressListener, notify

SECONDS = 20.0


def landed(number: int) -> PartWritten:
    return PartWritten("trainer/3", 7, "w", number, 10 * number, 10 * number + 10)


def tell(address: str, count: int) -> None:
    for number in range(count):
        notify(address, landed(number))


def test_messages_of_another_process_are_delivered_in_order() -> None:
    heard: list[PartWritten] = []
    all_heard = threading.Event()

    def deliver(message: PartWritten) -> None:
        heard.append(message)
        if len(heard) == 5:
            all_heard.set()

    listener = ProgressListener(deliver)
    process = mp.get_context("spawn").Process(target=tell, args=(listener.address, 5))
    process.start()
    assert all_heard.wait(SECONDS)
    process.join(SECONDS)
    listener.close()
    assert heard == [landed(number) for number in range(5)]


def test_draining_delivers_all_earlier_messages() -> None:
    for _ in range(50):
        heard: list[PartWritten] = []
        listener = ProgressListener(heard.append)
        tell(listener.address, 3)
        listener.drain()
        assert heard == [landed(number) for number in range(3)]
        listener.close()


def test_a_full_queue_does_not_block_the_sender() -> None:
    busy, go_on = threading.Event(), threading.Event()

    def deliver(_: PartWritten) -> None:
        busy.set()
        assert go_on.wait(SECONDS)

    listener = ProgressListener(deliver)
    tell(listener.address, 1)
    assert busy.wait(SECONDS)
    # This call would block forever if it waited for room.
    tell(listener.address, 5000)
    go_on.set()
    listener.close()


def test_sending_to_an_absent_listener_is_no_error() -> None:
    listener = ProgressListener(lambda _: None)
    listener.close()
    listener.close()
    tell(listener.address, 1)
    tell("never was", 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "write-progress"]


def test_the_listener_ignores_malformed_messages() -> None:
    heard: list[PartWritten] = []
    listener = ProgressListener(heard.append)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for junk in (b"\xc1", b"", b"\x93\x01\x02\x03", b"x" * 9000):
            stranger.sendto(junk, f"\0windlass-{listener.address}")
    tell(listener.address, 1)
    listener.drain()
    listener.close()
    assert heard == [landed(0)]


@given(
    st.lists(st.integers(1, 65536), max_size=200),
    st.integers(1, 1 << 20),
)
def test_parts_are_all_pieces_in_order_and_none_is_small(sizes: list[int], least: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "PART_NBYTES", least)
        parts = cut_parts(np.array(sizes, np.int64))
    assert [piece for part in parts for piece in part] == list(range(len(sizes)))
    assert all(parts)
    largest = max(sizes, default=0)
    assert len(parts) <= 1 or min(sum(sizes[i] for i in part) for part in parts) >= least - largest
