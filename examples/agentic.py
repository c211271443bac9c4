"""An agentic workflow: a simulated user, tools with state, many turns, updates in flight.

export WINDLASS_TOKEN=...
python examples/agentic.py controller --steps 3
python -m windlass.engines.embedded --name engine-a --model CONFIG.json --controller URL
python examples/agentic.py worker --name worker-0 --controller URL
torchrun --nproc-per-node 2 examples/trainer.py URL CONFIG.json

The task resembles tau2-bench, with token ids instead of words, so that any model can run it: a
customer wants to book one seat and cancel another. Each answer of the agent is one tool call
(tool and seat). The tool changes the state of the desk and answers; then the customer asks again,
until both wishes are met or the last turn is over. The reward is the share of wishes that the
final state meets.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import dataclass, field

import windlass
from windlass.rollout import RolloutGroup, WorkflowContext, run_rollout_worker, training_samples

NUM_SEATS = 8
MAX_TURNS = 6
SAMPLES_PER_TASK = 4
TASKS_PER_STEP = 8
TOOLS = ("look", "book", "cancel", "done")
# Tokens of the dialogue. All are below 64, so that they fit the smallest vocabulary.
SYSTEM, USER, TOOL, WANTS, DROPS, OK, NO = 1, 2, 3, 4, 5, 6, 7
SEAT_0 = 16


@dataclass(slots=True)
class Desk:
    """State of the tools: the seats that the customer has."""

    held: set[int] = field(default_factory=set)

    def call(self, tool: str, seat: int) -> tuple[int, ...]:
        """Run a tool and return its answer as tokens."""
        allowed = True
        if tool == "book":
            allowed = seat not in self.held
            self.held.add(seat)
        elif tool == "cancel":
            allowed = seat in self.held
            self.held.discard(seat)
        return (TOOL, SEAT_0 + seat, OK if allowed else NO)


@dataclass(frozen=True, slots=True)
class Customer:
    """Simulated user that wants to book one seat and cancel another."""

    wants: int
    drops: int

    def met(self, desk: Desk) -> float:
        """Return the share of wishes that are met."""
        return ((self.wants in desk.held) + (self.drops not in desk.held)) / 2

    def says(self, desk: Desk) -> tuple[int, ...]:
        """Return the next utterance: the first wish that is not met."""
        if self.wants not in desk.held:
            return (USER, WANTS, SEAT_0 + self.wants)
        if self.drops in desk.held:
            return (USER, DROPS, SEAT_0 + self.drops)
        return (USER, OK, OK)


async def book_a_seat(context: WorkflowContext) -> dict[str, float]:
    """Run one conversation. Each attempt has its own state."""
    if not isinstance(context.arguments, int):
        raise TypeError(f"book_a_seat: arguments must be a task number, got {context.arguments!r}")
    wants, drops = context.arguments % NUM_SEATS, (context.arguments + 3) % NUM_SEATS
    customer, desk = Customer(wants, drops), Desk({drops})
    dialogue: tuple[int, ...] = (SYSTEM, *customer.says(desk))
    for _ in range(MAX_TURNS):
        turn = await context.generate(dialogue)
        answer = turn.output.output_ids
        tool, seat = TOOLS[answer[0] % len(TOOLS)], answer[-1] % NUM_SEATS
        if tool == "done":
            break
        dialogue += answer + desk.call(tool, seat) + customer.says(desk)
        if customer.met(desk) == 1.0:
            break
    return {"reward": customer.met(desk), "turns": len(context.turns)}


WORKFLOWS = {"book_a_seat": book_a_seat}


def samples(group: RolloutGroup) -> tuple[windlass.TrainingSample, ...]:
    """Return one training sample per conversation, with its reward."""
    values = [rollout.value for rollout in group.rollouts]
    rewards = [float(value["reward"]) if isinstance(value, dict) else 0.0 for value in values]
    return training_samples(group, rewards)


async def control(steps: int, num_trainers: int) -> None:
    """Collect conversations while the trainer publishes; print the reward of each step."""
    sampling = windlass.SamplingParams(max_new_tokens=2, ignore_eos=True)
    policy = windlass.StalenessPolicy(
        max_staleness=1, batch_size=TASKS_PER_STEP * SAMPLES_PER_TASK, max_concurrent=256
    )
    async with windlass.Controller(token=token(), staleness=policy) as controller:
        print(controller.url, flush=True)
        await controller.wait_for_fleet(
            num_trainers=num_trainers, engines=("engine-a",), deadline_s=600
        )

        async def produce() -> None:
            for number in range(1_000_000):
                await controller.rollouts.wait_for_room(deadline_s=600)
                controller.rollouts.submit_workflow_group(
                    "book_a_seat", number, SAMPLES_PER_TASK, sampling
                )

        producer = asyncio.create_task(produce())
        for step in range(steps):
            await controller.batches.requested(step, deadline_s=600)
            groups = await controller.rollouts.next_batch(TASKS_PER_STEP, deadline_s=600)
            batch = [samples(group) for group in groups]
            await controller.batches.put(step, batch)
            dialogues = [sample for group in batch for sample in group]
            reward = sum(sample.reward for sample in dialogues) / len(dialogues)
            versions = sorted({v for s in dialogues for v in s.versions if v >= 0})
            print(
                f"step {step}: {len(dialogues)} dialogues, reward {reward:.3f}, versions {versions}"
            )
        await controller.wait_for_version(steps, deadline_s=600)
        print(f"lost {controller.rollouts.stats().lost}", flush=True)
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)


def token() -> str:
    """Return the controller's secret. Every process of a job has it in its environment."""
    return os.environ.get("WINDLASS_TOKEN") or sys.exit(
        "WINDLASS_TOKEN must be set to a secret that all processes share, got none; "
        "run `export WINDLASS_TOKEN=a-secret-of-yours` in every terminal"
    )


def main() -> int:
    """Run a controller, or a worker with the arguments of `python -m windlass.rollout.worker`."""
    if sys.argv[1:2] == ["worker"]:
        return run_rollout_worker(WORKFLOWS, sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["controller"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--num-trainers", type=int, default=2, help="ranks of the trainer")
    args = parser.parse_args()
    asyncio.run(control(args.steps, args.num_trainers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
