"""A caller that waits for a refused engine gets the reason at once, with real processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
from kept_port import free_port
from weight_fleet import TOKEN, Fleet

import windlass
from windlass.config import ControlConfig, PhaseDeadlines
from windlass.errors import EngineRefused

CONFIG = ControlConfig(deadlines=PhaseDeadlines(connect_s=20, fleet_s=2))
WAIT_S = 60.0

LAUNCHER = """
import sys
from windlass.engines.launch import arguments, serve
from windlass.engines.private_routes import new_key
from windlass.engines.spec import ServerCommand

url, port, server = sys.argv[1:]
words = ["--name", "vllm", "--model", "/m", "--port", port, "--controller", url]
args = arguments("program", None).parse_args(words)
args.host = args.advertise_host = "127.0.0.1"
command = ServerCommand((sys.executable, "-uc", server))
with new_key(int(port)):
    sys.exit(serve(args, command, ready_line="it serves"))
"""
SERVES = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(502)
        self.end_headers()
        self.wfile.write(b'{"error": "UnsupportedLayout: no kernel casts bfloat16 to float32"}')
print("it serves")
http.server.test(Handler, port=PORT, bind="127.0.0.1")
"""
ENDS = "raise SystemExit(3)"


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (SERVES, "engine vllm was refused: .*: no kernel casts bfloat16 to float32"),
        (
            ENDS,
            "engine vllm was refused: the server ended with status 3 before it accepted requests",
        ),
    ],
)
async def test_a_launched_engine_reports_why_it_cannot_join(server: str, says: str) -> None:
    async with windlass.Controller(token=TOKEN, config=CONFIG) as controller:
        began_s, port = time.monotonic(), str(free_port())
        command = (sys.executable, "-c", LAUNCHER, controller.url, port, server)
        launcher = subprocess.Popen(  # noqa: ASYNC220 - it is waited for in the controller
            [word.replace("PORT", port) for word in command],
            env={**os.environ, "WINDLASS_TOKEN": TOKEN},
        )
        try:
            with pytest.raises(EngineRefused, match=says):
                await controller.wait_for_fleet(
                    num_trainers=0, engines=("vllm",), deadline_s=WAIT_S
                )
            assert time.monotonic() - began_s < WAIT_S / 2
        finally:
            launcher.kill()
            launcher.wait(30)


async def test_an_engine_of_another_model_is_refused_and_waits_for_it_fail() -> None:
    async with windlass.Controller(token=TOKEN, config=CONFIG) as controller:
        fleet = Fleet(controller.url, 1)
        other = Fleet(controller.url, 1, scale=2)
        try:
            other.add_engine("b")
            assert await other.engines["b"][0].read() == "ready"
            fleet.add_trainers()
            assert await fleet.trainers[0].read() == "ready"
            with pytest.raises(EngineRefused, match=r"no engine is bound: ManifestError: .*embed"):
                await controller.wait_for_version(0, deadline_s=WAIT_S)
            fleet.add_engine("a")
            assert await fleet.engines["a"][0].read() == "ready"
            waits = asyncio.create_task(
                controller.wait_for_version(0, engines=("b",), deadline_s=WAIT_S)
            )
            with pytest.raises(EngineRefused, match=r"engine b was refused: .*embed"):
                await waits
            with pytest.raises(EngineRefused, match=r"engine b was refused: .*embed"):
                await controller.wait_for_fleet(num_trainers=1, engines=("b",), deadline_s=WAIT_S)
            assert (await fleet.publish(0)).outcome == "published"
        finally:
            fleet.close()
            other.close()
