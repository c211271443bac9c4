"""An SGLang server in the fleet: `python -m windlass.engines.sglang --name a --model DIR --port 8000`.

Everything else on the command line goes to `sglang.launch_server`. Run it with the interpreter of
SGLang's environment; the token is read from WINDLASS_TOKEN.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from windlass.engines.attach import AgentSettings
from windlass.engines.launch import (
    check_placed,
    launch,
    serve,
    tell_buffers,
)
from windlass.engines.quantised import require_followed
from windlass.engines.sglang.replicas import with_plugin
from windlass.engines.sglang.settings import UNSAFE, refuse_unsafe_settings
from windlass.engines.versions import SGLANG

CONNECT_DEADLINE_S = 600.0
HOOK = "windlass.engines.sglang.hook.run"


def main() -> int:
    """Run the server until it ends."""
    return launch(SGLANG, __doc__, unsafe=UNSAFE, connect=connect, start=_start)


def _start(args: argparse.Namespace, rest: list[str]) -> int:
    require_followed(Path(args.model), rest)
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", args.model),
        *("--host", args.host, "--port", str(args.port), "--tp-size", str(args.tp)),
        *(("--pp-size", str(args.pp)) if args.pp > 1 else ()),
        *(("--dp-size", str(args.dp)) if args.dp > 1 else ()),
        *("--custom-weight-loader", HOOK),
        *rest,
    ]
    with with_plugin(args.dp) as environment:
        return serve(
            args,
            command,
            environment=environment,
            ready_line="The server is fired up",
            connect=connect,
        )


def connect(settings: AgentSettings) -> None:
    """Have the ranks of a running server join a fleet, after leaving the one before.

    None joins before the layouts of all have been found good: an engine is never in a fleet unchecked,
    wherever this process ends.

    Raises:
        ConfigError: a checkpoint tensor is in the memory of no rank, or a setting that an update
            does not survive.
        PeerUnreachable: the server is not there, or a rank refused; says why. PeerTimeout.
    """
    from windlass.engines.sglang.orders import Join, Learn, Learnt, ask_ranks

    url, world_size = settings.url, settings.world_size
    num_stages = refuse_unsafe_settings(url, world_size)
    answers = ask_ranks(
        url, lambda folder: Learn(settings, folder, num_stages), world_size, CONNECT_DEADLINE_S
    )
    learnt = [msgspec.json.decode(answer, type=Learnt) for answer in answers]
    check_placed(settings.name, [rank.unplaced for rank in learnt])
    tell_buffers(settings.name, [(rank.buffer_nbytes, rank.recomputed) for rank in learnt])
    ask_ranks(url, lambda folder: Join(settings, folder), world_size, CONNECT_DEADLINE_S)


if __name__ == "__main__":
    sys.exit(main())
