"""An SGLang server over two hosts, with a rank on each, joins and is updated as one engine."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from host_fleet import Fleet
from hosts import Host, Network, why_no_hosts
from servers import Layout, Sample, Server, save
from sglang_servers import ENGINE_TOKEN, JOIN_S, following, install, launched, of_host, token_file
from trainer_rank import Order

from trainers import FSDP, training
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.engines.private_routes import key_folder
from windlass.net.addresses import free_port

pytestmark = [
    pytest.mark.engines,
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"hosts: {why_no_hosts()}"),
]
PROMPT = [(7 * place) % 240 for place in range(70)]
NUM_TOKENS = 12
FAST_BIT_S = 10_000_000_000
MODES = (UpdateMode.IN_PLACE, UpdateMode.STAGED)
LAYOUTS = (Layout(tp=2), Layout(pp=2), Layout(tp=2, attn_dp=2))


@contextmanager
def serving(
    model: Path, log: Path, hosts: Sequence[Host], layout: Layout, *told: Mapping[str, str]
) -> Iterator[Server]:
    """Start a server with a rank on each host; `told` are the environment variables of each rank."""
    installed = install(log.with_suffix(".installed"))
    flags = (
        *("--tp-size", str(layout.tp), "--pp-size", str(layout.pp), "--nnodes", str(len(hosts))),
        *("--attn-dp-size", str(layout.attn_dp)),
        *("--dist-init-addr", f"{hosts[0].address}:{free_port()}"),
    )
    own = [(*flags, "--host", host.address, "--node-rank", str(n)) for n, host in enumerate(hosts)]
    environments = [
        of_host(host, installed, **given) for host, given in zip(hosts, told, strict=True)
    ]
    with ExitStack() as undo:
        for n, host in enumerate(hosts[1:], 1):
            of_rank = log.with_suffix(f".{n}.log")
            undo.enter_context(following(model, of_rank, host, environments[n], own[n]))
        yield undo.enter_context(
            launched(
                model, log, free_port(), environments[0], flags=own[0], layout=layout, host=hosts[0]
            )
        )


def checksums(server: Server) -> list[dict[str, str]]:
    """Return SGLang's own checksums of all tensors, for each rank of the first stage."""
    said = server.post("/weights_checker", {"action": "checksum"})
    return [rank["checksums"] for rank in said["ranks"]]


