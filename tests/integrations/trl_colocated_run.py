"""One run of TRL's `GRPOTrainer(vllm_mode="colocate")` on a CPU, with vLLM in the trainer's process.

    torchrun ... trl_colocated_run.py SETTINGS    # a JSON file, see `Settings`

After every sync, each rank compares every tensor of its vLLM with a fresh load of the trainer's weights by vLLM's own
loader. The script, not Windlass, starts vLLM without compilation, because TRL has no option for it, and gives vLLM's
worker for CPUs a sleep mode.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import trl_run
import vllm_cpu_sleep
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from windlass.errors import RoundAborted, WindlassError
from windlass.integrations.trl import colocate
from windlass.integrations.trl.merging import merged, merged_names
from windlass.transfer.destination import Destination

NUM_TOKENS = 12


@dataclass(frozen=True)
class Settings:
    """Settings of one run.

    Attributes:
        model: folder that `trl_run.make` wrote.
        out: file for the results of rank 0; the ranks use its folder.
        steps: number of optimizer steps.
        tensor_parallel_size: ranks of one engine.
        sleep: use vLLM's sleep mode.
        lora: train an adapter.
        fails_at: number of a sync before which another sync fails; 0 for none.
        learning_rate: learning rate of AdamW.
    """

    model: str
    out: str
    steps: int
    tensor_parallel_size: int = 1
    sleep: bool = False
    lora: bool = False
    fails_at: int = 0
    learning_rate: float = 1e-2


class Checked:
    """Syncs of one trainer, each followed by comparisons.

    Attributes:
        compared: number of equal tensors in each sync.
        loads: calls of `load_weights` of vLLM's model in the syncs.
    """

    def __init__(self, trainer: Any, settings: Settings) -> None:
        self._trainer, self._settings = trainer, settings
        self.generation = trainer.vllm_generation
        self._sync = self.generation.sync_weights
        self.compared: list[int] = []
        self.loads = self.num_sharded = 0
        self.refused = ""
        self.generation.sync_weights = self.sync

    def sync(self) -> None:
        """Sync, and compare. If the settings say so, first let a sync fail and see that vLLM does not generate."""
        llm = self.generation.llm
        if len(self.compared) + 1 == self._settings.fails_at and not self.refused:
            self._fail()
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        with_loads = Mock(wraps=model.load_weights)
        vars(model)["load_weights"] = with_loads
        gather, DTensor.full_tensor = DTensor.full_tensor, None  # type: ignore[method-assign,assignment]
        try:
            self._sync()
        finally:
            del vars(model)["load_weights"]
            DTensor.full_tensor = gather  # type: ignore[method-assign]
        self.loads += with_loads.call_count
        self.compared.append(self._compare())

    def _compare(self) -> int:
        """Compare every tensor of vLLM with a fresh load of the trainer's weights; return the number of tensors."""
        llm = self.generation.llm
        fresh = llm.collective_rpc("fresh_digests", args=(str(self._save()),))[0]
        served = llm.collective_rpc("windlass_digests")[0]
        assert served == fresh, sorted(
            n for n in {*served, *fresh} if served.get(n) != fresh.get(n)
        )
        return len(fresh)

    def _save(self) -> Path:
        """Save the trainer's weights as a checkpoint, and return its folder. Collective."""
        folder = Path(self._settings.out).parent / "fresh"
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        self.num_sharded = sum(isinstance(p, DTensor) for p in model.parameters())
        names = merged_names(model.prefix) if self._settings.lora else str
        weights = {}
        with merged(model):
            for name, tensor in model.named_parameters():
                if saved := names(name):
                    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                    weights[saved] = whole.detach().clone().contiguous()
        if self._trainer.accelerator.is_main_process:
            shutil.copytree(self._settings.model, folder, dirs_exist_ok=True)
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
        self._trainer.accelerator.wait_for_everyone()
        return folder

    def _fail(self) -> None:
        """Let a sync fail in its middle; vLLM then refuses to generate."""
        verify = Destination.verify
        # Every source is reported as damaged, as after a byte that changed on its way.
        Destination.verify = lambda _self, expected, _hashed=None: tuple(expected)  # type: ignore[method-assign,assignment]
        try:
            self._sync()
        except RoundAborted as error:
            self.refused = str(error)
        finally:
            Destination.verify = verify  # type: ignore[method-assign]
        if self._settings.sleep:
            self.generation.llm.wake_up(tags=["kv_cache"])
        try:
            self.generation.llm.generate([{"prompt_token_ids": [2, 5, 6]}], use_tqdm=False)
        except WindlassError as error:
            self.refused += f" / {error}"
        if self._settings.sleep:
            self.generation.llm.sleep(level=2)


def train(settings: Settings) -> None:
    """Train, and write what was compared and TRL's log."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    out = Path(settings.out)
    if settings.sleep:
        vllm_cpu_sleep.install()
    vllm_generation.LLM = functools.partial(
        vllm_generation.LLM,
        enforce_eager=True,
        dtype="float32",
        worker_extension_cls="vllm_fresh.FreshLoads",
        block_size=32,
    )
    colocate(deadline_s=100)
    prompts = trl_run.rows()
    args = GRPOConfig(
        output_dir=str(out.parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=NUM_TOKENS,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=128,
        vllm_tensor_parallel_size=settings.tensor_parallel_size,
        vllm_enable_sleep_mode=settings.sleep,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if settings.lora else None
    trainer = GRPOTrainer(
        model=settings.model,
        reward_funcs=trl_run.reward,
        args=args,
        train_dataset=Dataset.from_list(prompts),
        peft_config=adapter,
    )
    if trainer.accelerator.num_processes > 1:
        trl_run.shard_on_cpu(trainer.accelerator)
    checked = Checked(trainer, settings)
    trainer.train()
    if trainer.accelerator.is_main_process:
        written = {
            "log": trainer.state.log_history,
            "compared": checked.compared,
            "loads": checked.loads,
            "num_sharded": checked.num_sharded,
            "num_parameters": len([*trainer.model.parameters()]),
            "refused": checked.refused,
            "version": checked.generation.llm.llm_engine.get_weight_version(),
        }
        out.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Settings(**json.loads(Path(sys.argv[1]).read_text())))
