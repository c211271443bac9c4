"""Requests to SGLang around an update: their order, and how long its loops are held."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import msgspec
import pytest
from http_answers import answering

from windlass.config import PauseMode
from windlass.engines.capture.description import Captured
from windlass.engines.engine_rank import RankHooks
from windlass.engines.http import EngineHttp
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.engines.sglang.orders import Quiesce, SglangApi
from windlass.errors import ConfigError, PeerUnreachable
from windlass.layout.manifest import ManifestBuilder, Role

DEADLINE_S = 20.0
PAUSE, BEGIN, END = "/pause_generation", "/begin_weight_update", "/end_weight_update"
FLUSH = "/flush_cache"
STAMP, GO_ON = "/update_weight_version", "/continue_generation"


@dataclass
class Loops:
    """The main loops of two ranks, behind routes like SGLang's. Each order reaches both loops, one order at a time.

    Attributes:
        seen: requests, in order. An order is added when both loops have left it.
        modes: mode of each pause that the server got.
        namespaces: namespace of the caches that each order sets.
        ends_requests: whether each order ends requests.
        refused: route that answers with a refusal.
        missing: routes that do not exist.
        longest_hold_s: see `QuiesceGate.block`.
        carried_out: set after the first order.
    """

    gates: tuple[QuiesceGate, ...] = field(default_factory=lambda: (QuiesceGate(), QuiesceGate()))
    seen: list[str] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    namespaces: list[str] = field(default_factory=list)
    ends_requests: list[bool] = field(default_factory=list)
    refused: str = ""
    missing: frozenset[str] = frozenset()
    longest_hold_s: float = DEADLINE_S
    carried_out: threading.Event = field(default_factory=threading.Event)
    busy: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: dict[str, Any]) -> bool:
        # These two routes do not go through the loops.
        if path in (PAUSE, GO_ON):
            self.seen.append(path)
            self.modes += [body["mode"]] if path == PAUSE else []
        elif path == "/update_weights_from_tensor":
            self.carry_out(body)
        else:
            with self.busy:
                self.seen.append(path)
        return path != self.refused

    def carry_out(self, body: dict[str, Any]) -> None:
        payload = base64.b64decode(body["serialized_named_tensors"][0])
        [(name, _)] = ForkingPickler.loads(payload)
        order = msgspec.json.decode(name, type=Quiesce)
        self.namespaces.append(order.namespace)
        self.ends_requests.append(order.ends_requests)
        with self.busy:
            threads = [
                threading.Thread(target=self.come_past, args=(gate, order)) for gate in self.gates
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.seen.append("Quiesce" if order.blocked_s is None else "Block")
        self.carried_out.set()

    def come_past(self, gate: QuiesceGate, order: Quiesce) -> None:
        if order.blocked_s is not None:
            gate.block(order.pause_id, order.blocked_s, self.longest_hold_s)
        else:
            gate.quiesced(order.pause_id)


@pytest.fixture
def loops() -> Loops:
    return Loops()


@pytest.fixture
def url(loops: Loops) -> Iterator[str]:
    def answer(path: str, asked: bytes) -> tuple[int, bytes]:
        if path in loops.missing:
            return 404, b"{}"
        body = msgspec.json.encode({"success": loops.answer(path, msgspec.json.decode(asked))})
        return 500 if path == PAUSE == loops.refused else 200, body

    with answering(answer) as url:
        yield url
        for gate in loops.gates:
            gate.end()


def hooks_of(loops: Loops, url: str, *, blocks: bool) -> list[RankHooks]:
    empty = ManifestBuilder("engine/0", Role.ENGINE).build()
    captured = Captured(empty, (), (), (), ())
    api = SglangApi(EngineHttp(url), len(loops.gates), loops.gates[0], blocks=blocks)
    return [
        RankHooks(captured, gate, None if rank else api) for rank, gate in enumerate(loops.gates)
    ]


def together(*calls: Any) -> None:
    """Make the calls at the same time, like the agents of several ranks."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def pause(hooks: list[RankHooks], mode: PauseMode = PauseMode.IN_PLACE, number: int = 1) -> None:
    together(*(lambda rank=rank: rank.pause(f"1.{number}", mode, DEADLINE_S) for rank in hooks))


def publish(rank: RankHooks) -> None:
    rank.set_version(1, DEADLINE_S)
    rank.resume(DEADLINE_S)


@pytest.mark.parametrize("mode", PauseMode)
def test_loops_are_held_from_the_pause_until_the_stamp(
    loops: Loops, url: str, mode: PauseMode
) -> None:
    hooks = hooks_of(loops, url, blocks=True)
    pause(hooks, mode)
    assert loops.busy.locked()
    assert loops.seen == [PAUSE, BEGIN]
    together(*(lambda rank=rank: publish(rank) for rank in hooks))
    after = loops.seen[2:]
    assert after[0] == "Block"
    assert sorted(after[1:3]) == sorted([STAMP, END]), "in either order"
    assert after[3:] == [GO_ON]


