"""Start an engine: `python -m windlass.engines.embedded --name a --model config.json --tp 2`.

The token is in the environment variable WINDLASS_TOKEN. This process is rank 0 and starts the other ranks as child
processes. If one rank ends, all ranks end: rank 0 waits for its children, and each child reads a pipe that rank 0
keeps open. When the engine is ready, rank 0 prints one JSON line with the engine's name and address.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from datetime import timedelta
from typing import NoReturn

import msgspec
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from windlass.backends.collective_group import Rendezvous
from windlass.engines.embedded.rank import run_rank
from windlass.engines.embedded.spec import EngineSettings, arguments, settings_of
from windlass.envs import control_token, inherited_environment
from windlass.errors import WindlassError
from windlass.net.addresses import own_address
from windlass.net.logs import configure_logging

STORE_DEADLINE_S = 300.0
IDLE_TIMEOUT = timedelta(days=30)
"""Timeout of collectives. It is long because ranks of an idle engine wait in a broadcast."""


def main() -> NoReturn:
    """Run rank 0 of an engine. With `--follow`, run another rank instead."""
    parser = arguments(__doc__)
    parser.add_argument("--follow", nargs=3, metavar=("RANK", "STORE_PORT", "SETTINGS"),
                        help=argparse.SUPPRESS)  # fmt: skip
    args = parser.parse_args()
    try:
        configure_logging(args.name)
        if args.follow is not None:
            _follow(int(args.follow[0]), int(args.follow[1]), args.follow[2])
        args.host = args.host or own_address(args.controller)
        _lead(settings_of(args))
    except WindlassError as error:
        sys.stderr.write(f"engine {args.name}: {type(error).__name__}: {error}\n")
        # `sys.exit` would wait for threads that the engine has already started.
        os._exit(2)


def _lead(settings: EngineSettings) -> NoReturn:
    """Start the other ranks as child processes, and run rank 0 until this process ends."""
    token = control_token()
    if settings.tensor_parallel_size > 1:
        rendezvous = Rendezvous("127.0.0.1", STORE_DEADLINE_S)
        for rank in range(1, settings.tensor_parallel_size):
            _start_follower(settings, rank, rendezvous.port)
        _meet(settings, 0, rendezvous.store)
    run_rank(settings, 0, token)


def _meet(settings: EngineSettings, rank: int, store: Store) -> None:
    """Create the default process group of all ranks. Collective."""
    size = settings.tensor_parallel_size
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=IDLE_TIMEOUT)


def _start_follower(settings: EngineSettings, rank: int, store_port: int) -> None:
    """Start another rank as a child process. End this process when the child process ends."""
    command = [
        *(sys.executable, "-m", "windlass.engines.embedded"),
        *("--name", settings.name, "--model", settings.model),
        *("--follow", str(rank), str(store_port), msgspec.json.encode(settings).decode()),
    ]
    environment = inherited_environment(with_tokens=True)
    follower = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)

    def watch() -> None:
        code = follower.wait()
        sys.stderr.write(f"engine {settings.name}: rank {rank} ended with {code}\n")
        os._exit(1)

    threading.Thread(target=watch, name=f"rank-{rank}", daemon=True).start()


def _follow(rank: int, store_port: int, encoded: str) -> NoReturn:
    """Run a rank other than 0 until rank 0 ends. `encoded` has the engine's settings as JSON."""
    settings, token = msgspec.json.decode(encoded, type=EngineSettings), control_token()

    def watch() -> None:
        # `read` returns when rank 0 has exited.
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, name="rank-0", daemon=True).start()
    store = TCPStore("127.0.0.1", store_port, settings.tensor_parallel_size, is_master=False)
    _meet(settings, rank, store)
    run_rank(settings, rank, token)


if __name__ == "__main__":
    main()
