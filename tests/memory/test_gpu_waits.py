"""Driver waits have no deadline: threads are reused, and a hanging wait blocks no other caller."""

from __future__ import annotations

import threading
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from windlass.errors import TransferFailed
from windlass.memory.cuda.gpu import WaitThreads


def test_the_thread_of_a_wait_is_reused_for_the_next_wait() -> None:
    waits, threads = WaitThreads(), set()
    for _ in range(50):
        waits.submit(lambda: threads.add(threading.get_ident())).result(10)
    assert len(threads) == 1


def test_a_failed_wait_raises_and_its_thread_is_reused() -> None:
    waits, threads = WaitThreads(), set()

    def fail() -> None:
        threads.add(threading.get_ident())
        raise TransferFailed("the GPU is gone")

    for _ in range(2):
        with pytest.raises(TransferFailed, match="the GPU is gone"):
            waits.submit(fail).result(10)
    assert waits.submit(lambda: threads.add(threading.get_ident())).result(10) >= 0
    assert len(threads) == 1


def test_a_hanging_wait_does_not_block_other_waits() -> None:
    waits, end = WaitThreads(), threading.Event()
    hung = waits.submit(lambda: end.wait(60) and None)  # type: ignore[arg-type]
    with pytest.raises(FutureTimeout):
        hung.result(0.05)
    for _ in range(3):
        assert waits.submit(lambda: None).result(10) < 10
    end.set()
    assert hung.result(10) > 0.0


def test_two_gpu_waits_run_concurrently() -> None:
    waits, both = WaitThreads(), threading.Barrier(2)
    over = [waits.submit(lambda: both.wait(10) and None) for _ in range(2)]  # type: ignore[arg-type]
    assert all(future.result(10) >= 0 for future in over)
