"""verl's own actor, manager and vLLM servers over Ray, on CPUs; run by the Python of verl's environment.

The configuration is verl's `ppo_trainer`, the actor ranks are its `ActorRolloutRefWorker`, the servers its `vLLMReplica`
of vLLM for CPUs. The job records vLLM's own checksums and answers, and saves the actor's export for a comparison.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import time
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import verl.trainer.config
from hydra import compose, initialize_config_dir
from safetensors.torch import save_file
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from windlass.errors import PeerUnreachable
from windlass.integrations.verl import ShardCheckpointManager

PROMPT = [5, 9, 33, 17]
MANAGER = "windlass.integrations.verl.ShardCheckpointManager"
SHARDS = (
    "actor_rollout_ref.rollout.checkpoint_engine.backend=windlass_shards",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.weight_transfer_config={backend:windlass}",
)
SEPARATE = (
    *SHARDS,
    f"+actor_rollout_ref.rollout.checkpoint_manager_class={MANAGER}",
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.free_cache_engine=False",
)
TINY = (
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.prompt_length=64",
    "actor_rollout_ref.rollout.response_length=128",
    "actor_rollout_ref.rollout.max_model_len=256",
    "actor_rollout_ref.rollout.max_num_batched_tokens=256",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=64",
)
"""Options for CPUs and for a tiny model."""
NUM_TOKENS = 12
NUM_RUNNING_TOKENS = 120


class Server(vLLMHttpServer):  # type: ignore[misc]  # verl has no types
    """verl's server, which calls vLLM's pause with the arguments of releases before 0.32."""

    async def run_server(self, args: argparse.Namespace) -> None:
        await super().run_server(args)
        pause = self.engine.pause_generation

        async def abort(*, wait_for_inflight_requests: bool, clear_cache: bool) -> None:
            assert not wait_for_inflight_requests
            await pause(mode="abort", clear_cache=clear_cache)

        self.engine.pause_generation = abort

    async def wait_running(self) -> None:
        """Wait until the server has requests."""
        while not self.engine.output_processor.request_states:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(0.01)


class Actor(ActorRolloutRefWorker):  # type: ignore[misc]  # verl has no types
    """verl's actor, with methods that change and export its weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change_weights(self, seed: int) -> None:
        """Add noise to every element."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.actor.engine.module.parameters():
                local = parameter.to_local()
                local.add_(torch.randn(local.shape) * 0.05)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def full_weights(self) -> dict[str, torch.Tensor]:
        """Return the current export of verl, gathered."""
        weights, _ = self.actor.engine.get_per_tensor_param()
        return {name: tensor.clone() for name, tensor in weights}


class Manager(ShardCheckpointManager):
    """Windlass's manager, which also kills processes after it has aborted requests."""

    pids: Sequence[int] = ()

    async def abort_replicas(self, reject_request: bool = False) -> None:
        await asyncio.gather(*(replica.abort_all_requests() for replica in self.replicas))
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)


class Job:
    """Actor ranks, and vLLM servers of one rank each. Ray counts GPUs that do not exist."""

    def __init__(self, args: argparse.Namespace) -> None:
        start_ray(args.rollouts)
        self.args, self.step = args, 0
        settings = configuration(args, SEPARATE)
        self.actors = RayWorkerGroup(
            resource_pool=RayResourcePool([args.trainers], use_gpu=False, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(
                cls=ray.remote(Actor), config=settings, role="actor"
            ),
            device_name="cpu",
        )
        self.actors.init_model()
        rollout, model = map(omega_conf_to_dataclass, (settings.rollout, settings.model))
        self.replicas = [
            get_rollout_replica_class("vllm")(rank, rollout, model, gpus_per_node=1)
            for rank in range(args.rollouts)
        ]
        asyncio.run(self._start())
        named = load_class_from_fqn(
            settings.rollout.checkpoint_manager_class, "CheckpointEngineManager"
        )
        assert named is ShardCheckpointManager
        config = omega_conf_to_dataclass(settings.rollout.checkpoint_engine)
        self.manager = Manager(config=config, actor_wg=self.actors, replicas=[*self.replicas])

    async def _start(self) -> None:
        for replica in self.replicas:
            replica.server_class = ray.remote(Server)
        await asyncio.gather(*(replica.init_standalone() for replica in self.replicas))

    def update(self) -> dict[str, Any]:
        """Change the weights, make one update while requests run, and return the state of every replica."""
        self.step += 1
        self.actors.change_weights(self.step)
        replicas = self.manager.replicas
        running = [generate(replica, NUM_RUNNING_TOKENS) for replica in replicas]
        ray.get([replica.server_handle.wait_running.remote() for replica in replicas])
        metrics = self.manager.update_weights(global_steps=self.step)
        return {
            "metrics": metrics,
            "running": [told(each) for each in ray.get(running)],
            **self.served(replicas),
        }

    def served(self, replicas: Sequence[Any]) -> dict[str, Any]:
        """Return vLLM's own checksums and answers for every replica."""
        return {
            "step": self.step,
            **tensors(replicas),
            "answers": [told(ray.get(generate(replica, NUM_TOKENS))) for replica in replicas],
        }

    def kill(self, replica: Any) -> dict[str, Any]:
        """Kill all processes of a replica in an update, after its requests are aborted."""
        self.step += 1
        self.actors.change_weights(self.step)
        pid = ray.get(replica.server_handle.__ray_call__.remote(lambda _: os.getpid()))
        self.manager.pids = family(pid)
        began = time.monotonic()
        try:
            self.manager.update_weights(global_steps=self.step)
            raised = ""
        except PeerUnreachable as error:
            raised = str(error)
        self.manager.pids = ()
        took_s = time.monotonic() - began
        self.manager.remove_replicas([replica])
        return {
            "raised": raised,
            "address": replica.server_address,
            "took_s": took_s,
            **self.served(self.manager.replicas),
        }


def start_ray(num_gpus: int) -> None:
    """Start Ray for a job. `num_gpus`: number of GPUs that Ray counts; they do not exist."""
    names = {"PYTHONPATH", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("VERL_", "VLLM_")) or name in names
    }
    ray.init(
        # Another cluster of Ray may run on this machine.
        address="local",
        num_cpus=16,
        num_gpus=num_gpus,
        include_dashboard=False,
        object_store_memory=256 << 20,
        runtime_env={"env_vars": environment},
    )


