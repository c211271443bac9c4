"""Failures of listeners, hooks, `close()` and a port in use do not spread to other parts."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from fake_agents import FakeEngineRank, engine_manifest, fake_hello
from fake_fleet import TOKEN, FakeFleet, until

import windlass
from windlass.backends import disk
from windlass.control.client import AgentChannel
from windlass.control.report import RoundOutcome
from windlass.control.session import AgentSession
from windlass.errors import ConfigError, PeerTimeout, RolloutError
from windlass.net import journal_file
from windlass.rollout import RolloutConfig, SamplingParams
from windlass.rollout.controller import RolloutController
from windlass.rollout.directory import StaticEngines
from windlass.rollout.journal import RolloutJournal, VersionReached
from windlass.transfer import relay
from windlass.transfer.base import ParameterMemory
from windlass.transfer.relay import ACCEPT_AGAIN_S, RelayReceiver

WITHIN_S = 20.0
FULL = OSError(errno.ENOSPC, "No space left on device")


async def test_listeners_that_raise_delay_no_round_and_no_report() -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a listener")

    async with FakeFleet() as rig:
        rig.coordinator.rounds.on_phase(broken)
        rig.coordinator.on_update(broken)
        rig.coordinator.subscribe(broken)
        await rig.start({"a": 1})
        for version in range(2):
            async with asyncio.timeout(WITHIN_S):
                report = await rig.publish(version)
            assert report.outcome is RoundOutcome.PUBLISHED
        assert rig.engines["a/0"].serving


async def test_a_coordinator_closes_its_agents_concurrently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close, together = AgentSession.close, asyncio.Barrier(3)

    async def slow(session: AgentSession) -> None:
        async with asyncio.timeout(WITHIN_S):
            await together.wait()
        await close(session)

    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        monkeypatch.setattr(AgentSession, "close", slow)
        async with asyncio.timeout(WITHIN_S):
            await rig.coordinator.close()


async def test_a_controller_that_cannot_listen_releases_its_journal(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first = windlass.Controller(token=TOKEN, port=port, journal_path=tmp_path / "rounds")
        with pytest.raises(ConfigError, match=f"port {port} cannot be bound"):
            await first.__aenter__()
    async with windlass.Controller(token=TOKEN, journal_path=tmp_path / "rounds"):
        pass


async def test_a_controller_stops_serving_although_its_closing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(_journal: RolloutJournal) -> None:
        raise FULL

    async def broken() -> None:
        raise ZeroDivisionError("closing")

    monkeypatch.setattr(RolloutJournal, "close", full)
    controller = windlass.Controller(token=TOKEN)
    await controller.__aenter__()
    monkeypatch.setattr(controller.coordinator, "close", broken)
    with pytest.raises(ZeroDivisionError):
        await controller.__aexit__()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(controller.url).port or 0)).close()


async def test_a_journal_that_cannot_be_written_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int, _data: bytes) -> None:
        raise FULL

    journal = RolloutJournal(RolloutConfig(journal=tmp_path / "journal"))
    journal.open(0)
    journal.add(VersionReached(1))
    with monkeypatch.context() as patch:
        patch.setattr(journal_file, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            await journal.close()
    again = RolloutJournal(RolloutConfig(journal=tmp_path / "journal"))
    again.open(0)
    await again.close()


async def test_a_wait_for_a_batch_ends_when_the_controller_closes() -> None:
    policy = windlass.StalenessPolicy.unbounded(1)
    async with RolloutController(StaticEngines(), policy) as rollouts:
        waiting = [asyncio.create_task(rollouts.next_batch(1, deadline_s=600)) for _ in range(2)]
        # Let both calls wait. A call that has not started yet is refused as well.
        await asyncio.sleep(0)
    async with asyncio.timeout(WITHIN_S):
        for each in waiting:
            with pytest.raises(ConfigError, match="next_batch: the controller is closed"):
                await each


async def test_an_engine_that_cannot_resume_alone_reconnects_to_its_controller() -> None:
    def broken() -> None:
        raise ConnectionRefusedError("the engine's HTTP server is away")

    async with FakeFleet() as rig:
        rank = FakeEngineRank("a/0", rig.num_trainers)
        hello = fake_hello(engine_manifest("a/0", rig.num_trainers), group="a")
        await rig.connect(hello, rank, on_disconnect=broken)
        sessions = rig.coordinator.members.sessions
        await until(lambda: "a/0" in sessions)
        first = sessions["a/0"]
        await first.close()
        await until(lambda: sessions.get("a/0") not in (None, first))


async def test_an_engine_that_could_not_resume_alone_resumes_before_its_next_round() -> None:
    told: list[str] = []

    def away_once() -> None:
        told.append("resume")
        if len(told) == 1:
            raise PeerTimeout("the engine's HTTP server is away")

    async with FakeFleet() as rig:
        rank = FakeEngineRank("a/0", rig.num_trainers, on_command=lambda c: told.append(str(c)))
        hello = fake_hello(engine_manifest("a/0", rig.num_trainers), group="a")
        await rig.connect(hello, rank, on_disconnect=away_once)
        sessions = rig.coordinator.members.sessions
        await until(lambda: "a/0" in sessions)
        first = sessions["a/0"]
        await first.close()
        await until(lambda: sessions.get("a/0") not in (None, first))
        await until(lambda: len(told) >= 2)
        assert told[:2] == ["resume", "resume"]


async def test_a_wait_for_a_batch_ends_when_the_journal_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise FULL

    policy = windlass.StalenessPolicy.unbounded(1)
    config = RolloutConfig(journal=tmp_path / "rollouts")
    async with RolloutController(StaticEngines(), policy, config=config) as rollouts:
        waiting = asyncio.create_task(rollouts.next_batch(1, deadline_s=600))
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            rollouts.submit((1,), SamplingParams(max_new_tokens=1))
            async with asyncio.timeout(WITHIN_S):
                with pytest.raises(RolloutError, match="No space left"):
                    await waiting


def test_a_channel_that_was_never_connected_leaves_no_loop_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loop)
    hello = fake_hello(engine_manifest("a/0", 1), group="a")
    channel = AgentChannel("http://127.0.0.1:1", TOKEN, lambda: hello, FakeEngineRank("a/0", 1))
    channel.close()
    assert loop.is_closed()


def test_old_versions_that_cannot_be_removed_fail_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(disk, "prune", refused)
    manifest = engine_manifest("trainer/0", 1)
    memory = np.zeros(manifest.parameters[0].nbytes, np.uint8)
    where = [ParameterMemory(int(memory.ctypes.data), memory.nbytes)]
    disk.DiskSender(windlass.DiskBackend(str(tmp_path)), manifest, lambda: where).prepare(1)


@pytest.fixture
def large_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the second descriptor of each pair too large for `select.select`, where the limit
    allows.
    """
    pair = socket.socketpair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = 1200 if hard == resource.RLIM_INFINITY else min(1200, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))

    def large() -> tuple[socket.socket, socket.socket]:
        one, other = pair()
        with other:
            moved = fcntl.fcntl(other, fcntl.F_DUPFD_CLOEXEC, num_files - 50)
        return one, socket.socket(fileno=moved)

    monkeypatch.setattr(socket, "socketpair", large)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("large_descriptors")