def ask_to_join(server: Server, controller: str) -> tuple[int, Any]:
    """Order the server to join, and return status and answer."""
    request = urllib.request.Request(
        f"{server.url}/windlass/join",
        json.dumps({"controller": controller}).encode(),
        {"Authorization": f"Bearer {ENGINE_TOKEN}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=JOIN_S) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@asynccontextmanager
async def controller_on(
    network: Network, mode: UpdateMode, pause_mode: PauseMode = PauseMode.ABORT
) -> AsyncIterator[Fleet]:
    config = ControlConfig(mode=mode, pause_mode=pause_mode, deadlines=PhaseDeadlines(pause_s=60))
    fleet = Fleet(network, config, "auto", 0)
    try:
        await fleet.start_controller("one")
        yield fleet
    finally:
        await fleet.close()


@pytest.fixture
def network() -> Iterator[Network]:
    # A wire in user space is too slow for the messages of SGLang's steps.
    with Network(("one", "two"), by_wire=False, rate_bit_s=FAST_BIT_S) as made:
        yield made


@pytest.fixture
def folders(network: Network, tmp_path: Path) -> Path:
    """Provide a folder for temporary files: the same path on both hosts, with separate contents."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    for name in ("one", "two"):
        network.host(name).run("mount", "-t", "tmpfs", "tmpfs", str(folder))
    return folder


def told(folder: Path, tokens: Sequence[str], controller: str = "wait") -> list[dict[str, str]]:
    """Return each host's variables for the controller, a file with the token, and temporary files."""
    found = []
    for number, token in enumerate(tokens):
        (own := folder.parent / f"host {number}").mkdir()
        found.append(
            {
                "WINDLASS_CONTROLLER": controller,
                "WINDLASS_TOKEN_FILE": str(token_file(own, token)),
                "TMPDIR": str(folder),
            }
        )
    return found


@contextmanager
def key_of(server: Server, host: Host, folders: Path) -> Iterator[None]:
    """Copy the server's key into this process's folder of keys, and remove it at the end."""
    file = key_folder() / server.url.rpartition(":")[2]
    file.parent.mkdir(mode=0o700, exist_ok=True)
    file.write_text(host.run("cat", str(folders / file.parent.name / file.name)))
    try:
        yield
    finally:
        file.unlink()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_one_server_over_two_hosts_is_updated_by_a_trainer_on_both(
    layout: Layout, network: Network, folders: Path, tmp_path: Path
) -> None:
    """Check links by cma inside a host and by Mooncake over TCP between hosts."""
    old, hosts = save("dense", 1, tmp_path / "old"), (network.host("one"), network.host("two"))
    first = hosts[0]

    def sample(server: Server) -> Sample:
        return first.call(lambda: server.sample(PROMPT, NUM_TOKENS))

    with ExitStack() as running:
        server = running.enter_context(
            serving(old, tmp_path / "live.log", hosts, layout, *told(folders, [ENGINE_TOKEN] * 2))
        )
        running.enter_context(key_of(server, first, folders))
        ranks = running.enter_context(training(FSDP, "dense", old, hosts=hosts))
        # This call also installs SGLang's missing CPU functions of attention (`sglang_cpu_gaps`).
        first.call(lambda: server.digests_of_fresh_load(old))
        answered, held = sample(server), first.call(lambda: checksums(server))
        pause_mode = PauseMode.ABORT if layout.pp > 1 else PauseMode.IN_PLACE
        before, version = answered, 0
        for mode in MODES:
            async with controller_on(network, mode, pause_mode) as fleet:
                said = await asyncio.to_thread(
                    first.call, lambda url=fleet.url: ask_to_join(server, url)
                )
                name = server.url.removeprefix("http://")
                assert said == (200, {"name": name, "controller": fleet.url})
                for _ in range(2):
                    version += 1
                    checkpoint = tmp_path / str(version)
                    order = Order(fleet.url, "auto", version, str(checkpoint))
                    await asyncio.to_thread(ranks.publish, order)
                    links = (await fleet.status())["status"]["links"]
                    taken = {
                        (link["source"], link["destination"]): link["transport"] for link in links
                    }
                    assert taken == {
                        (f"trainer/{source}", f"{name}/{rank}"): "cma"
                        if source == rank
                        else "mooncake"
                        for source in range(2)
                        for rank in range(2)
                    }
                    answered = await asyncio.to_thread(sample, server)
                    assert answered.versions == [version] * NUM_TOKENS
                    every_rank, afresh = await asyncio.to_thread(
                        first.call,
                        lambda path=checkpoint: (
                            server.digests(),
                            server.digests_of_fresh_load(path),
                        ),
                    )
                    assert every_rank == afresh
                    assert len(every_rank) == 2
        updated = first.call(lambda: checksums(server))
    plain = [{"TMPDIR": str(folders)}] * 2
    with serving(tmp_path / str(version), tmp_path / "fresh.log", hosts, layout, *plain) as fresh:
        first.call(lambda: fresh.digests_of_fresh_load(old))
        assert first.call(lambda: checksums(fresh)) == updated != held
        again = sample(fresh)
    assert (again.tokens, again.logprobs) == (answered.tokens, answered.logprobs)
    assert (before.tokens, before.logprobs) != (answered.tokens, answered.logprobs)


async def test_a_rank_with_another_token_than_its_server_is_named(
    network: Network, folders: Path, tmp_path: Path
) -> None:
    """Check that the error comes at once and that the server still answers as before."""
    old, hosts = save("dense", 1, tmp_path / "old"), (network.host("one"), network.host("two"))
    first, tokens = hosts[0], [ENGINE_TOKEN, "another"]
    with serving(old, tmp_path / "live.log", hosts, Layout(tp=2), *told(folders, tokens)) as server:
        answered = first.call(lambda: server.sample(PROMPT, NUM_TOKENS))
        async with controller_on(network, UpdateMode.STAGED) as fleet:
            status, said = await asyncio.to_thread(
                first.call, lambda: ask_to_join(server, fleet.url)
            )
        assert status == 502
        assert (
            "rank 1: the rank must have the token that the server was started with" in said["error"]
        )
        assert first.call(lambda: server.sample(PROMPT, NUM_TOKENS)) == answered
