"""Bring a running SGLang server into a fleet with no code of ours in its processes.

`python -m windlass.engines.sglang.table --url http://HOST:PORT --name a --model DIR --controller URL`,
with the interpreter of SGLang's environment, on the server's host and as its user. The server was
started with `--remote-instance-weight-loader-start-seed-via-transfer-engine`. Options after these
are appended to the server's own for the model that is built here. `--check` only looks, and prints
what it found. The token is read from WINDLASS_TOKEN.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from typing import final

import msgspec

from windlass.engines.launch import check_placed
from windlass.engines.sglang.releases import RELEASES
from windlass.engines.sglang.settings import server_info
from windlass.engines.sglang.table.routes import refuse_unsafe_server
from windlass.engines.sglang.table.wire import RankOrder, RankReport
from windlass.engines.signals import EndSignals
from windlass.engines.versions import installed_version
from windlass.envs import control_token
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, WindlassError
from windlass.net.addresses import free_port
from windlass.transports.mooncake.config import MooncakeConfig
from windlass.transports.registry import parse_transport

RANK = "windlass.engines.sglang.table.rank"
ANSWER_DEADLINE_S = 1800.0
"""To build a model and compare its layout; reads the checkpoint twice."""


def main() -> int:
    """Run until the server or this program is ended."""
    args, rest = _parser().parse_known_args()
    try:
        orders = _orders(args, rest)
    except WindlassError as error:
        return _refused(args.name, error)
    with _Ranks(orders) as ranks:
        try:
            reports = ranks.reports()
            check_placed(args.name, [report.unplaced for report in reports])
            if not args.check:
                ranks.join()
        except WindlassError as error:
            return _refused(args.name, error)
        found = {"name": args.name, "url": args.url, "ranks": reports}
        os.write(1, msgspec.json.encode(found) + b"\n")
        return 0 if args.check else ranks.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="windlass.engines.sglang.table", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--name", required=True, help="identity in the fleet")
    parser.add_argument("--url", required=True, help="of the running server")
    parser.add_argument("--model", required=True, help="folder with what the engine holds now")
    parser.add_argument("--controller", default="", help="address")
    parser.add_argument("--transport", default="mooncake", help="its settings, as JSON")
    parser.add_argument("--check", action="store_true", help="report whether it could join")
    return parser


def _orders(args: argparse.Namespace, rest: Sequence[str]) -> list[RankOrder]:
    config = parse_transport(args.transport)
    if not isinstance(config, MooncakeConfig):
        raise ConfigError(
            f"--transport must be mooncake, which SGLang's table is of, got {args.transport}"
        )
    if not args.check:
        if not args.controller:
            raise ConfigError("--controller must be given, or --check")
        control_token()  # fails here and not in a rank
    info = refuse_unsafe_server(server_info(args.url), _installed())
    dist_port = free_port()
    return [
        RankOrder(
            name=args.name,
            url=args.url,
            checkpoint=args.model,
            arguments=(*info.arguments(), "--model-path", args.model, *rest),
            rank=rank,
            world_size=info.tp_size,
            dist_port=dist_port,
            controller=args.controller,
            transport=config,
            device=info.device,
        )
        for rank in range(info.tp_size)
    ]


def _installed() -> str:
    found = installed_version(RELEASES)
    if not found:
        raise ConfigError(
            f"SGLang must be installed in the environment of {sys.executable}, of the server's version"
        )
    return found


def _refused(name: str, error: WindlassError) -> int:
    sys.stderr.write(f"engine {name}: {type(error).__name__}: {error}\n")
    return 2


@final
class _Ranks:
    """One process per rank; they end with this one, which holds their inputs."""

    def __init__(self, orders: Sequence[RankOrder]) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in orders
        ]
        EndSignals().call(self._stop)
        for rank, order in enumerate(orders):
            self._tell(rank, msgspec.json.encode(order))

    def reports(self) -> list[RankReport]:
        """Of every rank.

        Raises:
            PeerUnreachable: a rank refuses, or ended without a word; names the first.
            PeerTimeout: a rank has said nothing for `ANSWER_DEADLINE_S`.
        """
        return [self._report(rank) for rank in range(len(self._processes))]

    def join(self) -> None:
        """Have every rank join the fleet.

        Raises:
            PeerUnreachable: one could not.
        """
        for rank in range(len(self._processes)):
            self._tell(rank, b"join")
        self.reports()

    def wait(self) -> int:
        """Until one ends; its exit status."""
        with selectors.DefaultSelector() as waiting:
            for process in self._processes:
                if process.stdout is not None:
                    waiting.register(process.stdout, selectors.EVENT_READ, process)
            ended = waiting.select()[0][0].data
        return int(ended.wait())

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def _tell(self, rank: int, line: bytes) -> None:
        stream = self._processes[rank].stdin
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # it says why, or its silence does
                stream.write(line + b"\n")
                stream.flush()

    def _report(self, rank: int) -> RankReport:
        stream = self._processes[rank].stdout
        if stream is not None:
            with selectors.DefaultSelector() as waiting:
                waiting.register(stream, selectors.EVENT_READ)
                if not waiting.select(ANSWER_DEADLINE_S):
                    raise PeerTimeout(f"rank {rank}: no answer within {ANSWER_DEADLINE_S} s")
        line = b"" if stream is None else stream.readline()
        if not line:
            raise PeerUnreachable(f"rank {rank}: its process ended; its log says why")
        report = msgspec.json.decode(line, type=RankReport)
        if report.error:
            raise PeerUnreachable(f"rank {rank}: {report.error}")
        return report

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
