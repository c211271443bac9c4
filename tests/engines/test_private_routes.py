"""Routes of an engine's server that strangers cannot use, and secrets that its processes do not get."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from windlass.engines import private_routes
from windlass.engines.launch import arguments, serve, server_environment
from windlass.engines.private_routes import (
    ALIVE_PATH,
    KEY_HEADER,
    Message,
    PrivateRoutes,
    key_folder,
    new_key,
    remove_key,
    saved_key,
)
from windlass.engines.sglang.spec import SglangServer
from windlass.engines.spec import ServerCommand
from windlass.engines.vllm.spec import VllmServer
from windlass.errors import ConfigError

TOKEN = "secret of the test"
KEY = "key of the test"
OF_VLLM = ["/collective_rpc", "/pause", "/resume", "/sleep", "/reset_prefix_cache", "/server_info"]
OF_SGLANG = [
    *("/update_weights_from_tensor", "/update_weights_from_disk", "/pause_generation"),
    *("/begin_weight_update", "/load_lora_adapter_from_tensors", "/get_weights_by_name"),
]
OPEN = ["/generate", "/health", "/v1/completions", "/v1/models", "/metrics", "/model_info"]


@pytest.fixture
def routes() -> PrivateRoutes:
    async def app(_scope: Message, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    return PrivateRoutes(app, KEY, alive="/is_paused")


async def status_of(
    routes: PrivateRoutes,
    path: str,
    *headers: tuple[bytes, bytes],
    kind: str = "http",
    method: str = "GET",
    root_path: str = "",
) -> object:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "headers": headers,
        "root_path": root_path,
    }
    await routes(scope, receive, send)
    return sent[0].get("status", sent[0]["type"])


@pytest.mark.parametrize("path", [*OF_VLLM, *OF_SGLANG, "/v1/load_lora_adapter", "/not/known/yet"])
async def test_strangers_cannot_reach_routes_that_change_an_engine(
    routes: PrivateRoutes, path: str
) -> None:
    header = KEY_HEADER.encode()
    assert await status_of(routes, path) == 403
    assert await status_of(routes, path, (header, b"wrong")) == 403
    assert await status_of(routes, path, (header, TOKEN.encode())) == 403
    assert await status_of(routes, path, (header, KEY.encode()), (header, b"wrong")) == 403
    assert await status_of(routes, path, kind="websocket") == "websocket.close"
    assert await status_of(routes, path, (header, KEY.encode())) == 200


@pytest.mark.parametrize("path", OPEN)
async def test_clients_reach_routes_that_generate(routes: PrivateRoutes, path: str) -> None:
    assert await status_of(routes, path) == 200


@pytest.mark.parametrize("root", ["", "/v1/m", "/api"])
async def test_the_route_that_shows_life_reads_one_route_of_the_engine(root: str) -> None:
    served: list[tuple[str, bytes]] = []

    async def app(scope: Message, _receive: Any, send: Any) -> None:
        served.append((scope["path"], scope["raw_path"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    routes = PrivateRoutes(app, KEY, alive="/is_paused")
    inner = f"{root}/is_paused"
    assert await status_of(routes, inner, root_path=root) == 403
    assert await status_of(routes, root + ALIVE_PATH, method="POST", root_path=root) == 403
    assert await status_of(routes, root + ALIVE_PATH + "/", root_path=root) == 403
    assert await status_of(routes, root + ALIVE_PATH, root_path=root) == 200
    assert served == [(inner, inner.encode())]


ROOTS = ["/v1", "/v1/", "/v1/m", "/v1/models/a", "/api", "/generate", "/v1/load_lora_adapter"]


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("path", [*OF_VLLM, *OF_SGLANG, "/v1/load_lora_adapter"])
async def test_a_root_path_opens_no_private_route(
    routes: PrivateRoutes, root: str, path: str
) -> None:
    """Regression: a server with `--root-path /v1/m` answered `/v1/m/collective_rpc` without a key."""
    for asked in (root + path, path):
        if route_of(asked, root) == path:
            assert await status_of(routes, asked, root_path=root) == 403
            given = (KEY_HEADER.encode(), KEY.encode())
            assert await status_of(routes, asked, given, root_path=root) == 200


@pytest.mark.parametrize("root", ["/v1/m", "/api"])
@pytest.mark.parametrize("path", OPEN)
async def test_a_root_path_closes_no_open_route(
    routes: PrivateRoutes, root: str, path: str
) -> None:
    assert await status_of(routes, root + path, root_path=root) == 200


def route_of(path: str, root: str) -> str:
    """Return the path that a router of Starlette 1.10 matches, according to its source."""
    if not path.startswith(root):
        return path
    rest = path.removeprefix(root)
    return rest if rest == "" or rest.startswith("/") else path


async def test_routes_of_a_framework_are_opened_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def app(_scope: Message, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    monkeypatch.setenv("WINDLASS_OPEN_ROUTES", "/flush_cache, /abort_request,")
    opened = PrivateRoutes(app, KEY, alive="/is_paused")
    for path, status in (("/flush_cache", 200), ("/abort_request", 200), ("/pause", 403)):
        assert await status_of(opened, path) == status
    assert await status_of(opened, "/pause", (KEY_HEADER.encode(), KEY.encode())) == 200
    for given, says in (
        ("flush_cache", "must name paths like /a,/b, got 'flush_cache'"),
        (
            "/pause,/collective_rpc",
            "must not name /collective_rpc: this route runs the caller's code",
        ),
        ("/update_weights_from_tensor", "must not name /update_weights_from_tensor"),
    ):
        monkeypatch.setenv("WINDLASS_OPEN_ROUTES", given)
        with pytest.raises(ConfigError, match=f"WINDLASS_OPEN_ROUTES {says}"):
            PrivateRoutes(app, KEY, alive="/is_paused")


async def test_a_server_without_a_key_opens_no_private_route() -> None:
    async def app(*_: object) -> None:
        raise AssertionError

    header = KEY_HEADER.encode()
    for key in (b"", KEY.encode()):
        assert (
            await status_of(
                PrivateRoutes(app, "", alive="/is_paused"), "/collective_rpc", (header, key)
            )
            == 403
        )


def test_only_the_servers_user_finds_its_key_and_only_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with new_key(9) as key, new_key(10) as other:
        assert saved_key("http://127.0.0.1:9") == key != other
        (folder,) = tmp_path.iterdir()
        assert {path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())} == {0}
    assert saved_key("http://127.0.0.1:9") == ""


KEEPS_KEY = """
import subprocess, sys
from windlass.engines.private_routes import new_key, saved_key

