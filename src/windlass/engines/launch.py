"""Start somebody else's engine server, wait until it serves, and bring its ranks into the fleet."""

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
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from windlass.engines.adapters import adapter_of
from windlass.engines.private_routes import environment_of, new_key, saved_key
from windlass.engines.rank_reports import OTHER_NODES_VARIABLE, Secrets, join_fleet
from windlass.engines.spec import (
    AgentSettings,
    EngineSpec,
    ServerCommand,
    options_of,
    refuse_expandable_segments,
    refuse_options,
)
from windlass.engines.versions import check_installed
from windlass.envs import (
    FIRST_NODE_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    control_token,
    environment_value,
    inherited_environment,
    secret_value,
)
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, WindlassError
from windlass.net.addresses import (
    check_url,
    is_loopback,
    join_host_port,
    own_address,
    published_host,
    split_host_port,
    url_of,
)
from windlass.observability.progress import Progress
from windlass.updates.engine_channel import report_cannot_join

REACH_DEADLINE_S = 30.0
JOIN_S, JOIN_BYTES_PER_S = 600.0, 100_000_000
LOG_DEADLINE_S = 5.0
_PARALLEL = (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"))
"""Sizes of which the ranks of an engine are the product."""

Join = Callable[[AgentSettings], None]
"""Makes every rank of the running server join; raises a `WindlassError` when one cannot."""


def exit_at_signal(number: int, _frame: FrameType | None) -> None:
    """Handle a signal: leave the main thread by SystemExit, with a shell's status for it."""
    sys.exit(128 + number)


def _end_signals() -> int:
    """Return a file from which a byte can be read at the first SIGTERM or SIGINT from now on.

    Called in the main thread. Handlers written in Python run in that thread, which does not notice a signal that
    another thread was given, or that came between its last look and its wait for a lock: there it may wait
    for ever. The handler in C writes to a pipe, whatever the thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    return reader


def launch(engine: EngineSpec, description: str | None) -> int:
    """Check the command line of an engine with a server of its own, then start or attach it.

    A release that cannot be updated is refused, and what one lacks is told.

    Args:
        engine: with `releases` and a `server`.
        description: for `--help`.

    Returns:
        The exit status; 2, and one line on stderr, for whatever a `WindlassError` says.
    """
    args, rest = arguments(engine.module, description).parse_known_args()
    try:
        if engine.server is None or engine.releases is None:
            raise ConfigError(
                f"engine {engine.name!r} must have a server and releases, it has none"
            )
        _check(engine, args, rest)
        refuse_expandable_segments()
        args.host = args.host or own_address(args.controller)
        what = f"engine {args.name}"
        args.advertise_host = published_host(args.host, args.advertise_host, what)
        if args.attach:
            check_url(args.attach, "--attach")
            secrets = _secrets(args.controller, rest, saved_key(args.attach))
            join = partial(join_fleet, engine.server, secrets=secrets)
            return attach_running(args, join, secrets.token)
        if not args.port:
            raise ConfigError("--port must be given, or --attach")
        for warning in check_installed(engine.releases):
            sys.stderr.write(f"engine {args.name}: {warning}\n")
        if args.nnodes > 1:
            _meet(args)
        command = engine.server.command(args, rest)
        # On the other nodes nothing is served that a key could open.
        key_of = (
            contextlib.nullcontext(random.token_hex(32)) if args.node_rank else new_key(args.port)
        )
        with key_of as key:
            secrets = _secrets(args.controller, rest, key)
            join = partial(join_fleet, engine.server, secrets=secrets)
            ready_line = engine.server.ready_line
            with _told_token(args, secrets.token) as told:
                command = ServerCommand(command.argv, {**command.environment, **told})
                return serve(args, command, ready_line=ready_line, join=join, secrets=secrets)
    except WindlassError as error:
        sys.stderr.write(f"engine {args.name}: {type(error).__name__}: {error}\n")
        return 2


def _secrets(controller: str, rest: Sequence[str], key: str) -> Secrets:
    """Return what this process has to show others, of which no child inherits anything.

    Raises:
        ConfigError: there is a controller and no token.
    """
    token = control_token() if controller else secret_value(TOKEN_VARIABLE)
    options = dict(options_of(rest))
    api_key = options.get("--api-key") or environment_value("VLLM_API_KEY")
    return Secrets(token, key, api_key, options.get("--admin-api-key", ""))


def _meet(args: argparse.Namespace) -> None:
    """Find where the nodes of a server meet, as `dist_init_addr`, and check that the others reach the first.

    Raises:
        ConfigError: no place is known, or it is on another host than what others are told of the server.
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
def _told_token(args: argparse.Namespace, token: str) -> Iterator[dict[str, str]]:
    """Have a part of a server over several nodes find the token, in a file of this user's alone.

    Ranks on other nodes than the first join by it, and prove to the server by it who they are.

    Raises:
        ConfigError: there is none.
    """
    if args.nnodes == 1:
        yield {}
        return
    if not token:
        raise ConfigError(
            f"--nnodes must be 1 without a token, by which ranks on other nodes prove who they are, "
            f"got {args.nnodes}"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "token"
        file.touch(0o600)
        file.write_text(token)
        nodes = {OTHER_NODES_VARIABLE: "1"} if args.node_rank else {}
        yield {TOKEN_FILE_VARIABLE: str(file), **nodes}


def _check(engine: EngineSpec, args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raise unless a server can be started so, and updated.

    Raises:
        ConfigError: numbers of ranks or of nodes that do not go together, or what the engine's rules refuse.
    """
    refuse_options([*rest, *_own_words(args)], engine.rules)
    if not 0 <= args.node_rank < args.nnodes:
        raise ConfigError(f"--node-rank must be in [0, {args.nnodes}), got {args.node_rank}")
    if args.nnodes == 1:
        return
    if not engine.spans_nodes:
        raise ConfigError(f"--nnodes must be 1 for {engine.title}, got {args.nnodes}")
    if args.dp > 1:
        raise ConfigError(
            f"--dp must be 1 with --nnodes {args.nnodes}, got {args.dp}: replicas of one server lie on one host"
        )
    # Whole stages on each node, or each stage on as many nodes.
    per_stage = args.nnodes // args.pp
    if args.pp % args.nnodes and (args.nnodes % args.pp or args.tp % per_stage):
        raise ConfigError(
            f"--nnodes must divide the stages, or the ranks of each stage between its own nodes, "
            f"got --nnodes {args.nnodes} for --tp {args.tp} --pp {args.pp}"
        )


def _own_words(args: argparse.Namespace) -> list[str]:
    """Return options that every engine has here, but that not every engine can be given.

    Raises:
        ConfigError: a number of ranks or nodes is none.
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
    """Return the options of every engine; what the parser does not know goes to the engine's own server."""
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
    parser.add_argument("--controller", default="", help="address; none serves what it loaded")
    parser.add_argument("--transport", default="auto")
    for short, name in _PARALLEL:
        spelt = (f"--{short}", f"-{short}", f"--{short}-size")
        theirs = (f"--{name}-parallel-size", f"--{name}_parallel_size")  # the engines' own
        help_ = f"{name}-parallel size"
        parser.add_argument(*spelt, *theirs, type=int, default=1, help=help_)
    parser.add_argument("--nnodes", type=int, default=1, help="that the ranks are spread over")
    parser.add_argument("--node-rank", type=int, default=0, help="of this node; 0 serves")
    parser.add_argument(
        "--dist-init-addr",
        default="",
        metavar="HOST:PORT",
        help="of the first node, where all nodes meet; by default the address that the scheduler says "
        "and the port after --port",
    )
    parser.add_argument("--host", default="", help="to bind; see docs/hosts.md")
    parser.add_argument("--advertise-host", default="", help="what others connect to")
    parser.add_argument("--port", type=int, default=0, help="of the engine's server")
    parser.add_argument(
        "--start-deadline-s",
        type=float,
        default=3600.0,
        help="for the engine's server to load its model and serve",
    )
    parser.add_argument(
        "--join-deadline-s",
        type=float,
        help="for the engine's ranks to capture their layouts, and again to join the fleet; by default "
        f"{JOIN_S:.0f}, and one more per {JOIN_BYTES_PER_S // 10**6} MB of the checkpoint",
    )
    parser.add_argument(
        "--attach",
        default="",
        metavar="URL",
        help="do not start a server: have the one at URL, which this program started with the same "
        "name and model, join another controller, once the one before has ended",
    )
    return parser


def checked_arguments(engine: EngineSpec, words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line that an engine is started with, which is checked as `launch` does.

    Args:
        engine: with a server of its own.
        words: what follows the module's name.

    Raises:
        ConfigError: words that no engine can be started with, or that the engine's rules refuse.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args, rest = arguments(engine.module, None).parse_known_args(words)
    except SystemExit:
        raise ConfigError(said.getvalue().strip().rpartition("error: ")[2]) from None
    _check(engine, args, rest)
    return args


def attach_running(args: argparse.Namespace, join: Join, token: str) -> int:
    """Have a server that runs join a fleet, for `--attach`; print one JSON line.

    The layout that it has captured is used again; one that has not joined a fleet captures it now,
    and must still hold its checkpoint.

    Returns:
        0.

    Raises:
        ConfigError: no controller is named. Besides, see `join_fleet`.
        SystemExit: SIGTERM or SIGINT; what was asked of the server has been brought to its end.
    """
    if not args.controller:
        raise ConfigError("--attach: --controller must be given")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exit_at_signal)
    try:
        join(_settings(args, args.attach))
    except WindlassError as error:
        _tell(args, token, f"{type(error).__name__}: {error}")
        raise
    _say_joined(args, args.attach)
    return 0


def _settings(args: argparse.Namespace, url: str, *, loaded: bool = True) -> AgentSettings:
    adapter = adapter_of(args.adapter)
    # Ranks may read a checkpoint from a slow disk, however large it is.
    nbytes = sum(file.stat().st_size for file in Path(args.model).glob("*.safetensors"))
    return AgentSettings(
        name=args.name,
        controller=args.controller,
        transport=args.transport,
        url=url,
        checkpoint=args.model if adapter is None else str(adapter.folder),
        world_size=args.tp * args.pp * args.dp,
        loaded=loaded or adapter is not None,  # an adapter is always read from its folder
        adapter="" if adapter is None else adapter.name,
        join_deadline_s=args.join_deadline_s or JOIN_S + nbytes / JOIN_BYTES_PER_S,
    )


def serve(
    args: argparse.Namespace,
    command: ServerCommand,
    *,
    ready_line: str,
    join: Join,
    secrets: Secrets,
) -> int:
    """Run `command` until it ends; print one JSON line once its ranks have joined, on the first node.

    Args:
        args: of `arguments`, with all addresses; `port` is that of the command.
        command: the engine's own server.
        ready_line: what the server logs when it serves.
        join: called once, if there is a controller.
        secrets: of which the server is told the hash of the key alone.

    Returns:
        The exit status of the server, or 2 when its ranks could not join.
    """
    signals = _end_signals()
    server = subprocess.Popen(
        list(command.argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**inherited_environment(), **environment_of(secrets.key), **command.environment},
        start_new_session=True,
    )
    ready, status = threading.Event(), 0

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
        """Its status is known then, which at its log's end it is not."""
        server.wait()
        ready.set()

    threading.Thread(target=watch_signals, name="signals", daemon=True).start()
    log = threading.Thread(target=watch_log, name="log", daemon=True)
    log.start()
    threading.Thread(target=watch_server, name="end", daemon=True).start()
    progress = Progress(
        " ".join((args.model, str(args.tp * args.pp * args.dp), ready_line)),
        lambda line: sys.stderr.write(f"engine {args.name}: {line}\n"),
    )
    if not args.node_rank:
        progress.begin("its server starts and loads its model", args.start_deadline_s)
    try:
        if args.node_rank:
            server.wait()  # the first node serves, and has all ranks join
        elif not ready.wait(args.start_deadline_s):
            raise PeerTimeout(
                f"its server has not logged {ready_line!r} after {args.start_deadline_s} s"
            )
        elif server.poll() is None:
            _reach(args.host, args.port)
            progress.end()
            url = url_of(args.advertise_host, args.port)
            if args.controller:
                loaded = dict(options_of(command.argv)).get("--load-format") != "dummy"
                join(_settings(args, url, loaded=loaded))
            _say_joined(args, url)
        else:
            reason = f"its server ended with status {server.returncode} before it served"
            _tell(args, secrets.token, reason)
    except WindlassError as error:
        sys.stderr.write(f"engine {args.name}: {type(error).__name__}: {error}\n")
        status = 2
        _kill(server.pid)
        _tell(args, secrets.token, f"{type(error).__name__}: {error}")
    finally:
        progress.end(done=False)
        code = server.wait()
        _kill(server.pid)  # what a dead leader left behind
        log.join(LOG_DEADLINE_S)  # a process that has left the group may hold the pipe open
    return status or code


def _say_joined(args: argparse.Namespace, url: str) -> None:
    os.write(1, msgspec.json.encode({"name": args.name, "url": url}) + b"\n")


def _tell(args: argparse.Namespace, token: str, reason: str) -> None:
    """Tell the controller why this engine does not join, so that nobody waits for its deadline."""
    with contextlib.suppress(WindlassError):
        if args.controller:
            report_cannot_join(args.controller, token, args.name, reason)


def _reach(host: str, port: int) -> None:
    """Wait until a server listens: it logs that it serves a moment before, and says nothing afterwards.

    Raises:
        PeerUnreachable: refused for `REACH_DEADLINE_S`.
    """
    end_s, backoff_s = time.monotonic() + REACH_DEADLINE_S, 0.05
    while True:
        try:
            socket.create_connection((host, port), timeout=REACH_DEADLINE_S).close()
        except OSError as error:
            if time.monotonic() > end_s:
                raise PeerUnreachable(f"engine server {host}:{port}: {error}") from error
            threading.Event().wait(backoff_s)
            backoff_s *= 2
        else:
            return


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
