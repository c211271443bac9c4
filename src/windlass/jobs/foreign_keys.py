"""Names of TRL, verl, transformers and vLLM for settings of a job, for errors about unknown keys of a job's file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TRL: Mapping[str, str] = MappingProxyType(
    {
        "adam_beta1": "",
        "adam_beta2": "",
        "adam_epsilon": "",
        "attn_implementation": "training.attention",
        "beta": "training.kl_coefficient",
        "bf16": "training.compute = 'bfloat16'",
        "dataloader_num_workers": "",
        "delta": "training.correction_cap with training.correction",
        "epsilon": "training.clip_low and training.clip_high",
        "epsilon_high": "training.clip_high (for the loss cispo minus 1)",
        "eval_steps": "evaluation.every",
        "eval_strategy": "evaluation.every",
        "fp16": "training.compute, 'float32' or 'bfloat16',",
        "generation_batch_size": "rollout.groups_per_step times rollout.samples_per_group",
        "generation_kwargs": "rollout.sampling",
        "gradient_accumulation_steps": "training.max_tokens, the tokens of a micro-batch,",
        "importance_sampling_level": "training.loss = 'gspo'",
        "learning_rate": "training.learning_rate",
        "log_completions": "audit",
        "logging_dir": "log.tensorboard",
        "logging_steps": "",
        "loss_type": "training.loss",
        "lr_scheduler_kwargs": "",
        "lr_scheduler_type": "",
        "max_completion_length": "rollout.sampling.max_new_tokens",
        "max_steps": "steps",
        "model_name_or_path": "training.model",
        "num_generations": "rollout.samples_per_group",
        "num_generations_eval": "evaluation.samples_per_task",
        "num_iterations": "",
        "num_train_epochs": "data.epochs",
        "optim": "",
        "per_device_eval_batch_size": "",
        "per_device_train_batch_size": "rollout.groups_per_step times rollout.samples_per_group",
        "report_to": "log.tensorboard or log.wandb",
        "resume_from_checkpoint": "resume = 'auto', which continues with the newest checkpoint,",
        "reward_funcs": "rewards.function",
        "reward_weights": "",
        "save_steps": "trainer.save_every",
        "save_strategy": "trainer.save_every",
        "save_total_limit": "trainer.keep",
        "scale_rewards": "training.advantages ('dr_grpo' does not scale)",
        "shuffle_dataset": "data.shuffle",
        "steps_per_generation": "",
        "sync_ref_model": "",
        "train_dataset": "data.path",
        "eval_dataset": "data.evaluation",
        "use_vllm": "engines with kind = 'vllm'",
        "vllm_gpu_memory_utilization": "engines.arguments",
        "vllm_importance_sampling_cap": "training.correction_cap",
        "vllm_importance_sampling_clip_max": "training.correction_cap",
        "vllm_importance_sampling_correction": "training.correction with training.old_policy = 'trainer'",
        "vllm_importance_sampling_mode": "training.correction and training.correction_level",
        "vllm_max_model_length": "engines.arguments",
        "vllm_mode": "engines.colocate_with ('colocate'), or engines.num_gpus ('server')",
        "vllm_tensor_parallel_size": "engines.tensor_parallel_size",
        "warmup_ratio": "training.warmup_steps, a number of steps,",
    }
)
"""Name in TRL's `GRPOConfig` -> our keys; empty for a name in `REASONS`."""

VERL: Mapping[str, str] = MappingProxyType(
    {
        "adv_estimator": "training.advantages",
        "clip_ratio": "training.clip_low and training.clip_high",
        "clip_ratio_high": "training.clip_high",
        "clip_ratio_low": "training.clip_low",
        "entropy_coeff": "",
        "gpu_memory_utilization": "engines.arguments",
        "grad_clip": "training.max_grad_norm",
        "kl_loss_coef": "training.kl_coefficient",
        "kl_loss_type": "training.kl",
        "log_prob_micro_batch_size_per_gpu": "training.max_tokens",
        "loss_agg_mode": "training.mean",
        "loss_mode": "training.loss",
        "lr": "training.learning_rate",
        "lr_warmup_steps": "training.warmup_steps",
        "lr_warmup_steps_ratio": "training.warmup_steps, a number of steps,",
        "max_prompt_length": "",
        "max_response_length": "rollout.sampling.max_new_tokens",
        "n": "rollout.samples_per_group",
        "n_gpus_per_node": "trainer.num_gpus and trainer.world_size",
        "nnodes": "trainer.num_nodes",
        "norm_adv_by_std_in_grpo": "training.advantages ('dr_grpo' does not scale)",
        "ppo_epochs": "",
        "ppo_max_token_len_per_gpu": "training.max_tokens",
        "ppo_micro_batch_size_per_gpu": "training.max_tokens",
        "ppo_mini_batch_size": "rollout.groups_per_step",
        "prompt_key": "data.prompt",
        "save_freq": "trainer.save_every",
        "tensor_model_parallel_size": "engines.tensor_parallel_size",
        "test_freq": "evaluation.every",
        "tis_imp_ratio_cap": "training.correction_cap",
        "total_epochs": "data.epochs",
        "total_training_steps": "steps",
        "train_batch_size": "rollout.groups_per_step",
        "train_files": "data.path",
        "use_kl_loss": "training.kl_coefficient",
        "val_files": "data.evaluation",
    }
)
"""Last part of a name in verl's configuration -> our keys; empty for a name in `REASONS`."""

TRANSFORMERS: Mapping[str, str] = MappingProxyType({"stop_strings": "rollout.sampling.stop"})
"""Name in transformers' `GenerationConfig` -> our keys."""

VLLM: Mapping[str, str] = MappingProxyType({"max_tokens": "rollout.sampling.max_new_tokens"})
"""Name in vLLM's `SamplingParams` -> our keys."""

_ADAMW = "the optimiser is AdamW with torch's defaults; training.learning_rate and training.weight_decay set the rest"
_CONSTANT = "the learning rate stays constant after training.warmup_steps"
_ONE_STEP = "the trainer takes one optimiser step per batch"

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "adam_beta1": _ADAMW,
        "adam_beta2": _ADAMW,
        "adam_epsilon": _ADAMW,
        "dataloader_num_workers": "the controller reads the rows of the data itself",
        "entropy_coeff": "the losses have no entropy term",
        "logging_steps": "the job prints a line for every step",
        "lr_scheduler_kwargs": _CONSTANT,
        "lr_scheduler_type": _CONSTANT,
        "max_prompt_length": "no prompt is cut; leave long rows out of the data",
        "num_iterations": _ONE_STEP,
        "optim": _ADAMW,
        "per_device_eval_batch_size": "engines batch the answers of an evaluation themselves",
        "ppo_epochs": _ONE_STEP,
        "reward_weights": "add the rewards in one function, rewards.function",
        "steps_per_generation": _ONE_STEP,
        "sync_ref_model": "the weights of the reference model do not change",
    }
)
"""Name in TRL or verl that has no counterpart -> what the job does instead."""


def translated(key: str) -> str:
    """Return a text about a key of another library: Windlass's key, or the reason why Windlass has none.

    Return an empty string for any other key.
    """
    owners = ("TRL", TRL), ("verl", VERL), ("transformers", TRANSFORMERS), ("vLLM", VLLM)
    for owner, names in owners:
        if key in names:
            if ours := names[key]:
                return f"{owner}'s {key} is {ours} here"
            return f"{owner}'s {key} has no counterpart here; {REASONS[key]}"
    return ""
