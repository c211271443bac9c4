"""A vLLM server in the fleet: `python -m windlass.engines.vllm --name a --model DIR --port 8000`.

Everything else on the command line goes to vLLM's API server. Run it with the interpreter of vLLM's
environment; the token is read from WINDLASS_TOKEN.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from windlass.engines.adapters import Adapter, adapter_of
from windlass.engines.attach import AgentSettings, post
from windlass.engines.launch import (
    check_placed,
    launch,
    serve,
    tell_buffers,
)
from windlass.engines.quantised import require_followed
from windlass.engines.versions import VLLM
from windlass.engines.vllm.caches import OUTSIDE, SCHEDULER
from windlass.envs import environment_value
from windlass.errors import ConfigError

CONNECT_DEADLINE_S = 600.0
EXTENSION = "windlass.engines.vllm.extension.WindlassExtension"
ROUTE = "windlass.engines.vllm.generate_route.GenerateRoute"
_REPLICAS = "only replicas of one server, all on its host, switch together: --dp N"
_ONE_SLOT = (
    "--adapter NAME=FOLDER says which one adapter is served and updated, in a slot of its own"
)
_OFFLOADED = "weights are copied to the GPU for every step"
_EVICTED = "an adapter that shares slots can be evicted and is then read again from its folder"
UNSAFE = {
    "--enable-sleep-mode": "weights move and lose their registration when it sleeps",
    "--speculative-config": "the draft model's weights are not captured",
    "--data-parallel-rank": _REPLICAS,
    "-dpn": _REPLICAS,
    "--data-parallel-start-rank": _REPLICAS,
    "-dpr": _REPLICAS,
    "--data-parallel-size-local": _REPLICAS,
    "-dpl": _REPLICAS,
    "--data-parallel-address": _REPLICAS,
    "-dpa": _REPLICAS,
    "--data-parallel-backend": _REPLICAS,
    "-dpb": _REPLICAS,
    "--data-parallel-hybrid-lb": _REPLICAS,
    "-dph": _REPLICAS,
    "--data-parallel-external-lb": _REPLICAS,
    "-dpe": _REPLICAS,
    "--data-parallel-multi-port-external-lb": _REPLICAS,
    "-dpm": _REPLICAS,
    "--enable-elastic-ep": "ranks come and go, and experts move with them",
    "--prefill-context-parallel-size": "its ranks have not been shown",
    "-pcp": "its ranks have not been shown",
    "--quantization-config": "it has vLLM quantise while it loads",
    "--enable-lora": _ONE_SLOT,
    "--lora-modules": _ONE_SLOT,
    "--default-mm-loras": _ONE_SLOT,
    "--max-loras": _EVICTED,
    "--max-cpu-loras": _EVICTED,
    "--fully-sharded-loras": "adapters that are cut along their rank have not been shown",
    "--enable-eplb": "experts move between ranks while it serves",
    "--cpu-offload-gb": _OFFLOADED,
    "--offload-backend": _OFFLOADED,
    "--offload-group-size": _OFFLOADED,
    "--kv-transfer-config": OUTSIDE,
    "--kv-offloading-size": OUTSIDE,
    "--ec-transfer-config": OUTSIDE,
    "--scheduler-cls": "Windlass gives its own, with which caches are kept apart by version",
}
"""Options of vLLM with which an update would be wrong, and why."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of slots, as vLLM makes them; adapters of lower rank are padded."""
LOADS_WHILE_IT_RUNS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


class _Learnt(msgspec.Struct, frozen=True):
    unplaced: list[str]
    recomputed: list[str]
    buffer_nbytes: int


class _Answer(msgspec.Struct, frozen=True):
    results: list[msgspec.Raw]


def main() -> int:
    """Run the server until it ends."""
    return launch(VLLM, __doc__, unsafe=UNSAFE, connect=connect, start=_start)


def _start(args: argparse.Namespace, rest: list[str]) -> int:
    quantised = require_followed(Path(args.model), rest)
    served = adapter_options(adapter_of(args.adapter), rest, pp=args.pp, dp=args.dp)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model),
        *("--host", args.host, "--port", str(args.port)),
        *("--tensor-parallel-size", str(args.tp), "--worker-extension-cls", EXTENSION),
        *(("--pipeline-parallel-size", str(args.pp)) if args.pp > 1 else ()),
        *(("--data-parallel-size", str(args.dp)) if args.dp > 1 else ()),
        *("--scheduler-cls", SCHEDULER),
        *_generate_options(),
        *served,
        *rest,
    ]
    # The routes that pause an engine exist in this mode only.
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if quantised and not environment_value("VLLM_USE_DEEP_GEMM"):
        # For this kernel vLLM computes other weights, with scales that are powers of two.
        environment["VLLM_USE_DEEP_GEMM"] = "0"
    return serve(
        args,
        command,
        environment=environment,
        ready_line="Application startup complete",
        connect=connect,
    )


