"""A live SGLang server with no code of ours in its processes takes versions through its own table.

The server is started as its users start it; its environment names neither Windlass nor a hook. The
one thing added is what a torch for CPUs lacks, see `cpu_allocator`. The oracle is a second run of
`windlass.engines.sglang.table --check`: SGLang's loader makes a model of the trainer's weights, saved
as a checkpoint, and every live parameter is read back and compared with it, byte for byte.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rows import Record, Shown
from servers import (
    FLAGS,
    ROOT,
    VENVS,
    Layout,
    Server,
    engine_version,
    environment,
    save,
    traffic,
)
from servers import TOKEN as SECRET
from test_live_servers import NUM_TOKENS, PROMPT, check_answer
from trainer_rank import Order

import windlass
from trainers import FSDP, training
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.engines.sglang.table.routes import ENABLING
from windlass.net.addresses import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

NUM_RANKS = 2
NAME = "hookless"
PYTHON = str(VENVS["sglang"] / "bin/python")
START_S = 300.0
HTTP_S = 120.0
PAUSE_MODE = PauseMode(os.environ.get("WINDLASS_TABLE_PAUSE", "retract"))
"""`abort` by hand: each costs a server."""


@contextmanager
def plain_server(model: Path, log: Path) -> Iterator[Server]:
    """As its users start one."""
    port, bootstrap = free_port(), free_port()
    command = [
        *(PYTHON, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--tp-size", str(NUM_RANKS)),
        *(ENABLING, "--engine-info-bootstrap-port", str(bootstrap), *FLAGS["sglang"]),
        "--sleep-on-idle",  # or its ranks take the processors of everybody else
    ]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, text=True, start_new_session=True,
            env=environment("sglang", NUM_RANKS, str(Path(__file__).parent / "cpu_allocator")),
        )  # fmt: skip
    server = Server(process, f"http://127.0.0.1:{port}", "sglang", Layout(NUM_RANKS), model)
    try:
        wait_until_it_serves(server, log)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def wait_until_it_serves(server: Server, log: Path) -> None:
    end = time.monotonic() + START_S
    while "The server is fired up" not in log.read_text():
        assert server.process.poll() is None, log.read_text()[-6000:]
        assert time.monotonic() < end, log.read_text()[-6000:]
        threading.Event().wait(0.2)
    while True:  # it logs that it serves a moment before it listens
        try:
            urllib.request.urlopen(f"{server.url}/model_info", timeout=60).close()
        except OSError:
            assert time.monotonic() < end
            threading.Event().wait(0.05)
        else:
            return


def table_command(server: Server, checkpoint: Path, *rest: str) -> tuple[list[str], dict[str, str]]:
    command = [
        *(PYTHON, "-m", "windlass.engines.sglang.table", "--name", NAME, "--url", server.url),
        *("--model", str(checkpoint), *rest),
    ]
    return command, environment("sglang", NUM_RANKS, str(ROOT / "src"))


@contextmanager
def joined(server: Server, controller: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """The program beside the server, once every rank is in the fleet."""
    command, variables = table_command(server, server.model, "--controller", controller)
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env=variables, text=True, stdout=subprocess.PIPE, stderr=stream
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text()[-6000:]
        yield process
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def compare(server: Server, checkpoint: Path) -> tuple[int, str]:
    """Exit status and last words of the oracle."""
    command, variables = table_command(server, checkpoint, "--check")
    done = subprocess.run(
        command, check=False, env=variables, text=True, capture_output=True, timeout=START_S
    )
    return done.returncode, done.stdout or done.stderr[-3000:]


def check_answers(server: Server, checkpoint: Path, old: Path, version: int) -> None:
    check_answer(server.sample(PROMPT, NUM_TOKENS), checkpoint, version, old=old)


async def test_a_server_without_our_code_is_updated_through_its_own_table(
    tmp_path: Path, shown: Record
) -> None:
    old = save("dense", 1, tmp_path / "old")
    config = ControlConfig(
        mode=UpdateMode.IN_PLACE,
        pause_mode=PAUSE_MODE,
        deadlines=PhaseDeadlines(pause_s=120),
    )
    with plain_server(old, tmp_path / "server.log") as server:
        async with windlass.Controller(token=SECRET, config=config) as controller:
            await asyncio.to_thread(publish_all, server, controller, old, tmp_path)
        status, found = await asyncio.to_thread(compare, server, tmp_path / "4")
        assert status == 0, found
        assert [rank["cross_checked"] for rank in json.loads(found)["ranks"]] == [True] * NUM_RANKS
    shown(
        Shown(
            trainer=str(FSDP), engine="sglang", engine_version=engine_version("sglang"),
            engine_parallelism=f"tp{NUM_RANKS}", model="dense", dtype="float32 -> bfloat16",
            transport="mooncake (sglang's table)", mode=str(UpdateMode.IN_PLACE),
        )
    )  # fmt: skip


def publish_all(server: Server, controller: windlass.Controller, old: Path, folder: Path) -> None:
    """Two versions, a third in whose write a trainer dies, and a fourth by its successor."""
    with joined(server, controller.url, folder / "table.log"):
        with training(FSDP, "dense", old, ends_well=False) as ranks:
            for version in (1, 2):
                checkpoint = folder / str(version)
                with traffic(server, PROMPT) as answers:
                    ranks.publish(Order(controller.url, "mooncake", version, str(checkpoint)))
                spoken = [token for answer in answers for token in answer]
                assert spoken == sorted(spoken)
                assert {-1, *range(1, version + 1)}.issuperset(spoken)
                assert routable(controller) == {NAME: version}
                check_answers(server, checkpoint, old, version)
            before = checksums(server)
            with pytest.raises(AssertionError):  # no answer
                ranks.publish(Order(controller.url, "mooncake", 3, str(folder / "3"), dies=True))
            wait_until_mixed(controller)
            assert checksums(server) != before  # half of a write has arrived
        assert routable(controller) == {}
        successor = save("dense", 1, folder / "successor")
        with training(FSDP, "dense", successor) as ranks:
            ranks.publish(Order(controller.url, "mooncake", 4, str(folder / "4")))
        assert routable(controller) == {NAME: 4}
        check_answers(server, folder / "4", old, 4)


def checksums(server: Server) -> object:
    """SGLang's own, of every parameter on every rank; a paused server tells them too."""
    return server.post("/weights_checker", {"action": "checksum"})["per_engine_checksum"]


def routable(controller: windlass.Controller) -> dict[str, int]:
    return {engine.name: engine.version for engine in controller.coordinator.routable()}


def wait_until_mixed(controller: windlass.Controller) -> None:
    """The round whose trainer died is over, and the engine holds two versions."""
    end = time.monotonic() + 120
    while not any(engine["tainted"] for engine in status(controller)):
        assert time.monotonic() < end, status(controller)
        threading.Event().wait(0.1)


def status(controller: windlass.Controller) -> list[dict[str, object]]:
    request = urllib.request.Request(
        f"{controller.url}/v1/status", headers={"Authorization": f"Bearer {SECRET}"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return list(json.loads(response.read())["engines"])
