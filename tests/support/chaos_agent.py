"""One process of the real chaos: a trainer rank or an engine over a real transport.

`python chaos_agent.py trainer|engine URL TOKEN NAME INDEX TRANSPORT PARENT`. A trainer publishes
the versions that it reads from stdin and prints the result of each. An engine prints its URL and
serves `/generate` and `/state` until it is killed. Both end with their parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from chaos_weights import (
    NUM_TRAINERS,
    engine_bytes,
    engine_manifest,
    trainer_manifest,
    trainer_rows,
    values,
)

from windlass.engines.client import EngineClient, EngineWeights
from windlass.errors import RoundAborted, WindlassError
from windlass.layout.manifest import Role
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory
from windlass.transports.base import OneSidedTransport
from windlass.transports.registry import create_transport, parse_transport

ANNOUNCE_S = 30.0
CONNECT_S = 60.0
MIXED = -999
PR_SET_PDEATHSIG = 1


def memory_of(transport: OneSidedTransport, nbytes: int) -> tuple[int, Any, Any]:
    """Return newly registered memory: its address, its bytes and its region."""
    if transport.allocator is not None:
        address = transport.allocator.allocate(nbytes)
        raw = (ctypes.c_uint8 * nbytes).from_address(address)
        array = np.ctypeslib.as_array(raw)
    else:
        array = np.zeros(nbytes, np.uint8)
        address = int(array.ctypes.data)
    return address, array, transport.register(address, nbytes)


def run_trainer(url: str, token: str, name: str, index: int, transport: OneSidedTransport) -> None:
    rows = trainer_rows(index)
    address, array, region = memory_of(transport, values(0)[rows].nbytes)
    memory = (ParameterMemory(address, len(array)),)
    trainer = TrainerClient(
        TrainerWeights(
            manifest=trainer_manifest(name, index),
            parameters=lambda: memory,
        ),
        transport=transport,
        controller=url,
        token=token,
        world_size=NUM_TRAINERS,
        job="ranks that come back one by one",
        registered=[region],
        connect_deadline_s=CONNECT_S,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        version = int(line)
        array[:] = np.frombuffer(values(version)[rows].tobytes(), np.uint8)
        try:
            trainer.publish(version, deadline_s=ANNOUNCE_S)
            ended = "published"
        except RoundAborted as error:
            ended = f"aborted {error}"
        except WindlassError as error:
            ended = f"none {error}"
        print(f"{version} {ended}".replace("\n", " "), flush=True)


class Engine:
    """Engine with real memory, which it reads for every token."""

    def __init__(self, name: str, transport: OneSidedTransport) -> None:
        self.manifest = engine_manifest(f"{name}/0", 0, 1)
        self.name = name
        nbytes = self.manifest.parameters[0].nbytes
        self.address, self.array, self.region = memory_of(transport, nbytes)
        self.lock = threading.Lock()
        self.paused = True
        self.version = -1
        self.aborts = 0
        self.known = {engine_bytes(version, 0, 1): version for version in range(250)}

    # EngineHooks, called by the agent's thread.

    def pause(self, pause_id: str, mode: object, deadline_s: float) -> None:
        # The lock lets a running token finish first.
        with self.lock:
            self.paused = True
            self.aborts += 1

    def resume(self, deadline_s: float) -> None:
        with self.lock:
            self.paused = False

    def finalise(self) -> None:
        return

    def set_version(self, version: int, deadline_s: float) -> None:
        self.version = version

    # Called in the loop of the server.

    def token(self) -> int | None:
        """Return the version of the next token, `MIXED` for wrong weights, None while paused."""
        with self.lock:
            if self.paused or self.version < 0:
                return None
            content = self.known.get(self.array.tobytes(), MIXED)
            return self.version if content == self.version else MIXED

    async def generate(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        prompt, wanted = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        ids: list[int] = []
        versions: list[int] = []
        aborts = self.aborts
        while len(ids) < wanted and aborts == self.aborts:
            await asyncio.sleep(0.002)
            version = self.token()
            if version is not None:
                versions.append(version)
                ids.append(prompt[0] * 1000 + len(prompt) + len(ids))
        meta = {
            "finish_reason": {"type": "length" if len(ids) == wanted else "abort"},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "output_token_versions": versions,
        }
        return web.json_response({"output_ids": ids, "meta_info": meta})

    async def state(self, _request: web.Request) -> web.Response:
        content = self.known.get(self.array.tobytes(), MIXED)
        return web.json_response({"paused": self.paused, "label": self.version, "content": content})


async def run_engine(url: str, token: str, name: str, transport: OneSidedTransport) -> None:
    engine = Engine(name, transport)
    app = web.Application()
    app.add_routes([web.post("/generate", engine.generate), web.get("/state", engine.state)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    own_url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def connect() -> EngineClient:
        return EngineClient(
            EngineWeights(
                manifest=engine.manifest,
                addresses=[engine.address],
                regions=[engine.region],
            ),
            transport=transport,
            hooks=engine,
            controller=url,
            token=token,
            url=own_url,
            connect_deadline_s=CONNECT_S,
        )

    _client = await asyncio.to_thread(connect)
    print(own_url, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    role, url, token, name, index, kind, parent = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    transport = create_transport(parse_transport(kind))
    if Role(role) is Role.TRAINER:
        run_trainer(url, token, name, int(index), transport)
    else:
        asyncio.run(run_engine(url, token, name, transport))


if __name__ == "__main__":
    main()
