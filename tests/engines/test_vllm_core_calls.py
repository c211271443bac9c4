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

from windlass.config import PauseMode
from windlass.engines.vllm import engine_core
from windlass.engines.vllm.engine_core import (
    ABORTS,
    CLIENTS_CHOOSE_IDS,
    OWN_VERSIONS,
    QUIESCES,
    WEIGHTS,
    CoreCalls,
    keep_caches_apart,
)
from windlass.engines.vllm.worker import VllmApi
from windlass.errors import PeerTimeout, PeerUnreachable


class PauseState(IntEnum):
    """Copy of `PauseState` in `vllm/v1/core/sched/interface.py`."""

    UNPAUSED, PAUSED_NEW, PAUSED_ALL = range(3)


class Scheduler:
    """The used part of vLLM's scheduler."""

    pause_state = PauseState.UNPAUSED
    connector: object | None = None

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.pause_state = pause_state

    def get_kv_connector(self) -> object | None:
        return self.connector

    def finish_requests(self, _names: None, status: str) -> list[str]:
        return [status]


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
        self.identities = ["", ""]
        model = SimpleNamespace(is_multimodal_model=False)
        self.vllm_config = SimpleNamespace(model_config=model)
        self.blocked: Callable[[], int | None] = lambda: None
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

    def _send_abort_outputs(self, ended: list[str]) -> None:
        self.given_out += [(status, self.scheduler.pause_state) for status in ended]

    def set_weight_version(self, version: str) -> None:
        self.weight_version = version

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[object, ...] = (),
        kwargs: object = None,
    ) -> list[object]:
        if method == "refused":
            raise ValueError("no namespace")
        if method == WEIGHTS:
            return [*self.identities]
        self.called.append((method, args, threading.get_ident()))
        return [self.blocked()]


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


class PatchedCore(Core):
    """Core with the patches of `keep_caches_apart`."""

    def preprocess_add_request(self, request: object) -> None:
        raise NotImplementedError

    def _handle_client_request(self, kind: object, *request: object) -> None:
        raise NotImplementedError


class KVCacheManager:
    """The patched part of vLLM's manager."""

    def get_computed_blocks(self, request: object) -> None:
        raise NotImplementedError


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[PatchedCore]:
    """Yield a core in a process with modules of a vLLM that stamps tokens itself (0.32)."""
    interface, engine, manager, requests = (
        ModuleType("vllm.v1.core.sched.interface"),
        ModuleType("vllm.v1.engine.core"),
        ModuleType("vllm.v1.core.kv_cache_manager"),
        ModuleType("vllm.v1.request"),
    )
    vars(requests)["RequestStatus"] = SimpleNamespace(FINISHED_ABORTED="aborted")
    vars(interface)["PauseState"] = PauseState
    vars(engine).update(EngineCore=PatchedCore, EngineCoreProc=PatchedCore)
    vars(manager)["KVCacheManager"] = KVCacheManager
    # vLLM defines both methods in the class that is patched.
    for name in ("set_weight_version", "collective_rpc"):
        monkeypatch.setattr(PatchedCore, name, vars(Core)[name], raising=False)
    places = ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.engine")
    for module in (*map(ModuleType, places), interface, engine, manager, requests):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    keep_caches_apart.__wrapped__()
    made = PatchedCore()
    yield made
    made.input_queue.put(None)
    made.loop.join(10)


def test_a_hold_begins_after_running_batches_and_ends_with_the_version(
    patched: PatchedCore,
) -> None:
    patched.batch_queue += ["second", "first"]
    seen = []

    def blocked() -> int:
        seen.append((threading.get_ident(), patched.scheduler.pause_state, patched.weight_version))
        return 7

    patched.blocked = blocked
    patched.calls.call(QUIESCES, ["1.1", "10.0"], None)
    paused = [("first", PauseState.PAUSED_ALL), ("second", PauseState.PAUSED_ALL)]
    assert patched.given_out == paused
    assert seen == [(patched.loop.ident, PauseState.PAUSED_ALL, "default")]
    ((_, args, _),) = patched.called
    assert args[:2] == ("1.1", "10.0")
    assert args[2]
    assert (patched.scheduler.pause_state, patched.weight_version) == (PauseState.UNPAUSED, "7")


