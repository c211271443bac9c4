"""A trainer holds the loop of an engine. The loop resumes after the round, whatever the round's result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from windlass.config import PauseMode, PushBackend
from windlass.control.engine_agent import EngineAgent, Sleeper
from windlass.control.engine_state import HoldCause
from windlass.control.messages import Abort, BeginDriven, Pause, Publish
from windlass.engines.capture.description import Captured
from windlass.engines.capture.memory import Watched
from windlass.engines.capture.mirrors import Later
from windlass.engines.engine_rank import RankHooks
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.errors import PeerTimeout, PeerUnreachable
from windlass.layout.manifest import Role
from windlass.transfer.dtensor import describe_module, parameter_addresses
from windlass.transfer.receiver import Receiver
from windlass.transports.registry import create_transport, parse_transport

SECONDS = 10.0


class Sleeps:
    """Sleeper of a rank that has lost its weights."""

    is_empty, caches_nbytes = True, 0

    def sleep(self, mode: PauseMode, deadline_s: float) -> None:
        """Do nothing: the rank sleeps already."""

    def stays_awake(self) -> AbstractContextManager[None]:
        """Do nothing: the rank sends no weights."""
        return nullcontext()

    def round_ended(self) -> None:
        """Do nothing: no framework makes the rank sleep."""


@contextmanager
def engine(
    *,
    serves_own_weights: bool,
    on_held: Callable[[HoldCause | None], None] | None = None,
    num_ranks: int = 1,
    sleeper: Sleeper | None = None,
) -> Iterator[tuple[EngineAgent, QuiesceGate]]:
    """Yield an unbound agent over real memory, and the gate of its loop."""
    module = torch.nn.Linear(4, 4)
    manifest = describe_module(module, "engine/0", Role.ENGINE)
    addresses = parameter_addresses(module)
    transport = create_transport(parse_transport("cma"))
    regions = [
        transport.register(address, spec.nbytes)
        for address, spec in zip(addresses, manifest.parameters, strict=True)
    ]
    receiver, gate = Receiver(transport, manifest, addresses, regions), QuiesceGate()
    captured = Captured(manifest, tuple(addresses), (), (), ())
    hooks = RankHooks(captured, gate, None)
    agent = EngineAgent(
        receiver,
        hooks,
        serves_own_weights=serves_own_weights,
        on_held=on_held,
        num_ranks=num_ranks,
        sleeper=sleeper,
    )
    try:
        yield agent, gate
    finally:
        gate.end()
        agent.close()
        transport.close()


@contextmanager
def loop(gate: QuiesceGate, deadline_s: float = SECONDS) -> Iterator[threading.Thread]:
    """Yield the thread of the trainer's call that holds the engine's loop."""
    thread = threading.Thread(target=gate.block, args=("version 1", deadline_s))
    thread.start()
    yield thread
    gate.end()
    thread.join(SECONDS)


@pytest.mark.parametrize("serves_own_weights", [True, False])
def test_an_aborted_first_version_leaves_the_weights_of_the_start(
    serves_own_weights: bool,
) -> None:
    causes: list[HoldCause | None] = []
    with (
        engine(serves_own_weights=serves_own_weights, on_held=causes.append) as (agent, gate),
        loop(gate) as held,
    ):
        agent.on_disconnect()
        assert causes == [], "no round has paused the engine"
        agent.handle(Pause(PauseMode.IN_PLACE, SECONDS), epoch=1, round_number=1)
        assert held.is_alive()
        agent.handle(Abort("", mixed_weights=False), epoch=1, round_number=1)
        held.join(SECONDS if serves_own_weights else 0.3)
        assert held.is_alive() is not serves_own_weights
        assert causes == ([] if serves_own_weights else [HoldCause.NO_VERSION])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rank_whose_peer_may_have_applied_a_version_stays_paused(num_ranks: int) -> None:
    """The controller dies while it sends the command to apply. Only some ranks get this command."""
    causes: list[HoldCause | None] = []
    with (
        engine(serves_own_weights=True, on_held=causes.append, num_ranks=num_ranks) as (
            agent,
            gate,
        ),
        loop(gate) as held,
    ):
        agent.handle(BeginDriven(PushBackend()), epoch=1, round_number=1)
        agent.handle(Pause(PauseMode.IN_PLACE, SECONDS), epoch=1, round_number=1)
        agent.on_disconnect()
        held.join(SECONDS if num_ranks == 1 else 0.3)
        assert held.is_alive() is (num_ranks > 1)
        assert causes == ([HoldCause.MIXED] if num_ranks > 1 else [])


def test_rank_resumes_if_the_controller_ends_the_round_before_any_rank_applies() -> None:
    with engine(serves_own_weights=True, num_ranks=2) as (agent, gate), loop(gate) as held:
        agent.handle(BeginDriven(PushBackend()), epoch=1, round_number=1)
        agent.handle(Pause(PauseMode.IN_PLACE, SECONDS), epoch=1, round_number=1)
        assert held.is_alive()
        agent.handle(Abort("", mixed_weights=False), epoch=1, round_number=1)
        held.join(SECONDS)
        assert not held.is_alive()
        assert not agent.mixed_weights


def test_requests_of_a_sleeping_engine_wait_only_while_a_controller_is_connected() -> None:
    """A round that left the weights empty is over, so the next connection does not make a version likely."""
    causes: list[HoldCause | None] = []
    with engine(serves_own_weights=True, on_held=causes.append, sleeper=Sleeps()) as (agent, _):
        agent.on_welcome()
        for _ in range(2):
            with pytest.raises(PeerUnreachable, match="sleeps"):
                agent.on_disconnect()
            assert causes.pop() is HoldCause.EMPTY
            agent.on_welcome()
            assert causes.pop() is None
        agent.handle(Abort("", mixed_weights=False), epoch=1, round_number=1)
        assert causes.pop() is HoldCause.EMPTY
        with pytest.raises(PeerUnreachable, match="sleeps"):
            agent.on_disconnect()
        assert causes.pop() is HoldCause.EMPTY
        agent.on_welcome()
        assert causes == []


def test_an_engine_does_not_serve_mixed_weights() -> None:
    with engine(serves_own_weights=True) as (agent, gate), loop(gate) as held:
        agent.handle(Pause(PauseMode.IN_PLACE, SECONDS), epoch=1, round_number=1)
        agent.handle(Abort("", mixed_weights=True), epoch=1, round_number=1)
        held.join(0.3)
        assert held.is_alive()


def test_a_lost_controller_holds_the_loop_until_the_next_version() -> None:
    """The agent reports that the engine stays paused, and reports the end before the loop continues."""
    reports: list[tuple[HoldCause | None, bool]] = []
    with (
        engine(
            serves_own_weights=True,
            on_held=lambda held: reports.append((held, loop_thread.is_alive())),
        ) as (agent, gate),
        loop(gate) as loop_thread,
    ):
        agent.handle(Pause(PauseMode.IN_PLACE, SECONDS), epoch=1, round_number=1)
        agent.on_disconnect()
        agent.on_disconnect()
        loop_thread.join(0.3)
        assert reports == [(HoldCause.MIXED, True)]
        agent.handle(Pause(PauseMode.IN_PLACE, SECONDS), epoch=2, round_number=1)
        agent.handle(Publish(1, SECONDS, ""), epoch=2, round_number=1)
        loop_thread.join(SECONDS)
        assert not loop_thread.is_alive()
        assert reports == [(HoldCause.MIXED, True), (None, True)]


def test_a_pause_of_a_loop_that_is_not_held_fails_by_its_deadline() -> None:
    with (
        engine(serves_own_weights=True) as (agent, _),
        pytest.raises(PeerTimeout, match=r"not quiesced after 0\.2 s"),
    ):
        agent.handle(Pause(PauseMode.IN_PLACE, 0.2), epoch=1, round_number=1)


def searching_hooks(module: torch.nn.Module, gate: QuiesceGate) -> RankHooks:
    """Return hooks that search `module` for copies of its weights in each pause."""
    manifest = describe_module(module, "engine/0", Role.ENGINE)
    later = Later(Watched(module, frozenset()), ["weight"], ["weight", "bias"], {})
    return RankHooks(Captured(manifest, (), (), (), (), later=later), gate, None)


def test_failed_search_for_copies_releases_the_loop() -> None:
    """The search reads the engine's own objects, and these may raise any exception."""
    module, gate = torch.nn.Linear(4, 4), QuiesceGate()
    hooks = searching_hooks(module, gate)
    # torch refuses to read a parameter that has no memory yet.
    module.scale = torch.nn.UninitializedParameter()
    with loop(gate) as held:
        with pytest.raises(ValueError, match="uninitialized parameter"):
            hooks.pause("1.1", PauseMode.IN_PLACE, SECONDS)
        held.join(SECONDS / 2)
        assert not held.is_alive()
    assert not hooks.in_round


def test_failed_search_keeps_an_engine_with_mixed_weights_held() -> None:
    """The loop would run steps with weights of two versions."""
    module, gate = torch.nn.Linear(4, 4), QuiesceGate()
    hooks = searching_hooks(module, gate)
    with loop(gate) as held:
        hooks.pause("1.1", PauseMode.IN_PLACE, SECONDS)
        hooks.round_ended()
        module.scale = torch.nn.UninitializedParameter()
        with pytest.raises(ValueError, match="uninitialized parameter"):
            hooks.pause("2.1", PauseMode.IN_PLACE, SECONDS)
        held.join(0.3)
        assert held.is_alive()
        del module.scale
        hooks.pause("2.2", PauseMode.IN_PLACE, SECONDS)
        hooks.resume(SECONDS)
        held.join(SECONDS / 2)
        assert not held.is_alive()


def test_a_held_loop_without_a_round_continues_after_its_deadline() -> None:
    with engine(serves_own_weights=True) as (_, gate), loop(gate, deadline_s=0.2) as held:
        held.join(SECONDS)
        assert not held.is_alive()