def adapter_options(
    adapter: Adapter | None, rest: Sequence[str], *, pp: int = 1, dp: int = 1
) -> tuple[str, ...]:
    """Options of vLLM for one adapter that stays in its slot.

    Args:
        adapter: None serves none.
        rest: of the command line; `--max-lora-rank` there counts.
        pp: pipeline stages.
        dp: replicas.

    Raises:
        ConfigError: the adapter's rank is none that vLLM can serve, or vLLM was asked to load other
            adapters while it runs, or the engine has stages or replicas.
    """
    if adapter is None:
        return ()
    if pp * dp > 1:
        raise ConfigError(
            f"--adapter: --pp and --dp must be 1, got {pp} and {dp}: adapters on stages and on "
            f"replicas have not been shown"
        )
    if environment_value(LOADS_WHILE_IT_RUNS).lower() in ("1", "true"):
        raise ConfigError(f"{LOADS_WHILE_IT_RUNS} must not be set with --adapter: {_EVICTED}")
    options = (
        *("--enable-lora", "--lora-modules", f"{adapter.name}={adapter.folder}"),
        *("--max-loras", "1", "--max-cpu-loras", "1"),
    )
    if any(word.partition("=")[0].replace("_", "-") == "--max-lora-rank" for word in rest):
        return options
    rank = next((rank for rank in RANKS if rank >= adapter.rank), None)
    if rank is None:
        raise ConfigError(
            f"--adapter {adapter.name}: its rank must be at most {RANKS[-1]}, got {adapter.rank}"
        )
    return (*options, "--max-lora-rank", str(rank))


def _generate_options() -> tuple[str, ...]:
    """SGLang's `/generate`, where this release has the route behind it as an option of its own."""
    package = importlib.util.find_spec("vllm")  # looks for it without an import
    if package is None or package.origin is None:
        raise ConfigError(f"vLLM must be installed in the environment of {sys.executable}")
    if not (Path(package.origin).parent / "entrypoints" / "scale_out").exists():
        return ()
    return ("--enable-scale-out", "--middleware", ROUTE)


def connect(settings: AgentSettings) -> None:
    """Have the ranks of a running server join a fleet, after leaving the one before.

    None joins before the layouts of all have been found good: an engine is never in a fleet unchecked,
    wherever this process ends.

    Raises:
        ConfigError: a checkpoint tensor is in the memory of no rank, or not all ranks that were
            announced are of this server and on this host.
        PeerUnreachable: the server is not there, or a rank refused; says why. PeerTimeout.
    """
    answers = _ask_ranks(settings, "windlass_learn")
    learnt = [msgspec.json.decode(answer, type=_Learnt) for answer in answers]
    check_placed(settings.name, [rank.unplaced for rank in learnt])
    tell_buffers(settings.name, [(rank.buffer_nbytes, rank.recomputed) for rank in learnt])
    _ask_ranks(settings, "windlass_join")


def _ask_ranks(settings: AgentSettings, method: str) -> Sequence[bytes | msgspec.Raw]:
    """What a method of every rank returned, by rank.

    Every data-parallel replica carries out a call, but vLLM answers for the first one only: the
    ranks of the others leave what they have to say in a folder.
    """
    encoded = msgspec.json.encode(settings).decode()
    with tempfile.TemporaryDirectory() as folder:
        body = {"method": method, "args": [encoded, folder], "timeout": CONNECT_DEADLINE_S}
        answer = post(settings.url, "/collective_rpc", body, CONNECT_DEADLINE_S)
        results = msgspec.json.decode(answer, type=_Answer).results
        if len(results) >= settings.world_size:
            return results
        return [_left_in(folder, rank) for rank in range(settings.world_size)]


def _left_in(folder: str, rank: int) -> bytes:
    try:
        return (Path(folder) / str(rank)).read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(
            f"rank {rank} of the engine must be one of this server and of this host, got no answer "
            f"of it (--tp, --pp and --dp must be those with which the server was started)"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
