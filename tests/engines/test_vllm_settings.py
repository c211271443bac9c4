"""The configuration of a vLLM rank takes precedence over the command line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from windlass.engines.vllm.engine_core import SCHEDULER
from windlass.engines.vllm.spec import draft_follows, refuse_unsafe_config
from windlass.errors import ConfigError


def config(place: str = "", value: object = None) -> SimpleNamespace:
    """Return a configuration with the nesting of vLLM 0.32."""
    found = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=False, model="folder"),
        parallel_config=SimpleNamespace(
            enable_eplb=False,
            enable_elastic_ep=False,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        cache_config=SimpleNamespace(block_size=16),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0.0),
            prefetch=SimpleNamespace(offload_group_size=0),
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=SCHEDULER),
        speculative_config=SimpleNamespace(method="mtp", model="folder"),
        lora_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector="OffloadingConnector"),
        ec_transfer_config=None,
    )
    if place:
        *path, last = place.split(".")
        target = found
        for name in path:
            target = vars(target)[name]
        vars(target)[last] = value
    return found


def test_a_plain_engine_and_older_releases_are_accepted() -> None:
    refuse_unsafe_config(config(), adapter=False, serves_own_weights=False, transport="auto")
    refuse_unsafe_config(
        config("speculative_config", None),
        adapter=False,
        serves_own_weights=False,
        transport="auto",
    )
    adapter = config("speculative_config", None)
    adapter.lora_config = SimpleNamespace()
    refuse_unsafe_config(adapter, adapter=True, serves_own_weights=False, transport="auto")
    adapter.speculative_config = config().speculative_config
    refuse_unsafe_config(adapter, adapter=True, serves_own_weights=False, transport="auto")
    older = config()
    older.kv_transfer_config = None
    for name in ("lora_config", "cache_config"):
        delattr(older, name)
    older.offload_config = None
    delattr(older.parallel_config, "enable_elastic_ep")
    refuse_unsafe_config(older, adapter=False, serves_own_weights=False, transport="auto")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("model_config.enable_sleep_mode", True),
        ("parallel_config.enable_eplb", True),
        ("parallel_config.enable_elastic_ep", True),
        ("parallel_config.prefill_context_parallel_size", 2),
        ("cache_config.cpu_offload_gb", 4.0),
        ("offload_config.uva.cpu_offload_gb", 4.0),
        ("offload_config.prefetch.offload_group_size", 8),
        ("lora_config", "slots"),
        ("kv_transfer_config.kv_connector", "ExampleConnector"),
        ("ec_transfer_config", "store"),
        ("scheduler_config.scheduler_cls", "another"),
        ("diffusion_config", "steps"),
        ("model_config.logprobs_mode", "raw_logprobs"),
    ],
)
def test_a_setting_that_an_update_does_not_survive_is_named(place: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"vLLM: {place} must be .*, got {value}: "):
        refuse_unsafe_config(
            config(place, value), adapter=False, serves_own_weights=False, transport="auto"
        )


@pytest.mark.parametrize("size", ["pipeline_parallel_size", "data_parallel_size"])
def test_prefill_in_another_engine_needs_loops_that_a_pause_can_block(size: str) -> None:
    found = config("kv_transfer_config.kv_connector", "NixlConnector")
    refuse_unsafe_config(found, adapter=False, serves_own_weights=False, transport="auto")
    vars(found.parallel_config)[size] = 2
    with pytest.raises(ConfigError, match=rf"vLLM: parallel_config\.{size} must be 1, got 2: "):
        refuse_unsafe_config(found, adapter=False, serves_own_weights=False, transport="auto")


@pytest.mark.parametrize(
    ("method", "model"), [("eagle3", "folder of drafts"), ("ngram", "ngram"), ("mtp", "another")]
)
def test_a_draft_model_of_another_checkpoint_stays_frozen(method: str, model: str) -> None:
    found = config("speculative_config", SimpleNamespace(method=method, model=model))
    assert not draft_follows(found)
    found.parallel_config.pipeline_parallel_size = 2
    refuse_unsafe_config(found, adapter=False, serves_own_weights=False, transport="auto")


def test_updates_reach_the_draft_layers_of_the_served_checkpoint() -> None:
    assert draft_follows(config())
    assert not draft_follows(config("speculative_config", None))
    assert not draft_follows(config("parallel_config.pipeline_parallel_size", 2))


def test_the_user_of_a_server_with_weights_of_its_own_may_choose_its_logprobs() -> None:
    chosen = config("model_config.logprobs_mode", "raw_logprobs")
    refuse_unsafe_config(chosen, adapter=False, serves_own_weights=True, transport="auto")


def test_an_engine_may_sleep_if_it_reads_its_weights_itself() -> None:
    sleeps = config("model_config.enable_sleep_mode", True)
    refuse_unsafe_config(sleeps, adapter=False, serves_own_weights=False, transport="pull")
    with pytest.raises(ConfigError, match=r"enable_sleep_mode must be False.*transport pull"):
        refuse_unsafe_config(sleeps, adapter=False, serves_own_weights=False, transport="auto")
