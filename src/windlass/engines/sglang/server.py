"""SGLang's own server: how it is started, and how its ranks are reached."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

from windlass.engines.quantised import require_followed
from windlass.engines.sglang.replicas import with_plugin
from windlass.engines.sglang.settings import check_server
from windlass.engines.spec import AgentSettings, ServerCommand

__all__ = ["HOOK", "SglangServer"]

HOOK = "windlass.engines.sglang.hook.run"


@final
class SglangServer:
    """`EngineServer` of SGLang."""

    ready_line = "The server is fired up"

    @contextmanager
    def command(self, args: argparse.Namespace, rest: Sequence[str]) -> Iterator[ServerCommand]:
        """See `EngineServer.command`."""
        require_followed(Path(args.model), rest)
        with with_plugin(args.dp) as environment:
            yield ServerCommand(
                (
                    *(sys.executable, "-m", "sglang.launch_server", "--model-path", args.model),
                    *("--host", args.host, "--port", str(args.port), "--tp-size", str(args.tp)),
                    *(("--pp-size", str(args.pp)) if args.pp > 1 else ()),
                    *(("--dp-size", str(args.dp)) if args.dp > 1 else ()),
                    *("--custom-weight-loader", HOOK),
                    *rest,
                ),
                environment,
            )

    def capture(self, settings: AgentSettings) -> Sequence[bytes]:
        """See `EngineServer.capture`."""
        from windlass.engines.sglang.orders import Capture, ask_ranks

        num_stages = check_server(settings.url, settings.world_size)
        return ask_ranks(
            settings.url,
            lambda folder: Capture(settings, folder, num_stages),
            settings.world_size,
            settings.join_deadline_s,
        )

    def join(self, settings: AgentSettings) -> None:
        """See `EngineServer.join`."""
        from windlass.engines.sglang.orders import Join, ask_ranks

        ask_ranks(
            settings.url,
            lambda folder: Join(settings, folder),
            settings.world_size,
            settings.join_deadline_s,
        )
