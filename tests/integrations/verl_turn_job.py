"""verl's actor and its vLLM servers on the same GPUs (`hybrid_engine`), on CPUs; run by the Python of verl's environment.

The job makes the calls of verl's `PPOTrainerSync` (`verl/trainer/ppo/v1/trainer_base.py`, `trainer_sync.py`) in their order,
with verl's own manager class, `ActorRolloutRefWorker` with the role `actor_rollout`, and `vLLMReplica.init_hybrid`.
`vllm_cpu_sleep` gives vLLM's worker for CPUs memory that sleeps.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import get_rollout_replica_class
from verl_shard_job import (
    NUM_TOKENS,
    PROMPT,
    SHARDS,
    Actor,
    Server,
    configuration,
    family,
    generate,
    save,
    start_ray,
    tensors,
    told,
)

from windlass.errors import WindlassError
from windlass.integrations.verl import ShardCheckpointManager
from windlass.transfer.sender import Sender

NUM_RANKS = 2
WAITS_S = 10.0
"""Seconds without an answer after which a request counts as waiting."""


class TurnActor(Actor):
    """verl's actor, which can fail or kill processes while it offloads its parameters in an update."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def watch_offload(self) -> None:
        """Wrap the method with which verl offloads, so that `at_offload` and `num_offloads` work."""
        engine = self.actor.engine
        offload, self.num, self.does = engine.to, 0, ""
        self.pids: Sequence[int] = ()

        def to(device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
            does, self.does = self.does, ""
            for pid in self.pids if does == "kill" else ():
                os.kill(pid, signal.SIGKILL)
            if does == "raise":
                raise RuntimeError("the test fails this offload")
            self.num += 1
            offload(device, model=model, optimizer=optimizer, grad=grad)

        engine.to = to

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def num_offloads(self) -> int:
        return int(self.num)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_in_write(self, rank: int) -> None:
        """Make `rank` kill its own process when servers shall read from it."""

        def write(*_: Any) -> NoReturn:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        if self.rank == rank:
            Sender.write = write  # type: ignore[method-assign,assignment]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def at_offload(self, rank: int, does: str, pids: Sequence[int] = ()) -> None:
        """Make `rank` raise, or kill `pids`, at its next offload."""
        if self.rank == rank:
            self.does, self.pids = does, pids


class Job:
    """Actor ranks and vLLM servers that share GPUs. Ray counts GPUs that do not exist."""

    def __init__(self, args: argparse.Namespace) -> None:
        start_ray(NUM_RANKS)
        self.args, self.step, self.found = args, 0, dict[str, Any]()
        self.settings = configuration(
            args, [*SHARDS, "actor_rollout_ref.actor.fsdp_config.param_offload=True"]
        )
        self.actors = RayWorkerGroup(
            resource_pool=RayResourcePool([NUM_RANKS], use_gpu=True, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(
                cls=ray.remote(TurnActor), config=self.settings, role="actor_rollout"
            ),
            device_name="cpu",
        )
        self.actors.init_model()
        self.actors.watch_offload()
        rollout, model = map(omega_conf_to_dataclass, (self.settings.rollout, self.settings.model))
        assert rollout.enable_sleep_mode
        assert rollout.free_cache_engine
        self.replicas = [
            get_rollout_replica_class("vllm")(rank, rollout, model, gpus_per_node=NUM_RANKS)
            for rank in range(NUM_RANKS // rollout.tensor_model_parallel_size)
        ]
        asyncio.run(self._start())
        # As `PPOTrainer._setup` does.
        config = omega_conf_to_dataclass(self.settings.rollout.checkpoint_engine)
        config.backend = "naive"
        self.manager = CheckpointEngineManager(
            config=config, actor_wg=self.actors, replicas=[*self.replicas]
        )
        assert type(self.manager) is ShardCheckpointManager
        self.manager.sleep_replicas()

    async def _start(self) -> None:
        for replica in self.replicas:
            replica.server_class = ray.remote(Server)
        await asyncio.gather(*(replica.init_hybrid(self.actors) for replica in self.replicas))

    def update(self) -> dict[str, Any]:
        """Update the weights, as at the end of a step of verl's trainer. Return the state of every replica."""
        before, began = self.actors.num_offloads(), time.monotonic()
        metrics = self.manager.update_weights(self.step)
        took_s = time.monotonic() - began
        offloads = [now - was for now, was in zip(self.actors.num_offloads(), before, strict=True)]
        return {**self.served(), "metrics": metrics, "offloads": offloads, "took_s": took_s}

    def train(self) -> None:
        """Make the replicas sleep, and change the weights."""
        self.manager.sleep_replicas()
        self.step += 1
        self.actors.change_weights(self.step)

    def served(self) -> dict[str, Any]:
        """Return vLLM's own checksums and answers for every replica, and save the actor's weights."""
        weights = self.args.out.with_name(f"weights-{self.step}")
        save(self.actors.full_weights()[0], self.args.model, weights)
        answers = ray.get([generate(replica, NUM_TOKENS) for replica in self.manager.replicas])
        return {
            "step": self.step,
            "weights": str(weights),
            **tensors(self.manager.replicas),
            "answers": [told(answer) for answer in answers],
        }

    def raised(self) -> str:
        """Update the weights, and return the error."""
        try:
            self.manager.update_weights(self.step)
        except (WindlassError, ray.exceptions.RayError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def fail(self) -> dict[str, Any]:
        """Make an update that must fail. Return the error, and whether the replicas answer requests."""
        raised = self.raised()
        self.waiting = [generate(replica, NUM_TOKENS) for replica in self.manager.replicas]
        answered, _ = ray.wait(self.waiting, num_returns=len(self.waiting), timeout=WAITS_S)
        return {"raised": raised, "num_answered": len(answered)}

    def failed_offload(self) -> dict[str, Any]:
        """Let the last rank fail in an update, after the servers have read. Then update again."""
        self.train()
        self.actors.at_offload(NUM_RANKS - 1, "raise")
        failed = self.fail()
        return {
            **failed,
            "after it": self.update(),
            "waited": [told(answer) for answer in ray.get(self.waiting)],
        }

    def killed_server(self) -> dict[str, Any]:
        """Kill the last replica in an update, after it has read. Then train one more step."""
        killed = self.manager.replicas[-1]
        pid = ray.get(killed.server_handle.__ray_call__.remote(lambda _: os.getpid()))
        self.train()
        self.actors.at_offload(0, "kill", family(pid))
        raised = self.raised()
        self.manager.remove_replicas([killed])
        served = self.served()
        self.train()
        return {
            "raised": raised,
            "address": killed.server_address,
            **served,
            "after it": self.update(),
        }

    def killed_actor(self) -> dict[str, Any]:
        """Kill the last rank in an update, while the server reads from the other rank."""
        self.train()
        self.actors.die_in_write(NUM_RANKS - 1)
        return self.fail()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.set_defaults(trainers=NUM_RANKS)
    job = Job(parser.parse_args())
    found: dict[str, Any] = {"prompt": PROMPT, "updates": [job.update()]}
    for _ in range(3):
        job.train()
        found["updates"].append(job.update())
    found["failed offload"] = job.failed_offload()
    found["killed server"] = job.killed_server()
    found["killed actor"] = job.killed_actor()
    job.args.out.write_text(json.dumps(found, indent=1))
    ray.shutdown()


if __name__ == "__main__":
    main()
