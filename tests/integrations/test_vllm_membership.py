"""A user's own vLLM server joins the fleet of a controller because WINDLASS_CONTROLLER is set, with no other flag."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from fresh_servers import (
    checksums,
    require_equal_answers,
    require_equal_parameters,
    serving_fresh,
)
from plain_vllm import MODEL, SERVE, PlainServer, add_tokenizer, checkpoint, serving_plain
from safetensors.torch import load_file
from servers import TOKEN
from sglang_servers import ENGINE_TOKEN, ask_to_join, token_file
from trainer_rank import Order

import windlass
from trainers import FSDP, Ranks, training
from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.control.messages import Command, Result, Write
from windlass.control.trainer_agent import TrainerAgent
from windlass.engines.http import EngineHttp
from windlass.engines.private_routes import ALIVE_PATH
from windlass.errors import PeerTimeout, PeerUnreachable
from windlass.net.access import Access, role_token
from windlass.net.addresses import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

PROMPT = [(7 * place) % 240 for place in range(140)]
NUM_TOKENS = 12
JOIN_S = 480.0
SOON_S = 30.0
DTYPE = "bfloat16"
IN_PLACE = ControlConfig(mode=UpdateMode.IN_PLACE, pause_mode=PauseMode.IN_PLACE)
STAGED = ControlConfig(mode=UpdateMode.STAGED, pause_mode=PauseMode.ABORT)


def refuse_strangers(server: PlainServer) -> None:
    """Check that a stranger reaches no private route, and that a wrong token or order joins nothing."""
    for path in ("/collective_rpc", "/update_weights", "/init_weight_transfer_engine", "/pause"):
        with pytest.raises(PeerUnreachable, match=r": 403 .*private to the launcher"):
            EngineHttp(server.url).post(path, {})
    for token in ("", "wrong", role_token(TOKEN, Access.TRAINER), TOKEN):
        status, answer = ask_to_join(server.url, {"controller": "http://127.0.0.1:1"}, token)
        assert (status, "requires a token of role owner or engine" in answer["error"]) == (
            403,
            True,
        )
    status, answer = ask_to_join(server.url, {"controller": "nowhere"})
    assert (status, "controller must be http" in answer["error"]) == (400, True)
    for pid in server.family():
        assert ENGINE_TOKEN.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


async def publish(
    server: PlainServer, ranks: Ranks, controller: windlass.Controller, version: int, folder: Path
) -> Path:
    """Train and publish a version, and return its checkpoint."""
    saved, held = folder / str(version), await asyncio.to_thread(server.checksums)
    order = Order(controller.url, "auto", version, str(saved))
    await asyncio.to_thread(ranks.publish, order)
    assert await asyncio.to_thread(server.checksums) != held
    assert await asyncio.to_thread(server.version) == str(version)
    assert not await asyncio.to_thread(server.is_paused)
    add_tokenizer(saved)
    return saved


def require_fresh(server: PlainServer, weights: Path, log: Path, *, replicas: int = 1) -> None:
    """Compare every parameter, greedy tokens and logprobs with a server that has loaded the weights without Windlass."""
    updated = server.checksums()
    answered = [server.answer(PROMPT, NUM_TOKENS, replica=number) for number in range(replicas)]
    generated = json.loads(
        EngineHttp(server.url).post(
            "/generate",
            {
                "input_ids": PROMPT,
                "sampling_params": {
                    "temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True
                },
            },
        )
    )  # fmt: skip
    with serving_fresh("vllm", weights, log, dtype=DTYPE) as fresh:
        loaded = {
            name.rpartition(":")[2]: value for name, value in checksums("vllm", fresh.post).items()
        }
        told = fresh.answer(PROMPT, NUM_TOKENS)
    for number, answer in enumerate(answered):
        own = {
            name.rpartition(":")[2]: value
            for name, value in updated.items()
            if name.startswith(f"dp{number}:")
        }
        require_equal_parameters(own, loaded)
        require_equal_answers([answer], [told], dtype=DTYPE)
    assert generated["output_ids"] == answered[0][0]


async def test_waiting_server_joins_the_controller_that_it_is_told(tmp_path: Path) -> None:
    source, port = checkpoint(1, tmp_path / "source"), free_port()
    given = {"WINDLASS_CONTROLLER": "wait", "WINDLASS_TOKEN": ENGINE_TOKEN}
    waiting = serving_plain(source, tmp_path / "live.log", port=port, in_core=True, variables=given)
    with ExitStack() as running:
        ranks = running.enter_context(training(FSDP, "dense", source))
        server = await asyncio.to_thread(running.enter_context, waiting)
        await asyncio.to_thread(refuse_strangers, server)
        async with windlass.Controller(token="another secret") as controller:
            order = {"controller": controller.url}
            status, answer = await asyncio.to_thread(ask_to_join, server.url, order)
            assert (status, "token" in answer["error"]) == (502, True)
        weights = source
        for version, config in enumerate((STAGED, IN_PLACE), 1):
            async with windlass.Controller(token=TOKEN, config=config) as controller:
                order = {"controller": controller.url}
                joined = await asyncio.to_thread(ask_to_join, server.url, order)
                name = f"127.0.0.1:{port}"
                assert joined == (200, {"name": name, "controller": controller.url})
                weights = await publish(server, ranks, controller, version, tmp_path)
        await asyncio.to_thread(partial(require_fresh, server, weights, tmp_path / "fresh.log"))


class Named(torch.nn.Module):
    """A trainer's model with the tensors of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._loaded = load_file(folder / "model.safetensors")
        self.names = {f"p{number}": name for number, name in enumerate(self._loaded)}
        for number, value in enumerate(self._loaded.values()):
            self.register_parameter(f"p{number}", torch.nn.Parameter(value.float()))

    def set(self, added: float) -> None:
        """Set each weight to that of the checkpoint plus `added`."""
        with torch.no_grad():
            for parameter, loaded in zip(self.parameters(), self._loaded.values(), strict=True):
                parameter.copy_(loaded.float() + added)


