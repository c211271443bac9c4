"""`windlass demo`: run the job of `jobs/demo/job.toml`, with options."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from windlass import jobs
from windlass.cli import Command, add_update_mode
from windlass.config import DiskBackend, P2pBackend, PauseMode, UpdateMode, XcclBackend
from windlass.engines.spec import ENGINES
from windlass.envs import environment_value
from windlass.errors import DECODE_ERRORS, ConfigError
from windlass.jobs.config import EngineSection, LaunchConfig, TrainerSection, load_config
from windlass.jobs.schedulers.base import SCHEDULER_PLUGINS, PluginSchedulerConfig
from windlass.jobs.schedulers.configs import KnownScheduler
from windlass.jobs.schedulers.local import LocalSchedulerConfig, visible_gpus
from windlass.jobs.schedulers.ray import RaySchedulerConfig
from windlass.jobs.schedulers.slurm import SlurmSchedulerConfig
from windlass.net.addresses import free_port
from windlass.net.logs import configure_logging
from windlass.observability.live import LiveView, can_draw, plain_console
from windlass.progress import Progress

START = "start"
"""Folder of the checkpoint that a server loads if the demo makes it."""
FOLDER = Path(jobs.__file__).parent / "demo"
MODELS = {"cpu": "model.json", "cuda": "model_gpu.json"}
TRANSPORTS = {
    "cpu": ("cma", "shm", "pull", "mooncake", "nixl", "auto"),
    "cuda": ("cuda_ipc", "pull", "mooncake", "nixl", "auto"),
}
"""Device -> transports of the weights; the first one is the default."""
TRAINERS = {"fsdp": "trainer.py", "megatron": "megatron_trainer.py"}
"""Kind of trainer -> script of its ranks."""
CHECKPOINT_RATE = 5e-5
MAX_NEW_TOKENS = {"embedded": 12, "server": 60}
"""Kind of engine -> most tokens of an answer that fit into the context after a prompt of four tokens."""
SCHEDULERS: Mapping[str, KnownScheduler] = {
    "local": LocalSchedulerConfig(),
    "slurm": SlurmSchedulerConfig(host="127.0.0.1"),
    # Ray places a process only on free cores, and a laptop may have fewer cores than the demo has processes.
    # So tell Ray that there are five cores; the processes then share the real ones.
    "ray": RaySchedulerConfig(num_cpus=5),
}


class _Limit(msgspec.Struct, frozen=True):
    """Part of a model's config.json. Some kinds of models have no `max_position_embeddings`."""

    max_position_embeddings: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. With the defaults the demo takes less than four minutes on two cores."""
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps (default 40)")
    parser.add_argument(
        "--engine", default="embedded", choices=ENGINES.names(),
        help="embedded: two tiny engines of this package (default); any other: a real server, which must be installed",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="cpu", choices=[*MODELS],
        help="where trainers and engines compute; cuda takes all GPUs that are visible (default cpu)",
    )  # fmt: skip
    parser.add_argument(
        "--trainer", default="fsdp", choices=[*TRAINERS],
        help="fsdp: FSDP2 shards over the ranks; megatron: Megatron-core's tensor parallelism (default fsdp)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", default="p2p", choices=["p2p", "xccl", "disk"],
        help="p2p: trainers write into the engines (default); xccl: broadcasts by gloo or NCCL; disk: files",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=Path, metavar="FILE",
        help="configuration of a causal LM of transformers, with a vocabulary of at least 13 tokens, for random weights "
        "(default: a tiny Qwen3, larger with --device cuda)",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR",
        help="folder of a causal LM of transformers with its tokenizer: trainers and engines load it, and prompts are "
        "sums of two numbers as text",
    )  # fmt: skip
    parser.add_argument(
        "--learning-rate", type=float, metavar="RATE",
        help=f"learning rate of Adam (default {CHECKPOINT_RATE:g} with --checkpoint; otherwise a larger rate, chosen for the "
        "model's width)",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=int, default=8,
        help="maximum number of tokens per answer (default 8)",
    )  # fmt: skip
    parser.add_argument(
        "--transport", choices=sorted({name for names in TRANSPORTS.values() for name in names}),
        help="default: cma, or cuda_ipc with --device cuda",
    )  # fmt: skip
    parser.add_argument(
        "--colocate", action="store_true",
        help="trainers and engines take turns on the same memory: engines free it during each step, and read the new "
        "weights themselves (--transport pull); vllm and sglang need --device cuda",
    )  # fmt: skip
    add_update_mode(parser)
    parser.add_argument(
        "--pause-mode", choices=[m.value for m in PauseMode],
        help="what happens to running requests at an update (default: abort, or in_place with --device cuda "
        "--engine vllm)",
    )  # fmt: skip
    parser.add_argument(
        "--kill-engine-at", type=int, default=0, metavar="N",
        help="kill -9 one engine in the middle of the update to version N",
    )  # fmt: skip
    parser.add_argument(
        "--scheduler", default="local", choices=[*SCHEDULERS, *SCHEDULER_PLUGINS.names()],
        help="what starts the processes: this host (default), or a cluster that runs already",
    )  # fmt: skip
    parser.add_argument(
        "--compare", action="store_true",
        help="run the same job again with the engine's own weight transfer (NCCL if the engine has a separate GPU, otherwise "
        "a file), and print both",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, prompts and samples (default 0)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="DIR",
        help="folder for results and logs; files of an earlier demo there are deleted (default demo-output)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    parser.add_argument("--plain", action="store_true", help="lines instead of a live view")


def run(args: argparse.Namespace) -> int:
    """Run the demo and return its exit status: 1 if the demo found a problem. Raise ConfigError for wrong options."""
    configure_logging("controller")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"demo: --json must be a file in a folder that exists, got {args.json}")
    # Without --checkpoint, refuse wrong options before the slow imports below. With --checkpoint,
    # the options are checked after the imports, because the check loads the tokenizer.
    config = demo_config(args) if args.checkpoint is None else None
    console = plain_console()
    loads = Progress(is_shown=not args.plain and can_draw(console))
    with (
        LiveView(console, loads.text, is_transient=True, is_wanted=not args.plain),
        loads.part("loading PyTorch and transformers"),
    ):
        from windlass.jobs.demo.arithmetic import arithmetic, load_tokenizer
        from windlass.jobs.demo.recipe import REPEAT_OPERAND, DemoRecipe
        from windlass.jobs.demo.run import run_demo

    config = config or demo_config(args)
    problem = REPEAT_OPERAND
    if args.checkpoint is not None:
        problem = arithmetic(load_tokenizer(args.checkpoint))
    recipe = DemoRecipe(args.seed, args.kill_engine_at, problem, takes_turns=args.colocate)
    compared = DemoRecipe(args.seed, problem=problem) if args.compare else None
    return asyncio.run(
        run_demo(config, recipe, json_path=args.json, plain=args.plain, compared=compared)
    )


def demo_config(args: argparse.Namespace) -> LaunchConfig:
    """Return the configuration of the demo's job with these options.

    Raises:
        ConfigError: an option has an invalid value, or two options exclude each other.
    """
    job, folder = load_config(FOLDER / "job.toml"), args.output.resolve()
    engines, trainer, rollout, seed = job.engines, job.trainer, job.rollout, str(args.seed)
    transport = args.transport or ("pull" if args.colocate else TRANSPORTS[args.device][0])
    model = str((args.checkpoint or args.model or FOLDER / MODELS[args.device]).absolute())
    is_server = ENGINES.find(args.engine).server is not None
    if args.checkpoint is None:
        context = 0
        _check_room(args, model, is_server=is_server)
    else:
        context = _checked_context(args)
    if args.steps < 1:
        raise ConfigError(f"demo: --steps must be >= 1, got {args.steps}")
    if not 0 <= args.kill_engine_at < args.steps:
        raise ConfigError(
            f"demo: --kill-engine-at must be in [0, steps={args.steps}), got {args.kill_engine_at}: the killed "
            "engine comes back with a later version"
        )
    _check_transport(args, transport, is_server=is_server)
    if args.colocate:
        _check_colocate(args, transport)
    if args.compare:
        _check_compare(args, is_server=is_server)
    if is_server:
        _check_server_device(args)
        names = ["engine-a", "engine-b"][: 2 if args.kill_engine_at else 1]
        engines = tuple(_server(args, folder, name, context) for name in names)
    elif args.device != "cpu":
        raise ConfigError(
            f"demo: --device must be cpu with --engine {args.engine}, got {args.device!r}"
        )
    else:
        engines = tuple(
            replace(
                each,
                model=model,
                arguments=(*_with_context(each.arguments, each.kind, context), "--seed", seed),
            )
            for each in engines
        )
        restarts = 1 if args.kill_engine_at else 0
        engines = (*engines[:-1], replace(engines[-1], max_restarts=restarts))
    if args.device == "cuda":
        trainer, engines = _on_gpus(trainer, engines, shares=args.colocate)
        _check_groups(args, engines)
        if args.backend == "xccl" and args.engine == "sglang":
            # SGLang sets this for its own ranks, and all ranks of an NCCL group must use the same value.
            trainer = replace(trainer, environment={"NCCL_CUMEM_ENABLE": "0"})
    elif is_server:
        # Use fewer groups than `job.toml`, so that a server on two cores needs only seconds per step.
        rollout = replace(rollout, groups_per_step=16)
    backends = {
        "p2p": P2pBackend(),
        "xccl": XcclBackend(),
        "disk": DiskBackend(folder=str(folder / "weights")),
    }
    return replace(
        job,
        steps=args.steps,
        output_dir=str(folder),
        transport=transport,
        scheduler=SCHEDULERS.get(args.scheduler) or PluginSchedulerConfig(args.scheduler),
        trainer=replace(
            trainer,
            script=str(FOLDER / TRAINERS[args.trainer]),
            arguments=(model, str(folder / "versions"), seed, args.device, _learning_rate(args)),
        ),
        engines=engines,
        rollout=replace(
            rollout, sampling=replace(rollout.sampling, max_new_tokens=args.max_new_tokens)
        ),
        update=replace(
            job.update,
            mode=UpdateMode(args.mode),
            pause_mode=PauseMode(args.pause_mode) if args.pause_mode else _pause_mode(args),
            backend=backends[args.backend],
        ),
    )


def _learning_rate(args: argparse.Namespace) -> str:
    """Return the last argument of the trainer's script: a learning rate, or 0 for the script's default.

    Raises:
        ConfigError: `--learning-rate` is not above 0 and below 1.
    """
    rate = args.learning_rate
    if rate is None:
        rate = CHECKPOINT_RATE if args.checkpoint is not None else 0.0
    elif not 0 < rate < 1:
        raise ConfigError(f"demo: --learning-rate must be above 0 and below 1, got {rate}")
    return f"{rate:g}"


def _check_room(args: argparse.Namespace, model: str, *, is_server: bool) -> None:
    """Check that `model` is a file, and that answers fit into the context of the demo's engines.

    Raises:
        ConfigError: the model is not a file, or `--max-new-tokens` is below 1 or too large.
    """
    room = MAX_NEW_TOKENS["server" if is_server else "embedded"]
    if not Path(model).is_file():
        raise ConfigError(f"demo: --model must be a file, got {model!r}")
    if not 1 <= args.max_new_tokens <= room:
        raise ConfigError(
            f"demo: --max-new-tokens must be in [1, {room}] with --engine {args.engine}, "
            f"got {args.max_new_tokens}"
        )


def _checked_context(args: argparse.Namespace) -> int:
    """Check the checkpoint folder. Return the context that the demo needs: tokens of the longest prompt plus an answer.

    Raises:
        ConfigError: the folder lacks a model or a tokenizer, the model's context is too short for the prompts or for
            `--max-new-tokens`, or `--model` is given too.
    """
    folder = args.checkpoint
    if args.model is not None:
        raise ConfigError(
            f"demo: --model must not be given with --checkpoint, got {args.model}: the checkpoint contains a model"
        )
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"demo: --checkpoint must be a folder with config.json and safetensors files, got {folder}"
        )
    from windlass.jobs.demo.arithmetic import load_tokenizer, longest_prompt

    positions = _positions(folder / "config.json")
    longest = longest_prompt(load_tokenizer(folder))
    if positions <= longest:
        raise ConfigError(
            f"demo: --checkpoint must be a model with a context of more than {longest} tokens (the demo's longest prompt), "
            f"got {positions} tokens in {folder}"
        )
    if not 1 <= args.max_new_tokens <= positions - longest:
        raise ConfigError(
            f"demo: --max-new-tokens must be in [1, {positions - longest}] with this --checkpoint, whose context has "
            f"{positions} tokens, got {args.max_new_tokens}"
        )
    return int(longest + args.max_new_tokens)


def _positions(file: Path) -> int:
    """Return the size of a model's context in tokens, from `file`, its config.json.

    Return `sys.maxsize` if the file has no key `max_position_embeddings`.

    Raises:
        ConfigError: the file is not JSON, or the value of the key is not an integer.
    """
    try:
        limit = msgspec.json.decode(file.read_bytes(), type=_Limit).max_position_embeddings
    except DECODE_ERRORS as error:
        raise ConfigError(
            f"demo: --checkpoint: {file} must be JSON, and max_position_embeddings must be an integer or absent: {error}"
        ) from error
    return sys.maxsize if limit is None else limit


def _with_context(arguments: tuple[str, ...], kind: str, context: int) -> tuple[str, ...]:
    """Return an engine's arguments, with the size of the context set to `context` tokens.

    Return the arguments unchanged if `context` is 0, or if the arguments do not set the size of the context.
    """
    option = ENGINES.find(kind).context_option
    if not context or option not in arguments:
        return arguments
    place = arguments.index(option) + 1
    return (*arguments[:place], str(context), *arguments[place + 1 :])


def _pause_mode(args: argparse.Namespace) -> PauseMode:
    """Return the default pause mode.

    With --colocate, this is `retract` for embedded engines and `abort` for servers. Without --colocate, it is `in_place`
    for vLLM on GPUs and `abort` for all other engines.

    vLLM cannot retract requests at an update. SGLang gets `abort` even on GPUs: SGLang 0.5.16, the release for GPUs,
    reports a single version for all tokens of an answer. This version would be wrong if a request continued after an
    update.
    """
    if args.colocate:
        # Engines free the KV cache before each optimiser step. After the update, the embedded
        # engine can prefill its requests again.
        return PauseMode.RETRACT if args.engine == "embedded" else PauseMode.ABORT
    keeps = args.device == "cuda" and args.engine == "vllm"
    return PauseMode.IN_PLACE if keeps else PauseMode.ABORT


def _check_transport(args: argparse.Namespace, transport: str, *, is_server: bool) -> None:
    """Check that the transport can move weights on this device into this engine's memory.

    Raises:
        ConfigError: the transport cannot move them.
    """
    able, device = TRANSPORTS[args.device], args.device
    if transport not in able:
        kind = "host memory" if device == "cuda" else "memory of GPUs"
        raise ConfigError(
            f"demo: --transport must be one of {list(able)} with --device {device}, got {transport!r}: "
            f"{transport} writes only {kind}"
        )
    # Only the backend p2p moves weights by a transport.
    if is_server and transport == "shm" and args.backend == "p2p":
        raise ConfigError(
            f"demo: --transport must not be shm with --engine {args.engine}, because shm writes only memory that it "
            f"has allocated, and {args.engine} allocates its weights itself; use cma or auto"
        )


def _check_colocate(args: argparse.Namespace, transport: str) -> None:
    """Check that engines can sleep, and that no other option excludes this.

    Raises:
        ConfigError: the engine cannot sleep, or another option excludes it.
    """
    is_server = args.engine != "embedded"
    if is_server and args.device != "cuda":
        if not ENGINES.find(args.engine).sleep_arguments:
            raise ConfigError(
                f"demo: --colocate needs an --engine that can sleep, got {args.engine!r}"
            )
        raise ConfigError(
            f"demo: --colocate with --engine {args.engine} needs --device cuda, got {args.device!r}: "
            f"{args.engine}'s build for CPUs cannot free its memory; use --engine embedded on a CPU"
        )
    able = ["pull"] if is_server else ["pull", "cma"]
    if args.backend != "p2p" or transport not in able:
        raise ConfigError(
            f"demo: --colocate with --engine {args.engine} needs --backend p2p and --transport {' or '.join(able)}, "
            f"got {args.backend!r} and {transport!r}: other backends and transports need the memory of engines to "
            "stay in place"
        )
    modes = ["abort"] if args.engine == "vllm" else ["abort", "retract"]
    if args.pause_mode not in {None, *modes}:
        raise ConfigError(
            f"demo: --pause-mode must be {' or '.join(modes)} with --colocate --engine {args.engine}, got "
            f"{args.pause_mode!r}: the KV cache is freed"
        )
    if args.kill_engine_at:
        raise ConfigError(
            f"demo: --kill-engine-at must be 0 with --colocate, got {args.kill_engine_at}: a restarted engine "
            "copies weights from an awake engine, and all engines sleep"
        )


def _check_server_device(args: argparse.Namespace) -> None:
    able = [name for name in ENGINES.names() if ENGINES.find(name).gpu_arguments]
    if args.device == "cuda" and args.engine not in able:
        raise ConfigError(f"demo: --device cuda needs an --engine in {able}, got {args.engine!r}")


def _check_compare(args: argparse.Namespace, *, is_server: bool) -> None:
    """Check that a second job with the engine's own transfer can run.

    Raises:
        ConfigError: the engine has no transfer of its own, or another option excludes the second job.
    """
    if not is_server:
        raise ConfigError(
            f"demo: --compare needs --engine vllm or sglang, because the engine {args.engine} has no weight transfer of "
            f"its own"
        )
    if args.kill_engine_at:
        raise ConfigError(
            f"demo: --kill-engine-at must be 0 with --compare, got {args.kill_engine_at}: the engine's own "
            "transfer does not survive the death of an engine"
        )
    if args.scheduler != "local":
        raise ConfigError(
            f"demo: --scheduler must be local with --compare, got {args.scheduler!r}: the second job runs on this "
            "host"
        )


def _check_groups(args: argparse.Namespace, engines: Sequence[EngineSection]) -> None:
    """Check that no NCCL group would have a trainer rank and an engine rank on the same GPU.

    Raises:
        ConfigError: the backend is xccl, and an engine shares a GPU with a trainer rank.
    """
    if args.backend == "xccl" and any(engine.colocate_with for engine in engines):
        raise ConfigError(
            f"demo: --backend xccl with --device cuda needs more GPUs than engines, because NCCL refuses a group with "
            f"two ranks on one GPU; got {len(visible_gpus())} GPUs and {len(engines)} engines; use --backend p2p or disk"
        )


def _server(args: argparse.Namespace, folder: Path, name: str, context: int) -> EngineSection:
    """Return the configuration of one engine server.

    The server runs in the virtual environment that `WINDLASS_<KIND>_VENV` names. Without this variable, the server runs
    in the current environment, or in `.venv-<kind>` if the current environment lacks the engine.
    """
    kind, spec = args.engine, ENGINES.find(args.engine)
    on_gpu, environment = args.device == "cuda", {"TOKENIZERS_PARALLELISM": "false"}
    if not on_gpu:
        environment |= spec.cpu_environment
    python, venv = sys.executable, environment_value(f"WINDLASS_{kind.upper()}_VENV")
    if venv or importlib.util.find_spec(kind) is None:
        python = str((Path(venv or f".venv-{kind}") / "bin" / "python").absolute())
        environment["PYTHONPATH"] = str(folder / "package")
    return EngineSection(
        name=name,
        kind=kind,
        model=str(args.checkpoint.absolute() if args.checkpoint else folder / START),
        port=free_port(),
        arguments=(
            *("--dtype", "bfloat16"),
            *_with_context(spec.gpu_arguments if on_gpu else spec.cpu_arguments, kind, context),
            *(spec.sleep_arguments if args.colocate else ()),
        ),
        python=python,
        environment=environment,
        max_restarts=1 if args.kill_engine_at else 0,
    )


def _on_gpus(
    trainer: TrainerSection, engines: tuple[EngineSection, ...], *, shares: bool
) -> tuple[TrainerSection, tuple[EngineSection, ...]]:
    """Assign one GPU to every engine and the remaining GPUs to trainer ranks.

    If `shares` is set, or no GPU remains for trainer ranks, every GPU gets a trainer rank, and each engine shares a trainer
    rank's GPU.

    Raises:
        ConfigError: no GPU is visible.
    """
    num_gpus = len(visible_gpus())
    if not num_gpus:
        raise ConfigError("demo: --device cuda needs a GPU, none is visible")
    num_left = 0 if shares else num_gpus - len(engines)
    if num_left > 0:
        engines = tuple(replace(engine, num_gpus=1) for engine in engines)
    else:
        engines = tuple(
            replace(engine, colocate_with=f"trainer-{number % num_gpus}")
            for number, engine in enumerate(engines)
        )
    return replace(trainer, world_size=max(num_left, 0) or num_gpus, num_gpus=1), engines


COMMAND = Command(
    "asynchronous GRPO on this machine: trainers, engines and rollouts, live", add_arguments, run
)
