"""Launchers of engines: command lines, start, and results."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from http_answers import answering_requests

from windlass import envs
from windlass.engines import launch as launch_module
from windlass.engines.join_route import JoinOrder
from windlass.engines.launch import (
    arguments,
    attach_running,
    checked_arguments,
    launch,
    serve,
    server_environment,
    wait_for_server,
)
from windlass.engines.options import Rule, options_of, refuse_options
from windlass.engines.private_routes import KEY_HEADER, new_key, remove_key
from windlass.engines.rank_reports import check_layouts
from windlass.engines.spec import (
    ENGINES,
    CapturedLayout,
    EngineSpec,
    ServerCommand,
    refuse_expandable_segments,
)
from windlass.engines.versions import EngineReleases
from windlass.engines.vllm.spec import VllmServer
from windlass.errors import ConfigError, EngineRefused, PeerUnreachable
from windlass.net.addresses import own_address

WORDS = ["--name", "a", "--model", "/m", "--tp", "2", "--attach", "http://127.0.0.1:1"]
TOKEN = "secret of the test"


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)


class Server:
    """Server of an engine that answers its join route. Its URL is valid within `running`."""

    def __init__(self, status: int = 200, answer: object = None) -> None:
        self.orders: list[JoinOrder] = []
        self.headers: list[Mapping[str, str]] = []
        self.key = self.url = ""
        self._status, self._answer = status, answer

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        with (
            answering_requests(self._carry_out) as self.url,
            new_key(int(self.url.rpartition(":")[2])) as self.key,
        ):
            yield self.url

    def attach(self, *words: str) -> int:
        """Run `--attach` with the options of a launcher."""
        given = [*WORDS[:-1], self.url, "--controller", "http://127.0.0.1:1", *words]
        return attach_running(arguments("program", None).parse_args(given))

    def _carry_out(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        assert path == "/windlass/join"
        self.headers.append(headers)
        self.orders.append(msgspec.json.decode(body, type=JoinOrder))
        return self._status, msgspec.json.encode(self._answer)


def test_attach_makes_a_running_server_join_another_controller(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = Server()
    with server.running():
        assert server.attach("--transport", "mooncake", "--join-deadline-s", "7") == 0
    assert server.orders == [
        JoinOrder(
            controller="http://127.0.0.1:1",
            transport="mooncake",
            token=TOKEN,
            name="a",
            url=server.url,
            serves_own_weights=False,
            deadline_s=7.0,
            model="/m",
        )
    ]
    assert {name.lower(): value for name, value in server.headers[0].items()}[
        KEY_HEADER
    ] == server.key
    assert capfd.readouterr().out == f'{{"name":"a","url":"{server.url}"}}\n'


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"error": "ProtocolError: the controller must be stopped"}, "^ProtocolError: the contr"),
        ("no JSON object", r"^POST http://127.0.0.1:\d+/windlass/join: 409 .no JSON object"),
    ],
)
def test_attach_quotes_the_reason_of_the_server(answer: object, reason: str) -> None:
    server = Server(409, answer)
    with server.running(), pytest.raises(EngineRefused, match=reason):
        server.attach()


def test_attach_sends_nothing_to_a_server_without_a_key() -> None:
    server = Server()
    with server.running():
        remove_key(int(server.url.rpartition(":")[2]))
        with pytest.raises(ConfigError, match="must be a server of this user on this host"):
            server.attach()
    assert server.orders == []


def test_attach_sends_nothing_to_another_host() -> None:
    words = [*WORDS[:-1], "http://192.0.2.1:1", "--controller", "http://127.0.0.1:1"]
    try:
        own_address("http://192.0.2.1:1")
    except PeerUnreachable:
        pytest.skip("no way to another host")
    with pytest.raises(ConfigError, match="--attach must be the URL of a server on this host"):
        attach_running(arguments("program", None).parse_args(words))


def test_ranks_have_time_to_join_by_the_size_of_their_checkpoint(tmp_path: Path) -> None:
    for shard in range(2):
        with (tmp_path / f"{shard}.safetensors").open("wb") as file:
            file.truncate(250 * 10**9)
    server = Server()
    with server.running():
        server.attach("--model", str(tmp_path))
    assert server.orders[0].deadline_s == 5600.0


@pytest.mark.parametrize(
    "words",
    [
        ["--tp", "2", "--pp", "3", "--dp", "4"],
        ["-tp", "2", "-pp", "3", "-dp", "4"],
        ["--tp-size=2", "--pp-size=3", "--dp-size=4"],
        ["--tensor-parallel-size=2", "--pipeline_parallel_size=3", "--data-parallel-size", "4"],
    ],
)
def test_the_sizes_of_an_engine_have_the_names_of_the_engines(words: list[str]) -> None:
    args, rest = arguments("program", None).parse_known_args(
        ["--name", "a", "--model", "/m", *words]
    )
    assert (args.tp, args.pp, args.dp) == (2, 3, 4)
    assert rest == []


class NeverStarted:
    """A server that is never started."""

    ready_line = "it serves"

    def command(self, args: argparse.Namespace, rest: Sequence[str]) -> ServerCommand:
        raise AssertionError


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            [*WORDS, "--controller", "http://127.0.0.1:1"],
            "http://127.0.0.1:1 must be a server of this user on this host",
        ),
        (WORDS, "--controller must be given"),
        ([*WORDS, "--enable-it"], "it moves"),
        ([*WORDS, "--dp", "2"], "--data-parallel-size must not be given: no replicas"),
        ([*WORDS, "-pp", "2"], "--pipeline-parallel-size must not be given: no stages"),
        ([*WORDS, "--pp", "0"], "--pp must be 1 or more, got 0"),
        (WORDS[:-2], "--port must be > 0 without --attach, got 0"),
        ([*WORDS[:-2], "--port", "1"], "nothing here must be installed in the environment of"),
        ([*WORDS, "--nnodes", "0"], "--nnodes must be 1 or more, got 0"),
        ([*WORDS, "--nnodes", "2"], "--nnodes must be 1 for nothing here, got 2"),
        ([*WORDS, "--node-rank", "1"], "--node-rank must be in [0, 1), got 1"),
    ],
)
def test_a_launcher_prints_its_reason_in_one_line(
    words: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["program", *words])
    engine = EngineSpec(
        name="nothing",
        title="nothing here",
        module="nothing",
        releases=EngineReleases("nothing here", "no_such_package", (), ((1,),), {}, ()),
        rules=(
            Rule("--enable-it", (), "it moves"),
            Rule("--data-parallel-size", (), "no replicas"),
            Rule("--pipeline-parallel-size", (), "no stages"),
        ),
        server=NeverStarted(),
    )
    assert launch(engine, None) == 2
    *slow, said = capsys.readouterr().err.splitlines()
    assert said.startswith("engine a: ")
    assert reason in said
    assert all(line.partition("its ranks capture")[1] for line in slow)


def test_wait_for_a_server_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses connections at first, and later leaves them without an answer."""
    monkeypatch.setattr(launch_module, "REACH_DEADLINE_S", 2.0)
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        address = server.getsockname()

        def stop_answering() -> None:
            server.listen(0)
            for _ in range(4):
                client = opened.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(address)

        timer = threading.Timer(1.0, stop_answering)
        timer.start()
        began_s = time.monotonic()
        with pytest.raises(PeerUnreachable, match="timed out"):
            wait_for_server(*address)
        seconds = time.monotonic() - began_s
        timer.join()
    assert seconds < 2.8, "no attempt outlasts the deadline"


