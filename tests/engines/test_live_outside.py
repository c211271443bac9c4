"""A live SGLang server without Windlass takes versions through its own weight table.

The server is started as its users start it. Its environment names neither Windlass nor a hook; it has only the parts that
SGLang lacks on CPUs (`cpu_allocator`, `sglang_cpu_gaps`). `windlass capture` writes the layout beforehand in another
process. The reference is a fresh server that loads the trainer's saved weights: SGLang's own checksums of all parameters,
and greedy tokens with their log-probabilities, must be equal.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_servers import (
    Answer,
    Fresh,
    checksums,
    filled_gaps,
    require_equal_answers,
    serving_fresh,
)
from rows import Record, Shown
from servers import ENVIRONMENT, FLAGS, ROOT, TOKEN, VENVS, Layout, build, engine_version, save
from trainer_rank import Order

import windlass
from trainers import FSDP, training
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines
from windlass.engines.client import EngineClient, EngineWeights
from windlass.engines.http import EngineHttp
from windlass.engines.sglang.outside import MIXED
from windlass.engines.sglang.table import ENABLING, read_table
from windlass.layout.manifest import Role
from windlass.net.addresses import free_port
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer.dtensor import describe_module, parameter_addresses
from windlass.transports.mooncake.transport import MooncakeConfig
from windlass.transports.network import NetworkPeer
from windlass.transports.registry import create_transport

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

NAME = "outside"
PROMPTS = ([5, 9, 33, 101], [200, 3], [(7 * place) % 240 for place in range(70)])
NUM_TOKENS = 8
WITHIN_S = 300.0
PYTHON = str(VENVS["sglang"] / "bin/python")


def captured(model: Path, layout: Layout, dtype: str, output: Path) -> Path:
    """Return the layout file that `windlass capture` writes for a model."""
    flags = [flag for flag in FLAGS["sglang"] if flag not in ("--dtype", "bfloat16")]
    command = [
        *(PYTHON, "-m", "windlass.cli.main", "capture", "--engine", "sglang"),
        *("--model", str(model), "--tp", str(layout.tp), "--output", str(output)),
        *("--", *flags, "--dtype", dtype),
    ]
    environment = {**os.environ, **ENVIRONMENT["sglang"], "PYTHONPATH": str(ROOT / "src")}
    if layout.tp == 2:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    done = subprocess.run(
        command, check=False, env=environment, text=True, capture_output=True, timeout=WITHIN_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return output


@contextmanager
def plain_server(
    model: Path, log: Path, layout: Layout, dtype: str, port: int = 0
) -> Iterator[Fresh]:
    """Run SGLang with a weight table, as its user starts it."""
    allocator = ROOT / "tests/support/cpu_allocator"
    options = (ENABLING, "--engine-info-bootstrap-port", str(free_port()), "--sleep-on-idle")
    with serving_fresh(
        "sglang", model, log, layout=layout, dtype=dtype, path=str(allocator),
        variables={"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1"}, options=options, port=port,
    ) as server:  # fmt: skip
        yield server


def require_without_windlass(log: Path) -> None:
    """Check that the server's path of imports has no Windlass."""
    path = f"{filled_gaps(log)}:{ROOT / 'tests/support/cpu_allocator'}"
    found = subprocess.run(
        (PYTHON, "-c", "import windlass"), check=False, env={**os.environ, "PYTHONPATH": path},
        cwd=log.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert "No module named 'windlass'" in found.stderr


def attach_command(url: str, controller: str, layout: Path) -> tuple[list[str], dict[str, str]]:
    command = [
        *(sys.executable, "-m", "windlass.cli.main", "attach", "--layout", str(layout)),
        *("--url", url, "--name", NAME, "--controller", controller),
    ]
    return command, {**os.environ, "PYTHONPATH": str(ROOT / "src"), "WINDLASS_TOKEN": TOKEN}


@contextmanager
def attached(url: str, controller: str, layout: Path, log: Path) -> Iterator[Callable[[], None]]:
    """Run the agent of a server. Yield a function that waits until the agent has joined once more."""
    command, environment = attach_command(url, controller, layout)
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=stream
        )
    assert process.stdout is not None

    def join() -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()[-4000:]
        assert json.loads(line)["name"] == NAME

    try:
        join()
        yield join
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def held(server: Fresh) -> tuple[dict[str, str], list[Answer]]:
    """Return the checksums of a server's parameters, and its answers."""
    answers = [server.answer(prompt, NUM_TOKENS) for prompt in PROMPTS]
    return checksums("sglang", server.post), answers


