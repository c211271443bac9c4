"""Windlass is installed beside SGLang, and the user's own `sglang.launch_server` joins when it is told where."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from servers import FLAGS, ROOT, TOKEN, VENVS, Layout, Server, environment, require_private, save
from trainer_rank import Order

import windlass
from trainers import FSDP, Ranks, training
from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.engines.sglang.spec import HOOK
from windlass.net.access import Access, role_token
from windlass.net.addresses import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPT = [5, 9, 33, 101]
NUM_TOKENS = 8
START_S = 240.0
JOIN_S = 120.0
ENGINE_TOKEN = role_token(TOKEN, Access.ENGINE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH of an environment into which Windlass was installed: with its entry points."""
    if not (python := VENVS["sglang"] / "bin/python").exists():
        pytest.skip(f"no {python}: make engines installs sglang")
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = site / f"windlass-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: windlass\nVersion: {project['version']}\n"
    )
    (metadata / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
            for group, points in project["entry-points"].items()
        )
    )
    path = f"{site}:{ROOT / 'src'}:{ROOT / 'tests/support'}"
    found = (
        "import importlib.metadata as m; print(*m.entry_points(group='sglang.srt.plugins').names)"
    )
    command = (str(python), "-c", found)
    names = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True
    )
    assert "windlass" in names.stdout.split()
    return path


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(ENGINE_TOKEN + "\n")
    return path


def command(model: Path, port: int, *flags: str) -> list[str]:
    """What a user types, who has a custom weight loader already."""
    return [
        *(str(VENVS["sglang"] / "bin/python"), "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--port", str(port), *FLAGS["sglang"]),
        *("--custom-weight-loader", "sglang_fresh.run", *flags),
    ]


def variables(installed: str, **given: str) -> dict[str, str]:
    inherited = environment("sglang", 1, installed)
    return {**{k: v for k, v in inherited.items() if not k.startswith("WINDLASS_")}, **given}


@contextmanager
def launched(
    model: Path, log: Path, port: int, environment: Mapping[str, str], flags: Sequence[str] = ()
) -> Iterator[Server]:
    """A server of the user's, once it serves."""
    ready = threading.Event()
    process = subprocess.Popen(
        command(model, port, *flags), env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip

    def forward() -> None:
        assert process.stdout is not None
        with process.stdout, log.open("a") as written:
            for line in process.stdout:
                written.write(line)
                written.flush()
                if "The server is fired up" in line:
                    ready.set()
        ready.set()

    reading = threading.Thread(target=forward)
    reading.start()
    try:
        assert ready.wait(START_S), log.read_text()[-4000:]
        assert process.poll() is None, log.read_text()[-4000:]
        yield Server(process, f"http://127.0.0.1:{port}", "sglang", Layout(), model)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        reading.join(30)


def written(log: Path, line: str, times: int) -> None:
    """Wait until a log has it that often."""
    end = time.monotonic() + JOIN_S
    while log.read_text().count(line) < times:
        assert time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.1)


def kill(server: Server) -> None:
    """As an out-of-memory killer would: its ranks notice by themselves."""
    server.process.kill()
    server.process.wait(30)


def ask_to_join(server: Server, body: object, token: str = ENGINE_TOKEN) -> tuple[int, Any]:
    """Status and answer."""
    request = urllib.request.Request(
        f"{server.url}/windlass/join",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {token}"} if token else {},
    )
    try:
        with urllib.request.urlopen(request, timeout=JOIN_S) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


async def publish(
    server: Server, ranks: Ranks, controller: windlass.Controller, version: int, folder: Path
) -> None:
    """Train, publish, and compare what the engine holds and serves with what its own loader makes of it."""
    checkpoint, before = folder / str(version), server.digests()
    await asyncio.to_thread(ranks.publish, Order(controller.url, "auto", version, str(checkpoint)))
    held = server.digests()
    assert all(a != b for a, b in zip(before, held, strict=True))
    assert held == server.digests_of_fresh_load(checkpoint)
    check_answer(server, checkpoint, version)


def check_answer(server: Server, checkpoint: Path, version: int) -> None:
    import torch
    import transformers

    sample = server.sample(PROMPT, NUM_TOKENS)
    assert sample.versions == [version] * NUM_TOKENS
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *sample.tokens[:-1]]])).logits[0, len(PROMPT) - 1 :]
    assert sample.tokens == logits.argmax(-1).tolist()