def save(weights: dict[str, torch.Tensor], model: str, folder: Path) -> None:
    """Write a checkpoint of these weights, with the other files of the folder `model`."""
    folder.mkdir()
    for path in Path(model).iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def configuration(args: argparse.Namespace, windlass: Sequence[str]) -> Any:
    """Return verl's configuration with the options `windlass`, for CPUs and for a tiny model."""
    named = (
        f"actor_rollout_ref.model.path={args.model}",
        f"actor_rollout_ref.actor.fsdp_config.fsdp_size={args.trainers}",
        "actor_rollout_ref.actor.optim.total_training_steps=10",
    )
    folder = Path(verl.trainer.config.__file__).parent
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=[*windlass, *TINY, *named]).actor_rollout_ref


def generate(replica: Any, num_tokens: int) -> Any:
    sampling = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": True}
    return replica.server_handle.generate.remote(list(PROMPT), sampling, uuid.uuid4().hex)


def told(output: Any) -> dict[str, Any]:
    return {
        "tokens": output.token_ids,
        "logprobs": output.log_probs,
        "stop_reason": output.stop_reason,
        "step": output.extra_fields.get("global_steps"),
    }


def tensors(replicas: Sequence[Any]) -> dict[str, Any]:
    """Return vLLM's own checksums and Windlass's fingerprints of every tensor, for every replica."""
    fingerprints = {"method": "windlass_digests"}
    return {
        "checksums": [checksums(replica) for replica in replicas],
        "digests": [
            _post(replica, "/collective_rpc", fingerprints)["results"][0] for replica in replicas
        ],
    }


def checksums(replica: Any) -> dict[str, str]:
    """Return vLLM's own checksum of every tensor."""
    return dict(_post(replica, "/weight_checker", {"action": "checksum"})["checksums"])


def identity(replica: Any) -> str:
    """Return the identity of the version of the fleet that the replica serves; empty for weights from elsewhere."""
    return str(_post(replica, "/collective_rpc", {"method": "windlass_weights"})["results"][0])


def _post(replica: Any, path: str, body: dict[str, str]) -> Any:
    request = urllib.request.Request(
        f"http://{replica.server_address}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def family(pid: int) -> list[int]:
    """Return the process ids of a process and of all its descendants."""
    found, left = [], [pid]
    while left:
        pid = left.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            left += [int(child) for child in task.read_text().split()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=2)
    args = parser.parse_args()
    job = Job(args)
    first, last = job.replicas[0], job.replicas[-1]
    found: dict[str, Any] = {"prompt": PROMPT, "first": checksums(first)}
    found["updates"] = [job.update(), job.update()]
    job.manager.remove_replicas([first])
    found["without one"] = job.update()
    job.manager.add_replicas([first])
    found["with it again"] = job.update()
    found["killed"] = job.kill(last)
    found["after it"] = job.update()
    save(job.actors.full_weights()[0], args.model, args.out.with_name("weights"))
    args.out.write_text(json.dumps(found, indent=1))
    ray.shutdown()


if __name__ == "__main__":
    main()
