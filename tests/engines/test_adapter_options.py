"""Adapters for the start of engines, and their options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.engines.adapters import Adapter, adapter_of
from windlass.engines.vllm.spec import adapter_options
from windlass.errors import ConfigError, UnsupportedLayout


def folder(path: Path, **config: object) -> Path:
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, **config}))
    (path / "adapter_model.safetensors").write_bytes(b"")
    return path


def test_an_adapter_option_names_a_folder_saved_by_peft(tmp_path: Path) -> None:
    assert adapter_of("") is None
    found = adapter_of(f"math={folder(tmp_path, lora_alpha=8, target_modules=['q_proj'])}")
    assert found == Adapter("math", tmp_path, 4, (2.0,))
    patterns = {"rank_pattern": {"k_proj": 16}, "alpha_pattern": {"v_proj": 32}}
    found = adapter_of(f"math={folder(tmp_path, lora_alpha=8, use_rslora=True, **patterns)}")
    assert found == Adapter("math", tmp_path, 16, (2.0, 4.0, 8.0, 16.0))


def test_a_folder_without_an_adapter_of_peft_is_refused(tmp_path: Path) -> None:
    for text in ("math", "=x", "math="):
        with pytest.raises(ConfigError, match="must be NAME=FOLDER"):
            adapter_of(text)
    with pytest.raises(ConfigError, match="must contain adapter_model"):
        adapter_of(f"math={tmp_path}")
    folder(tmp_path, r="four")
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        adapter_of(f"math={tmp_path}")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "must be LORA, got IA3"),
        ({"bias": "all"}, "no biases"),
        ({"lora_bias": True}, "no biases"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"trainable_token_indices": [3]}, "embeddings"),
        ({"layer_replication": [[0, 1]]}, "share weights"),
    ],
)
def test_an_adapter_that_updates_reach_only_in_part_is_refused(
    tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnsupportedLayout, match=f"--adapter math: .*{reason}"):
        adapter_of(f"math={folder(tmp_path, **config)}")


@pytest.mark.parametrize(("rank", "slot"), [(1, "1"), (4, "8"), (16, "16"), (300, "320")])
def test_vllm_serves_one_adapter_in_one_slot_of_at_least_its_rank(rank: int, slot: str) -> None:
    options = adapter_options(Adapter("math", Path("/a"), rank, (2.0,)), [])
    assert options[:3] == ("--enable-lora", "--lora-modules", "math=/a")
    assert options[3:] == ("--max-loras", "1", "--max-cpu-loras", "1", "--max-lora-rank", slot)
    assert adapter_options(None, []) == ()


def test_the_rank_of_vllms_slot_may_be_given() -> None:
    for word in ("--max-lora-rank", "--max_lora_rank=64"):
        options = adapter_options(Adapter("math", Path("/a"), 4, (2.0,)), [word])
        assert "--max-lora-rank" not in options


def test_settings_that_let_vllm_replace_an_adapter_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="at most 512, got 513"):
        adapter_options(Adapter("math", Path("/a"), 513, (2.0,)), [])
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with pytest.raises(ConfigError, match="must not be set"):
        adapter_options(Adapter("math", Path("/a"), 4, (2.0,)), [])