def test_an_abort_releases_the_loops_before_the_engine_resumes(loops: Loops, url: str) -> None:
    hooks = hooks_of(loops, url, blocks=True)
    pause(hooks)
    together(*(partial(rank.resume, 20.0) for rank in hooks))
    assert loops.seen == [PAUSE, BEGIN, "Block", END, GO_ON]
    pause(hooks, number=2)
    together(*(partial(rank.resume, 20.0) for rank in hooks))
    assert loops.seen == [PAUSE, BEGIN, "Block", END, GO_ON] * 2
    assert len(set(loops.namespaces)) == 2, "a pause of the same number has another one too"


def test_a_torn_engine_stays_held_until_the_next_pause(loops: Loops, url: str) -> None:
    hooks = hooks_of(loops, url, blocks=True)
    pause(hooks)
    pause(hooks, number=2)
    assert loops.busy.locked()
    together(*(lambda rank=rank: publish(rank) for rank in hooks))
    assert loops.seen.count(PAUSE) == loops.seen.count("Block") == 1
    assert loops.seen[-1] == GO_ON


def test_a_refused_session_fails_the_pause_at_once(loops: Loops, url: str) -> None:
    loops.refused = BEGIN
    hooks = hooks_of(loops, url, blocks=True)
    with pytest.raises(PeerUnreachable, match=BEGIN):
        hooks[0].pause("1.1", PauseMode.IN_PLACE, DEADLINE_S)
    hooks[0].resume(DEADLINE_S)
    assert loops.seen == [PAUSE, BEGIN, GO_ON]


def test_loops_are_quiesced_and_not_held_without_blocking(loops: Loops, url: str) -> None:
    hooks = hooks_of(loops, url, blocks=False)
    pause(hooks, PauseMode.RETRACT)
    assert not loops.busy.locked()
    together(*(lambda rank=rank: publish(rank) for rank in hooks))
    assert loops.seen == [PAUSE, BEGIN, "Quiesce", END, STAMP, GO_ON]


def test_loops_of_a_release_without_sessions_are_held(loops: Loops, url: str) -> None:
    loops.missing = frozenset({BEGIN, END})
    hooks = hooks_of(loops, url, blocks=True)
    pause(hooks)
    assert loops.busy.locked()
    together(*(lambda rank=rank: publish(rank) for rank in hooks))
    assert loops.seen[0] == PAUSE
    assert sorted(loops.seen[1:3]) == sorted(["Block", STAMP])
    assert loops.seen[3:] == [GO_ON]


def test_a_session_stays_open_when_a_loop_leaves_before_the_write_ends(
    loops: Loops, url: str
) -> None:
    loops.longest_hold_s = 0.01
    hooks = hooks_of(loops, url, blocks=True)
    pause(hooks)
    assert loops.carried_out.wait(DEADLINE_S)
    (blocked,) = (thread for thread in threading.enumerate() if thread.name == "windlass-block")
    blocked.join(0.05)
    assert blocked.is_alive()
    assert loops.seen == [PAUSE, BEGIN, "Block"]
    together(*(lambda rank=rank: publish(rank) for rank in hooks))
    assert loops.seen.index(END) > loops.seen.index("Block")
    assert loops.seen[-1] == GO_ON


def test_an_engine_with_stages_pauses_only_by_abort_and_drains(loops: Loops, url: str) -> None:
    api = SglangApi(EngineHttp(url), len(loops.gates), loops.gates[0], blocks=False, num_stages=2)
    for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
        with pytest.raises(ConfigError, match=f"must be abort with pipeline stages, got {mode}"):
            api.pause(mode, DEADLINE_S)
    assert loops.seen == []
    assert api.pause(PauseMode.ABORT, DEADLINE_S)
    api.quiesce("1.1", DEADLINE_S, block=False)
    assert loops.seen == [PAUSE, BEGIN, "Quiesce", END, f"{FLUSH}?timeout=20.0"]


def test_ranks_end_requests_in_an_abort_if_they_can(loops: Loops, url: str) -> None:
    gate = loops.gates[0]
    api = SglangApi(EngineHttp(url), len(loops.gates), gate, blocks=False, can_end_requests=True)
    for mode in (PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE):
        api.pause(mode, DEADLINE_S)
        api.quiesce("1.1", DEADLINE_S, block=False)
    assert loops.modes == ["retract", "retract", "in_place"]
    assert loops.ends_requests == [True, False, False]


@pytest.mark.parametrize(("can_end", "num_stages"), [(False, 1), (True, 2)])
def test_the_server_ends_requests_in_an_abort_if_ranks_cannot(
    loops: Loops, url: str, can_end: bool, num_stages: int
) -> None:
    api = SglangApi(
        EngineHttp(url),
        len(loops.gates),
        loops.gates[0],
        blocks=False,
        num_stages=num_stages,
        can_end_requests=can_end,
    )
    api.pause(PauseMode.ABORT, DEADLINE_S)
    api.quiesce("1.1", DEADLINE_S, block=False)
    assert (loops.modes, loops.ends_requests) == (["abort"], [False])


def test_an_engine_that_does_not_answer_a_pause_is_resumed(loops: Loops, url: str) -> None:
    loops.refused = PAUSE
    hooks = hooks_of(loops, url, blocks=True)
    with pytest.raises(PeerUnreachable, match=PAUSE):
        hooks[0].pause("1.1", PauseMode.IN_PLACE, DEADLINE_S)
    hooks[0].resume(DEADLINE_S)
    assert loops.seen == [PAUSE, GO_ON]
