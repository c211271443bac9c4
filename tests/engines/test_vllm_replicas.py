"""vLLM answers only for its first data-parallel replica; the launcher must check the other replicas too."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config import PauseMode
from windlass.engines.http import EngineHttp
from windlass.engines.vllm.worker import VllmApi, WorkerMethods


def test_a_server_whose_ranks_cannot_block_pauses_by_its_route() -> None:
    free, bound = (
        VllmApi(EngineHttp("http://h"), can_block=can_block, stamps=False)
        for can_block in (True, False)
    )
    assert free.blocks(PauseMode.IN_PLACE)
    assert free.blocks(PauseMode.ABORT)
    assert not bound.blocks(PauseMode.IN_PLACE)


@dataclass(frozen=True)
class Parallel:
    data_parallel_index: int
    world_size: int


def test_ranks_are_numbered_replica_after_replica() -> None:
    class Worker(WorkerMethods):
        def __init__(self, replica: int, rank: int) -> None:
            self.parallel_config, self.rank = Parallel(replica, 4), rank

    ranks = [Worker(replica, rank).windlass_rank() for replica in range(3) for rank in range(4)]
    assert ranks == list(range(12))
