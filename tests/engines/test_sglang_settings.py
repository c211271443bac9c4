"""The settings that a running SGLang server reports take precedence over its command line."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager

import pytest
from http_answers import answering

from windlass.engines.http import EngineHttp
from windlass.engines.launch import checked_arguments
from windlass.engines.sglang.spec import ENGINE, RULES, check_server, require_pull
from windlass.errors import ConfigError, PeerUnreachable

PLAIN = {
    "version": "0.5.23",
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "nnodes": 1,
    "enable_memory_saver": False,
    "enable_lora": None,
    "enable_eplb": False,
    "elastic_ep_backend": None,
    "cpu_offload_gb": 0,
    "offload_group_size": -1,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "tokenizer_worker_num": 1,
    "torchao_config": "",
    "hicache_storage_backend": None,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_unified_cache_external_linker": False,
    "enable_mm_global_cache": False,
    "radix_cache_backend": None,
    "enable_streaming_session": False,
    "language_only": False,
    "encoder_only": False,
}


def server(body: bytes, status: int = 200) -> AbstractContextManager[str]:
    return answering(lambda _path, _asked: (status, body))


def test_a_server_without_refused_settings_is_accepted() -> None:
    for told in (PLAIN, {"version": "0.5.6"}):
        with server(json.dumps(told).encode()) as url:
            check_server(EngineHttp(url), 2)
    with server(b"", 404) as url:
        check_server(EngineHttp(url), 2)


@pytest.mark.parametrize(
    ("setting", "value", "option"),
    [
        ("enable_eplb", True, "--enable-eplb"),
        ("cpu_offload_gb", 4, "--cpu-offload-gb"),
        ("offload_group_size", 2, "--offload-group-size"),
        ("elastic_ep_backend", "mooncake", "--elastic-ep-backend"),
        ("disaggregation_mode", "decode", "--disaggregation-mode"),
        ("tokenizer_worker_num", 2, "--tokenizer-worker-num"),
        (
            "enable_dp_attention_local_control_broadcast",
            True,
            "--enable-dp-attention-local-control-broadcast",
        ),
        ("enable_memory_saver", True, "--enable-memory-saver"),
        ("enable_lora", True, "--enable-lora"),
        ("torchao_config", "int4wo-32", "--torchao-config"),
        ("hicache_host_memory_mode", "buffer_only", "--hicache-host-memory-mode"),
        ("enable_lmcache", True, "--enable-lmcache"),
        ("enable_flexkv", True, "--enable-flexkv"),
        ("enable_unified_cache_external_linker", True, "--enable-unified-cache-external-linker"),
        ("enable_mm_global_cache", True, "--enable-mm-global-cache"),
        ("radix_cache_backend", "flexkv", "--radix-cache-backend"),
        ("enable_streaming_session", True, "--enable-streaming-session"),
        ("language_only", True, "--language-only"),
        ("encoder_only", True, "--encoder-only"),
    ],
)
def test_a_refused_setting_without_an_option_is_found(
    setting: str, value: object, option: str
) -> None:
    with (
        server(json.dumps({**PLAIN, setting: value}).encode()) as url,
        pytest.raises(ConfigError, match=rf"{setting} must be .*, got {value}: ") as refused,
    ):
        check_server(EngineHttp(url), 2)
    (rule,) = (rule for rule in RULES if rule.option == option)
    assert str(refused.value).endswith(rule.why)


def test_a_server_whose_weights_may_sleep_needs_the_transport_pull() -> None:
    words = ("--name", "e", "--model", "m", "--enable-memory-saver")
    for transport in ("pull", '{"type": "pull", "num_threads": 4}'):
        require_pull(transport)
        checked_arguments(ENGINE, [*words, "--transport", transport])
    for transport in ("auto", "cma", '{"type": "cma"}'):
        for check in (
            lambda name=transport: require_pull(name),
            lambda name=transport: checked_arguments(ENGINE, [*words, "--transport", name]),
        ):
            with pytest.raises(ConfigError, match=r"^--enable-memory-saver.*transport.* pull"):
                check()
    with server(json.dumps({**PLAIN, "enable_memory_saver": True}).encode()) as url:
        check_server(EngineHttp(url), 2, "pull")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("pp_size", 2), ("speculative_algorithm", "EAGLE"), ("weight_cache_mode", "client")],
)
def test_a_server_whose_weights_may_sleep_has_further_rules(setting: str, value: object) -> None:
    told = {**PLAIN, setting: value}
    with server(json.dumps(told).encode()) as url:
        check_server(EngineHttp(url), 2 * (2 if setting == "pp_size" else 1), "pull")
    with (
        server(json.dumps({**told, "enable_memory_saver": True}).encode()) as url,
        pytest.raises(ConfigError, match=rf"{setting} must be .*, got {value}: "),
    ):
        check_server(EngineHttp(url), 2, "pull")


def test_stored_entries_need_keys_with_the_version_of_the_weights() -> None:
    told = {**PLAIN, "hicache_storage_backend": "file"}
    with server(json.dumps(told).encode()) as url:
        check_server(EngineHttp(url), 2)
    with (
        server(json.dumps({**told, "version": "0.5.19"}).encode()) as url,
        pytest.raises(
            ConfigError,
            match=r"hicache_storage_backend must be None, got file: this release finds stored",
        ),
    ):
        check_server(EngineHttp(url), 2)


def test_data_parallel_attention_is_accepted_with_the_settings_of_newer_releases() -> None:
    told = {**PLAIN, "nnodes": 2, "attn_dp_size": 2, "enable_dp_attention": True}
    with server(json.dumps(told).encode()) as url:
        assert check_server(EngineHttp(url), 2) == 1


def test_groups_of_data_parallel_attention_share_ranks_in_older_releases() -> None:
    """In SGLang 0.5.15 to 0.5.21, `dp_size` counts the groups of `--enable-dp-attention`."""
    told = {**PLAIN, "dp_size": 2, "enable_dp_attention": True}
    with server(json.dumps(told).encode()) as url:
        assert check_server(EngineHttp(url), 2) == 1
        with pytest.raises(ConfigError, match=r"'tp_size': 2, 'pp_size': 1, 'dp_size': 1}, got 4"):
            check_server(EngineHttp(url), 4)
    # Replicas of newer releases have ranks of their own, also with `--attn-dp-size`.
    with server(json.dumps({**told, "attn_dp_size": 2}).encode()) as url:
        assert check_server(EngineHttp(url), 4) == 1


def test_a_server_with_an_unannounced_number_of_ranks_is_refused() -> None:
    told = json.dumps({**PLAIN, "pp_size": 3}).encode()
    with server(told) as url:
        assert check_server(EngineHttp(url), 6) == 3
        with pytest.raises(ConfigError, match=r"'tp_size': 2, 'pp_size': 3.*, got 2"):
            check_server(EngineHttp(url), 2)


def test_an_answer_of_another_server_is_reported() -> None:
    with (
        server(b"<html>") as url,
        pytest.raises(PeerUnreachable, match="must answer as SGLang does"),
    ):
        check_server(EngineHttp(url), 2)
