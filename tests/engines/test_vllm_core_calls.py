"""Orders in the queue of vLLM's core; `tests/jobs/test_live_demo.py` has live servers carry them out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from windlass.engines.vllm.core_calls import CoreCalls
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
        self.loop = threading.Thread(target=self._run)
        self.loop.start()

    def _run(self) -> None:
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
    CoreCalls(core).call("windlass_set_version", [7], 10.0)
    assert core.called == [("windlass_set_version", (7,), core.loop.ident)]


def test_what_the_worker_raises_reaches_the_caller_and_not_the_loop(core: Core) -> None:
    calls = CoreCalls(core)
    with pytest.raises(PeerUnreachable, match="vLLM's core: refused: ValueError: no namespace"):
        calls.call("refused", [], 10.0)
    calls.call("windlass_set_version", [7], 10.0)
    assert len(core.called) == 1


def test_a_loop_that_does_not_come_by_is_waited_for_until_the_deadline(core: Core) -> None:
    core.held.clear()
    with pytest.raises(PeerTimeout, match=r"windlass_quiesce: not within 0\.05 s"):
        CoreCalls(core).call("windlass_quiesce", ["p"], 0.05)
