"""One rank of an AReaL job against plain vLLM or SGLang servers, on a CPU, in AReaL's own environment.

    torchrun ... areal_run.py train SETTINGS     # JSON, see `Settings`
    torchrun ... areal_run.py refusals MODEL     # prints the configurations that are refused, and the reasons
    python areal_run.py ppo SETTINGS             # AReaL's `PPOTrainer` and all that it starts, see `PpoSettings`

The job uses AReaL's own FSDP engine and PPO actor with gloo, optimizer steps, rollout engine, workflow executor and
checkpoints. Around an update, the loop of `train` makes the same calls as `PPOTrainer.train`
(`areal/trainer/rl_trainer.py`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from areal.api import (
    FinetuneSpec,
    ModelAllocation,
    ModelRequest,
    RolloutWorkflow,
    SaveLoadMeta,
    WeightUpdateMeta,
)
from areal.api.cli_args import (
    ArchonEngineConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
)
from areal_on_cpu import archon_actor, megatron_actor, step_megatron
from fresh_servers import checksums
from sglang_cpu_sleep import HostSaver, moved
from torch.distributed.tensor import DTensor

from windlass.engines.http import EngineHttp
from windlass.engines.private_routes import saved_key
from windlass.errors import WindlassError

NUM_WORDS = 240
ASKED_S = 0.5
"""Seconds after which answers have begun and none has ended."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a job.

    Attributes:
        engine: `vllm` or `sglang`.
        backend: AReaL's `actor.backend`; by default FSDP on all ranks.
        adapter: name of the LoRA adapter that the actor trains; by default it trains all weights.
        kill: process ids that rank 0 kills when the round of version `kill_at` is in its write phase.
        offloads: whether the actor frees its memory between the steps, as with `actor.offload` and `enable_offload`.
    """

    engine: str
    model: str
    out: str
    servers: list[str]
    num_versions: int
    num_tokens: int
    backend: str = ""
    adapter: str = ""
    kill: list[int] = []
    kill_at: int = -1
    offloads: bool = False


class Saver:
    """Memory that sleeps, in place of torch_memory_saver, which needs CUDA. A process that reads it then ends."""

    hook_mode = ""

    def __init__(self) -> None:
        self._saver = HostSaver()

    def manage(self, model: torch.nn.Module) -> None:
        """Move the shards of an FSDP2 model into memory that sleeps, before its first forward pass."""
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            local = moved(parameter.to_local().detach(), "training", backed_up=True)
            shard = DTensor.from_local(
                local, parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(shard))  # type: ignore[no-untyped-call]

    def pause(self) -> None:
        self._saver.pause("training")

    def resume(self) -> None:
        self._saver.resume("training")


class Say(RolloutWorkflow):  # type: ignore[misc]  # AReaL is not typed here
    """Workflow that records one greedy answer with the version of each token."""

    def __init__(self, num_tokens: int, adapter: str) -> None:
        self.answers: list[dict[str, list[int]]] = []
        self._settings = GenerationHyperparameters(
            max_new_tokens=num_tokens, greedy=True, ignore_eos=True, lora_name=adapter
        )

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        """Record an answer, and return the tensors of an episode."""
        request = ModelRequest(input_ids=data["prompt"], gconfig=self._settings)
        said = await engine.agenerate(request)
        self.answers.append(
            {
                "prompt": data["prompt"],
                "tokens": said.output_tokens,
                "versions": said.output_versions,
            }
        )
        ids = torch.tensor([said.input_tokens + said.output_tokens])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}


def actor_config(model: str, backend: str = "", **options: Any) -> PPOActorConfig:
    return PPOActorConfig(
        path=model, experiment_name="areal", trial_name="run", attn_impl="sdpa",
        archon=ArchonEngineConfig(attn_type="sdpa"),
        backend=backend or f"fsdp:d{os.environ['WORLD_SIZE']}",
        optimizer=OptimizerConfig(lr=3e-2 if options.get("use_lora") else 3e-3, warmup_steps_proportion=0.0), **options,
    )  # fmt: skip


def rollout_config(backend: str = "vllm:d1") -> InferenceEngineConfig:
    return InferenceEngineConfig(
        backend=backend, experiment_name="areal", trial_name="run",
        consumer_batch_size=64, max_head_offpolicyness=100, request_retries=1, setup_timeout=300,
    )  # fmt: skip


def train(settings: Settings) -> None:
    import areal.trainer.rl_trainer
    from areal.engine import fsdp_engine
    from hosted_controllers import kill_in_phase, remember_hosted

    from windlass.integrations.areal import install

    install()
    rank = int(os.environ["RANK"])
    has_adapter = bool(settings.adapter)
    lora = {"use_lora": True, "lora_rank": 4, "lora_alpha": 6} if has_adapter else {}
    config = actor_config(settings.model, settings.backend, **lora)
    allocation = ModelAllocation.from_str(config.backend)
    actor = actor_class(allocation.backend)(config=config)
    actor.create_process_group(parallel_strategy=allocation.parallel)
    actor.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=800, train_batch_size=8))
    if settings.offloads:
        saver = vars(fsdp_engine)["torch_memory_saver"] = Saver()
        saver.manage(actor.model)
    engines = vars(areal.trainer.rl_trainer)
    engine = engines[{"vllm": "RemotevLLMEngine", "sglang": "RemoteSGLangEngine"}[settings.engine]]
    backend = f"{settings.engine}:d{len(settings.servers)}"
    rollout = engine(dataclasses.replace(rollout_config(backend), use_lora=has_adapter))
    rollout.initialize(addr=settings.servers, train_data_parallel_size=dist.get_world_size())
    meta = WeightUpdateMeta.from_fsdp_xccl(
        ModelAllocation.from_str(backend), use_lora=has_adapter, lora_name=settings.adapter
    )
    hosted = remember_hosted()
    actor.connect_engine(rollout, meta)
    workflow = Say(settings.num_tokens, settings.adapter)
    parameters = [*actor.model.parameters()]
    found: dict[str, Any] = {
        "num_sharded": sum(isinstance(p, DTensor) for p in parameters),
        "num_parameters": len(parameters),
        "num_gathers": 0, "serving": [], "answers": workflow.answers,
    }  # fmt: skip
    num_asked = 0
    if settings.offloads:
        actor.offload()
    for version in range(1, settings.num_versions + 1):
        if settings.offloads:
            actor.onload()
        train_step(actor, version)
        actor.save(SaveLoadMeta(f"{settings.out}/{version}", "hf", False, actor.tokenizer))
        for k in range(4):
            prompt = [(17 * version + 31 * k + 7 * j + 100 * rank) % NUM_WORDS for j in range(5)]
            rollout.submit({"prompt": prompt}, workflow=workflow)
            num_asked += 1
        time.sleep(ASKED_S)
        if version == settings.kill_at and rank == 0:
            coordinator = hosted[-1].controller.coordinator
            kill_in_phase(coordinator, version, "write", settings.kill)
        with counting_gathers(found):
            rollout.pause()
            found["serving"].append(actor.update_weights(meta.with_version(version)))
        actor.set_version(version)
        rollout.set_version(version)
        if settings.offloads:
            actor.offload()
        rollout.resume()
    found["num_finished"] = sum(
        answer is not None for answer in rollout.wait(num_asked, timeout=200, raise_timeout=False)
    )
    found["num_asked"] = num_asked
    Path(settings.out, f"{rank}.json").write_text(json.dumps(found))
    rollout.destroy()
    actor.destroy()


def actor_class(backend: str) -> type[Any]:
    """Return the class that `PPOTrainer` would use for this backend."""
    if backend == "archon":
        return archon_actor()
    if backend == "megatron":
        return megatron_actor()
    import areal.engine

    found: type[Any] = areal.engine.FSDPPPOActor
    return found


def train_step(actor: Any, version: int) -> None:
    """Make one optimizer step of AReaL's engine, on different data in each rank."""
    if hasattr(actor, "mcore_config"):
        step_megatron(actor, version)
        return
    generator = torch.Generator().manual_seed(1000 * version + actor.rank)
    ids = torch.randint(0, NUM_WORDS, (4, 12), generator=generator)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "loss_mask": torch.ones_like(ids),
    }
    actor.train()

    def loss(logprobs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return -logprobs.mean()

    said = actor.train_batch(batch, loss, lambda _: torch.tensor(1.0))
    assert said["update_successful"] == 1.0


class counting_gathers:  # noqa: N801 - used like a function
    """Counter of calls of `full_tensor`, which AReaL's own update uses to gather weights."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._found, self._real = found, DTensor.full_tensor

    def __enter__(self) -> None:
        def counted(tensor: DTensor, **options: Any) -> torch.Tensor:
            self._found["num_gathers"] += 1
            return self._real(tensor, **options)

        DTensor.full_tensor = counted  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        DTensor.full_tensor = self._real  # type: ignore[method-assign]


class PpoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a job of AReaL's single controller.

    Attributes:
        engine: `vllm` or `sglang`.
        python: interpreter of the server that AReaL starts.
        variables: environment variables of this server.
    """

    engine: str
    model: str
    out: str
    num_steps: int
    python: str
    variables: dict[str, str]


def reward(*said: Any, **_: Any) -> float:
    """Return the share of even tokens in an answer. AReaL passes prompt, answer and the tokens of both."""
    tokens: list[int] = said[3]
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


def ppo(settings: PpoSettings) -> None:
    """Run `PPOTrainer` with two actor workers and a rollout worker that starts a server."""
    from areal import PPOTrainer
    from areal.api.cli_args import (
        ClusterSpecConfig,
        GRPOConfig,
        NameResolveConfig,
        SchedulingSpec,
        SGLangConfig,
        TrainDatasetConfig,
        vLLMConfig,
    )
    from datasets import Dataset

    from windlass.integrations.areal import install

    install()
    worker = SchedulingSpec(cpu=1, mem=1, gpu=0, cmd="python3 -m areal.infra.rpc.rpc_server")
    python = f"WINDLASS_{settings.engine.upper()}_PYTHON"
    variables = {python: settings.python, **settings.variables}
    server = dataclasses.replace(worker, env_vars=variables)
    actor = dataclasses.replace(
        actor_config(settings.model, "fsdp:d2"), ppo_n_minibatches=1, scheduling_spec=(worker,)
    )
    rollout = dataclasses.replace(
        rollout_config(f"{settings.engine}:d1"), scheduling_spec=(server,), consumer_batch_size=4
    )
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=16, max_tokens=64)
    config = GRPOConfig(
        experiment_name="areal", trial_name="run", tokenizer_path=settings.model,
        cluster=ClusterSpecConfig(
            fileroot=settings.out, n_nodes=1, n_gpus_per_node=1,
            name_resolve=NameResolveConfig(nfs_record_root=settings.out),
        ),
        actor=actor, rollout=rollout, gconfig=gconfig, total_train_steps=settings.num_steps,
        train_dataset=TrainDatasetConfig(path="", type="rl", batch_size=4),
        vllm=vLLMConfig(model=settings.model, max_model_len=128, max_num_seqs=8, enforce_eager=True, block_size=32),
        sglang=SGLangConfig(
            model_path=settings.model, context_length=128, attention_backend="torch_native",
            sampling_backend="pytorch", disable_cuda_graph=True, disable_overlap_schedule=True,
            mem_fraction_static=0.5,
        ),
    )  # fmt: skip
    config.scheduler.type = "local"
    config.stats_logger.experiment_name, config.stats_logger.trial_name = "areal", "run"
    config.stats_logger.fileroot = config.saver.fileroot = config.recover.fileroot = settings.out
    config.saver.experiment_name = config.recover.experiment_name = "areal"
    config.saver.trial_name = config.recover.trial_name = "run"
    rows = [{"messages": [{"role": "user", "content": f"w{k} w{k + 1}"}]} for k in range(16)]
    with PPOTrainer(config, train_dataset=Dataset.from_list(rows)) as trainer:
        trainer.train(
            workflow="areal.workflow.rlvr.RLVRWorkflow",
            workflow_kwargs={
                "reward_fn": "areal_run.reward", "gconfig": gconfig, "tokenizer": settings.model,
            },
        )  # fmt: skip
        saved = f"{settings.out}/saved"
        trainer.actor.save(SaveLoadMeta(saved, "hf", False, trainer.tokenizer))
        (address,) = trainer.rollout.server_addresses
        found = served(settings.engine, f"http://{address}")
    Path(settings.out, "found.json").write_text(json.dumps(found))