def test_a_relay_without_descriptors_does_not_accept_in_a_busy_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept, room, asked = socket.socket.accept, threading.Event(), threading.Semaphore(0)

    def scarce(listener: socket.socket) -> tuple[socket.socket, object]:
        asked.release()
        if not room.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    began = time.monotonic()
    listener = RelayReceiver("a/0", "127.0.0.1")
    try:
        with socket.create_connection(
            ("127.0.0.1", listener.address.port), timeout=WITHIN_S
        ) as visitor:
            for _ in range(4):
                assert asked.acquire(timeout=WITHIN_S)
            assert time.monotonic() - began >= 3 * ACCEPT_AGAIN_S
            room.set()
            # These bytes are not a frame, so the relay closes the connection.
            visitor.sendall(b"\xff" * 64)
            assert visitor.recv(1) == b""
    finally:
        listener.close()


def test_a_relay_closes_connections_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "OPEN_S", 0.05)
    monkeypatch.setattr(relay, "MAX_CONNECTIONS", 1)
    listener = RelayReceiver("a/0", "127.0.0.1")
    where = "127.0.0.1", listener.address.port
    try:
        with (
            socket.create_connection(where, timeout=WITHIN_S) as silent,
            socket.create_connection(where, timeout=WITHIN_S) as next_one,
        ):
            assert silent.recv(1) == b""
            assert next_one.recv(1) == b""
    finally:
        listener.close()
