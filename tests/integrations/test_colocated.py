"""A vLLM that cannot be updated in its process is refused before anything is captured. `test_trl_colocated.py` has the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from windlass.errors import ConfigError
from windlass.integrations.vllm import ColocatedEngine


def llm(*, backend: str = "windlass", replicas: int = 1, ranks: int = 1, core: bool = True) -> Any:
    """Return the settings of vLLM's `LLM` that are checked; it has no other part."""
    config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend=backend),
        parallel_config=SimpleNamespace(data_parallel_size=replicas, world_size=ranks),
    )
    client = SimpleNamespace(engine_core=object()) if core else SimpleNamespace()
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config, engine_core=client))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"backend": "nccl"}, 'must be made with weight_transfer_config={"backend": "windlass"}'),
        ({"replicas": 2}, "data_parallel_size must be 1, got 2"),
        ({"core": False}, "EngineCore must run in this process; pass distributed_executor_backend"),
        ({"ranks": 2}, "number of trainer ranks, got 2 engine ranks and 1 trainer ranks"),
    ],
)
def test_a_vllm_that_cannot_be_updated_in_its_process_is_refused(
    given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason.replace("{", r"\{")):
        ColocatedEngine(llm(**given))
