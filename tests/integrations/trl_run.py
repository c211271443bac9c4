"""One run of TRL's `AsyncGRPOTrainer` against vLLM servers, on a CPU, in TRL's own environment.

    python trl_run.py make FOLDER 64 2        # a tiny Qwen3 and its tokenizer
    torchrun ... trl_run.py train SETTINGS    # a JSON file, see `Settings`
    torchrun ... trl_run.py refusals -        # prints arguments that `WeightTransfer` refuses

TRL 1.16 calls FlashAttention-3 (`trl/experimental/async_grpo/packing.py`), which has no build for CPUs.
`varlen_attention` replaces this function in plain torch. On CPUs, `train` also replaces the query of the GPU's name, and
`shard_on_cpu` sets up FSDP.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import requests
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

WORDS = [f"w{i}" for i in range(56)]
GOOD = frozenset(WORDS[:14])
"""Words that the reward counts: a quarter of the words of an untrained policy."""
SPECIAL = ["<pad>", "<eos>", "<user>", "<bot>", "<unk>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user> {{ m['content'] }}"
    "{% else %}<bot> {% generation %}{{ m['content'] }} <eos>{% endgeneration %}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)

ANSWER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bot>",
    "fields": {"content": {"close_pattern": r"<eos>\s*", "content": "text"}},
}


def rows() -> list[dict[str, list[dict[str, str]]]]:
    """Return the prompts, each a different pair of words."""
    return [
        {"prompt": [{"role": "user", "content": f"{WORDS[i]} {WORDS[(7 * i) % 56]}"}]}
        for i in range(56)
    ]


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Compute causal attention like `flash_attn_varlen_func`, aligned at the ends of query and key."""
    assert causal
    assert window_size == (-1, -1)
    del max_seqlen_q, max_seqlen_k
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    out = torch.empty_like(query)
    for i in range(len(queries) - 1):
        rows, columns = slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])
        nq, nk = queries[i + 1] - queries[i], keys[i + 1] - keys[i]
        mask = torch.ones(nq, nk, dtype=torch.bool).tril(nk - nq)
        out[rows] = torch.nn.functional.scaled_dot_product_attention(
            query[rows].transpose(0, 1),
            key[columns].transpose(0, 1),
            value[columns].transpose(0, 1),
            attn_mask=mask,
            scale=softmax_scale,
            enable_gqa=True,
        ).transpose(0, 1)
    return out


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = ANSWER
    tokenizer.save_pretrained(folder)


def make(folder: Path, hidden: int, layers: int) -> None:
    """Write a Qwen3 of random weights and a tokenizer of whole words."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    save_tokenizer(folder)
    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        # vLLM's CPU attention has no smaller head.
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


class DiskReload:
    """Transfer that works on a CPU without Windlass: a checkpoint on disk, and vLLM's own `reload_weights`.

    TRL's own transfer works only with NCCL: a CPU worker of vLLM 0.32 answers `/init_weight_transfer_engine` with
    "Cannot access accelerator device when none is available".
    """

    def __init__(self, servers: list[str], model: str, folder: Path) -> None:
        self._servers = servers
        self._folder = folder
        shutil.copytree(model, folder, dirs_exist_ok=True)

    def init_weight_transfer(self) -> None:
        """Set up nothing."""

    def _post(self, path: str, body: Any = None) -> None:
        for server in self._servers:
            response = requests.post(f"{server}{path}", json=body, timeout=120)
            response.raise_for_status()

    def pause(self) -> None:
        """Pause the servers as TRL's own client does."""
        self._post("/pause?mode=keep")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the weights, and let every worker load the file."""
        save_file(
            {n: t.contiguous() for n, t in iterator},
            self._folder / "model.safetensors",
            {"format": "pt"},
        )
        self._post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}},
        )

    def resume(self) -> None:
        """Resume the servers as TRL's own client does."""
        self._post("/resume")

    def destroy(self) -> None:
        """Release nothing."""


