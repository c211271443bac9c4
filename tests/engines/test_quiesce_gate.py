"""Loop and agent reach the gate in either order, and no step runs during a pause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from windlass.engines.quiesce_gate import QuiesceGate
from windlass.errors import PeerTimeout, PeerUnreachable

DEADLINE_S = 20.0


class Loop:
    """A main loop that a remote call of the engine holds."""

    def __init__(self, gate: QuiesceGate) -> None:
        self.gate = gate
        self.threads: list[threading.Thread] = []

    def block(
        self, pause_id: str, deadline_s: float = DEADLINE_S, longest_s: float | None = None
    ) -> threading.Thread:
        thread = threading.Thread(target=self.gate.block, args=(pause_id, deadline_s, longest_s))
        thread.start()
        self.threads.append(thread)
        return thread


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(QuiesceGate())
    yield made
    made.gate.end()
    for thread in made.threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_blocked_loop_stays_until_the_pause_ends(loop: Loop, asked_first: bool) -> None:
    steps: list[Callable[[], object]] = [
        lambda: loop.gate.ask("1.1"),
        lambda: loop.block("1.1"),
    ]
    for step in steps if asked_first else reversed(steps):
        step()
    loop.gate.wait("1.1", DEADLINE_S)
    thread = loop.threads[0]
    thread.join(0.05)
    assert thread.is_alive()
    loop.gate.end()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_later_pause_takes_over_a_blocked_loop(loop: Loop) -> None:
    loop.gate.ask("1.1")
    thread = loop.block("1.1")
    loop.gate.wait("1.1", DEADLINE_S)
    assert loop.gate.ask("1.2")
    loop.gate.wait("1.2", DEADLINE_S)
    thread.join(0.05)
    assert thread.is_alive(), "not one step between two pauses of a torn engine"


def test_a_call_after_the_end_of_its_pause_blocks_no_loop(loop: Loop) -> None:
    loop.gate.ask("1.1")
    with pytest.raises(PeerTimeout, match=r"pause 1\.1"):
        loop.gate.wait("1.1", 0.01)
    loop.gate.end()
    loop.block("1.1").join(DEADLINE_S)
    assert not loop.threads[0].is_alive()


def test_a_late_call_of_an_old_pause_blocks_for_the_new_pause(loop: Loop) -> None:
    loop.gate.ask("1.1")
    loop.gate.end()
    loop.gate.ask("1.2")
    loop.block("1.1")
    loop.gate.wait("1.2", DEADLINE_S)


def test_a_blocked_loop_without_a_pause_continues_after_the_deadline(loop: Loop) -> None:
    started = time.monotonic()
    loop.block("1.1", 0.2).join(DEADLINE_S)
    assert 0.2 <= time.monotonic() - started < DEADLINE_S


def test_a_blocked_loop_leaves_after_its_longest_wait_despite_a_pause(loop: Loop) -> None:
    loop.gate.ask("1.1")
    thread = loop.block("1.1", longest_s=0.2)
    loop.gate.wait("1.1", DEADLINE_S)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not loop.gate.ask("1.2"), "it has to be brought to rest again"


def test_a_pause_that_cannot_be_reached_fails_at_once_with_the_reason(loop: Loop) -> None:
    loop.gate.ask("1.1")
    loop.gate.fail("1.1", PeerUnreachable("refused"))
    with pytest.raises(PeerUnreachable, match="refused"):
        loop.gate.wait("1.1", DEADLINE_S)


def test_a_later_pause_ignores_the_failure_of_an_earlier_pause(loop: Loop) -> None:
    loop.gate.fail("1.1", PeerUnreachable("refused"))
    loop.gate.ask("1.2")
    loop.block("1.2")
    loop.gate.wait("1.2", DEADLINE_S)


def test_a_loop_that_was_reached_before_the_call_failed_is_at_rest(loop: Loop) -> None:
    loop.gate.ask("1.1")
    loop.block("1.1")
    loop.gate.wait("1.1", DEADLINE_S)
    loop.gate.fail("1.1", PeerUnreachable("the connection ended"))
    loop.gate.wait("1.1", DEADLINE_S)


def test_a_pause_that_ends_before_the_loop_wakes_releases_the_loop(loop: Loop) -> None:
    """On a busy machine, a pause may begin and end before the waiting loop can check for it."""
    thread = loop.block("asked by the trainer", deadline_s=5 * DEADLINE_S)
    loop.gate.wait("asked by the trainer", DEADLINE_S)
    # The loop cannot check the gate while the test has this lock.
    with loop.gate.changed:
        loop.gate.ask("1.1")
        loop.gate.end()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_pauses_find_a_held_loop_blocked_and_outlast_it(loop: Loop) -> None:
    with loop.gate.held():
        for pause_id in ("1.1", "1.2"):
            assert loop.gate.ask(pause_id)
            loop.gate.wait(pause_id, 0)
            loop.gate.end()
        assert loop.gate.ask("1.3")
    loop.gate.wait("1.3", 0)
    loop.gate.end()
    assert not loop.gate.ask("1.4")
    with pytest.raises(PeerTimeout):
        loop.gate.wait("1.4", 0)


def test_a_pause_that_began_before_finds_a_held_loop(loop: Loop) -> None:
    assert not loop.gate.ask("1.1")
    with loop.gate.held():
        loop.gate.wait("1.1", 0)
