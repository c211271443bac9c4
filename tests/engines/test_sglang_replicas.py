"""The plugin of SGLang by which orders reach every replica, and how SGLang finds it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from windlass.engines.sglang import replicas
from windlass.engines.sglang.replicas import with_plugin
from windlass.errors import ConfigError


def test_a_server_without_replicas_is_started_as_ever() -> None:
    with with_plugin(1) as environment:
        assert environment == {}


def test_the_plugin_is_found_on_the_path_for_as_long_as_the_server_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "installed_version", lambda _: "0.5.22")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    with with_plugin(2) as environment:
        folder, *rest = environment["PYTHONPATH"].split(":")
        assert rest == ["/elsewhere"]
        assert environment["SGLANG_PLUGINS"] == "another,windlass"
        (found,) = importlib.metadata.distributions(path=[folder])
        (point,) = found.entry_points
        assert (point.group, point.name) == ("sglang.srt.plugins", "windlass")
        assert point.load() is replicas.register
    assert not Path(folder).exists()


@pytest.mark.parametrize("version", ["0.5.16", "0.5.21"])
def test_a_release_whose_ranks_do_not_know_their_replica_is_refused_replicas(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "installed_version", lambda _: version)
    with pytest.raises(ConfigError, match=f"dp: must be 1 with SGLang {version}"), with_plugin(2):
        pass


@dataclass
class Request:
    serialized_named_tensors: list[str | bytes]
    load_format: str | None


@dataclass
class Manager:
    """SGLang's, as far as it is used."""

    update_weights_from_tensor_communicator: object = "every replica"
    asked: list[tuple[object, Request]] = field(default_factory=list)

    def auto_create_handle_loop(self) -> None:
        """Nothing to begin."""

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
def test_only_what_is_the_same_for_every_rank_passes_the_refusal_by(
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
    answer = asyncio.run(replicas._reach_every_replica(refuse, manager, request))
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
        ([True, True], Flushed(True, -1)),
        ([True, False], Flushed(False, 1)),
        ([False, True], Flushed(False, 0)),
    ],
)
def test_a_flush_that_one_replica_refuses_is_refused_though_another_answers_first(
    successes: list[bool], answer: Flushed, monkeypatch: pytest.MonkeyPatch
) -> None:
    structs, asked = ModuleType("sglang.srt.managers.io_struct"), []
    vars(structs)["FlushCacheReqInput"] = dict
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, structs.__name__, structs)
    registry, hooks = ModuleType("sglang.srt.plugins.hook_registry"), {}
    vars(registry)["HookRegistry"] = SimpleNamespace(
        register=lambda target, hook, kind: hooks.update({target.rpartition(".")[2]: (hook, kind)})
    )
    vars(registry)["HookType"] = SimpleNamespace(AROUND="around")
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins", ModuleType("sglang.srt.plugins"))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)

    async def communicator(request: object) -> list[Flushed]:
        asked.append(request)
        return [Flushed(success, replica) for replica, success in enumerate(successes)]

    async def of_one(manager: Any, timeout_s: float | None) -> Flushed:
        (answered, *_) = await manager.flush_cache_communicator({"timeout_s": timeout_s})
        return Flushed(answered.success, -1)

    manager: Any = Manager()
    manager.flush_cache_communicator = communicator
    replicas.register()
    hook, kind = hooks["flush_cache"]
    assert kind == "around"
    assert asyncio.run(hook(of_one, manager, timeout_s=3.0)) == answer
    assert asked[0] == {"timeout_s": 3.0}