def reward(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """Return the share of good words in each answer."""
    shares = []
    for completion in completions:
        words = completion[0]["content"].split()
        shares.append(sum(word in GOOD for word in words) / max(len(words), 1))
    return shares


def shard_on_cpu(accelerator: Any) -> None:
    """Set up `fsdp_version: 2` as accelerate does on GPUs; on CPUs its state ignores it (`accelerate/state.py`)."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    )


@dataclass(frozen=True)
class Settings:
    """Settings of one run.

    Attributes:
        model: folder that `make` wrote.
        out: file for the results of rank 0; the final weights go into the same folder.
        servers: addresses of the servers.
        transfer: the weight transfer: "trl" for TRL's own, "disk" for `DiskReload`, "whole" and "shards" for Windlass.
        pause: see `WeightTransfer`; empty for none.
        steps: number of optimizer steps.
        lora: train an adapter.
        learning_rate: learning rate of AdamW.
    """

    model: str
    out: str
    servers: list[str]
    transfer: str
    steps: int
    pause: str = "keep"
    lora: bool = False
    learning_rate: float = 2e-3


def transfer_of(settings: Settings) -> Any:
    """Return the value of TRL's `weight_transfer`; None for TRL's own transfer."""
    from windlass.integrations.trl import WeightTransfer

    if settings.transfer == "trl":
        return None
    if settings.transfer == "disk":
        return DiskReload(settings.servers, settings.model, Path(settings.out).parent / "reloaded")
    return WeightTransfer(settings.servers, pause=settings.pause or None, deadline_s=100)


def train(settings: Settings) -> None:
    """Train, and write TRL's log and the final weights."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        packing,
    )

    # The original function asks a GPU for its name.
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    out = Path(settings.out)
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    prompts = rows()
    args = AsyncGRPOConfig(
        output_dir=str(out.parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=16,
        max_staleness=2,
        token_budget=0,
        vllm_server_base_url=settings.servers[0],
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    transfer = transfer_of(settings)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if settings.lora else None
    trainer = AsyncGRPOTrainer(
        model=settings.model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(prompts),
        peft_config=adapter,
        weight_transfer=transfer,
    )
    if trainer.accelerator.num_processes > 1:
        shard_on_cpu(trainer.accelerator)
    gather = trainer._streaming_iter
    gathers = Mock(wraps=gather)
    trainer._streaming_iter = gathers
    if settings.transfer == "shards":
        transfer.attach(trainer)
    trainer.train()
    if settings.lora:
        trainer.model.merge_adapter()
    final = {name: tensor.contiguous() for name, tensor in gather()}
    parameters = [parameter for _, parameter in trainer.model.named_parameters()]
    if trainer.accelerator.is_main_process:
        save_file(final, out.parent / "final.safetensors", {"format": "pt"})
        written = {
            "log": trainer.state.log_history,
            "model_version": trainer.model_version,
            "num_sharded": sum(isinstance(parameter, DTensor) for parameter in parameters),
            "num_parameters": len(parameters),
            "num_gathers": gathers.call_count,
        }
        out.write_text(json.dumps(written, indent=1))


def refusals() -> None:
    """Print the refusals, on rank 0."""
    from windlass.errors import ConfigError
    from windlass.integrations.trl import WeightTransfer

    dist.init_process_group("gloo")
    cases: dict[str, Callable[[], object]] = {
        "servers": lambda: WeightTransfer([]),
        "twice": lambda: WeightTransfer(["http://a:1", "http://a:1"]),
        "ranks": lambda: WeightTransfer(["http://a:1"]).init_weight_transfer(),
    }
    found = {}
    for name, make_one in cases.items():
        try:
            make_one()
        except ConfigError as error:
            found[name] = str(error)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    command, path, *sizes = sys.argv[1:]
    if command == "make":
        make(Path(path), *map(int, sizes))
    elif command == "refusals":
        refusals()
    else:
        train(Settings(**json.loads(Path(path).read_text())))
