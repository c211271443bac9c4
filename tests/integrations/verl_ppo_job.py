"""verl's own GRPO job with its default placement, on CPUs; run by the Python of verl's environment.

The job is `python -m verl.trainer.main_ppo` with verl's default trainer (`trainer_mode=sync`), and options for CPUs and for a
tiny model. `RecordingManager` records the weights of vLLM's servers before each batch of rollouts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import ray
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl_shard_job import NUM_TOKENS, PROMPT, SHARDS, TINY, generate, identity, tensors, told

NUM_RANKS, NUM_STEPS, NUM_PROMPTS, NUM_WORDS = 2, 3, 4, 16
REWARD = f"""
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len({{*solution_str.split()}}) / {NUM_WORDS}
"""


class Replica(NamedTuple):
    """Server of a vLLM replica, with verl's names."""

    server_address: str
    server_handle: Any


class RecordingManager(AgentLoopManagerTQ):  # type: ignore[misc]  # verl has no types
    """verl's agent loop manager, which records what the servers serve before it starts a batch of rollouts.

    verl's trainer calls it after the update of the previous step: at the start of each step, and for the validation after the
    last step.
    """

    def generate_sequences(self, prompts: Any) -> None:
        self._record()
        super().generate_sequences(prompts)

    def _record(self) -> None:
        """Append the state of every server to `found.json`."""
        servers = [ray.get_actor(f"vllm_server_{rank}_0") for rank in range(NUM_RANKS)]
        addresses = ray.get([server.get_server_address.remote() for server in servers])
        replicas = [
            Replica(f"{host}:{port}", server)
            for (host, port), server in zip(addresses, servers, strict=True)
        ]
        state = {
            "prompt": PROMPT,
            **tensors(replicas),
            "identities": [identity(replica) for replica in replicas],
            "answers": [told(ray.get(generate(replica, NUM_TOKENS))) for replica in replicas],
        }
        path = Path(self.config.trainer.default_local_dir) / "found.json"
        found = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*found, state], indent=1))


def overrides(model: str, folder: Path) -> list[str]:
    """Return the options of verl's job. It writes checkpoints and `found.json` to `folder`."""
    return [
        *SHARDS,
        *TINY,
        f"actor_rollout_ref.model.path={model}",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder / 'rows.parquet'}",
        f"data.val_files={folder / 'rows.parquet'}",
        f"data.train_batch_size={NUM_PROMPTS}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=0.001",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.prompt_length=16",
        f"actor_rollout_ref.rollout.response_length={NUM_WORDS}",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_ppo_job.RecordingManager",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        f"trainer.n_gpus_per_node={NUM_RANKS}",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"trainer.test_freq={NUM_STEPS}",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={folder}",
        f"hydra.run.dir={folder / 'hydra'}",
        "ray_kwargs.ray_init.num_cpus=16",
        # Ray counts GPUs that do not exist.
        f"+ray_kwargs.ray_init.num_gpus={NUM_RANKS}",
        # Another cluster of Ray may run on this machine.
        "+ray_kwargs.ray_init.address=local",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"+ray_kwargs.ray_init.object_store_memory={256 << 20}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    folder = args.out.parent
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": f"w{number} w9 w33"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(5, 5 + NUM_PROMPTS * NUM_STEPS)
    ]
    datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    (folder / "reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(args.model, folder)]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
