"""verl's own worker groups over Ray, on CPUs; run by the Python of verl's environment.

The job follows `tests/checkpoint_engine/test_correctness_on_gpu.py` of verl 0.9.1 and uses its helpers: real
`TrainingWorker`s with FSDP2, real `CheckpointEngineWorker`s, a real `CheckpointEngineManager`. The processes of the
rollout side compare the received weights element by element.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray
import torch
from tests.checkpoint_engine.test_utils import (
    CheckpointEngineWorkerTest,
    MockReplica,
    MockServerAdapter,
    TrainingWorkerTest,
)
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import CheckpointConfig
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import (
    CheckpointEngineConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RolloutConfig,
)
from verl.workers.engine_workers import TrainingWorkerConfig

STOP_S = 4.0
"""Seconds that a stopped reader waits."""


class Ended:
    """Record for the driver of the end of a worker's last update: (error, time)."""

    last: tuple[str, float] = ("", 0.0)

    def note(self, error: BaseException | None) -> None:
        # All workers run on one host, so their clocks agree.
        self.last = (f"{type(error).__name__}: {error}" if error else "", time.monotonic())


class Trainer(TrainingWorkerTest):  # type: ignore[misc]  # verl has no types
    """verl's trainer worker, with a method that changes its weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # verl asks for "cpu:gloo,DEVICE:BACKEND", which would name the CPU twice.
        initialize_global_process_group_ray(timeout_second=None, backend="cpu:gloo")
        super().__init__(*args, **kwargs)
        self.ended = Ended()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add_to_weights(self, number: float) -> int:
        """Add a number to every element, and return the process id."""
        with torch.no_grad():
            for parameter in self.engine.module.parameters():
                parameter.to_local().add_(number)
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Send the weights and return the engine's metrics, as `ActorRolloutRefWorker.update_weights` does."""
        weights, _ = self.engine.get_per_tensor_param()
        try:
            done = await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)
        except BaseException as error:
            self.ended.note(error)
            raise
        return done or {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def full_weights(self) -> dict[str, torch.Tensor]:
        """Return the current export of verl."""
        weights, _ = self.engine.get_per_tensor_param()
        return {name: tensor.clone() for name, tensor in weights}

    async def how_ended(self) -> tuple[str, float]:
        return self.ended.last


class Adapter(MockServerAdapter):  # type: ignore[misc]
    """Adapter that keeps received weights and can stop in mid-stream."""

    stop_at = -1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stopped, self.over, self.ended = asyncio.Event(), asyncio.Event(), Ended()

    async def update_weights(self, weights: Any, **kwargs: Any) -> None:
        self.received_weights, self.global_steps = {}, kwargs.get("global_steps")
        self.over.clear()
        try:
            async for name, weight in weights:
                self.received_weights[name] = weight.clone()
                if len(self.received_weights) == self.stop_at:
                    self.stopped.set()
                    await asyncio.sleep(STOP_S)
            self.ended.note(None)
        except BaseException as error:
            self.ended.note(error)
            raise
        finally:
            self.over.set()


class Rollout(CheckpointEngineWorkerTest):  # type: ignore[misc]
    """verl's rollout worker, with a comparison of its received weights with the trainer's."""

    def __init__(self, rollout_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(rollout_config, model_config, *args, **kwargs)
        self.server_adapter = Adapter(rollout_config, model_config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def differences(self, expected: dict[str, torch.Tensor], step: int) -> list[str]:
        """Return the names of tensors with another dtype, shape or element; empty for none."""
        got = self.server_adapter.received_weights
        found = sorted(expected.keys() ^ got.keys())
        for name in expected.keys() & got.keys():
            same = expected[name].dtype == got[name].dtype and torch.equal(
                expected[name], got[name]
            )
            found += [] if same else [name]
        return found + ([] if self.server_adapter.global_steps == step else ["global_steps"])

    async def stand_still_at(self, num_tensors: int) -> int:
        self.server_adapter.stop_at = num_tensors
        self.server_adapter.stopped.clear()
        return os.getpid()

    async def wait_stopped(self) -> None:
        await asyncio.wait_for(self.server_adapter.stopped.wait(), 60)

    async def how_ended(self) -> tuple[str, float]:
        await asyncio.wait_for(self.server_adapter.over.wait(), 60)
        return self.server_adapter.ended.last


class Job:
    """Trainer ranks, and rollout ranks that are one replica each."""

    def __init__(self, args: argparse.Namespace) -> None:
        environment = {
            name: os.environ[name]
            for name in os.environ
            if name.startswith("VERL_") or name in {"PYTHONPATH", "OMP_NUM_THREADS"}
        }
        ray.init(
            # Another cluster of Ray may run on this machine.
            address="local",
            num_cpus=args.trainers + args.rollouts + 1,
            include_dashboard=False,
            object_store_memory=256 << 20,
            log_to_driver=False,
            runtime_env={"env_vars": environment},
        )
        self.args, self.step = args, -1
        config = CheckpointEngineConfig(
            backend=args.backend,
            update_weights_bucket_megabytes=args.bucket_megabytes,
            engine_kwargs={args.backend: json.loads(args.engine_kwargs)},
            custom_backend_module="windlass.integrations.verl",
        )
        model = HFModelConfig(
            path=args.model,
            use_remove_padding=False,
            override_config={"attn_implementation": "eager"},
        )
        rollout_config = RolloutConfig(
            name="vllm", tensor_model_parallel_size=1, checkpoint_engine=config
        )
        trainer = TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=FSDPEngineConfig(
                fsdp_size=args.trainers,
                strategy="fsdp2",
                param_offload=False,
                optimizer_offload=False,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
        self.actors = self._group(
            args.trainers, Trainer, config=trainer, checkpoint_engine_config=config
        )
        self.actors.reset()
        self.rollouts = self._group(
            args.rollouts, Rollout, model_config=model, rollout_config=rollout_config
        )
        self.replicas = [
            MockReplica(replica_rank=rank, config=rollout_config, model_config=model)
            for rank in range(args.rollouts)
        ]
        for replica in self.replicas:
            asyncio.run(replica.init_hybrid(self.rollouts))
        self.manager = CheckpointEngineManager(
            config=config, actor_wg=self.actors, replicas=[*self.replicas]
        )

    def _group(self, num_ranks: int, kind: type, **kwargs: Any) -> Any:
        return RayWorkerGroup(
            resource_pool=RayResourcePool([num_ranks], use_gpu=False, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(kind), **kwargs),
            device_name="cpu",
        )

    def update(self) -> dict[str, Any]:
        """Change the weights, make one update, and return the differences on every replica in it."""
        self.step += 1
        self.actors.add_to_weights(1.0)
        began = time.perf_counter()
        metrics = self.manager.update_weights(global_steps=self.step)
        seconds = time.perf_counter() - began
        expected = self.actors.full_weights()[0]
        workers = [worker for replica in self.manager.replicas for worker in replica.workers]
        return {
            "seconds": seconds,
            "metrics": metrics,
            "num_tensors": len(expected),
            "num_elements": sum(tensor.numel() for tensor in expected.values()),
            "differences": ray.get(
                [worker.differences.remote(expected, self.step) for worker in workers]
            ),
        }

    def kill(self, worker: Any, pid: int) -> dict[str, Any]:
        """Begin an update, and kill one process (SIGKILL) while a reader is stopped in the middle."""
        self.step += 1
        stopped = self.rollouts.workers[-1]
        own_pid = ray.get(stopped.stand_still_at.remote(5))
        results = self.begin()
        ray.get(stopped.wait_stopped.remote())
        killed = time.monotonic()
        os.kill(pid or own_pid, signal.SIGKILL)
        left = [
            each for each in [*self.actors.workers[:1], *self.rollouts.workers] if each != worker
        ]
        told = []
        for each in left:
            if each in self.rollouts.workers:
                why, when = ray.get(each.how_ended.remote())
                told.append([why, when - killed])
        try:
            ray.get(results)
            raised = ""
        except Exception as error:  # noqa: BLE001 - Ray chooses the class
            raised = f"{type(error).__name__}: {error}"
        if worker not in self.actors.workers:
            why, when = ray.get(self.actors.workers[0].how_ended.remote())
            told.append([why, when - killed])
        return {"raised": raised, "told": told}

    def begin(self) -> list[Any]:
        """Start the steps of `CheckpointEngineManager.update_weights` that send and receive."""
        workers = [worker for replica in self.manager.replicas for worker in replica.workers]
        rollouts = RayWorkerGroup(
            worker_handles=workers,
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Rollout)),
        )
        self.manager.build_process_group(rollouts)
        sent = self.actors.update_weights(global_steps=self.step, mode=self.args.backend)
        return [*sent, *rollouts.update_weights(global_steps=self.step)]


def all_that_can_happen(job: Job) -> dict[str, Any]:
    """Run updates: a replica leaves and returns; a receiver dies and the others continue; the sender dies."""
    found: dict[str, Any] = {"updates": [job.update() for _ in range(3)]}
    job.manager.remove_replicas(job.replicas[:1])
    found["without one"] = job.update()
    job.manager.add_replicas(job.replicas[:1])
    found["with it again"] = job.update()
    last = job.rollouts.workers[-1]
    found["receiver killed"] = job.kill(last, 0)
    job.manager.remove_replicas(job.replicas[-1:])
    job.rollouts.workers.remove(last)
    found["after it"] = job.update()
    sender = job.actors.workers[0]
    found["sender killed"] = job.kill(sender, job.actors.add_to_weights(0.0)[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="windlass")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--bucket-megabytes", type=int, default=1)
    parser.add_argument("--engine-kwargs", default="{}")
    args = parser.parse_args()
    found = all_that_can_happen(Job(args))
    args.out.write_text(json.dumps(found, indent=1))
    ray.shutdown()


if __name__ == "__main__":
    main()
