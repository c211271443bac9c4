"""vLLM answers only for its first data-parallel replica; the launcher must check the other replicas too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec
import pytest
from http_answers import answering

from windlass.config import PauseMode
from windlass.engines.http import EngineHttp
from windlass.engines.rank_reports import Secrets, carry_out, join_fleet
from windlass.engines.spec import AgentSettings, CapturedLayout
from windlass.engines.vllm.extension import VllmApi, WindlassExtension
from windlass.engines.vllm.spec import VllmServer
from windlass.errors import ConfigError, PeerTimeout


def server(
    unplaced: Mapping[int, list[str]], unread: Mapping[int, list[str]] = {}
) -> AbstractContextManager[str]:
    """Start a server with ranks that report to the given folder."""

    def answer(_path: str, asked: bytes) -> tuple[int, bytes]:
        _, folder = json.loads(asked)["args"]
        for rank, names in unplaced.items():
            layout = CapturedLayout(
                unplaced=tuple(names), unread=tuple(unread.get(rank, ())), buffer_nbytes=0
            )
            carry_out(folder, rank, lambda _, layout=layout: msgspec.json.encode(layout))  # type: ignore[misc]
        return 200, b"{}"

    return answering(answer)


def settings(url: str, world_size: int) -> AgentSettings:
    return AgentSettings(
        name="a", controller="http://c", transport="cma", url=url, checkpoint="/m",
        world_size=world_size,
    )  # fmt: skip


def test_a_tensor_that_only_another_replica_has_is_accepted() -> None:
    with server({0: ["expert.1"], 1: ["expert.0"]}) as url:
        join_fleet(VllmServer(), settings(url, 2), Secrets())


def test_a_tensor_that_no_rank_of_any_replica_has_is_refused() -> None:
    with (
        server({0: ["x", "y"], 1: ["y"]}) as url,
        pytest.raises(ConfigError, match=r"its loader reads must be .* got none of 'y': "),
    ):
        join_fleet(VllmServer(), settings(url, 2), Secrets())


def test_a_tensor_that_no_loader_reads_is_reported_and_not_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["mtp.0.w", "mtp.1.w", "lm_head.weight"]
    with server({0: names, 1: ["x", *names]}, {0: names, 1: names}) as url:
        join_fleet(VllmServer(), settings(url, 2), Secrets())
    assert "skips 'lm_head.weight', 2 of 'mtp.*.w' of the checkpoint" in capsys.readouterr().err
    with (
        server({0: names, 1: names}, {0: names, 1: names[1:]}) as url,
        pytest.raises(ConfigError, match=r"its loader reads must be .* got none of 'mtp\.0\.w': "),
    ):
        join_fleet(VllmServer(), settings(url, 2), Secrets())


def test_a_silent_replica_is_named() -> None:
    with (
        server({0: []}) as url,
        pytest.raises(
            PeerTimeout, match=r"ranks \[1\] have not reported .* must be of this server"
        ),
    ):
        join_fleet(VllmServer(), settings(url, 2), Secrets())


def test_a_server_whose_ranks_cannot_block_pauses_by_its_route() -> None:
    free, bound = (
        VllmApi(EngineHttp("http://h"), can_block=can_block, stamps=False)
        for can_block in (True, False)
    )
    assert free.blocks(PauseMode.IN_PLACE)
    assert not free.blocks(PauseMode.ABORT)
    assert not bound.blocks(PauseMode.IN_PLACE)


@dataclass(frozen=True)
class Parallel:
    data_parallel_index: int
    world_size: int


def test_ranks_are_numbered_replica_after_replica() -> None:
    class Worker(WindlassExtension):
        def __init__(self, replica: int, rank: int) -> None:
            self.parallel_config, self.rank = Parallel(replica, 4), rank

    ranks = [Worker(replica, rank).windlass_rank() for replica in range(3) for rank in range(4)]
    assert ranks == list(range(12))
