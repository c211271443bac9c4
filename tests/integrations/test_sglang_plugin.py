"""With Windlass installed next to SGLang, the user's own `sglang.launch_server` joins a controller on request."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from servers import TOKEN, Layout, Server, require_private, save, serving, traffic
from sglang_servers import (
    JOIN_S,
    NUM_TOKENS,
    PROMPT,
    START_S,
    ask_to_join,
    check_answer,
    command,
    install,
    kill,
    launched,
    token_file,
    variables,
    written,
)
from trainer_rank import Order

import windlass
from trainers import FSDP, Ranks, training
from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.control.round_state import Phase
from windlass.engines.sglang.orders import HOOK
from windlass.net.access import Access, role_token
from windlass.net.addresses import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return install(tmp_path_factory.mktemp("site"))


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return token_file(tmp_path)


async def publish(
    server: Server,
    ranks: Ranks,
    controller: windlass.Controller,
    version: int,
    folder: Path,
    *,
    busy: Sequence[int] = (),
) -> None:
    """Train, publish, and compare the engine's bytes and answers with a load by its own loader.

    `busy`: replicas that answer requests during the update.
    """
    checkpoint, before = folder / str(version), server.digests()
    order = Order(controller.url, "auto", version, str(checkpoint))
    with ExitStack() as traffics:
        for replica in busy:
            traffics.enter_context(traffic(server, PROMPT, replica))
        await asyncio.to_thread(ranks.publish, order)
    held = server.digests()
    assert all(a != b for a, b in zip(before, held, strict=True))
    assert held == server.digests_of_fresh_load(checkpoint)
    check_answer(server, checkpoint, version)


async def test_a_server_of_the_user_joins_the_given_controller(
    tmp_path: Path, installed: str, token: Path
) -> None:
    old, log, port = save("dense", 1, tmp_path / "old"), tmp_path / "server.log", free_port()
    name = f"127.0.0.1:{port}"
    given = partial(variables, installed, WINDLASS_TOKEN_FILE=str(token))
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
                await fail_the_first_version(server, tmp_path)
                said = await asyncio.to_thread(
                    ask_to_join, server.url, {"controller": controller.url}
                )
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
                ask_to_join, server.url, {"controller": "http://127.0.0.1:1"}
            )
            assert status == 502
            assert "must be stopped before the engine joins another fleet" in answer["error"]
        async with windlass.Controller(token=TOKEN, config=in_place) as controller:
            order = {"controller": controller.url, "transport": "cma"}
            said = await asyncio.to_thread(ask_to_join, server.url, order)
            assert said == (200, {"name": name, "controller": controller.url})
            await publish(server, ranks, controller, 3, tmp_path)


@pytest.mark.parametrize(
    ("kind", "spelt"),
    [
        ("dense", ("--attn-dp-size", "2")),
        ("moe", ("--dp-size", "2", "--enable-dp-attention")),
    ],
    ids=["dense", "moe"],
)
async def test_a_server_with_data_parallel_attention_is_updated_while_it_answers(
    kind: str, spelt: tuple[str, ...], tmp_path: Path, installed: str, token: Path
) -> None:
    """Check a server with two ranks that answer separate requests and wait for each other in every step."""
    old, log, port = save(kind, 1, tmp_path / "old"), tmp_path / "server.log", free_port()
    given = variables(
        installed,
        WINDLASS_TOKEN_FILE=str(token),
        WINDLASS_CONTROLLER="wait",
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
    )
    layout = Layout(tp=2, attn_dp=2)
    flags = ("--tp-size", "2", *spelt)
    configs = (
        ControlConfig(mode=UpdateMode.STAGED, pause_mode=PauseMode.RETRACT),
        ControlConfig(mode=UpdateMode.IN_PLACE, pause_mode=PauseMode.IN_PLACE),
    )
    with ExitStack() as running:
        server = running.enter_context(launched(old, log, port, given, flags=flags, layout=layout))
        ranks = running.enter_context(training(FSDP, kind, old))
        assert server.digests() == server.digests_of_fresh_load(old)
        for version, config in enumerate(configs, 1):
            async with windlass.Controller(token=TOKEN, config=config) as controller:
                order = {"controller": controller.url}
                assert (await asyncio.to_thread(ask_to_join, server.url, order))[0] == 200
                await publish(server, ranks, controller, version, tmp_path, busy=(0, 1))
                check_answer(server, tmp_path / str(version), version, replica=1)


async def test_a_launched_server_with_data_parallel_attention_is_updated(tmp_path: Path) -> None:
    old, log = save("dense", 1, tmp_path / "old"), tmp_path / "server.log"
    config = ControlConfig(mode=UpdateMode.STAGED, pause_mode=PauseMode.RETRACT)
    started = serving(
        "sglang", old, log, layout=Layout(tp=2, attn_dp=2), flags=("--attn-dp-size", "2")
    )
    with started as server, training(FSDP, "dense", old) as ranks:
        assert server.digests() == server.digests_of_fresh_load(old)
        async with windlass.Controller(token=TOKEN, config=config) as controller:
            await asyncio.to_thread(server.join, controller.url, "cma")
            await publish(server, ranks, controller, 1, tmp_path)
            await publish(server, ranks, controller, 2, tmp_path, busy=(0, 1))
            check_answer(server, tmp_path / "2", 2, replica=1)


async def fail_the_first_version(server: Server, folder: Path) -> None:
    """Kill the trainers while the engine is paused, and check that it continues with the weights of its start."""
    in_place = ControlConfig(mode=UpdateMode.IN_PLACE, pause_mode=PauseMode.IN_PLACE)
    source = save("dense", 1, folder / "dying")
    answered, held = server.sample(PROMPT, NUM_TOKENS), server.digests()
    async with windlass.Controller(token=TOKEN, config=in_place) as controller:
        status, _ = await asyncio.to_thread(ask_to_join, server.url, {"controller": controller.url})
        assert status == 200
        with training(FSDP, "dense", source, ends_well=False) as ranks:

            def kill_trainers(_version: int, phase: Phase) -> None:
                if phase is Phase.PREPARE:
                    for process in ranks.processes:
                        process.kill()

            controller.coordinator.rounds.on_phase(kill_trainers)
            order = Order(controller.url, "auto", 1, str(folder / "never"))
            # No rank answers.
            with pytest.raises(AssertionError):
                await asyncio.to_thread(ranks.publish, order)
        assert await asyncio.to_thread(server.sample, PROMPT, NUM_TOKENS) == answered
        assert await asyncio.to_thread(server.digests) == held


async def refuse_strangers_and_errors(server: Server) -> None:
    """Check that invalid orders do not make the engine join, and do not prevent a later join."""
    for token in ("", "wrong", role_token(TOKEN, Access.TRAINER), TOKEN):
        status, answer = ask_to_join(server.url, {"controller": "http://127.0.0.1:1"}, token)
        assert (status, "requires a token of role owner or engine" in answer["error"]) == (
            403,
            True,
        )
    for body, says in (
        (
            {"controller": "nowhere"},
            "controller must be http or https://host[:port], got 'nowhere'",
        ),
        ({"controler": "http://127.0.0.1:1"}, "unknown field `controler`"),
    ):
        status, answer = ask_to_join(server.url, body)
        assert (status, says in answer["error"]) == (400, True), answer
    async with windlass.Controller(token="another secret") as controller:
        order = {"controller": controller.url}
        status, answer = await asyncio.to_thread(ask_to_join, server.url, order)
    assert status == 502
    assert "token" in answer["error"]


async def test_a_server_that_cannot_join_the_given_controller_ends(
    tmp_path: Path, installed: str, token: Path
) -> None:
    """Otherwise the server would answer forever with the weights of its start."""
    old, log, port = save("dense", 1, tmp_path / "old"), tmp_path / "server.log", free_port()
    async with windlass.Controller(token="another secret") as controller:
        told = {"WINDLASS_CONTROLLER": controller.url, "WINDLASS_TOKEN_FILE": str(token)}
        server = launched(old, log, port, variables(installed, **told))
        with ExitStack() as running:
            process = (await asyncio.to_thread(running.enter_context, server)).process
            assert await asyncio.to_thread(process.wait, JOIN_S) == 2
    assert f"engine 127.0.0.1:{port}: PeerUnreachable: rank 0: " in log.read_text()


def test_a_server_without_settings_of_windlass_is_unchanged(tmp_path: Path, installed: str) -> None:
    old, log, port = save("dense", 1, tmp_path / "old"), tmp_path / "server.log", free_port()
    with launched(old, log, port, variables(installed)) as server:
        with urllib.request.urlopen(f"{server.url}/server_info", timeout=JOIN_S) as answer:
            assert HOOK not in json.loads(answer.read())["custom_weight_loader"]
        assert ask_to_join(server.url, {"controller": "http://127.0.0.1:1"})[0] == 404


REFUSED = {
    "offloaded weights": (["--cpu-offload-gb", "4"], {}, "cpu_offload_gb must be 0, got 4"),
    "quantisation": (["--quantization", "fp8"], {}, "--quantization must not be given"),
    "token file": (
        [],
        {"WINDLASS_TOKEN_FILE": "open"},
        "must be a file that its user alone can read",
    ),
    "no controller": ([], {"WINDLASS_CONTROLLER": "nowhere"}, "WINDLASS_CONTROLLER must be http"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_server_that_cannot_be_updated_does_not_start(
    what: str, tmp_path: Path, installed: str, token: Path
) -> None:
    flags, given, says = REFUSED[what]
    opened = tmp_path / "open"
    opened.write_text(TOKEN)
    opened.chmod(0o644)
    told = {"WINDLASS_CONTROLLER": "http://127.0.0.1:1", "WINDLASS_TOKEN_FILE": str(token)}
    told |= {name: str(opened) if value == "open" else value for name, value in given.items()}
    old = save("dense", 1, tmp_path / "old")
    ended = subprocess.run(
        command(old, free_port(), *flags), env=variables(installed, **told), text=True,
        capture_output=True, timeout=START_S,
    )  # fmt: skip
    assert ended.returncode != 0
    assert says in ended.stderr.strip().splitlines()[-1], ended.stderr[-2000:]
    assert "Load weight begin" not in ended.stderr
