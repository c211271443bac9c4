"""One rank of an SGLang server that runs no code of ours: its agent, in a process of its own.

Started by `windlass.engines.sglang.table`, with one `RankOrder` in JSON on the first line of its
standard input. It captures the layout from the engine's own model class and loader, proves that the
live engine's memory has that layout, says so, and joins when it is told to. It ends when its input
does, or when the engine's process does.
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import msgspec

from windlass.engines.capture.capture import capture
from windlass.engines.capture.codes import checkpoint_specs, checkpoint_tensors
from windlass.engines.client import EngineClient
from windlass.engines.sglang.hook import load_again
from windlass.engines.sglang.table.model import build_model
from windlass.engines.sglang.table.proof import TableRank
from windlass.engines.sglang.table.routes import TableRoutes
from windlass.engines.sglang.table.wire import RankOrder, RankReport
from windlass.envs import control_token
from windlass.errors import WindlassError

CONNECT_DEADLINE_S = 60.0
ALONE_DEADLINE_S = 10.0
ENGINE_ENDED = 3


def main() -> int:
    """Prove, report, join when told."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    order = msgspec.json.decode(sys.stdin.readline(), type=RankOrder)
    try:
        rank, report = _prove(order)
    except WindlassError as error:
        _answer(answers, RankReport(error=f"{type(error).__name__}: {error}"))
        return 2
    _answer(answers, report)
    if sys.stdin.readline().strip() != "join":
        return 0
    try:
        client = _join(order, rank)
    except WindlassError as error:
        _answer(answers, RankReport(error=f"{type(error).__name__}: {error}"))
        return 2
    _answer(answers, report)
    waiting = select.poll()
    waiting.register(0, select.POLLIN | select.POLLHUP)
    waiting.register(rank.session.process, select.POLLIN)
    ended = dict(waiting.poll())
    status = ENGINE_ENDED if rank.session.process in ended else 0
    client.close()
    return status


def _prove(order: RankOrder) -> tuple[TableRank, RankReport]:
    routes = TableRoutes(order.url, order.world_size)
    table = routes.table(order.rank)
    model = build_model(order.arguments, order.rank, order.dist_port)
    folder = Path(order.checkpoint)
    captured = capture(
        model,
        checkpoint_specs(folder),
        lambda weights: load_again(model, weights),
        worker=f"{order.name}/{order.rank}",
        reference=lambda: checkpoint_tensors(folder),
        recompute=False,  # the live engine's loader is in another process
    )
    rank = TableRank(order.transport, routes, order.rank, table, model, captured)
    if order.controller:  # nobody whom this rank does not know may write from here on
        rank.session.require_alone(deadline_s=ALONE_DEADLINE_S)
    rank.require_equal()
    return rank, RankReport(
        session=table.session,
        parameters=len(table.entries),
        nbytes=sum(entry.nbytes for entry in table.entries.values()),
        unplaced=captured.unplaced,
        cross_checked=rank.cross_check(order.device),
        wire=rank.session.report().protocol,
    )


def _join(order: RankOrder, rank: TableRank) -> EngineClient:
    return EngineClient(
        manifest=rank.captured.manifest,
        addresses=rank.captured.addresses,
        regions=rank.local_regions,
        transport=rank.session,
        hooks=rank,
        controller=order.controller,
        token=control_token(),
        group=order.name,
        rank=order.rank,
        world_size=order.world_size,
        url=order.url if order.rank == 0 else "",
        can_send=False,
        connect_deadline_s=CONNECT_DEADLINE_S,
        remote=rank.copies,
    )


def _answer(descriptor: int, report: RankReport) -> None:
    os.write(descriptor, msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a library's threads must not keep a rank that is over
