"""TLS: trusted authorities, roles in certificates, and no plain connections."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from certificates import Authority
from fake_agents import FakeEngineRank, engine_manifest, fake_hello, trainer_manifest
from fake_engine import FakeEngine
from fake_fleet import TOKEN, FakeFleet
from open_sockets import read_to_end

import windlass
from windlass.cli.controller import fetch_overview
from windlass.config import ControlConfig
from windlass.control.client import AgentChannel
from windlass.envs import temporary_values
from windlass.errors import (
    AuthenticationError,
    ConfigError,
    PeerUnreachable,
    ProtocolError,
)
from windlass.net import listener
from windlass.net.access import ROUTES, Access, role_of_certificate, role_token
from windlass.net.server import ControlServer
from windlass.net.sockets import open_http
from windlass.net.tls import client_context
from windlass.rollout import (
    BatchClient,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    mount_rollout_routes,
)
from windlass.rollout.batches import BatchQueue

NO_FILES = {"WINDLASS_TLS_CA": "", "WINDLASS_TLS_CERT": "", "WINDLASS_TLS_KEY": ""}
METHODS = {"/v1/callback": "POST", "/v1/workers": "POST", "/v1/completions": "POST"}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@contextmanager
def served(files: dict[str, str], token: str = TOKEN) -> Iterator[str]:
    """Yield the address of `windlass serve` with these files."""
    process = subprocess.Popen(
        (sys.executable, "-m", "windlass.cli.main", "serve"),
        env={**os.environ, "WINDLASS_TOKEN": token, **files},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


async def test_a_client_trusts_only_its_authority(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path)
    with served(authority.issue()) as url:
        assert url.startswith("https://127.0.0.1:")
        with environment(authority.issue()):
            assert (await fetch_overview(url, TOKEN, 10.0))["published_version"] == -1
            with pytest.raises(AuthenticationError):
                await fetch_overview(url, "wrong", 10.0)
            plain = url.replace("https", "http")
            with pytest.raises(ConfigError, match="controller must be https://"):
                await fetch_overview(plain, TOKEN, 10.0)
        with environment(stranger.issue()), pytest.raises(PeerUnreachable, match="CERTIFICATE"):
            await fetch_overview(url, TOKEN, 10.0)
        with environment(NO_FILES):
            # The server accepts no plain connection.
            with pytest.raises(PeerUnreachable):
                await fetch_overview(plain, TOKEN, 10.0)
            with pytest.raises(PeerUnreachable, match="CERTIFICATE"):
                await fetch_overview(url, TOKEN, 10.0)
        # This client trusts the server's authority, but its own certificate has another issuer.
        believing = stranger.issue("owner", believes=authority)
        with environment(believing), pytest.raises(PeerUnreachable):
            await fetch_overview(url, TOKEN, 10.0)
    for files in (authority.issue(expired=True), authority.issue(host="other.example")):
        with (
            served(files) as url,
            environment(authority.issue()),
            pytest.raises(PeerUnreachable, match="CERTIFICATE"),
        ):
            await fetch_overview(url, TOKEN, 10.0)


# aiohttp does not close a connection whose TLS handshake is cancelled at a deadline.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_blocking_client_and_an_agent_verify_the_server_too(
    authority: Authority, tmp_path: Path
) -> None:
    with served(authority.issue()) as url:

        def ask() -> None:
            with BatchClient(url, TOKEN) as batches:
                batches.next_batch(0, 0, 1, deadline_s=2.0)

        def join() -> None:
            hello = fake_hello(engine_manifest("a/0", 2), group="a")
            with AgentChannel(url, TOKEN, lambda: hello, FakeEngineRank("a/0", 2)) as channel:
                channel.connect(10.0)

        with environment(authority.issue()):
            await asyncio.to_thread(join)
            with pytest.raises(windlass.PeerTimeout, match=r"got no batch of step 0"):
                await asyncio.to_thread(ask)
        with environment(Authority(tmp_path).issue()):
            for call in (ask, join):
                with pytest.raises(windlass.PeerTimeout, match="CERTIFICATE_VERIFY_FAILED"):
                    await asyncio.to_thread(call)
    # The warnings belong to this test and not to a later one.
    gc.collect()


@pytest.mark.parametrize("role", sorted(set(Access) - {Access.OWNER}))
async def test_no_client_shows_its_token_to_a_server_with_another_roles_certificate(
    role: Access, authority: Authority
) -> None:
    """A trainer used to send its token to a false controller with an engine's certificate."""
    with served(authority.issue(role.value)) as url:

        def ask() -> None:
            with BatchClient(url, TOKEN) as batches:
                batches.next_batch(0, 0, 1, deadline_s=2.0)

        says = f"must have role owner or no role, got {role}"
        with environment(authority.issue("trainer")):
            with pytest.raises(windlass.PeerTimeout, match=says):
                await asyncio.to_thread(ask)
            with pytest.raises(PeerUnreachable, match=says):
                await fetch_overview(url, TOKEN, 10.0)