def require_equal(
    ours: tuple[dict[str, str], list[Answer]],
    theirs: tuple[dict[str, str], list[Answer]],
    dtype: str,
) -> None:
    assert ours[0] == theirs[0]
    require_equal_answers(ours[1], theirs[1], dtype=dtype)


def label(server: Fresh) -> str:
    """Return the version that a server reports."""
    found = subprocess.run(
        ("curl", "-s", f"{server.url}/model_info"), check=True, capture_output=True, text=True
    )
    return str(json.loads(found.stdout)["weight_version"])


def routable(controller: windlass.Controller) -> dict[str, int]:
    return {engine.name: engine.version for engine in controller.coordinator.routable()}


@torch.no_grad()
def fill(model: torch.nn.Module, version: int) -> None:
    """Fill a model in float32 so that all elements of all versions differ."""
    total = sum(parameter.numel() for parameter in model.parameters())
    order = torch.randperm(total, generator=torch.Generator().manual_seed(version))
    values = ((order.double() + version / 8) / total * 0.2 - 0.1).float()
    for parameter in model.parameters():
        own, values = values[: parameter.numel()], values[parameter.numel() :]
        parameter.copy_(own.reshape(parameter.shape))
    everything = torch.cat([parameter.flatten() for parameter in model.parameters()])
    assert bool(everything.sort().values.diff().all())


@contextmanager
def second_engine(controller: str) -> Iterator[Any]:
    """Run an engine of this process that stays when the server ends."""
    model = build("dense", 1).float().requires_grad_(requires_grad=False)
    manifest, addresses = (
        describe_module(model, "second/0", Role.ENGINE),
        parameter_addresses(model),
    )
    transport = create_transport(MooncakeConfig(host="127.0.0.1"))
    regions = transport.register_all(
        [(at, spec.nbytes) for at, spec in zip(addresses, manifest.parameters, strict=True)]
    )
    weights = EngineWeights(manifest=manifest, addresses=addresses, regions=regions)
    with EngineClient(
        weights, transport=transport, hooks=RestingEngine(), controller=controller, token=TOKEN,
        url="http://second",
    ):  # fmt: skip
        yield model


async def test_a_server_without_windlass_is_updated_and_its_faults_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: Record
) -> None:
    model: Any = build("dense", 1).float()
    fill(model, 1)
    model.save_pretrained(tmp_path / "old")
    one, dtype = Layout(), "float32"
    layout = await asyncio.to_thread(captured, tmp_path / "old", one, dtype, tmp_path / "layout")
    config = ControlConfig(deadlines=PhaseDeadlines(pause_s=60.0, write_s=30.0))
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(_update_and_break, model, layout, controller, tmp_path, monkeypatch)
    shown(row(one, "plain", dtype))