def test_a_server_does_not_start_on_the_port_of_another() -> None:
    # vLLM's servers listen with this option, so two of them can have one port.
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        args = arguments("program", None).parse_args(
            ["--name", "a", "--model", "/m", "--host", "127.0.0.1", "--port", port]
        )
        with pytest.raises(ConfigError, match=rf"--port must be free.* port {port} .*in use"):
            serve(args, ServerCommand(("false",)), ready_line="never")


@pytest.mark.parametrize("word", ["--enable-it", "--enable_it", "--enable-it=1"])
def test_a_refused_option_is_found_in_every_spelling(word: str) -> None:
    with pytest.raises(ConfigError, match="--enable-it must not be given: it moves"):
        refuse_options(["--other", word], [Rule("--enable-it", (), "it moves")])


@pytest.mark.parametrize("network", ["nixl", '{"type": "mooncake", "host": "192.0.2.1"}'])
def test_expandable_segments_are_refused_with_a_nic_only(
    monkeypatch: pytest.MonkeyPatch, network: str
) -> None:
    refuse_expandable_segments(network)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for transport in ("auto", "cuda_ipc", "pull", "cma", '{"type": "pull"}'):
        refuse_expandable_segments(transport)
    with pytest.raises(ConfigError, match=r"cannot be registered with a NIC, .* use cuda_ipc or"):
        refuse_expandable_segments(network)


def layout(buffer_nbytes: int, *recomputed: str) -> CapturedLayout:
    return CapturedLayout(unplaced=(), recomputed=recomputed, buffer_nbytes=buffer_nbytes)


def test_a_launcher_prints_the_cost_of_buffers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_layouts("a", [layout(0), layout(0)])
    assert capsys.readouterr().err == ""
    check_layouts("a", [layout(0), layout(96, "A", "D")])
    said = capsys.readouterr().err
    assert "engine a: updates need buffers of 96 bytes per rank; " in said
    assert " computes 2 tensors per rank again" in said