@pytest.mark.parametrize("role", list(Access))
async def test_a_certificate_opens_the_routes_of_its_role_and_no_others(
    role: Access, authority: Authority
) -> None:
    with environment(authority.issue()):
        async with windlass.Controller(token=TOKEN) as controller:
            with environment(authority.issue(role.value)):
                http = open_http("", to_controller=True)
            async with http:
                for route, allowed in ROUTES.items():
                    if "{" in route:
                        continue
                    method = METHODS.get(route, "GET")
                    async with http.request(method, controller.url + route) as answer:
                        refused = answer.status in {401, 403}
                        assert refused is (role not in {Access.OWNER, *allowed}), (
                            route,
                            answer.status,
                        )
                # A token, if sent, takes precedence over the certificate.
                for token, status in (("wrong", 401), (role_token(TOKEN, Access.OBSERVER), 200)):
                    headers = {"Authorization": f"Bearer {token}"}
                    async with http.get(controller.url + "/v1/status", headers=headers) as answer:
                        assert answer.status == status


async def test_a_certificate_without_a_role_opens_nothing(authority: Authority) -> None:
    with environment(authority.issue()):
        async with (
            windlass.Controller(token="") as controller,
            open_http("", to_controller=True) as http,
        ):
            async with http.get(controller.url + "/v1/status") as answer:
                assert answer.status == 401
            # An empty secret must give no tokens, because everyone knows it.
            for role in Access:
                assert role_token("", role) == ""
            headers = {"Authorization": "Bearer "}
            async with http.get(controller.url + "/v1/status", headers=headers) as answer:
                assert answer.status == 401


def test_a_certificate_names_one_role_or_none() -> None:
    def subject(*units: str) -> dict[str, object]:
        return {"subject": tuple((("organizationalUnitName", unit),) for unit in units)}

    assert role_of_certificate(subject("windlass-engine")) is Access.ENGINE
    assert role_of_certificate(subject("research", "windlass-engine")) is Access.ENGINE
    for units in (
        ("windlass-engine", "windlass-trainer"),
        ("engine",),
        ("windlass-",),
        ("windlass-king",),
        ("windlass-engine", "windlass-king"),
    ):
        assert role_of_certificate(subject(*units)) is None
    assert role_of_certificate({"subject": ((("commonName", "windlass-owner"),),)}) is None
    assert role_of_certificate({}) is None
    assert role_of_certificate(None) is None


async def test_a_fleet_of_certificates_is_updated_without_any_token(authority: Authority) -> None:
    with environment(authority.issue()):
        async with FakeFleet(ControlConfig()) as rig:
            assert rig.server.url.startswith("https://")
            rig.token = ""
            with environment(authority.issue("trainer")):
                for index in range(rig.num_trainers):
                    await rig.add_trainer(index)
            with environment(authority.issue("engine")):
                await rig.add_engine("a")
                hello = fake_hello(trainer_manifest("trainer/0", 0, 2), group="trainer")
                with pytest.raises(ProtocolError, match="role engine may not join as trainer"):
                    await rig.connect(hello, FakeEngineRank("trainer/0", 2))
            await rig.coordinator.members.wait_for_fleet(
                num_trainers=2, engines=("a",), deadline_s=20
            )
            assert (await rig.publish(0)).outcome == "published"
            assert rig.routable == {"a": 0}


async def test_a_worker_with_only_a_certificate_runs_a_rollout(authority: Authority) -> None:
    engines = StaticEngines()
    with environment(authority.issue("owner")):
        async with (
            FakeEngine("a") as engine,
            RolloutController(engines, StalenessPolicy.unbounded(100)) as controller,
        ):
            server = ControlServer(host="127.0.0.1", port=0, token="")
            mount_rollout_routes(server, controller, BatchQueue())
            await server.start()
            engines.set([engine.entry])
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "windlass.rollout.worker", "--name", "worker-0"),
                *("--controller", server.url),
                env={**os.environ, **authority.issue("worker")},
            )
            try:
                await controller.wait_for_workers(1, deadline_s=30)
                rollout = await controller.submit((3, 5), SamplingParams(max_new_tokens=2))
                assert len(rollout.output_ids) == 2
            finally:
                worker.kill()
                await worker.wait()
                await controller.close()
                await server.close()