def test_a_hold_does_not_wait_for_running_batches_whose_versions_are_recorded(
    patched: PatchedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OWN_VERSIONS, "1")
    patched.batch_queue += ["second", "first"]
    patched.blocked = lambda: 7
    patched.calls.call(QUIESCES, ["1.1", "10.0"], None)
    assert patched.given_out == []
    assert list(patched.batch_queue) == ["second", "first"]
    assert engine_core.own_core.version == 7
    assert patched.scheduler.pause_state is PauseState.UNPAUSED


@pytest.mark.parametrize(("setting", "is_drained"), [("", False), ("0", False), ("1", True)])
def test_ended_requests_get_no_late_tokens_if_clients_choose_their_ids(
    patched: PatchedCore, setting: str, is_drained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client repeats an ended request. Its new request has the same id, and would get the tokens of the running batch."""
    monkeypatch.setenv(OWN_VERSIONS, "1")
    monkeypatch.setenv(CLIENTS_CHOOSE_IDS, setting)
    patched.batch_queue += ["second", "first"]
    patched.blocked = lambda: 7
    patched.calls.call(QUIESCES, ["1.1", "10.0", ABORTS], None)
    drained = ["first", "second"] if is_drained else []
    assert [name for name, _ in patched.given_out] == ["aborted", *drained]


@pytest.mark.parametrize("identities", [["run/7", "run/7"], ["run/7", "run/8"], ["", ""]])
def test_a_core_with_a_connector_learns_the_identity_of_its_weights(
    patched: PatchedCore, identities: list[str]
) -> None:
    """If the ranks serve no version of a fleet, or not the same, the identity differs from that of every engine."""
    patched.scheduler.connector, patched.identities = object(), identities
    patched.calls.call(QUIESCES, ["1.1", "10.0"], None)
    ((_, args, _),) = patched.called
    expected = "run/7" if identities == ["run/7", "run/7"] else args[2]
    assert engine_core.own_core.namespace.weights == expected


def test_a_hold_without_a_version_leaves_the_core_unchanged(patched: PatchedCore) -> None:
    # The user of the engine has paused it.
    patched.scheduler.pause_state = PauseState.PAUSED_NEW
    patched.calls.call(QUIESCES, ["1.1", "10.0"], None)

    def fails() -> int:
        raise ValueError("no round")

    patched.blocked = fails
    with pytest.raises(PeerUnreachable, match="windlass_quiesce: ValueError: no round"):
        patched.calls.call(QUIESCES, ["1.2", "10.0"], None)
    assert patched.scheduler.pause_state is PauseState.PAUSED_NEW
    assert patched.weight_version == "default"


def test_only_a_block_of_the_loop_pauses_a_server_that_its_trainer_pauses(
    patched: PatchedCore,
) -> None:
    api = VllmApi(None, can_block=True, stamps=False, core=patched.calls)
    assert api.blocks(PauseMode.IN_PLACE)
    assert not api.blocks(PauseMode.ABORT)
    patched.blocked = lambda: 7
    assert not api.pause(PauseMode.ABORT, 10.0)
    api.quiesce("1.1", 10.0, block=False)
    api.set_version(7, 10.0)
    api.resume(10.0)
    assert patched.called == []
    assert not api.pause(PauseMode.IN_PLACE, 10.0)
    api.quiesce("1.2", 10.0, block=True)
    ((method, args, _),) = patched.called
    assert (method, args[:2]) == (QUIESCES, ("1.2", "10.0"))
    assert patched.weight_version == "7"
