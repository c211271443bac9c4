"""Strangers cost a server almost nothing: few connections, for a short time, and no log lines."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from fake_agents import (
    FakeEngineRank,
    FakeFabric,
    FakeTrainerRank,
    engine_manifest,
    fake_hello,
    trainer_manifest,
)
from fake_fleet import TOKEN
from open_sockets import read_to_end

from windlass.control.client import AgentChannel, CommandHandler, TrainerChannel
from windlass.control.connect_messages import Hello
from windlass.errors import PeerTimeout
from windlass.net import listener
from windlass.net.listener import RateLimit
from windlass.net.server import ControlServer

NUM_FILES = 256
NUM_STRANGERS = 300
NUM_UPDATES = 10

SERVE = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[2])))
import windlass
from windlass.net.logs import configure_logging

async def main():
    configure_logging("controller")
    async with windlass.Controller(token=sys.argv[1]) as controller:
        print(controller.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def controller_process(errors: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with errors.open("w") as file:
        process = subprocess.Popen(
            (sys.executable, "-c", SERVE, TOKEN, str(NUM_FILES)),
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            process.stdout.close()


@contextmanager
def member(url: str, hello: Hello, handler: CommandHandler) -> Iterator[TrainerChannel]:
    with TrainerChannel(url, TOKEN, lambda: hello, handler) as channel:
        channel.connect(20.0)
        yield channel


@contextmanager
def fake_fleet(url: str) -> Iterator[TrainerChannel]:
    """Connect a trainer and an engine of this process, and yield the trainer's channel."""
    fabric, engine = FakeFabric(), FakeEngineRank("a/0", 1)
    fabric.ranks["a/0"] = engine
    trainer = FakeTrainerRank("trainer/0", fabric)
    trainer_hello = fake_hello(trainer_manifest("trainer/0", 0, 1), group="trainer")
    engine_hello = fake_hello(engine_manifest("a/0", 1), group="a")
    with member(url, trainer_hello, trainer) as channel, member(url, engine_hello, engine):
        yield channel


def processor_s(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_more_strangers_than_descriptors_delay_no_update_and_fill_no_log(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with controller_process(errors) as (url, process), ExitStack() as stack:
        # The usual soft limit is for programs that use `select`.
        limits = (NUM_FILES, NUM_FILES)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == limits
        address = ("127.0.0.1", urlsplit(url).port or 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < 2 * NUM_STRANGERS:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        trainer = stack.enter_context(fake_fleet(url))
        for _ in range(NUM_STRANGERS):
            stranger = stack.enter_context(socket.create_connection(address, timeout=5.0))
            stranger.settimeout(5.0)
        began_s, used_s = time.monotonic(), processor_s(process)
        for version in range(NUM_UPDATES):
            assert trainer.announce(version, 20.0).outcome == "published"
        assert time.monotonic() - began_s < 5.0
        time.sleep(1.0)
        assert processor_s(process) - used_s < 1.5
        late = fake_hello(engine_manifest("b/0", 1), group="b")
        with member(url, late, FakeEngineRank("b/0", 1)):
            # A real member can still connect.
            pass
    assert errors.stat().st_size < 20_000


def test_members_beyond_the_descriptors_are_refused_and_delay_no_update(
    tmp_path: Path,
) -> None:
    """Connected members continue.

    A late member is told the reason, and connects once there is room.
    """
    errors = tmp_path / "errors"
    with controller_process(errors) as (url, _), ExitStack() as stack:
        address = ("127.0.0.1", urlsplit(url).port or 0)
        trainer = stack.enter_context(fake_fleet(url))
        request = f"GET /v1/status HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        members, refused = ExitStack(), []
        stack.enter_context(members)
        for _ in range(NUM_FILES):
            connection = members.enter_context(socket.create_connection(address, timeout=5.0))
            connection.sendall(request.encode())
            answer = connection.recv(1 << 16)
            if not answer.startswith(b"HTTP/1.1 200 "):
                refused.append(answer)
        assert len(refused) >= 20
        for answer in refused:
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"no file descriptor is left" in answer
        for version in range(NUM_UPDATES):
            assert trainer.announce(version, 20.0).outcome == "published"
        late = fake_hello(engine_manifest("b/0", 1), group="b")
        with (
            AgentChannel(url, TOKEN, lambda: late, FakeEngineRank("b/0", 1)) as channel,
            pytest.raises(PeerTimeout, match="accepts no further connection"),
        ):
            channel.connect(2.0)
        members.close()
        with member(url, late, FakeEngineRank("b/0", 1)):
            assert trainer.announce(NUM_UPDATES, 20.0).outcome == "published"
    said = errors.read_text()
    assert "no file descriptor is left" in said
    assert "Traceback" not in said
    assert len(said) < 20_000


async def test_a_connection_that_shows_no_token_in_time_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "STRANGER_S", 0.3)
    monkeypatch.setattr(listener, "MAX_STRANGERS", 4)
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    await server.start()
    try:
        port = urlsplit(server.url).port or 0
        kept = aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})
        async with kept, kept.get(server.url + "/nothing") as answer:
            assert answer.status == 404
            began = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for (_, writer), sent in zip(
                began,
                (b"", b"GET", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\na: b\r\n"),
                strict=True,
            ):
                writer.write(sent)
            for reader, writer in began:
                async with asyncio.timeout(5):
                    await read_to_end(reader)
                writer.close()
            async with kept.get(server.url + "/nothing") as again:
                assert again.status == 404
    finally:
        await server.close()


async def test_the_oldest_stranger_makes_room_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "STRANGER_S", 60.0)
    monkeypatch.setattr(listener, "MAX_STRANGERS", 4)
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    await server.start()
    try:
        port = urlsplit(server.url).port or 0
        first = await asyncio.open_connection("127.0.0.1", port)
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        async with asyncio.timeout(5):
            await read_to_end(first[0])
        others[-1][1].write(b"GET /nothing HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(5):
            assert b"401" in await others[-1][0].read()
        for _, writer in (first, *others):
            writer.close()
    finally:
        await server.close()


async def test_malformed_requests_write_few_lines_to_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = RateLimit(5)
    monkeypatch.setattr(listener.request_log, "filters", [limit])
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    await server.start()
    try:
        port = urlsplit(server.url).port or 0
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nbad header\x00\r\n\r\n")
            await read_to_end(reader)
            writer.close()
    finally:
        await server.close()
    text = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert len([line for line in text.splitlines() if "Error handling request" in line]) == 5
    assert "Traceback" not in text
    monkeypatch.setattr(listener, "LOG_PERIOD_S", 0.0)
    record = logging.LogRecord("a", logging.ERROR, "f", 1, "next %s", ("one",), None)
    assert limit.filter(record)
    assert re.fullmatch(r"next one \(45 more were not logged\)", record.getMessage())
