"""Launchers refuse adapters that do not fit the engine's base model, and name the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.checkpoint_files import ADAPTER
from windlass.engines.adapters import CONFIG, adapter_of
from windlass.errors import UnsupportedLayout


def folder(tmp_path: Path, **config: Any) -> str:
    (tmp_path / ADAPTER).write_bytes(b"")
    (tmp_path / CONFIG).write_text(json.dumps({"r": 4, "peft_type": "LORA", **config}))
    return f"mine={tmp_path}"


@pytest.mark.parametrize(
    "how", ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga", "unheard_of"]
)
def test_adapter_whose_initialisation_changes_the_base_is_refused(tmp_path: Path, how: str) -> None:
    with pytest.raises(
        UnsupportedLayout,
        match=f"--adapter mine: init_lora_weights must .*{how}.*path_initial_model_for_weight_conversion",
    ):
        adapter_of(folder(tmp_path, init_lora_weights=how))


@pytest.mark.parametrize("how", [True, False, "gaussian", "orthogonal", "eva", "mica", None])
def test_adapter_whose_initialisation_keeps_the_base_is_accepted(
    tmp_path: Path, how: bool | str | None
) -> None:
    assert adapter_of(folder(tmp_path, init_lora_weights=how)) is not None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens must .*train it without"),
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            r"target_modules must .*\['embed_tokens'\]",
        ),
        ({"target_modules": ["lm_head"]}, r"must leave out .*\['lm_head'\]"),
        ({"target_modules": "lm_head"}, "target_modules"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"use_qalora": True}, "use_qalora must not be set"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_adapter_that_updates_cannot_reach_is_refused(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedLayout, match=says):
        adapter_of(folder(tmp_path, **config))


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "v_proj"], r".*\.q_proj"])
def test_adapter_of_linear_layers_is_accepted(tmp_path: Path, target: list[str] | str) -> None:
    assert adapter_of(folder(tmp_path, target_modules=target)) is not None
