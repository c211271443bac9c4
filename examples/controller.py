"""A controller. It prints its address; start the other processes with that URL.

export WINDLASS_TOKEN=...
python examples/controller.py
python -m windlass.engines.embedded --name engine-a --model CONFIG.json --controller URL
python -m windlass.rollout.worker --name worker-0 --controller URL
torchrun --nproc-per-node 2 examples/trainer.py URL CONFIG.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

import windlass
from windlass.rollout import RolloutGroup, training_samples

SAMPLES_PER_PROMPT = 4
PROMPTS_PER_STEP = 8


async def main(steps: int, port: int) -> None:
    """Serve batches of rollouts. The score is the share of token 7."""
    sampling = windlass.SamplingParams(max_new_tokens=8, ignore_eos=True)
    policy = windlass.StalenessPolicy(
        max_staleness=1, batch_size=PROMPTS_PER_STEP * SAMPLES_PER_PROMPT, max_concurrent=256
    )
    async with windlass.Controller(token=token(), port=port, staleness=policy) as controller:
        print(controller.url, flush=True)
        await controller.wait_for_fleet(num_trainers=2, engines=("engine-a",), deadline_s=600)
        for step in range(steps):
            for number in range(PROMPTS_PER_STEP):
                controller.rollouts.submit_group((1, 2, number), SAMPLES_PER_PROMPT, sampling)
            groups = await controller.rollouts.next_batch(PROMPTS_PER_STEP, deadline_s=600)
            await controller.batches.put(step, [score(group) for group in groups])
        await controller.wait_for_version(steps, deadline_s=600)


def token() -> str:
    """Return the controller's secret. Every process of a job has it in its environment."""
    return os.environ.get("WINDLASS_TOKEN") or sys.exit(
        "WINDLASS_TOKEN must be set to a secret that all processes share, got none; "
        "run `export WINDLASS_TOKEN=a-secret-of-yours` in every terminal"
    )


def score(group: RolloutGroup) -> tuple[windlass.TrainingSample, ...]:
    """Return the answers of a group with their rewards."""
    rewards = [r.output_ids.count(7) / len(r.output_ids) for r in group.rollouts]
    return training_samples(group, rewards)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A controller and the rollouts of a few steps.")
    parser.add_argument("--steps", type=int, default=3, help="the same number as the trainer's")
    parser.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    args = parser.parse_args()
    asyncio.run(main(args.steps, args.port))