def _update_and_break(
    model: Any,
    layout: Path,
    controller: windlass.Controller,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, dtype, port, log = Layout(), "float32", free_port(), folder / "server.log"
    with (
        second_engine(controller.url) as second,
        windlass.connect_trainer(
            model, controller=controller.url, token=TOKEN, transport="mooncake"
        ) as trainer,
        ExitStack() as agent,
    ):
        with plain_server(folder / "old", log, one, dtype, port) as server:
            require_without_windlass(log)
            refuse_other_layouts(server, controller.url, layout, folder)
            joined_again = agent.enter_context(
                attached(server.url, controller.url, layout, folder / "agent.log")
            )
            before = held(server)
            for version in (2, 3):
                fill(model, version)
                trainer.publish(version)
                assert routable(controller) == {NAME: version, "second": version}
                assert label(server) == str(version)
            model.save_pretrained(folder / "3")
            with serving_fresh("sglang", folder / "3", folder / "3.log", dtype=dtype) as fresh:
                require_equal(updated := held(server), held(fresh), dtype)
            assert not before[0].items() & updated[0].items()
            end_during_write(server, monkeypatch)
            fill(model, 4)
            trainer.publish(4)
            assert routable(controller) == {"second": 4}
            assert torch.equal(second.lm_head.weight, model.lm_head.weight)
        # The server comes back at its old address, with its old weights at other addresses in memory.
        with plain_server(folder / "old", folder / "again.log", one, dtype, port) as server:
            joined_again()
            fill(model, 5)
            trainer.publish(5)
            assert routable(controller) == {NAME: 5, "second": 5}
            model.save_pretrained(folder / "5")
            with serving_fresh("sglang", folder / "5", folder / "5.log", dtype=dtype) as fresh:
                require_equal(held(server), held(fresh), dtype)
            agent.close()


def end_during_write(server: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the server when the trainer begins its next write to it, and then kill the server."""
    write, group = NetworkPeer.write, os.getpgid(server.process.pid)
    session = read_table(EngineHttp(server.url), 0).session

    def stopping(peer: Any, pieces: Any, deadline: Any) -> None:
        if peer.endpoint.address == session:
            monkeypatch.undo()
            os.killpg(group, signal.SIGSTOP)
            threading.Timer(1.0, os.killpg, (group, signal.SIGKILL)).start()
        write(peer, pieces, deadline)

    monkeypatch.setattr(NetworkPeer, "write", stopping)


def refuse_other_layouts(server: Fresh, controller: str, path: Path, folder: Path) -> None:
    """Check that the agent refuses a server whose table or release differs from the layout, and names the difference."""
    name, other = "lm_head.weight", folder / "other"
    changes: Sequence[tuple[Callable[[Any], object], str]] = (
        (lambda told: first(told)["parameters"][name].update(shape=[7]), f"numel of {name} must be 7"),
        (lambda told: first(told)["parameters"].pop(name), f"the layout must contain {name}"),
        (lambda told: first(told)["derived"].update(a="b"), "a cannot be updated"),
        (lambda told: told.update(version="0.5.22"), "version must be '0.5.22'"),
    )  # fmt: skip
    for change, words in changes:
        told = json.loads(path.read_text())
        change(told)
        other.write_text(json.dumps(told))
        command, environment = attach_command(server.url, controller, other)
        done = subprocess.run(
            command, check=False, env=environment, text=True, capture_output=True, timeout=60
        )
        assert done.returncode == 2
        assert words in done.stderr


def first(told: Any) -> Any:
    """Return the first rank of a layout file."""
    return told["ranks"][0]


def row(layout: Layout, trainer: str, dtype: str) -> Shown:
    return Shown(
        trainer=trainer, engine="sglang", engine_version=engine_version("sglang"),
        engine_parallelism=str(layout), model="dense", dtype=f"float32 -> {dtype}",
        transport="mooncake (sglang's table)", mode="in_place",
    )  # fmt: skip


async def test_two_ranks_without_windlass_are_updated_by_sharded_trainers(
    tmp_path: Path, shown: Record
) -> None:
    two, dtype = Layout(tp=2), "bfloat16"
    old = save("dense", 1, tmp_path / "old")
    layout = await asyncio.to_thread(captured, old, two, dtype, tmp_path / "layout")
    config = ControlConfig(pause_mode=PauseMode.RETRACT, deadlines=PhaseDeadlines(pause_s=120.0))
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        updated = await asyncio.to_thread(_update_sharded, old, layout, controller, tmp_path)
    with serving_fresh(
        "sglang", tmp_path / "3", tmp_path / "3.log", layout=two, dtype=dtype
    ) as fresh:
        require_equal(updated, held(fresh), dtype)
    shown(row(two, str(FSDP), dtype))


def _update_sharded(
    old: Path, layout: Path, controller: windlass.Controller, folder: Path
) -> tuple[dict[str, str], list[Answer]]:
    """Publish two versions while requests run, and a third after an agent that ended during an update."""
    with (
        plain_server(old, folder / "server.log", Layout(tp=2), "bfloat16") as server,
        training(FSDP, "dense", old) as ranks,
    ):

        def publish(version: int) -> None:
            ranks.publish(Order(controller.url, "mooncake", version, str(folder / str(version))))
            assert routable(controller) == {NAME: version}
            assert label(server) == str(version)

        with attached(server.url, controller.url, layout, folder / "agent.log"):
            for version in (1, 2):
                busy = threading.Thread(target=server.answer, args=(PROMPTS[0], 100))
                busy.start()
                publish(version)
                busy.join(WITHIN_S)
        server.post("/pause_generation", {"mode": "abort"})
        server.post("/update_weight_version", {"new_version": MIXED, "abort_all_requests": False})
        with attached(server.url, controller.url, layout, folder / "second-agent.log"):
            assert routable(controller) == {}
            publish(3)
            return held(server)
