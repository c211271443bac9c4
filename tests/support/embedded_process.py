"""An embedded engine of a tiny model in a process of its own."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from child_process import running
from weight_fleet import TOKEN

CONFIG: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}


def start_engine(stack: ExitStack, name: str, folder: Path, url: str) -> None:
    """Start an engine with the model of `CONFIG`, which ends with `stack`. Its configuration file goes into `folder`."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    stack.enter_context(
        running(
            *("-m", "windlass.engines.embedded", "--name", name, "--transport", "cma"),
            *("--model", str(folder / "config.json"), "--controller", url),
            token=TOKEN,
        )
    )