subprocess.run(["hostname", sys.argv[1]], check=True)
with new_key(9) as key:
    print(key, flush=True)
    sys.stdin.read(1)
    print(saved_key("http://localhost:9") == key, flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can name a host")
def test_servers_of_two_hosts_with_one_port_have_their_own_keys_in_a_shared_folder(
    tmp_path: Path,
) -> None:
    """Hosts may share the folder of temporary files, for example a TMPDIR in a home directory."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(
                subprocess.Popen(
                    ("unshare", "--uts", sys.executable, "-c", KEEPS_KEY, name),
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for name in ("node-a", "node-b")
        ]
        keys = [host.stdout.readline().strip() for host in hosts]  # type: ignore[union-attr]
        assert len({*keys}) == 2
        assert [len(key) for key in keys] == [64, 64]
        found = [host.communicate("x", timeout=60)[0] for host in hosts]
    assert found == ["True\n", "True\n"]


def test_saved_key_of_a_server_that_ends_meanwhile_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # The server ends after the check of the folder and before the read of the key.
    monkeypatch.setattr(private_routes, "require_own", lambda _: remove_key(9))
    key_folder().mkdir(mode=0o700)
    (key_folder() / "9").write_text("a key")
    assert saved_key("http://127.0.0.1:9") == ""


def test_a_folder_of_keys_writable_by_other_users_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with new_key(9):
        (folder,) = tmp_path.iterdir()
    folder.chmod(0o755)
    with (
        pytest.raises(ConfigError, match="must be a folder that this user alone can read"),
        new_key(9),
    ):
        pass
    folder.rename(tmp_path / "another")
    (tmp_path / "another" / "9").touch()
    folder.symlink_to(tmp_path / "another")
    with pytest.raises(ConfigError, match="must be a folder that this user alone can read"):
        saved_key("http://127.0.0.1:9")


def test_both_engines_start_with_private_routes(tmp_path: Path) -> None:
    """Without the plugin, vLLM does not know the backend and ends; SGLang's program loads the plugin itself.

    `test_vllm_membership_routes.py` checks the routes of a vLLM server with the plugin.
    """
    args = arguments("program", None).parse_args(["--name", "a", "--model", str(tmp_path)])
    words = VllmServer().command(args, ()).argv
    assert words[words.index("--weight-transfer-config") + 1] == '{"backend": "windlass"}'
    assert SglangServer().command(args, ()).argv[1:3] == ("-m", "windlass.engines.sglang.serve")
    with server_environment(args) as given:
        assert given["WINDLASS_CONTROLLER"] == "wait"


SAYS_ITS_ENVIRONMENT = """
import os, sys
print(*(f"{name}={value}" for name, value in os.environ.items()), sep="\\n", flush=True)
"""


def test_tokens_are_in_no_environment_of_a_server(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    monkeypatch.setenv("WINDLASS_ENGINE_TOKEN", f"{TOKEN} of clients")
    words = ["--name", "a", "--model", "/m", "--host", "127.0.0.1", "--port", "9"]
    args = arguments("program", None).parse_args(words)
    with server_environment(args) as given:
        file = Path(given["WINDLASS_TOKEN_FILE"])
        assert file.read_text() == TOKEN
        assert file.stat().st_mode & 0o077 == 0
        command = ServerCommand((sys.executable, "-c", SAYS_ITS_ENVIRONMENT), given)
        serve(args, command, ready_line="never")
    said = capfd.readouterr().err
    assert "WINDLASS_CONTROLLER=wait" in said
    assert TOKEN not in said
    assert not file.exists()


def test_an_ended_server_leaves_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher kills its server, which then cannot remove its key."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = ["--name", "a", "--model", "/m", "--host", "127.0.0.1", "--port", "9"]
    args = arguments("program", None).parse_args(words)
    with new_key(9):
        serve(args, ServerCommand((sys.executable, "-c", "")), ready_line="never")
        assert saved_key("http://127.0.0.1:9") == ""
