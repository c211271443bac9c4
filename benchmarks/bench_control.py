"""Cost of an update without weights: 64 engine ranks, real sockets.

The benchmark runs the same phases with the same commands and answers in two ways: PREPARE with PAUSE, WRITE, VERIFY,
APPLY, PUBLISH. One way is the real coordinator with a WebSocket per agent. The other way posts each command to an HTTP
server in every rank, over connections that stay open. Rounds of the two alternate, so that both see the same machine.
All agents run in one other process and answer at once, so only the control plane is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import aiohttp
from aiohttp import web
from fake_agents import (
    engine_manifest,
    fake_endpoint,
    fake_hello,
    trainer_manifest,
)

from harness import Row, median_p95, parser, report
from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.control.connect_messages import Bound, ConnectEngine, Welcome
from windlass.control.coordinator import Coordinator
from windlass.control.messages import (
    AGENT_FRAMES,
    CONTROLLER_FRAMES,
    Announce,
    Apply,
    Command,
    Done,
    Pause,
    Prepare,
    Probe,
    Publish,
    Result,
    Verified,
    Verify,
    Write,
)
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.control.routes import mount_updates
from windlass.envs import temporary_values
from windlass.net.messages import Envelope, Reply, encode
from windlass.net.server import ControlServer
from windlass.net.sockets import open_http
from windlass.transfer.bindings import DestinationBinding, LinkOutcome, LinkStatus, Written

TOKEN = "benchmark"
GOAL_MS = 20.0
DIGEST = "0" * 32
WARM_UP = 3


# --- the process of the agents, which answer at once ------------------------------------------------


def answer(worker: str, command: Command | Probe) -> Result:
    match command:
        case ConnectEngine():
            binding = DestinationBinding(worker, fake_endpoint(worker), (), ())
            return Bound(command.plan_digest, binding)
        case Write():
            links = tuple(LinkOutcome(d, LinkStatus.OK, 0, DIGEST) for d in command.destinations)
            return Written(links, 0.0, 0.0)
        case Verify():
            return Verified(())
        case _:
            return Done()


class Agents:
    """Agents of all ranks on one event loop, with WebSockets and HTTP."""

    def __init__(self, url: str, num_engines: int) -> None:
        self.url = url
        trainer = trainer_manifest("trainer/0", 0, 1)
        self.hellos = [fake_hello(trainer, group="trainer")]
        for index in range(num_engines):
            manifest = engine_manifest(f"engine-{index}/0", 1)
            self.hellos.append(fake_hello(manifest, group=f"engine-{index}"))

    async def serve_http(self) -> list[int]:
        ports = []
        for _ in self.hellos:
            app = web.Application(handler_args={"access_log": None})
            app.add_routes([web.post("/command", self._on_post)])
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            ports.append(runner.addresses[0][1])
        self.workers = {p: h.worker for p, h in zip(ports, self.hellos, strict=True)}
        return ports

    async def _on_post(self, request: web.Request) -> web.Response:
        frame = CONTROLLER_FRAMES.decode(await request.read())
        assert isinstance(frame, Envelope)
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        worker = self.workers[int(request.host.rpartition(":")[2])]
        reply = Reply(frame.epoch, frame.round, frame.seq, answer(worker, frame.command))
        return web.Response(body=encode(reply))

    async def run(self) -> None:
        print(*await self.serve_http(), flush=True)
        async with open_http(TOKEN, to_controller=True, many_connections=True) as http:
            await asyncio.gather(*(self._agent(http, index) for index in range(len(self.hellos))))

    async def _agent(self, http: aiohttp.ClientSession, index: int) -> None:
        hello = self.hellos[index]
        async with http.ws_connect(self.url + "/v1/agents") as socket:
            await socket.send_bytes(encode(hello))
            async for message in socket:
                frame = CONTROLLER_FRAMES.decode(message.data)
                if isinstance(frame, Envelope):
                    result = answer(hello.worker, frame.command)
                    await socket.send_bytes(
                        encode(Reply(frame.epoch, frame.round, frame.seq, result))
                    )
                elif isinstance(frame, (Welcome, UpdateReport)) and index == 0:
                    done = frame.version if isinstance(frame, UpdateReport) else -1
                    # The parent starts each round with one line on stdin.
                    line = await asyncio.to_thread(sys.stdin.readline)
                    if not line:
                        return
                    await socket.send_bytes(encode(Announce(done + 1, done + 2)))


# --- the same phases as HTTP requests ------------------------------------------------------------


class HttpRounds:
    def __init__(self, http: aiohttp.ClientSession, urls: Mapping[str, str]) -> None:
        self._http = http
        self._urls = urls
        self._seq = 0

    async def _post(self, worker: str, command: Command) -> Result:
        self._seq += 1
        body = encode(Envelope(1, 1, self._seq, command))
        async with self._http.post(self._urls[worker], data=body) as response:
            frame = AGENT_FRAMES.decode(await response.read())
        assert isinstance(frame, Reply)
        return frame.result

    async def run(self, version: int) -> float:
        engines = [worker for worker in self._urls if worker != "trainer/0"]
        began = time.perf_counter()
        pause = Pause(PauseMode.ABORT, 30.0)
        first = [self._post("trainer/0", Prepare(version))]
        first += [self._post(w, pause) for w in engines]
        await asyncio.gather(*first)
        written = await self._post("trainer/0", Write(version, tuple(engines), 30.0))
        assert isinstance(written, Written)
        digests = {link.destination: link.digest for link in written.links}
        for command in (
            lambda w: Verify(version, {"trainer/0": digests[w]}),
            lambda _w: Apply(version),
            lambda _w: Publish(version, 30.0, ""),
        ):
            await asyncio.gather(*(self._post(w, command(w)) for w in engines))
        return time.perf_counter() - began


# --- this process -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def controller(
    journal: Path | None,
) -> AsyncIterator[tuple[Coordinator, ControlServer, asyncio.Queue[UpdateReport]]]:
    config = ControlConfig(mode=UpdateMode.IN_PLACE)
    coordinator = Coordinator(config, journal_path=journal)
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    mount_updates(coordinator, server)
    reports: asyncio.Queue[UpdateReport] = asyncio.Queue()
    coordinator.on_update(reports.put_nowait)
    await server.start()
    try:
        yield coordinator, server, reports
    finally:
        await coordinator.close()
        await server.close()


def start_agents(url: str, num_engines: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "--agents", url, str(num_engines)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


async def measure(
    num_engines: int, rounds: int, journal: Path | None
) -> tuple[list[float], list[float]]:
    """Return the seconds per round over WebSockets and over HTTP."""
    async with controller(journal) as (coordinator, server, reports):
        process = start_agents(server.url, num_engines)
        assert process.stdin is not None
        assert process.stdout is not None
        ports = (await asyncio.to_thread(process.stdout.readline)).split()
        engines = [f"engine-{index}" for index in range(num_engines)]
        await coordinator.members.wait_for_fleet(num_trainers=1, engines=engines, deadline_s=60)
        names = ["trainer/0", *(f"{name}/0" for name in engines)]
        urls = {n: f"http://127.0.0.1:{port}/command" for n, port in zip(names, ports, strict=True)}
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(headers=headers, connector=connector) as http:
            by_http = HttpRounds(http, urls)
            over_socket: list[float] = []
            over_http: list[float] = []
            for version in range(WARM_UP + rounds):
                process.stdin.write("go\n")
                process.stdin.flush()
                done = await asyncio.wait_for(reports.get(), 60)
                assert done.outcome is RoundOutcome.PUBLISHED, done.reason
                assert len(done.engines) == num_engines
                http_s = await by_http.run(version)
                if version >= WARM_UP:
                    over_socket.append(done.update_s)
                    over_http.append(http_s)
    # The connections are closed now, so the agents end by themselves.
    process.communicate(timeout=20)
    return over_socket, over_http


def rows_of(case: str, over_socket: list[float], over_http: list[float]) -> list[Row]:
    rows = []
    names = ("median", "p95")
    socket_ms = [1e3 * value for value in median_p95(over_socket)]
    http_ms = [1e3 * value for value in median_p95(over_http)]
    for name, value, reference in zip(names, socket_ms, http_ms, strict=True):
        for label, against in (("same phases over HTTP", reference), ("goal", GOAL_MS)):
            rows.append(Row(case, f"empty update, {name}", value, "ms", label, against))
    return rows


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--engines", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=40)
    arguments.add_argument("--agents", nargs=2, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.agents:
        asyncio.run(Agents(given.agents[0], int(given.agents[1])).run())
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cases: list[tuple[str, Path | None, dict[str, str]]] = [
            ("journal in memory", None, {}),
            ("journal on disk", Path(folder) / "journal", {}),
        ]
        if importlib.util.find_spec("trustme") is not None:
            from certificates import Authority

            cases.append(("journal in memory, TLS", None, Authority(Path(folder)).issue()))
        for case, journal, files in cases:
            with temporary_values(files):
                measured = asyncio.run(measure(given.engines, given.rounds, journal))
            rows += rows_of(f"{given.engines} engine ranks, {case}", *measured)
    report(rows, given.json, "Control plane: an update with nothing to send")


if __name__ == "__main__":
    main()