async def test_a_server_of_the_users_joins_where_it_is_told(
    tmp_path: Path, installed: str, token_file: Path
) -> None:
    old, log, port = save("dense", 1, tmp_path / "old"), tmp_path / "server.log", free_port()
    name = f"127.0.0.1:{port}"
    given = partial(variables, installed, WINDLASS_TOKEN_FILE=str(token_file))
    staged = ControlConfig(mode=UpdateMode.STAGED, pause_mode=PauseMode.RETRACT)
    in_place = ControlConfig(mode=UpdateMode.IN_PLACE, pause_mode=PauseMode.IN_PLACE)
    with ExitStack() as running:
        ranks = running.enter_context(training(FSDP, "dense", old))
        async with windlass.Controller(token=TOKEN, config=staged) as controller:
            waiting = launched(old, log, port, given(WINDLASS_CONTROLLER="wait"))
            with ExitStack() as first:
                server = await asyncio.to_thread(first.enter_context, waiting)
                require_private(server)
                await refuse_strangers_and_errors(server)
                said = await asyncio.to_thread(ask_to_join, server, {"controller": controller.url})
                assert said == (200, {"name": name, "controller": controller.url})
                await publish(server, ranks, controller, 1, tmp_path)
                kill(server)
            again = launched(old, log, port, given(WINDLASS_CONTROLLER=controller.url))
            server = await asyncio.to_thread(running.enter_context, again)
            require_private(server)
            await controller.wait_for_fleet(num_trainers=0, engines=[name], deadline_s=JOIN_S)
            await asyncio.to_thread(written, log, f"joined the fleet of {controller.url}", 2)
            await publish(server, ranks, controller, 2, tmp_path)
            status, answer = await asyncio.to_thread(
                ask_to_join, server, {"controller": "http://127.0.0.1:1"}
            )
            assert status == 502
            assert (
                "the controller must be stopped before its engine joins another" in answer["error"]
            )
        async with windlass.Controller(token=TOKEN, config=in_place) as controller:
            order = {"controller": controller.url, "transport": "cma"}
            said = await asyncio.to_thread(ask_to_join, server, order)
            assert said == (200, {"name": name, "controller": controller.url})
            await publish(server, ranks, controller, 3, tmp_path)


async def refuse_strangers_and_errors(server: Server) -> None:
    """None of them brings the engine anywhere, nor keeps it from joining afterwards."""
    for token in ("", "wrong", role_token(TOKEN, Access.TRAINER), TOKEN):
        status, answer = ask_to_join(server, {"controller": "http://127.0.0.1:1"}, token)
        assert (status, "is for owner and engine" in answer["error"]) == (403, True)
    for body, says in (
        (
            {"controller": "nowhere"},
            "controller must be http or https://host[:port], got 'nowhere'",
        ),
        ({"controler": "http://127.0.0.1:1"}, "unknown field `controler`"),
    ):
        status, answer = ask_to_join(server, body)
        assert (status, says in answer["error"]) == (400, True), answer
    async with windlass.Controller(token="another secret") as controller:
        order = {"controller": controller.url}
        status, answer = await asyncio.to_thread(ask_to_join, server, order)
    assert status == 502
    assert "token" in answer["error"]


async def test_a_server_that_cannot_join_where_it_is_told_ends(
    tmp_path: Path, installed: str, token_file: Path
) -> None:
    """Else it would answer with the weights of its start for ever."""
    old, log, port = save("dense", 1, tmp_path / "old"), tmp_path / "server.log", free_port()
    async with windlass.Controller(token="another secret") as controller:
        told = {"WINDLASS_CONTROLLER": controller.url, "WINDLASS_TOKEN_FILE": str(token_file)}
        server = launched(old, log, port, variables(installed, **told))
        with ExitStack() as running:
            process = (await asyncio.to_thread(running.enter_context, server)).process
            assert await asyncio.to_thread(process.wait, JOIN_S) == 2
    assert f"engine 127.0.0.1:{port}: PeerUnreachable: rank 0: " in log.read_text()


def test_a_server_that_is_told_nothing_is_as_sglang_made_it(tmp_path: Path, installed: str) -> None:
    old, log, port = save("dense", 1, tmp_path / "old"), tmp_path / "server.log", free_port()
    with launched(old, log, port, variables(installed)) as server:
        with urllib.request.urlopen(f"{server.url}/server_info", timeout=JOIN_S) as answer:
            assert HOOK not in json.loads(answer.read())["custom_weight_loader"]
        assert ask_to_join(server, {"controller": "http://127.0.0.1:1"})[0] == 404


REFUSED = {
    "memory saver": (["--enable-memory-saver"], {}, "enable_memory_saver must be False, got True"),
    "quantisation": (["--quantization", "fp8"], {}, "--quantization must not be given"),
    "token file": (
        [],
        {"WINDLASS_TOKEN_FILE": "open"},
        "must be a file that its user alone can read",
    ),
    "no controller": ([], {"WINDLASS_CONTROLLER": "nowhere"}, "WINDLASS_CONTROLLER must be http"),
    "expandable segments": (
        [],
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        "must not ask for expandable segments",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_server_that_cannot_be_updated_does_not_start(
    what: str, tmp_path: Path, installed: str, token_file: Path
) -> None:
    flags, given, says = REFUSED[what]
    opened = tmp_path / "open"
    opened.write_text(TOKEN)
    opened.chmod(0o644)
    told = {"WINDLASS_CONTROLLER": "http://127.0.0.1:1", "WINDLASS_TOKEN_FILE": str(token_file)}
    told |= {name: str(opened) if value == "open" else value for name, value in given.items()}
    old = save("dense", 1, tmp_path / "old")
    ended = subprocess.run(
        command(old, free_port(), *flags), env=variables(installed, **told), text=True,
        capture_output=True, timeout=START_S,
    )  # fmt: skip
    assert ended.returncode != 0
    assert says in ended.stderr.strip().splitlines()[-1], ended.stderr[-2000:]
    assert "Load weight begin" not in ended.stderr
