"""SGLang servers as users start them, with Windlass installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hosts import Host
from servers import FLAGS, ROOT, TOKEN, VENVS, Layout, Server, environment

from tools.entry_points import write_entry_points
from windlass.engines.launch import wait_for_server
from windlass.net.access import Access, role_token
from windlass.net.addresses import free_port

PROMPT = [5, 9, 33, 101]
NUM_TOKENS = 8
START_S = 480.0
JOIN_S = 120.0
ANSWER_S = 480.0
"""Seconds within which a server must answer an order to join; it joins before it answers."""
ENGINE_TOKEN = role_token(TOKEN, Access.ENGINE)


def install(site: Path) -> str:
    """Return the PYTHONPATH of an environment with Windlass and its entry points."""
    if not (python := VENVS["sglang"] / "bin/python").exists():
        pytest.skip(f"no {python}: make engines installs sglang")
    write_entry_points(site)
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


def ask_to_join(url: str, body: object, token: str = ENGINE_TOKEN) -> tuple[int, Any]:
    """Order the server at `url` to join; return status and answer."""
    request = urllib.request.Request(
        f"{url}/windlass/join",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {token}"} if token else {},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def token_file(folder: Path, token: str = ENGINE_TOKEN) -> Path:
    """Write a token to a file that only this user can read."""
    path = folder / "token"
    path.touch(0o600)
    path.write_text(token + "\n")
    return path


LAUNCH_SERVER = ("-m", "sglang.launch_server")
SLIME_SERVER = (str(Path(__file__).with_name("slime_server.py")),)


def command(
    model: Path, port: int, *flags: str, program: Sequence[str] = LAUNCH_SERVER
) -> list[str]:
    """Return the command of a user who already has a custom weight loader."""
    return [
        *(str(VENVS["sglang"] / "bin/python"), *program),
        *("--model-path", str(model), "--port", str(port), *FLAGS["sglang"]),
        *("--custom-weight-loader", "sglang_fresh.run", *flags),
    ]


def variables(installed: str, **given: str) -> dict[str, str]:
    inherited = environment("sglang", 1, installed)
    return {**{k: v for k, v in inherited.items() if not k.startswith("WINDLASS_")}, **given}


def of_host(host: Host, installed: str, **given: str) -> dict[str, str]:
    """Return `variables` for one of two ranks, on a host of a `Network`."""
    own = {
        "GLOO_SOCKET_IFNAME": "rail0",
        "SGLANG_HOST_IP": host.address,
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    }
    return {**variables(installed, **given), **own}


@contextmanager
def following(
    model: Path, log: Path, host: Host, environment: Mapping[str, str], flags: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a further part of a server over several hosts, on a host other than the first."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            host.command(*command(model, free_port(), *flags)), env=environment,
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@contextmanager
def launched(
    model: Path,
    log: Path,
    port: int,
    environment: Mapping[str, str],
    program: Sequence[str] = LAUNCH_SERVER,
    *,
    flags: Sequence[str] = (),
    layout: Layout = Layout(),  # noqa: B008 - frozen
    host: Host | None = None,
) -> Iterator[Server]:
    """Run a server as its user starts it; yield once it serves.

    Args:
        flags: appended to the command.
        layout: layout that the flags request.
        host: host of a `Network` to run on; None for this machine.
    """
    ready = threading.Event()
    typed = command(model, port, *flags, program=program)
    process = subprocess.Popen(
        typed if host is None else host.command(*typed), env=environment, text=True,
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip

    def forward() -> None:
        assert process.stdout is not None
        with process.stdout, log.open("a") as written:
            for line in process.stdout:
                written.write(line)
                written.flush()
                if "The server is fired up" in line:
                    ready.set()
        with suppress(subprocess.TimeoutExpired):
            # The log may end before the process has its exit status.
            process.wait(5)
        ready.set()

    reading = threading.Thread(target=forward)
    reading.start()
    try:
        assert ready.wait(START_S), log.read_text()[-4000:]
        assert process.poll() is None, log.read_text()[-4000:]
        address = "127.0.0.1" if host is None else host.address
        if host is None:
            # SGLang logs its ready line shortly before it listens.
            wait_for_server(address, port)
        yield Server(process, f"http://{address}:{port}", "sglang", layout, model)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        reading.join(30)


def written(log: Path, line: str, times: int) -> None:
    """Wait until a log contains the line so many times."""
    end = time.monotonic() + JOIN_S
    while log.read_text().count(line) < times:
        assert time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.1)


def kill(server: Server) -> None:
    """Kill the server's main process, as an out-of-memory killer does; its ranks notice by themselves."""
    server.process.kill()
    server.process.wait(30)


def check_answer(server: Server, checkpoint: Path, version: int, replica: int = 0) -> None:
    """Check that the tokens carry the version and agree with transformers' for the same weights."""
    sample = server.sample(PROMPT, NUM_TOKENS, replica=replica)
    assert sample.versions == [version] * NUM_TOKENS
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *sample.tokens[:-1]]])).logits[0, len(PROMPT) - 1 :]
    # Kernels round bfloat16 differently, so a token may be another one of the nearly best tokens.
    chosen = logits.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0].float()
    best = logits.max(-1).values.float()
    assert torch.all(best - chosen <= 2**-6 * best.abs()), (sample.tokens, best, chosen)
