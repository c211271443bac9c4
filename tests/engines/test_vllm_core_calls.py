"""Calls through the queue of vLLM's core. Live: `tests/jobs/test_demo_on_gpu.py`; holds: `test_vllm_plugin.py`."""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from windlass.engines.vllm.engine_core import CoreCalls
from windlass.errors import PeerTimeout, PeerUnreachable


class PauseState(IntEnum):
    """Copy of `PauseState` in `vllm/v1/core/sched/interface.py`."""

    UNPAUSED, PAUSED_NEW, PAUSED_ALL = range(3)


class Scheduler:
    """The used part of vLLM's scheduler."""

    pause_state = PauseState.UNPAUSED

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.pause_state = pause_state


class Core:
    """The used part of an EngineCore. Its loop is a thread that takes calls from the queue."""

    def __init__(self) -> None:
        self.input_queue: queue.SimpleQueue[tuple[object, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self.called: list[tuple[str, tuple[object, ...], int]] = []
        self.scheduler, self.batch_queue = Scheduler(), deque[str]()
        self.given_out: list[tuple[str, PauseState]] = []
        self.weight_version = "default"
        model = SimpleNamespace(is_multimodal_model=False)
        self.vllm_config = SimpleNamespace(model_config=model)
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

    def _process_engine_step(self) -> None:
        self.given_out.append((self.batch_queue.pop(), self.scheduler.pause_state))

    def set_weight_version(self, version: str) -> None:
        self.weight_version = version

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


def test_a_call_runs_in_the_loop_and_returns_after_it(core: Core) -> None:
    core.calls.call("windlass_set_version", [7], 10.0)
    assert core.called == [("windlass_set_version", (7,), core.loop.ident)]


def test_an_error_of_the_worker_reaches_the_caller_and_not_the_loop(core: Core) -> None:
    calls = core.calls
    with pytest.raises(PeerUnreachable, match="vLLM's core: refused: ValueError: no namespace"):
        calls.call("refused", [], 10.0)
    calls.call("windlass_set_version", [7], 10.0)
    assert len(core.called) == 1


def test_a_long_call_logs_the_place_of_the_loop(
    core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    core.held.clear()
    with pytest.raises(PeerTimeout):
        core.calls.call("windlass_quiesce", ["p"], 0.05)
    assert (
        "windlass_quiesce waits for the loop of vLLM's EngineCore, which is now in" in caplog.text
    )
    assert f"{Path(__file__).name}:" in caplog.text
    assert " _run < " in caplog.text


def test_a_call_to_a_stuck_loop_fails_by_its_deadline(core: Core) -> None:
    core.held.clear()
    with pytest.raises(PeerTimeout, match=r"windlass_quiesce did not end within 0\.05 s"):
        core.calls.call("windlass_quiesce", ["p"], 0.05)


@pytest.fixture
def _releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide modules of a vLLM that stamps tokens itself (0.32)."""
    interface, engine = (
        ModuleType("vllm.v1.core.sched.interface"),
        ModuleType("vllm.v1.engine.core"),
    )
    vars(interface)["PauseState"], vars(engine)["EngineCore"] = PauseState, Core
    places = ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.engine")
    for module in (*map(ModuleType, places), interface, engine):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("_releases")
def test_a_hold_begins_after_running_batches_and_ends_with_the_version(core: Core) -> None:
    core.batch_queue += ["second", "first"]
    seen = []

    def blocked() -> int:
        seen.append((threading.get_ident(), core.scheduler.pause_state, core.weight_version))
        return 7

    core.calls.hold(blocked)
    assert core.given_out == [("first", PauseState.PAUSED_ALL), ("second", PauseState.PAUSED_ALL)]
    assert seen == [(core.loop.ident, PauseState.PAUSED_ALL, "default")]
    assert (core.scheduler.pause_state, core.weight_version) == (PauseState.UNPAUSED, "7")


@pytest.mark.usefixtures("_releases")
def test_a_hold_without_a_version_leaves_the_core_unchanged(core: Core) -> None:
    # The user of the engine has paused it.
    core.scheduler.pause_state = PauseState.PAUSED_NEW
    core.calls.hold(lambda: -1)

    def fails() -> int:
        raise ValueError("no round")

    with pytest.raises(PeerUnreachable, match="vLLM's core: hold: ValueError: no round"):
        core.calls.hold(fails)
    assert core.scheduler.pause_state is PauseState.PAUSED_NEW
    assert core.weight_version == "default"