@pytest.mark.parametrize("shakes_hands", [False, True], ids=["silent", "after-the-handshake"])
async def test_strangers_of_a_tls_listener_are_few_and_do_not_last(
    shakes_hands: bool, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "STRANGER_S", 2.0)
    monkeypatch.setattr(listener, "MAX_STRANGERS", 4)
    with environment(authority.issue()):
        server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        context = client_context(to_controller=True) if shakes_hands else None
        await server.start()
        try:
            port = urlsplit(server.url).port
            async with open_http(TOKEN, to_controller=True) as kept:
                async with kept.get(server.url + "/nothing") as answer:
                    assert answer.status == 404
                strangers = [
                    await asyncio.open_connection("127.0.0.1", port, ssl=context) for _ in range(6)
                ]
                # The server closed the oldest connections to make room.
                async with asyncio.timeout(1.5):
                    for reader, _ in strangers[:2]:
                        await read_to_end(reader)
                # The other strangers have sent no token in time.
                async with asyncio.timeout(10):
                    for reader, _ in strangers:
                        await read_to_end(reader)
                async with kept.get(server.url + "/nothing") as answer:
                    assert answer.status == 404
            for _, writer in strangers:
                writer.close()
        finally:
            await server.close()


async def test_a_request_behind_the_handshake_in_one_segment_is_answered(
    authority: Authority,
) -> None:
    with environment(authority.issue()):
        server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        await server.start()
        context = client_context(to_controller=True)
        assert context is not None

        def ask() -> bytes:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            with socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0)) as plain:
                plain.settimeout(10)
                while True:
                    try:
                        tls.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        plain.sendall(outgoing.read())
                        incoming.write(plain.recv(1 << 16))
                tls.write(b"GET /nothing HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                plain.sendall(outgoing.read())
                while True:
                    try:
                        return tls.read(1 << 16)
                    except ssl.SSLWantReadError:
                        incoming.write(plain.recv(1 << 16))

        try:
            assert b"401" in await asyncio.to_thread(ask)
        finally:
            await server.close()


async def test_an_open_handshake_does_not_delay_the_end_of_a_server(authority: Authority) -> None:
    with environment(authority.issue()):
        server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            await server.close()
            await read_to_end(reader)
        writer.close()


def test_certificate_files_that_do_not_match_are_refused_by_name(authority: Authority) -> None:
    files = authority.issue()
    ca = {**NO_FILES, "WINDLASS_TLS_CA": files["WINDLASS_TLS_CA"]}
    with environment(ca), pytest.raises(ConfigError, match="WINDLASS_TLS_CERT must be set"):
        ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    with (
        environment({**files, "WINDLASS_TLS_KEY": ""}),
        pytest.raises(ConfigError, match="together"),
    ):
        ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    other = authority.issue()["WINDLASS_TLS_KEY"]
    with environment({**files, "WINDLASS_TLS_KEY": other}), pytest.raises(ConfigError, match="PEM"):
        ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    with (
        environment({**files, "WINDLASS_TLS_CA": "/nowhere"}),
        pytest.raises(ConfigError, match="PEM"),
    ):
        client_context(to_controller=True)


async def test_every_client_refuses_a_plain_controller_address_where_tls_is_required(
    authority: Authority,
) -> None:
    plain = "http://127.0.0.1:1"
    with environment(authority.issue()):
        for make in (
            lambda: BatchClient(plain, TOKEN),
            lambda: windlass.RolloutCallback(plain, TOKEN),
            lambda: AgentChannel(
                plain,
                TOKEN,
                lambda: fake_hello(engine_manifest("a/0", 2), group="a"),
                FakeEngineRank("a/0", 2),
            ),
        ):
            with pytest.raises(ConfigError, match="must be https://"):
                make()
    with temporary_values(NO_FILES):
        BatchClient(plain, TOKEN).close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_an_eavesdropper_reads_the_token_only_without_tls(
    tls: bool, authority: Authority
) -> None:
    seen = bytearray()
    with environment(authority.issue() if tls else {}):
        server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        await server.start()

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(data)
            writer.close()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
            await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

        wire = await asyncio.start_server(carry, "127.0.0.1", 0)
        port = wire.sockets[0].getsockname()[1]
        url = f"{urlsplit(server.url).scheme}://127.0.0.1:{port}/nothing"
        try:
            async with open_http(TOKEN, to_controller=True) as http, http.get(url) as answer:
                assert answer.status == 404
        finally:
            wire.close()
            await server.close()
    assert (TOKEN.encode() in seen) is not tls
    assert (b"/nothing" in seen) is not tls