@contextmanager
def controlling(port: int, journal: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `windlass serve` on a port until the block ends."""
    options = ("--port", str(port), "--pause-mode", "in_place", "--journal", str(journal))
    process = subprocess.Popen(
        (sys.executable, "-m", "windlass.cli.main", "serve", *options),
        env={**os.environ, "WINDLASS_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert str(port) in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def status_of(server: PlainServer, path: str, body: object = None) -> tuple[int, str]:
    """Return status and text of an answer that must come soon."""
    sent = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(server.url + path, sent, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=SOON_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_server_whose_controller_dies_in_an_update_says_why_until_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server must not serve a mixture of versions, and its requests must not wait without a reason."""
    source, port, controller_port = checkpoint(1, tmp_path / "source"), free_port(), free_port()
    given = {"WINDLASS_CONTROLLER": "wait", "WINDLASS_TOKEN": ENGINE_TOKEN}
    url, journal = f"http://127.0.0.1:{controller_port}", tmp_path / "journal"
    dies: list[subprocess.Popen[str]] = []
    handle = TrainerAgent.handle

    def handle_write(agent: TrainerAgent, command: Command, **numbers: int) -> Result:
        result = handle(agent, command, **numbers)
        if isinstance(command, Write) and dies:
            dies.pop().kill()
        return result

    monkeypatch.setattr(TrainerAgent, "handle", handle_write)
    model, asked = Named(source), {"model": MODEL, "prompt": PROMPT[:9], "max_tokens": 4}
    with ExitStack() as running:
        first = running.enter_context(controlling(controller_port, journal))
        server = running.enter_context(
            serving_plain(source, tmp_path / "live.log", port=port, in_core=True, variables=given)
        )
        assert ask_to_join(server.url, {"controller": url})[0] == 200
        client = running.enter_context(
            windlass.connect_trainer(model, controller=url, token=TOKEN, name_map=model.names.get)
        )
        client.publish(1).result()
        held, answer = server.checksums(), server.answer(PROMPT, NUM_TOKENS)
        model.set(0.5)
        dies.append(first)
        with pytest.raises(PeerTimeout):
            client.publish(2, deadline_s=10.0).result()
        rollout = {"input_ids": PROMPT[:9], "sampling_params": {"max_new_tokens": 4}}
        for path, body in (("/health", None), ("/v1/completions", asked), ("/generate", rollout)):
            status, said = status_of(server, path, body)
            assert (status, f"an update of the controller {url} did not" in said) == (503, True)
        for path in ("/v1/models", ALIVE_PATH):
            assert status_of(server, path)[0] == 200
        begun = time.monotonic()
        status, refusal = ask_to_join(server.url, {"controller": "http://127.0.0.1:1"})
        assert (status, "restart the engine" in refusal["error"]) == (409, True)
        running.enter_context(controlling(controller_port, journal))
        assert ask_to_join(server.url, {"controller": url})[0] == 200
        assert time.monotonic() - begun < SOON_S
        model.set(0.0)
        client.publish(3).result()
        assert status_of(server, "/health")[0] == 200
        assert server.version() == "3"
        # Versions 1 and 3 have the same weights.
        assert server.checksums() == held
        assert server.answer(PROMPT, NUM_TOKENS) == answer


async def test_replicas_behind_two_api_servers_join_at_their_start(tmp_path: Path) -> None:
    """`vllm serve --data-parallel-size 2` starts two API servers by default."""
    source, port, log = checkpoint(1, tmp_path / "source"), free_port(), tmp_path / "live.log"
    with ExitStack() as running:
        ranks = running.enter_context(training(FSDP, "dense", source))
        async with windlass.Controller(token=TOKEN, config=IN_PLACE) as controller:
            given = {
                "WINDLASS_CONTROLLER": controller.url,
                "WINDLASS_TOKEN_FILE": str(token_file(tmp_path)),
            }
            started = serving_plain(source, log, dp=2, port=port, program=SERVE, variables=given)
            server = await asyncio.to_thread(running.enter_context, started)
            await controller.wait_for_fleet(
                num_trainers=0, engines=[f"127.0.0.1:{port}"], deadline_s=JOIN_S
            )
            weights = source
            for version in (1, 2):
                weights = await publish(server, ranks, controller, version, tmp_path)
            await asyncio.to_thread(
                partial(require_fresh, server, weights, tmp_path / "fresh.log", replicas=2)
            )


async def test_server_that_cannot_join_at_its_start_ends(tmp_path: Path) -> None:
    """Otherwise the server would serve the weights of its start for ever."""
    source, port, log = checkpoint(1, tmp_path / "source"), free_port(), tmp_path / "live.log"
    async with windlass.Controller(token="another secret") as controller:
        given = {"WINDLASS_CONTROLLER": controller.url, "WINDLASS_TOKEN": ENGINE_TOKEN}
        with ExitStack() as running:
            started = serving_plain(source, log, port=port, in_core=True, variables=given)
            server = await asyncio.to_thread(running.enter_context, started)
            assert await asyncio.to_thread(server.process.wait, JOIN_S) == 2
    assert f"engine 127.0.0.1:{port}: PeerUnreachable: rank 0: " in log.read_text()
