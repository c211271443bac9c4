"""A vLLM server in the fleet: `python -m windlass.engines.vllm --name a --model DIR --port 8000`.

Everything else on the command line goes to vLLM's API server. Run it with the interpreter of vLLM's
environment; the token is read from WINDLASS_TOKEN.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import msgspec

from windlass.engines.attach import AgentSettings, post
from windlass.engines.launch import check_placed, launch, serve
from windlass.engines.quantised import require_followed
from windlass.engines.versions import VLLM
from windlass.envs import environment_value
from windlass.errors import ConfigError

CONNECT_DEADLINE_S = 600.0
EXTENSION = "windlass.engines.vllm.extension.WindlassExtension"
ROUTE = "windlass.engines.vllm.generate_route.GenerateRoute"
_STAGES = "ranks of later stages have no tensor-parallel number of their own"
_REPLICAS = "replicas would join under one name: start a server for each"
UNSAFE = {
    "--enable-sleep-mode": "weights move and lose their registration when it sleeps",
    "--speculative-config": "the draft model's weights are not captured",
    "--pipeline-parallel-size": _STAGES,
    "-pp": _STAGES,
    "--data-parallel-size": _REPLICAS,
    "-dp": _REPLICAS,
    "--quantization-config": "it has vLLM quantise while it loads",
    "--enable-lora": "wrapped layers are rebuilt per adapter",
    "--enable-eplb": "experts move between ranks while it serves",
    "--cpu-offload-gb": "weights are copied to the GPU for every step",
}
"""Options of vLLM with which an update would be wrong, and why."""


class _Joined(msgspec.Struct, frozen=True):
    unplaced: list[str]


class _Answer(msgspec.Struct, frozen=True):
    results: list[_Joined]


def main() -> int:
    """Run the server until it ends."""
    return launch(VLLM, __doc__, unsafe=UNSAFE, connect=connect, start=_start)


def _start(args: argparse.Namespace, rest: list[str]) -> int:
    quantised = require_followed(Path(args.model), rest)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model),
        *("--host", args.host, "--port", str(args.port)),
        *("--tensor-parallel-size", str(args.tp), "--worker-extension-cls", EXTENSION),
        *_generate_options(),
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

    Raises:
        ConfigError: a checkpoint tensor is in the memory of no rank.
        PeerUnreachable: the server is not there, or a rank refused; says why. PeerTimeout.
    """
    encoded = msgspec.json.encode(settings).decode()
    body = {"method": "windlass_connect", "args": [encoded], "timeout": CONNECT_DEADLINE_S}
    answer = post(settings.url, "/collective_rpc", body, CONNECT_DEADLINE_S)
    joined = msgspec.json.decode(answer, type=_Answer).results
    check_placed(settings.name, [rank.unplaced for rank in joined])


if __name__ == "__main__":
    sys.exit(main())
