"""Start a third-party engine server, wait until it serves, and order it to join the fleet.

A user could start the same server without the launcher: Windlass's plugin in the server waits for the order
(`WINDLASS_CONTROLLER=wait`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import secrets as random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from types import FrameType

import msgspec

from windlass.control.engine_channel import report_cannot_join
from windlass.engines.http import LONGEST_ANSWER
from windlass.engines.join_route import JOIN_PATH, JoinOrder
from windlass.engines.member import WAIT
from windlass.engines.options import refuse_options
from windlass.engines.private_routes import KEY_HEADER, remove_key, saved_key
from windlass.engines.spec import (
    JOIN_BYTES_PER_S,
    JOIN_S,
    EngineSpec,
    ServerCommand,
    join_deadline_s,
    refuse_expandable_segments,
)
from windlass.engines.versions import check_installed
from windlass.envs import (
    CONTROLLER_VARIABLE,
    FIRST_NODE_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    control_token,
    environment_value,
    has_certificate,
    inherited_environment,
    secret_value,
)
from windlass.errors import (
    ConfigError,
    EngineRefused,
    PeerTimeout,
    PeerUnreachable,
    WindlassError,
)
from windlass.net.addresses import (
    check_url,
    is_loopback,
    is_this_host,
    join_host_port,
    listen,
    own_address,
    published_host,
    split_host_port,
    url_of,
)
from windlass.net.blocking_http import BlockingHttp
from windlass.net.clock import Backoff
from windlass.progress import Progress
from windlass.transports.registry import transport_name

REACH_DEADLINE_S = 30.0
"""Seconds within which a server must accept connections after its ready line."""
LOG_DEADLINE_S = 5.0
"""Seconds that the launcher waits for the server's last log lines after the server has ended."""
ANSWER_S = 60.0
"""Seconds that the launcher waits for a server's answer after the deadlines of the join."""
_PARALLEL = (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"))
"""Short and long names of the options of parallel sizes. An engine has tp x pp x dp ranks."""


def exit_at_signal(number: int, _frame: FrameType | None) -> None:
    """Handle a signal: raise SystemExit with status 128 + `number`, as a shell reports it."""
    sys.exit(128 + number)


def _end_signals() -> int:
    """Return a file descriptor that becomes readable at the next SIGTERM or SIGINT. Call this in the main thread.

    Python runs signal handlers only in the main thread, and a main thread that waits for a lock may never run them. But
    CPython's own C handler runs at once. `signal.set_wakeup_fd` makes this C handler write to a pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    return reader


def launch(engine: EngineSpec, description: str | None) -> int:
    """Check the command line of a third-party engine, then start its server, or order a running server to join.

    If the engine's installed release lacks a required feature, print an error. If it lacks an optional feature, print
    a warning.

    Args:
        engine: engine with `releases` and a `server`.
        description: text for `--help`.

    Returns:
        The exit status of the server; 0 if a running server has joined (`--attach`). After a `WindlassError` it is 2, and
        stderr has one line with the error.
    """
    args, rest = arguments(engine.module, description).parse_known_args()
    try:
        if engine.server is None or engine.releases is None:
            raise ConfigError(
                f"engine {engine.name!r} must have `server` and `releases`, got None for one or both"
            )
        _check_options(engine, args, rest)
        refuse_expandable_segments(args.transport)
        args.host = args.host or own_address(args.controller)
        what = f"engine {args.name}"
        args.advertise_host = published_host(args.host, args.advertise_host, what)
        if args.attach:
            return attach_running(args)
        if not args.port:
            raise ConfigError(f"--port must be > 0 without --attach, got {args.port}")
        for warning in check_installed(engine.releases):
            sys.stderr.write(f"engine {args.name}: {warning}\n")
        if args.nnodes > 1:
            _set_rendezvous_address(args)
        command = engine.server.command(args, rest)
        with server_environment(args) as given:
            command = ServerCommand(command.argv, {**command.environment, **given})
            return serve(args, command, ready_line=engine.server.ready_line)
    except WindlassError as error:
        sys.stderr.write(f"engine {args.name}: {type(error).__name__}: {error}\n")
        return 2


def _set_rendezvous_address(args: argparse.Namespace) -> None:
    """Set `args.dist_init_addr`, the rendezvous address of torch.distributed on the server's first node.

    Raises:
        ConfigError: the address of the first node is unknown. Or other nodes cannot reach the server, because the
            advertised host is a loopback address and the rendezvous address is not.
    """
    if not args.dist_init_addr:
        if not (first := environment_value(FIRST_NODE_VARIABLE)):
            raise ConfigError("--dist-init-addr must be HOST:PORT of the first node, got none")
        args.dist_init_addr = join_host_port(first, args.port + 1)
    first, _ = split_host_port(args.dist_init_addr)
    if is_loopback(args.advertise_host) and not is_loopback(first):
        raise ConfigError(
            f"--host must be an address that the other nodes reach, got {args.advertise_host!r}"
        )


@contextlib.contextmanager
def server_environment(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield environment variables for the server: they make the server's plugin wait for an order to join.

    The server gets the token of this process. If this process has a certificate but no token, the server gets no token.
    If this process has neither, the server gets a random token. The token is in a file that only this user can read.
    The file exists only inside the block.

    Raises:
        ConfigError: a controller is given but no token, or the server has several nodes but no token.
    """
    token = control_token() if args.controller else secret_value(TOKEN_VARIABLE)
    if args.nnodes > 1 and not token:
        raise ConfigError(
            f"--nnodes must be 1 without a token, got {args.nnodes}: ranks on other nodes authenticate with the "
            "token"
        )
    waits = {CONTROLLER_VARIABLE: WAIT}
    if not token and has_certificate():
        yield waits
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "token"
        file.touch(0o600)
        file.write_text(token or random.token_hex(32))
        yield {**waits, TOKEN_FILE_VARIABLE: str(file)}


def _check_options(engine: EngineSpec, args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Check that a server with these options can start and get updates.

    Raises:
        ConfigError: the numbers of ranks and nodes do not match, or the engine's rules refuse an option.
    """
    refuse_options([*rest, *_own_words(args)], engine.rules, transport_name(args.transport))
    if not 0 <= args.node_rank < args.nnodes:
        raise ConfigError(f"--node-rank must be in [0, {args.nnodes}), got {args.node_rank}")
    if args.nnodes == 1:
        return
    if not engine.spans_nodes:
        raise ConfigError(f"--nnodes must be 1 for {engine.title}, got {args.nnodes}")
    if engine.num_replicas(args.dp, rest) > 1:
        raise ConfigError(
            f"--dp must be 1 with --nnodes {args.nnodes}, got {args.dp}: all replicas of a server run on one host"
        )
    # Either each node runs whole pipeline stages, or each stage runs on its own nodes with equal numbers of ranks.
    per_stage = args.nnodes // args.pp
    if args.pp % args.nnodes and (args.nnodes % args.pp or args.tp % per_stage):
        raise ConfigError(
            f"--nnodes must give each node whole pipeline stages, or each stage its own whole nodes, "
            f"got --nnodes {args.nnodes} for --tp {args.tp} --pp {args.pp}"
        )


def _own_words(args: argparse.Namespace) -> list[str]:
    """Check the numbers in `args`. Return, as command-line words, the options that an engine's rules may refuse.

    Raises:
        ConfigError: a number of ranks or nodes is below 1, or the join deadline is not finite and above 0.
    """
    for name in ("tp", "pp", "dp", "nnodes"):
        if vars(args)[name] < 1:
            raise ConfigError(f"--{name} must be 1 or more, got {vars(args)[name]}")
    if args.join_deadline_s is not None and not 0 < args.join_deadline_s < float("inf"):
        raise ConfigError(
            f"--join-deadline-s must be finite and above 0, got {args.join_deadline_s}"
        )
    return [
        *(["--adapter"] if args.adapter else []),
        *(["--pipeline-parallel-size"] if args.pp > 1 else []),
        *(["--data-parallel-size"] if args.dp > 1 else []),
        *(["--nnodes", str(args.nnodes)] if args.nnodes > 1 else []),
    ]


def arguments(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for the options of every engine. The caller passes unknown options to the engine's server."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--name", required=True, help="identity in the fleet")
    parser.add_argument("--model", required=True, help="checkpoint folder (safetensors)")
    parser.add_argument(
        "--adapter",
        default="",
        metavar="NAME=FOLDER",
        help="serve this one LoRA adapter (a folder that PEFT saved) too, and update it instead of "
        "the model",
    )
    parser.add_argument(
        "--controller",
        default="",
        help="address of the controller; without a controller, the server keeps the weights that it loaded",
    )
    parser.add_argument("--transport", default="auto")
    for short, name in _PARALLEL:
        spelt = (f"--{short}", f"-{short}", f"--{short}-size")
        # vLLM and SGLang use these long names.
        theirs = (f"--{name}-parallel-size", f"--{name}_parallel_size")
        help_ = f"{name}-parallel size"
        parser.add_argument(*spelt, *theirs, type=int, default=1, help=help_)
    parser.add_argument("--nnodes", type=int, default=1, help="number of nodes of the engine")
    parser.add_argument(
        "--node-rank", type=int, default=0, help="index of this node; node 0 serves requests"
    )
    parser.add_argument(
        "--dist-init-addr",
        default="",
        metavar="HOST:PORT",
        help="rendezvous address on the first node; by default the first node's address from the job scheduler, and "
        "the port after --port",
    )
    parser.add_argument("--host", default="", help="address to bind; see docs/hosts.md")
    parser.add_argument("--advertise-host", default="", help="host that clients connect to")
    parser.add_argument("--port", type=int, default=0, help="port of the engine's server")
    parser.add_argument(
        "--start-deadline-s",
        type=float,
        default=3600.0,
        help="seconds for the engine's server to load its model and serve",
    )
    parser.add_argument(
        "--join-deadline-s",
        type=float,
        help="seconds for the engine's ranks to capture their layouts, and as many to join the fleet; by default, each of the two "
        f"gets {JOIN_S:.0f} seconds, and one second more for each {JOIN_BYTES_PER_S // 10**6} MB of the checkpoint",
    )
    parser.add_argument(
        "--attach",
        default="",
        metavar="URL",
        help="do not start a server; order the server at URL (on this host, started by this program with the same name "
        "and model) to join another controller, after the server's previous controller has ended",
    )
    return parser


def checked_arguments(engine: EngineSpec, words: Sequence[str]) -> argparse.Namespace:
    """Parse an engine's command line, check the options, and return them.

    Args:
        engine: engine with a `server`.
        words: words of the command line after the module's name.

    Raises:
        ConfigError: the words are invalid, or the engine's rules refuse them.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args, rest = arguments(engine.module, None).parse_known_args(words)
    except SystemExit:
        raise ConfigError(said.getvalue().strip().rpartition("error: ")[2]) from None
    _check_options(engine, args, rest)
    return args


def attach_running(args: argparse.Namespace) -> int:
    """Order the running server of `--attach` to join a fleet, and print one JSON line.

    A rank that has already joined a fleet reuses its captured layout. A rank that never joined a fleet captures its
    layout now, so it must still have the weights of the checkpoint. If this process ends before the server answers, the
    server still carries out the order.

    Returns:
        Always 0, the exit status.

    Raises:
        ConfigError: no controller is given, the server does not run on this host, or the server saved no key on this host.
        EngineRefused: the server did not join; the message has the server's reason.
        PeerUnreachable, PeerTimeout: the server did not answer.
        SystemExit: SIGTERM or SIGINT arrived.
    """
    if not args.controller:
        raise ConfigError("--attach: --controller must be given")
    check_url(args.attach, "--attach")
    # Keys are saved by port, so a server on another host would get the key of a server on this host, and the token.
    if not is_this_host(args.attach):
        raise ConfigError(f"--attach must be the URL of a server on this host, got {args.attach}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exit_at_signal)
    try:
        with _progress_of(args).part("its ranks capture their layouts and join the fleet"):
            _order_join(args, args.attach, args.attach, control_token())
    except WindlassError as error:
        _report_cannot_join(args, f"{type(error).__name__}: {error}")
        raise
    _say_joined(args, args.attach)
    return 0


def _order_join(args: argparse.Namespace, server: str, url: str, token: str = "") -> None:
    """Order a server to join the fleet of `--controller`. Blocks.

    Args:
        args: options from `arguments`.
        server: address at which this process reaches the server.
        url: address at which peers reach the server.
        token: token for the controller; empty if the server has it.

    Raises:
        ConfigError: the server has no key on this host; nothing was sent.
        EngineRefused: the server did not join; the message has the server's reason.
        PeerUnreachable: the server does not answer.
        PeerTimeout: the server did not answer within the deadlines for the capture and the join.
    """
    key = saved_key(server)
    if not key:
        raise ConfigError(
            f"{server} must be a server of this user on this host, with Windlass's plugin and "
            f"{CONTROLLER_VARIABLE} in its environment, but this host has no key of the server"
        )
    deadline_s = args.join_deadline_s or join_deadline_s(Path(args.model))
    order = JoinOrder(
        controller=args.controller,
        transport=args.transport,
        token=token,
        name=args.name,
        url=url,
        serves_own_weights=False,
        deadline_s=deadline_s,
        model=str(Path(args.model).resolve()),
    )
    with BlockingHttp(server, {KEY_HEADER: key}, to_controller=False) as http:
        # The capture of the ranks and the join of the ranks have one deadline each.
        answer_s = 2 * deadline_s + ANSWER_S
        reply = http.ask("POST", JOIN_PATH, msgspec.json.encode(order), deadline_s=answer_s)
    if reply.status == HTTPStatus.OK:
        return
    try:
        reason = msgspec.json.decode(reply.body, type=dict[str, str])["error"]
    except (msgspec.MsgspecError, KeyError):
        reason = f"POST {server}{JOIN_PATH}: {reply.status} {reply.text(LONGEST_ANSWER)}"
    raise EngineRefused(reason)


def serve(
    args: argparse.Namespace,
    command: ServerCommand,
    *,
    ready_line: str,
    task: Callable[[str], None] | None = None,
) -> int:
    """Run an engine's server until it ends. On the first node, order all ranks to join, and then print one JSON line.

    Args:
        args: options from `arguments`, with all addresses; the server listens on `args.port`.
        command: command of the engine's own server.
        ready_line: text that the server logs when it is ready.
        task: called with the URL of the ready server, instead of an order to join. The server is killed when `task`
            returns.

    Returns:
        The exit status of the server, or 2 if the server did not become ready or a rank failed to join. If `task`
        returned and the server was killed, the status is 0.

    Raises:
        ConfigError: another server listens on the port. vLLM would share the port with that server (SO_REUSEPORT), and
            the order to join could reach that server.
    """
    if not args.node_rank:
        listen(args.host, args.port, "--port must be free").close()
    signals = _end_signals()
    server = subprocess.Popen(
        list(command.argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**inherited_environment(), **command.environment},
        start_new_session=True,
    )
    ready, status, is_done = threading.Event(), 0, False

    def watch_signals() -> None:
        os.read(signals, 1)
        _kill(server.pid)

    def watch_log() -> None:
        """Copy the server's log to stderr."""
        for line in server.stdout or ():
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            if ready_line.encode() in line:
                ready.set()

    def watch_server() -> None:
        """Set `ready` when the server has exited, so that the main thread does not wait for a ready line."""
        server.wait()
        ready.set()

    threading.Thread(target=watch_signals, name="signals", daemon=True).start()
    log = threading.Thread(target=watch_log, name="log", daemon=True)
    log.start()
    threading.Thread(target=watch_server, name="end", daemon=True).start()
    try:
        if args.node_rank:
            # The launcher on the first node orders all ranks to join.
            server.wait()
        else:
            _wait_and_order_join(args, server, ready, ready_line, task)
            if task is not None and server.poll() is None:
                is_done = True
                _kill(server.pid)
    except WindlassError as error:
        sys.stderr.write(f"engine {args.name}: {type(error).__name__}: {error}\n")
        status = 2
        _kill(server.pid)
        _report_cannot_join(args, f"{type(error).__name__}: {error}")
    finally:
        code = server.wait()
        # Kill child processes that outlive the server.
        _kill(server.pid)
        # A killed server does not delete its key.
        if not args.node_rank:
            remove_key(args.port)
        # A child process that has left the process group survives and keeps the log's pipe open. So wait with a
        # deadline.
        log.join(LOG_DEADLINE_S)
    return status or (0 if is_done else code)


def _wait_and_order_join(
    args: argparse.Namespace,
    server: subprocess.Popen[bytes],
    ready: threading.Event,
    ready_line: str,
    task: Callable[[str], None] | None = None,
) -> None:
    """Wait until a server serves, order the server to join, and print one JSON line.

    If there is a `task`, call the task with the server's URL instead of ordering the join. If the server ends before it
    serves, report this to the controller and return. `ready` is set when the server has logged `ready_line`, or has
    ended.

    Raises:
        PeerTimeout: the server is not ready within its start deadline, or did not answer the order in time.
        ConfigError, EngineRefused, PeerUnreachable: the server did not join; see `_order_join`.
    """
    progress = _progress_of(args)
    progress.begin("its server starts and loads its model", args.start_deadline_s)
    try:
        if not ready.wait(args.start_deadline_s):
            raise PeerTimeout(
                f"the server did not log {ready_line!r} within {args.start_deadline_s} s"
            )
        if server.poll() is not None:
            _report_cannot_join(
                args,
                f"the server ended with status {server.returncode} before it accepted requests",
            )
            return
        wait_for_server(args.host, args.port)
        progress.end()
        if task is not None:
            task(url_of(args.host, args.port))
            return
        url = url_of(args.advertise_host, args.port)
        if args.controller:
            _order_join(args, url_of(args.host, args.port), url)
        _say_joined(args, url)
    finally:
        progress.end(done=False)


def _progress_of(args: argparse.Namespace) -> Progress:
    """Return a `Progress` that writes to stderr which part of the engine's start runs, and for how long."""
    return Progress(lambda line: sys.stderr.write(f"engine {args.name}: {line}\n"))


def _say_joined(args: argparse.Namespace, url: str) -> None:
    """Print one JSON line with the engine's name and address. It tells the parent process that the engine has joined."""
    os.write(1, msgspec.json.encode({"name": args.name, "url": url}) + b"\n")


def _report_cannot_join(args: argparse.Namespace, reason: str) -> None:
    """Report to the controller why this engine does not join. The controller then stops waiting for the engine."""
    with contextlib.suppress(WindlassError):
        if args.controller:
            report_cannot_join(args.controller, control_token(), args.name, reason)


def wait_for_server(host: str, port: int) -> None:
    """Wait until the server accepts connections. The server logs its ready line shortly before it accepts connections.

    Raises:
        PeerUnreachable: the server accepted no connection within `REACH_DEADLINE_S`.
    """
    end_s, pauses = time.monotonic() + REACH_DEADLINE_S, Backoff(0.05, 1.0).pauses()
    while True:
        try:
            left_s = max(end_s - time.monotonic(), 0.01)
            socket.create_connection((host, port), timeout=left_s).close()
        except OSError as error:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise PeerUnreachable(
                    f"engine server {host}:{port} accepted no connection within {REACH_DEADLINE_S} s: {error}"
                ) from error
            threading.Event().wait(min(next(pauses), left_s))
        else:
            return


def _kill(group: int) -> None:
    """Kill a process group. Do nothing if all of its processes have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
