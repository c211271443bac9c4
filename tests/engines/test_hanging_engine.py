"""Engines that hang after their update, when their server must stamp the version or resume."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_pair import connect_small_pair

from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.control import recovery
from windlass.control.coordinator import Coordinator
from windlass.control.engine_state import EngineStatus
from windlass.control.report import RoundOutcome
from windlass.control.routes import mount_updates
from windlass.engines.engine_rank import EngineApi
from windlass.engines.http import EngineHttp
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.engines.sglang.orders import SglangApi
from windlass.engines.vllm.worker import VllmApi
from windlass.errors import PeerTimeout
from windlass.net.clock import Backoff
from windlass.net.server import ControlServer

TOKEN = "a-token"
WITHIN_S = 30.0
PUBLISH_S = 3.0

SERVER = """
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    hangs_at = sys.argv[1]

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == Handler.hangs_at:
            Handler.hangs_at = ""
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            self.send_response(200)
            self.end_headers()
        except ConnectionError:
            pass  # the client has closed the connection

    def log_message(self, *_):
        pass

server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Served:
    """`EngineHooks` over an HTTP server, as for vLLM and SGLang."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.version = -1
        self.paused = True
        self.failed: list[str] = []

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        self.paused = True

    def finalise(self) -> None:
        return

    def set_version(self, version: int, deadline_s: float) -> None:
        self._post("/version", deadline_s)
        self.version = version

    def resume(self, deadline_s: float) -> None:
        self._post("/resume", deadline_s)
        self.paused = False

    def _post(self, path: str, deadline_s: float) -> None:
        assert deadline_s <= PUBLISH_S
        try:
            EngineHttp(self.url).post(path, {}, deadline_s)
        except PeerTimeout:
            self.failed.append(path)
            raise


@pytest.mark.parametrize(
    ("hangs_at", "mode"), [("/version", UpdateMode.IN_PLACE), ("/resume", UpdateMode.STAGED)]
)
async def test_an_engine_with_a_hanging_server_is_published_and_rests_until_it_answers(
    hangs_at: str, mode: UpdateMode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recovery, "BACKOFF", Backoff(0.02, 30.0))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, hangs_at, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    hooks = Served(f"http://127.0.0.1:{int(await process.stdout.readline())}")
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    config = ControlConfig(mode=mode, deadlines=PhaseDeadlines(publish_s=PUBLISH_S))
    coordinator = Coordinator(config, journal_path=tmp_path / "journal")
    mount_updates(coordinator, server)
    await server.start()
    pair = await asyncio.to_thread(connect_small_pair, server.url, TOKEN, hooks, hooks.url)
    try:
        await coordinator.members.wait_for_fleet(num_trainers=1, engines=["a"], deadline_s=WITHIN_S)
        report = (await asyncio.to_thread(pair.trainer.publish, 0)).result()
        assert (report.outcome, report.engines) == (RoundOutcome.PUBLISHED, ("a",))
        assert report.left_out == {}
        assert coordinator.routable() == ()
        assert (hooks.failed[0], hooks.paused) == (hangs_at, True)
        assert [engine.status for engine in coordinator.fleet.states()] == [
            EngineStatus.NOT_RESUMED
        ]
        assert bytes(pair.served) == bytes(pair.trained)
        os.kill(process.pid, signal.SIGCONT)
        await coordinator.changes.until(
            lambda: bool(coordinator.routable()), WITHIN_S, lambda: "not routable"
        )
        assert (hooks.version, hooks.paused) == (0, False)
        # One report: the weights were copied only once.
        assert [report.version for report in coordinator.reports] == [0]
    finally:
        process.kill()
        await process.wait()
        await asyncio.to_thread(pair.close)
        await coordinator.close()
        await server.close()


APIS: dict[str, Callable[[str], EngineApi]] = {
    "vllm": lambda url: VllmApi(EngineHttp(url), can_block=False, stamps=False),
    "sglang": lambda url: SglangApi(EngineHttp(url), 1, QuiesceGate(), blocks=False),
}


@pytest.mark.parametrize("engine", APIS)
def test_an_engine_api_times_out_by_the_given_deadline(engine: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api = APIS[engine](f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(PeerTimeout, match=r"no answer within 0\.1 s"):
            api.set_version(1, 0.1)
        with pytest.raises(PeerTimeout, match=r"no answer within 0\.1 s"):
            api.resume(0.1)