SIGNALLED_AT_ITS_START = """
import os, signal, subprocess, sys, threading, time
from windlass.engines.launch import arguments, serve
from windlass.engines.spec import ServerCommand

start = subprocess.Popen

def started(*args, **options):
    server = start(*args, **options)
    print(server.pid, flush=True)
    SEND
    return server

def callers_of(frame):
    return [] if frame is None else [frame.f_code.co_name, *callers_of(frame.f_back)]

def to_another_thread():
    main = threading.main_thread().ident
    while callers_of(sys._current_frames()[main])[:2] != ["wait", "wait"]:
        pass
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

subprocess.Popen = started
args = arguments("program", None).parse_args(["--name", "a", "--model", "/m", "--port", "1"])
command = ServerCommand((sys.executable, "-c", "import signal; signal.pause()"))
serve(args, command, ready_line="never")
"""


@pytest.mark.parametrize(
    "send",
    [
        "os.kill(os.getpid(), signal.SIGTERM)",
        "threading.Thread(target=to_another_thread, daemon=True).start()",
    ],
    ids=["at once", "to a thread that is not the one that waits"],
)
def test_a_launcher_ended_during_the_start_of_its_server_ends_the_server(send: str) -> None:
    command = (sys.executable, "-c", SIGNALLED_AT_ITS_START.replace("SEND", send))
    said = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=False).stdout
    server = int(said)
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)
        pytest.fail("the server outlives its launcher")


GOING_ON_WITHOUT_A_LOG = (
    "import os, sys, time; os.close(1); os.close(2); time.sleep(0.5); sys.exit(3)"
)


