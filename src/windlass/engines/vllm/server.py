"""vLLM's own API server: how it is started, and how its ranks are reached."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

import msgspec

from windlass.engines.adapters import Adapter, adapter_of
from windlass.engines.http import EngineHttp
from windlass.engines.quantised import require_followed
from windlass.engines.spec import AgentSettings, RankStep, ServerCommand
from windlass.engines.vllm.caches import SCHEDULER
from windlass.envs import environment_value
from windlass.errors import ConfigError

__all__ = ["VllmServer", "adapter_options"]

EXTENSION = "windlass.engines.vllm.extension.WindlassExtension"
ROUTE = "windlass.engines.vllm.generate_route.GenerateRoute"
PRIVATE = "windlass.engines.private_routes.PrivateRoutes"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of slots, as vLLM makes them; adapters of lower rank are padded."""
LOADS_WHILE_IT_RUNS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


@final
class VllmServer:
    """`EngineServer` of vLLM."""

    ready_line = "Application startup complete"
    answers_for_all = True

    @contextmanager
    def command(self, args: argparse.Namespace, rest: Sequence[str]) -> Iterator[ServerCommand]:
        """See `EngineServer.command`."""
        quantised = require_followed(Path(args.model), rest)
        served = adapter_options(adapter_of(args.adapter), rest, pp=args.pp, dp=args.dp)
        # The routes that pause an engine exist in this mode only.
        environment = {"VLLM_SERVER_DEV_MODE": "1"}
        if quantised and not environment_value("VLLM_USE_DEEP_GEMM"):
            # For this kernel vLLM computes other weights, with scales that are powers of two.
            environment["VLLM_USE_DEEP_GEMM"] = "0"
        yield ServerCommand(
            (
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", args.model, "--host", args.host, "--port", str(args.port)),
                *("--tensor-parallel-size", str(args.tp), "--worker-extension-cls", EXTENSION),
                *(("--pipeline-parallel-size", str(args.pp)) if args.pp > 1 else ()),
                *(("--data-parallel-size", str(args.dp)) if args.dp > 1 else ()),
                *("--scheduler-cls", SCHEDULER, "--middleware", PRIVATE),
                *_generate_options(),
                *served,
                *rest,
            ),
            environment,
        )

    def order(
        self, server: EngineHttp, step: RankStep, settings: AgentSettings, folder: str
    ) -> None:
        """See `EngineServer.order`."""
        args, deadline_s = (
            [msgspec.json.encode(settings).decode(), folder],
            settings.join_deadline_s,
        )
        body = {"method": f"windlass_{step}", "args": args, "timeout": deadline_s}
        server.post("/collective_rpc", body, deadline_s)


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
        raise ConfigError(
            f"{LOADS_WHILE_IT_RUNS} must not be set with --adapter: an adapter that is loaded besides can evict this one"
        )
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
