"""Which of a server's ranks this process is, as far as the release of SGLang says it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist

from windlass.engines.sglang import hook

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