def test_a_launcher_does_not_take_the_end_of_a_log_for_a_ready_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check a server right after a kill: its log has ended, and its exit status is not known yet."""
    monkeypatch.setattr("windlass.engines.launch.REACH_DEADLINE_S", 0.0)
    args = arguments("program", None).parse_args(["--name", "a", "--model", "/m", "--port", "1"])
    args.host = args.advertise_host = "127.0.0.1"
    command = ServerCommand((sys.executable, "-c", GOING_ON_WITHOUT_A_LOG))
    assert serve(args, command, ready_line="never") == 3
    began, ended = capsys.readouterr().err.splitlines()
    part = "its server starts and loads its model"
    assert began == f"engine a: {part} (at most 3600 s)"
    assert ended.startswith(f"engine a: gave up: {part}: ")


SGLANG = ENGINES.find("sglang")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tp", "3", "--nnodes", "2"], "--nnodes must give each .* 2 for --tp 3 --pp 1"),
        (["--tp", "2", "--pp", "3", "--nnodes", "2"], "--nnodes must give each node whole"),
        (["--tp", "2", "--pp", "2", "--nnodes", "3"], "--nnodes must give each node whole"),
        (["--dp", "2", "--nnodes", "2"], "--dp must be 1 with --nnodes 2, got 2: all replicas"),
        (["--tp", "2", "--nnodes", "2", "--node-rank", "2"], r"must be in \[0, 2\), got 2"),
    ],
)
def test_numbers_of_nodes_that_do_not_fit_an_engine_are_refused(
    words: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        checked_arguments(SGLANG, ["--name", "a", "--model", "/m", *words])


def test_groups_of_data_parallel_attention_may_be_on_several_nodes() -> None:
    words = ["--tp", "4", "--dp", "4", "--enable-dp-attention", "--nnodes", "2"]
    assert checked_arguments(SGLANG, ["--name", "a", "--model", "/m", *words]).dp == 4


@pytest.mark.parametrize(("tp", "pp", "nodes"), [(16, 1, 2), (2, 2, 4), (1, 4, 2), (8, 3, 3)])
def test_an_engine_puts_whole_stages_on_nodes_or_whole_nodes_in_stages(
    tp: int, pp: int, nodes: int
) -> None:
    words = ["--tp", str(tp), "--pp", str(pp), "--nnodes", str(nodes)]
    assert checked_arguments(SGLANG, ["--name", "a", "--model", "/m", *words]).nnodes == nodes


def started(
    monkeypatch: pytest.MonkeyPatch, *words: str, engine: EngineSpec = SGLANG
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a server's part, with the token and the host that the part gets."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def serve(args: argparse.Namespace, command: ServerCommand, **_: object) -> int:
        assert command.environment["WINDLASS_CONTROLLER"] == "wait"
        file = Path(command.environment["WINDLASS_TOKEN_FILE"])
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o077 == 0
        found.append(([*command.argv], {"token": file.read_text(), "host": args.advertise_host}))
        return 0

    monkeypatch.setattr("windlass.engines.launch.serve", serve)
    monkeypatch.setattr("windlass.engines.launch.check_installed", lambda _: [])
    common = ["--name", "a", "--model", "/m", "--port", "8000", "--tp", "4", "--nnodes", "2"]
    common += ["--controller", "http://10.0.0.1:8000"]
    monkeypatch.setattr("sys.argv", ["program", *common, *words])
    assert launch(engine, None) == (0 if found else 2)
    return found[0] if found else ([], {})


def test_vllm_without_the_plugin_is_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = arguments("program", None).parse_args(["--name", "a", "--model", str(tmp_path)])
    monkeypatch.setenv("VLLM_PLUGINS", "another,one")
    with pytest.raises(ConfigError, match="VLLM_PLUGINS must contain windlass, got 'another,one'"):
        VllmServer().command(args, ())
    monkeypatch.setenv("VLLM_PLUGINS", "another,windlass")
    VllmServer().command(args, ())
    monkeypatch.setattr("windlass.engines.vllm.spec.entry_points", lambda **_: ())
    with pytest.raises(ConfigError, match=r"vllm\.general_plugins has no entry point windlass"):
        VllmServer().command(args, ())


def test_server_without_a_controller_has_a_token_that_nobody_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(envs, "removed_secrets", {})
    monkeypatch.delenv("WINDLASS_TOKEN")
    args = arguments("program", None).parse_args(["--name", "a", "--model", "/m"])
    tokens = set()
    for _ in range(2):
        with server_environment(args) as given:
            tokens.add(Path(given["WINDLASS_TOKEN_FILE"]).read_text())
    assert {len(token) for token in tokens} == {64}
    assert len(tokens) == 2


def test_parts_of_a_server_meet_at_the_first_node_with_the_token_in_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WINDLASS_FIRST_NODE", "10.0.0.7")
    for node in ("0", "1"):
        argv, told = started(monkeypatch, "--host", "10.0.0.7", "--node-rank", node)
        options = dict(options_of(argv))
        assert (options["--nnodes"], options["--node-rank"]) == ("2", node)
        assert (options["--dist-init-addr"], options["--tp-size"]) == ("10.0.0.7:8001", "4")
        assert (options["--port"] == "8000") is (node == "0")
        assert told["token"] == "secret of the test"
    argv, _ = started(monkeypatch, "--host", "10.0.0.7", "--dist-init-addr", "10.0.0.7:5000")
    assert dict(options_of(argv))["--dist-init-addr"] == "10.0.0.7:5000"


def test_a_launched_vllm_that_joins_must_have_windlass_backend(tmp_path: Path) -> None:
    words = ["--name", "a", "--model", str(tmp_path), "--controller", "http://10.0.0.1:8000"]
    args = arguments("program", None).parse_args(words)
    own = ("--weight-transfer-config", '{"backend": "ipc"}')
    with pytest.raises(
        ConfigError, match=r'must name the backend windlass .* "ipc"}; leave it out'
    ):
        VllmServer().command(args, own)
    args.controller = ""
    assert VllmServer().command(args, own).argv[-2:] == own


def test_only_the_first_part_of_a_vllm_server_has_routes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WINDLASS_FIRST_NODE", "10.0.0.7")
    vllm = ENGINES.find("vllm")
    for node in ("0", "1"):
        argv, _ = started(monkeypatch, "--host", "10.0.0.7", "--node-rank", node, engine=vllm)
        options = dict(options_of(argv))
        assert (options["--nnodes"], options["--node-rank"]) == ("2", node)
        assert (options["--master-addr"], options["--master-port"]) == ("10.0.0.7", "8001")
        assert argv[2].endswith("headless") is (node == "1") is ("--port" not in argv)
        assert options["--weight-transfer-config"] == '{"backend": "windlass"}'
    with pytest.raises(
        ConfigError, match="-n must not be given: use --nnodes, --node-rank and --dist"
    ):
        checked_arguments(vllm, ["--name", "a", "--model", "/m", "-n", "2"])


@pytest.mark.parametrize(
    ("first", "words", "says"),
    [
        ("", (), "--dist-init-addr must be HOST:PORT of the first node, got none"),
        (
            "10.0.0.7",
            ("--host", "127.0.0.1"),
            "--host must be an address that the other nodes reach, got '127.0.0.1'",
        ),
    ],
)
def test_a_part_of_a_server_that_other_parts_cannot_reach_is_not_started(
    first: str,
    words: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WINDLASS_FIRST_NODE", first)
    assert started(monkeypatch, *words) == ([], {})
    assert says in capsys.readouterr().err
