"""A rank of an SGLang server knows its number, and an error during a pause does not end its loop."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from windlass.engines import engine_rank
from windlass.engines.rank_reports import RankReports
from windlass.engines.sglang import hook
from windlass.engines.sglang.orders import Digests, Quiesce
from windlass.engines.spec import AgentSettings
from windlass.errors import UnsupportedLayout, WindlassError

RANK, WORLD_SIZE = 1, 2


@pytest.mark.parametrize(
    ("release", "says", "rank"),
    [
        ("0.5.23, a replica of several", SimpleNamespace(dp_size=3, dp_rank=2), 5),
        ("0.5.23, no replicas", SimpleNamespace(dp_size=1, dp_rank=None), 1),
        ("0.5.16", SimpleNamespace(tp_size=2, tp_rank=1), 1),
        ("0.5.6", None, 1),
    ],
)
def test_a_rank_knows_its_number_among_all_of_the_server(
    release: str, says: SimpleNamespace | None, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: RANK)
    monkeypatch.setattr(dist, "get_world_size", lambda: WORLD_SIZE)
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    if says is not None:
        context = ModuleType("sglang.srt.runtime_context")
        vars(context)["get_parallel"] = lambda: says
        monkeypatch.setitem(sys.modules, context.__name__, context)
    assert hook.own_rank() == rank, release


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (UnsupportedLayout("by_name['gain']: must be made again"), r"^by_name\['gain'\]: must"),
        (RuntimeError("dictionary changed size"), "could not pause: .*dictionary changed size"),
    ],
)
@pytest.mark.parametrize("blocked_s", [None, 5.0])
def test_error_before_an_update_refuses_the_pause_and_does_not_end_the_loop(
    error: Exception, raised: str, blocked_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> None:
        raise error

    rank = hook.SglangRank()
    settings = AgentSettings(
        name="engine", controller="http://c", transport="cma", url="", checkpoint="", world_size=1
    )
    captured: Any = SimpleNamespace(unplaced=(), buffer_nbytes=0, seconds={}, look=look)
    monkeypatch.setattr(engine_rank, "freeze_heap", lambda: None)
    rank.engine_rank.capture(settings, 0, lambda: captured)
    monkeypatch.setattr(hook, "this_rank", rank)
    monkeypatch.setattr(hook, "own_rank", lambda: 0)
    order = msgspec.json.encode(Quiesce("1.1", "namespace", blocked_s)).decode()
    hook.run(torch.nn.Module(), [(order, torch.empty(0))])
    with pytest.raises(WindlassError, match=raised):
        rank.engine_rank.gate.wait("1.1", 5.0)


def test_error_while_digests_are_taken_does_not_end_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def held_by(_model: torch.nn.Module) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(hook, "held_by", held_by)
    monkeypatch.setattr(hook, "own_rank", lambda: 0)
    with RankReports(1) as reports:
        order = msgspec.json.encode(Digests(reports.folder)).decode()
        hook.run(torch.nn.Module(), [(order, torch.empty(0))])
        with pytest.raises(WindlassError, match="dictionary changed size"):
            list(reports.gather(5.0))
