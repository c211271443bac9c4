"""Launchers check before an engine starts whether updates can reproduce its quantised checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.engines.quantised import require_followed
from windlass.errors import ConfigError
from windlass.layout.quantization import CAPABILITIES, Scheme

BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
CONFIGS: list[tuple[Scheme, dict[str, object]]] = [
    (Scheme.FP8_BLOCK_UE8M0, {**BLOCK_FP8, "scale_fmt": "ue8m0"}),
    (Scheme.FP8_TENSOR, {"quant_method": "fp8", "activation_scheme": "static"}),
    (Scheme.FP8_TENSOR, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    (Scheme.FP8_CHANNEL, {"quant_method": "ptpc_fp8"}),
    (Scheme.MXFP4, {"quant_method": "mxfp4"}),
    (Scheme.NVFP4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    (Scheme.INT8, {"quant_method": "w8a8_int8"}),
    (Scheme.INT4_GROUPED, {"quant_method": "awq", "bits": 4}),
    (Scheme.INT4_GROUPED, {"quant_method": "gptq", "bits": 4}),
]


def checkpoint(folder: Path, quantised: object) -> Path:
    config = {"model_type": "qwen3", "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "words",
    [[], ["--quantization", "fp8"], ["--quantization=fp8"], ["-q", "fp8"], ["--dtype", "bfloat16"]],
)
def test_a_checkpoint_in_block_float8_is_accepted(tmp_path: Path, words: list[str]) -> None:
    assert require_followed(checkpoint(tmp_path, BLOCK_FP8), words)


@pytest.mark.parametrize("words", [["--quantization", "awq"], ["-q=mxfp4"], ["--quantization"]])
def test_an_engine_does_not_quantise_a_block_float8_checkpoint_again(
    tmp_path: Path, words: list[str]
) -> None:
    with pytest.raises(ConfigError, match="must be fp8 with this checkpoint"):
        require_followed(checkpoint(tmp_path, BLOCK_FP8), words)


@pytest.mark.parametrize("words", [["--quantization", "fp8"], ["--quantization=fp8"], ["-q", "x"]])
def test_a_plain_checkpoint_is_not_quantised_by_the_engine(
    tmp_path: Path, words: list[str]
) -> None:
    assert not require_followed(tmp_path, [])
    assert not require_followed(checkpoint(tmp_path, None), ["--dtype", "bfloat16"])
    with pytest.raises(ConfigError, match=r"must not be given: .*quantises while it loads"):
        require_followed(tmp_path, words)


@pytest.mark.parametrize(("scheme", "quantised"), CONFIGS)
def test_other_schemes_are_refused_with_the_reason_of_the_table(
    tmp_path: Path, scheme: Scheme, quantised: dict[str, object]
) -> None:
    reason = next(row.reason for row in CAPABILITIES if row.scheme is scheme)
    assert reason
    for folder in (checkpoint(tmp_path, quantised),):
        with pytest.raises(ConfigError) as refused:
            require_followed(folder, [])
        assert str(scheme) in str(refused.value)
        assert reason in str(refused.value)


def test_every_refused_scheme_has_a_test_config() -> None:
    assert {scheme for scheme, _ in CONFIGS} == {row.scheme for row in CAPABILITIES if row.reason}


@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        ({**BLOCK_FP8, "weight_block_size": [64, 64]}, r"must be \[128, 128\], got \[64, 64\]"),
        ({"quant_method": "bitsandbytes"}, "got 'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "got 'modelopt'"),
        ({"quant_method": 8}, "config.json must be valid"),
    ],
)
def test_an_unknown_scheme_is_refused(tmp_path: Path, quantised: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_followed(checkpoint(tmp_path, quantised), [])


def test_a_quantisation_is_found_in_every_place_that_engines_read(tmp_path: Path) -> None:
    awq = {"quant_method": "awq"}
    for config in ({"text_config": {"quantization_config": awq}}, {"compression_config": awq}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="int4_grouped"):
            require_followed(tmp_path, [])
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(ConfigError, match="nvfp4"):
        require_followed(tmp_path, [])
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json must be valid"):
        require_followed(tmp_path, [])
