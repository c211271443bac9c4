"""Orders reach every replica of an SGLang server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from windlass.engines.sglang import spec
from windlass.engines.sglang.plugin import reach_replicas, replicas_of
from windlass.errors import ConfigError


@pytest.mark.parametrize("version", ["0.5.16", "0.5.21"])
def test_replicas_are_refused_for_a_release_whose_ranks_do_not_know_their_replica(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(spec, "installed_version", lambda _: version)
    args = argparse.Namespace(model=str(tmp_path), dp=2)
    with pytest.raises(ConfigError, match=f"--dp must be 1 with SGLang {version}, got 2"):
        spec.SglangServer().command(args, ())


def test_groups_of_data_parallel_attention_are_no_replicas(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(spec, "installed_version", lambda _: "0.5.16")
    (tmp_path / "config.json").write_text("{}")
    given = {"model": str(tmp_path), "host": "127.0.0.1", "port": 1, "dist_init_addr": ""}
    args = argparse.Namespace(tp=2, pp=1, dp=2, nnodes=1, node_rank=0, **given)
    argv = spec.SglangServer().command(args, ("--enable-dp-attention",)).argv
    assert argv[argv.index("--dp-size") + 1] == "2"
    assert replicas_of(SimpleNamespace(dp_size=2, enable_dp_attention=True)) == 1
    assert replicas_of(SimpleNamespace(dp_size=2, enable_dp_attention=False)) == 2
    # Newer releases derive the setting from `attn_dp_size`.
    newer = SimpleNamespace(dp_size=2, attn_dp_size=2, enable_dp_attention=True)
    assert replicas_of(newer) == 2


@dataclass
class Request:
    serialized_named_tensors: list[str | bytes]
    load_format: str | None


@dataclass
class Manager:
    """The used part of SGLang's tokenizer manager."""

    server_args: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(dp_size=2))
    update_weights_from_tensor_communicator: object = "every replica"
    asked: list[tuple[object, Request]] = field(default_factory=list)

    def auto_create_handle_loop(self) -> None:
        """Start nothing."""

    async def _weight_update_session_call(
        self, communicator: object, obj: Request
    ) -> tuple[bool, str]:
        self.asked.append((communicator, obj))
        return True, "every replica"


async def refuse(*_: object) -> tuple[bool, str]:
    return False, "one replica only"


@pytest.mark.parametrize(
    ("payloads", "load_format", "reached"),
    [
        (["b3JkZXI=", "b3JkZXI="], "windlass.engines.sglang.hook.run", True),
        (["b3JkZXI=", "b3RoZXI="], "windlass.engines.sglang.hook.run", False),
        (["b3JkZXI=", "b3JkZXI="], None, False),
        (["b3JkZXI=", "b3JkZXI="], "flattened_bucket", False),
    ],
)
def test_only_orders_equal_for_every_rank_reach_all_replicas(
    payloads: list[str | bytes],
    load_format: str | None,
    reached: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    common = ModuleType("sglang.srt.utils.common")
    vars(common)["normalize_serialized_named_tensor_payloads"] = lambda given: [*given, "decoded"]
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, common.__name__, common)
    manager: Any = Manager()
    request = Request(payloads, load_format)
    mixin = SimpleNamespace(update_weights_from_tensor=refuse, flush_cache=refuse)
    reach_replicas(mixin)
    answer = asyncio.run(mixin.update_weights_from_tensor(manager, request))
    assert answer == ((True, "every replica") if reached else (False, "one replica only"))
    assert manager.asked == ([("every replica", request)] if reached else [])
    assert ("decoded" in request.serialized_named_tensors) == reached


@dataclass
class Flushed:
    success: bool
    replica: int


@pytest.mark.parametrize(
    ("successes", "answer"),
    [
        ([True, True], Flushed(True, 0)),
        ([True, False], Flushed(False, 1)),
        ([False, True], Flushed(False, 0)),
    ],
)
def test_a_flush_fails_if_any_replica_refuses_it(successes: list[bool], answer: Flushed) -> None:
    asked = []

    async def communicator(request: object) -> list[Flushed]:
        asked.append(request)
        return [Flushed(success, replica) for replica, success in enumerate(successes)]

    async def of_one(manager: Any, timeout_s: float | None) -> Flushed:
        answers: list[Flushed] = await manager.flush_cache_communicator({"timeout_s": timeout_s})
        return answers[0]

    manager: Any = Manager()
    manager.flush_cache_communicator = communicator
    mixin = SimpleNamespace(update_weights_from_tensor=refuse, flush_cache=of_one)
    reach_replicas(mixin)
    assert asyncio.run(mixin.flush_cache(manager, timeout_s=3.0)) == answer
    assert asked == [{"timeout_s": 3.0}]


async def test_a_server_without_replicas_uses_sglangs_own_method() -> None:
    manager: Any = Manager(SimpleNamespace(dp_size=1))
    mixin = SimpleNamespace(update_weights_from_tensor=refuse, flush_cache=refuse)
    reach_replicas(mixin)
    request = Request(["b3JkZXI="], "windlass.engines.sglang.hook.run")
    assert await mixin.update_weights_from_tensor(manager, request) == (False, "one replica only")
    assert await mixin.flush_cache(manager, 1.0) == (False, "one replica only")
    assert manager.asked == []
