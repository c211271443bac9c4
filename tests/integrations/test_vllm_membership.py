"""A user's own vLLM server joins the fleet of a controller because WINDLASS_CONTROLLER is set, with no other flag."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from fresh_servers import (
    checksums,
    require_equal_answers,
    require_equal_parameters,
    serving_fresh,
)
from plain_vllm import SERVE, PlainServer, add_tokenizer, checkpoint, serving_plain
from servers import TOKEN
from sglang_servers import ENGINE_TOKEN, ask_to_join, token_file
from trainer_rank import Order

import windlass
from trainers import FSDP, Ranks, training
from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.engines.http import EngineHttp
from windlass.errors import PeerUnreachable
from windlass.net.access import Access, role_token
from windlass.net.addresses import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

PROMPT = [(7 * place) % 240 for place in range(140)]
NUM_TOKENS = 12
JOIN_S = 480.0
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
        assert (status, "is for owner and engine" in answer["error"]) == (403, True)
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
