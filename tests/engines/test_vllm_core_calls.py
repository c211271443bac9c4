"""Orders in the queue of vLLM's core; live only on GPUs, by `tests/jobs/test_demo_on_gpu.py`: elsewhere ranks have other processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from windlass.engines.vllm.engine_core import CoreCalls
from windlass.errors import PeerTimeout, PeerUnreachable


class Core:
    """The part of an EngineCore that is used; its loop is a thread that takes what is in the queue."""

    def __init__(self) -> None:
        self.input_queue: queue.SimpleQueue[tuple[object, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self.called: list[tuple[str, tuple[object, ...], int]] = []
        self.held = threading.Event()
        self.held.set()
        self.loop, made = threading.Thread(target=self._run), threading.Event()
        self.made = made
        self.loop.start()
        assert made.wait(10)

    def _run(self) -> None:
        self.calls = CoreCalls(self)
        self.made.set()
        while (found := self.input_queue.get()) is not None:
            self.held.wait(10)
            found[1]()

    def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[object]:
        if method == "refused":
            raise ValueError("no namespace")
        self.called.append((method, args, threading.get_ident()))
        return [None]


@pytest.fixture
def core() -> Iterator[Core]:
    made = Core()
    yield made
    made.held.set()
    made.input_queue.put(None)
    made.loop.join(10)


def test_a_call_is_made_in_the_loop_and_returns_when_it_has(core: Core) -> None:
    core.calls.call("windlass_set_version", [7], 10.0)
    assert core.called == [("windlass_set_version", (7,), core.loop.ident)]


def test_what_the_worker_raises_reaches_the_caller_and_not_the_loop(core: Core) -> None:
    calls = core.calls
    with pytest.raises(PeerUnreachable, match="vLLM's core: refused: ValueError: no namespace"):
        calls.call("refused", [], 10.0)
    calls.call("windlass_set_version", [7], 10.0)
    assert len(core.called) == 1


def test_whoever_waits_for_long_is_told_where_the_loop_is(
    core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    core.held.clear()
    with pytest.raises(PeerTimeout):
        core.calls.call("windlass_quiesce", ["p"], 0.05)
    assert "windlass_quiesce waits for vLLM's core, whose loop is in" in caplog.text
    assert f"{Path(__file__).name}:" in caplog.text
    assert " _run < " in caplog.text


def test_a_loop_that_does_not_come_by_is_waited_for_until_the_deadline(core: Core) -> None:
    core.held.clear()
    with pytest.raises(PeerTimeout, match=r"windlass_quiesce: not within 0\.05 s"):
        core.calls.call("windlass_quiesce", ["p"], 0.05)
