"""Orders of a vLLM API server to the ranks of all replicas; `tests/integrations/test_vllm_plugin.py` has live servers.

The client of vLLM's cores is the only part that is not real: vLLM is not installed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from windlass.engines.join_route import JoinOrder
from windlass.engines.spec import AgentSettings, CapturedLayout, RankStep
from windlass.engines.vllm.api_server import (
    RankAnswer,
    RankOrder,
    join_ranks,
    note_adapters,
    settings_of,
)
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable

LAYOUT = msgspec.json.encode(CapturedLayout(unplaced=(), buffer_nbytes=0)).decode()
GOOD = {"capture": RankAnswer(said=LAYOUT), "join": RankAnswer()}
REFUSES = {"capture": RankAnswer(failed=True, said="rank 1: no memory")}
IS_TOLD = {"capture": RankAnswer(failed=True)}


class Cores:
    """Client of vLLM's cores, one per replica, each with the answers of its ranks by step."""

    def __init__(self, *replicas: Sequence[Mapping[str, RankAnswer]]) -> None:
        self.core_engines = range(len(replicas))
        self.client_index = 0
        self._replicas = replicas
        self.is_done = asyncio.Event()
        self.orders: list[tuple[int, RankStep]] = []
        self.tokens: set[str] = set()

    async def _call_utility_async(
        self,
        method: str,
        order: str,
        _s: float,
        args: tuple[str, str],
        _named: None,
        *,
        engine: int,
    ) -> list[str]:
        assert (method, order) == ("collective_rpc", "windlass_order")
        decoded = msgspec.json.decode(args[1], type=RankOrder)
        assert decoded.step == args[0]
        self.orders.append((engine, decoded.step))
        self.tokens.add(decoded.token)
        if len(self.orders) == 2 * len(self._replicas):
            self.is_done.set()
        answers = [rank.get(decoded.step) for rank in self._replicas[engine]]
        if None in answers:
            await asyncio.Event().wait()
        return [msgspec.json.encode(answer).decode() for answer in answers]


def join(cores: Cores, world_size: int, deadline_s: float = 30.0) -> None:
    settings = AgentSettings(
        name="a", controller="http://c:1", transport="auto", url="http://a:1", checkpoint="",
        world_size=world_size, join_deadline_s=deadline_s,
    )  # fmt: skip
    engine = SimpleNamespace(engine_core=cores)
    asyncio.run(join_ranks(engine, settings, "token", pauses_itself=False))


def test_ranks_of_all_replicas_capture_before_any_rank_joins() -> None:
    cores = Cores([GOOD], [GOOD])
    join(cores, 2)
    assert cores.orders == [(0, "capture"), (1, "capture"), (0, "join"), (1, "join")]


@pytest.mark.parametrize("replicas", [([IS_TOLD, REFUSES],), ([GOOD], [REFUSES])])
def test_reason_of_the_rank_that_failed_is_raised_and_no_rank_joins(replicas: Any) -> None:
    cores = Cores(*replicas)
    with pytest.raises(PeerUnreachable, match=r"^rank 1: no memory$"):
        join(cores, 2)
    assert {step for _, step in cores.orders} == {RankStep.CAPTURE}


def layout(unplaced: Sequence[str], unread: Sequence[str] = ()) -> Mapping[str, RankAnswer]:
    """Return the answers of a rank that lacks these checkpoint tensors."""
    found = CapturedLayout(unplaced=tuple(unplaced), unread=tuple(unread), buffer_nbytes=0)
    said = msgspec.json.encode(found).decode()
    return {"capture": RankAnswer(said=said), "join": RankAnswer()}


def test_tensor_that_only_another_replica_has_is_accepted() -> None:
    join(Cores([layout(["expert.1"])], [layout(["expert.0"])]), 2)


def test_tensor_that_no_rank_of_any_replica_has_is_refused() -> None:
    cores = Cores([layout(["x", "y"])], [layout(["y"])])
    with pytest.raises(ConfigError, match=r"loader reads 'y', but the memory of no rank"):
        join(cores, 2)
    assert {step for _, step in cores.orders} == {RankStep.CAPTURE}


def test_tensor_that_no_loader_reads_is_reported_and_not_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["mtp.0.w", "mtp.1.w", "lm_head.weight"]
    join(Cores([layout(names, names)], [layout(["x", *names], names)]), 2)
    assert "skips 'lm_head.weight', 2 of 'mtp.*.w' of the checkpoint" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"loader reads 'mtp\.0\.w', but the memory of no rank"):
        join(Cores([layout(names, names)], [layout(names, names[1:])]), 2)


def test_api_server_that_does_not_reach_all_ranks_refuses() -> None:
    with pytest.raises(ConfigError, match="must reach all 2 ranks, got 1; leave out"):
        join(Cores([GOOD]), 2)


def test_rank_that_does_not_answer_is_waited_for_until_the_deadline() -> None:
    with pytest.raises(PeerTimeout, match=r"engine a: every rank must capture within 0\.2 s"):
        join(Cores([GOOD], [{}]), 2, deadline_s=0.2)


def test_adapter_of_the_options_must_be_in_a_folder_that_peft_saved(
    tmp_path: Path,
) -> None:
    parallel = SimpleNamespace(world_size=1, world_size_across_dp=2, data_parallel_size=2)
    model = SimpleNamespace(model=str(tmp_path), revision=None)
    config = SimpleNamespace(parallel_config=parallel, model_config=model)
    engine = SimpleNamespace(vllm_config=config)
    order = JoinOrder("c", name="a", url="u")
    assert settings_of(engine, order).world_size == 2
    same = msgspec.structs.replace(order, model=f"{tmp_path}/.")
    assert settings_of(engine, same).world_size == 2
    other = msgspec.structs.replace(order, model="/models/other")
    with pytest.raises(
        ConfigError,
        match=r"--model must be .*, the model of the server that joins, got /models/other",
    ):
        settings_of(engine, other)
    note_adapters([SimpleNamespace(name="tuned", path="/nowhere")])
    try:
        with pytest.raises(ConfigError, match="--lora-modules tuned: /nowhere must contain"):
            settings_of(engine, order)
    finally:
        note_adapters(None)


@pytest.mark.parametrize("has_experts", [False, True])
def test_replicas_that_run_in_lockstep_serve_no_adapter(tmp_path: Path, has_experts: bool) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    parallel = SimpleNamespace(world_size=1, world_size_across_dp=2, data_parallel_size=2)
    model = SimpleNamespace(model=str(tmp_path), revision=None, is_moe=has_experts)
    config = SimpleNamespace(parallel_config=parallel, model_config=model)
    engine, order = SimpleNamespace(vllm_config=config), JoinOrder("c", name="a", url="u")
    note_adapters([SimpleNamespace(name="tuned", path=str(tmp_path))])
    try:
        if not has_experts:
            assert settings_of(engine, order).adapter == "tuned"
            return
        with pytest.raises(ConfigError, match=r"size must be 1 for an adapter .* got 2"):
            settings_of(engine, order)
    finally:
        note_adapters(None)


def test_token_is_not_in_what_is_logged() -> None:
    asked = JoinOrder("c", token="hidden")
    settings = AgentSettings(
        name="a", controller="c", transport="auto", url="u", checkpoint="", world_size=1
    )
    order = RankOrder(step=RankStep.JOIN, settings=settings, token="hidden", pauses_itself=True)
    assert "hidden" not in repr(asked) + repr(order)