def served(engine: str, url: str) -> dict[str, Any]:
    """Return the version that a server serves, and its checksums."""
    http = EngineHttp(url, key=saved_key(url))
    said = msgspec.json.decode(http.get({"vllm": "/weight_info", "sglang": "/model_info"}[engine]))
    found = checksums(engine, lambda path, body: msgspec.json.decode(http.post(path, body)))
    return {"version": said["weight_version"], "checksums": found}


def refusals(model: str) -> None:
    """Print the error of each refused configuration, on rank 0."""
    from areal.engine import RemoteSGLangEngine
    from areal.infra.controller.rollout_callback import RolloutCallback

    from windlass.integrations import areal as ours

    meta = WeightUpdateMeta.from_fsdp_xccl(ModelAllocation.from_str("vllm:d1"))
    rollout = ours.RemotevLLMEngine(rollout_config())
    lora = ours.FSDPPPOActor(actor_config(model, use_lora=True))
    plain = ours.FSDPPPOActor(actor_config(model))
    disk = WeightUpdateMeta.from_disk("areal", "run", "/tmp")
    second = actor_config(model)
    second._version = "v2"
    tries = {
        "lora": lambda: lora.connect_engine(ours.RemoteSGLangEngine(rollout_config()), meta),
        "disk": lambda: plain.connect_engine(rollout, disk),
        "sglang": lambda: plain.connect_engine(RemoteSGLangEngine(rollout_config()), meta),
        "callback": lambda: plain.connect_engine(RolloutCallback("h:1"), meta),
        "v2": lambda: ours.FSDPPPOActor.as_controller(second, None),
        "own group": lambda: rollout.init_weights_update_group(meta),
        "own buckets": lambda: rollout.update_weights_from_distributed(meta, []),
        "own files": lambda: rollout.update_weights_from_disk(disk),
    }
    print(json.dumps({name: error_of(call) for name, call in tries.items()}))


def error_of(call: Any) -> str:
    try:
        call()
    except WindlassError as error:
        return str(error)
    return ""


def main() -> None:
    what, argument = sys.argv[1:]
    if what == "train":
        train(msgspec.json.decode(Path(argument).read_bytes(), type=Settings))
    elif what == "ppo":
        ppo(msgspec.json.decode(Path(argument).read_bytes(), type=PpoSettings))
    else:
        refusals(argument)


if __name__ == "__main__":
    main()
