"""SGLang's own server: how it is started, and how its ranks are reached."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

from windlass.engines.http import EngineHttp
from windlass.engines.quantised import require_followed
from windlass.engines.sglang.settings import RELEASES, REPLICAS, check_server
from windlass.engines.spec import AgentSettings, RankStep, ServerCommand
from windlass.engines.versions import has, installed_version
from windlass.errors import ConfigError

__all__ = ["HOOK", "SglangServer"]

HOOK = "windlass.engines.sglang.hook.run"


@final
class SglangServer:
    """`EngineServer` of SGLang."""

    ready_line = "The server is fired up"
    answers_for_all = False

    @contextmanager
    def command(self, args: argparse.Namespace, rest: Sequence[str]) -> Iterator[ServerCommand]:
        """See `EngineServer.command`."""
        require_followed(Path(args.model), rest)
        if args.dp > 1 and not has(REPLICAS, version := installed_version(RELEASES)):
            raise ConfigError(
                f"dp: must be 1 with SGLang {version}, whose ranks do not say which replica they "
                f"are, got --dp {args.dp}"
            )
        yield ServerCommand(
            (
                *(
                    sys.executable,
                    "-m",
                    "windlass.engines.sglang.serve",
                    "--model-path",
                    args.model,
                ),
                *("--host", args.host, "--port", str(args.port), "--tp-size", str(args.tp)),
                *(("--pp-size", str(args.pp)) if args.pp > 1 else ()),
                *(("--dp-size", str(args.dp)) if args.dp > 1 else ()),
                *("--custom-weight-loader", HOOK),
                *rest,
            )
        )

    def order(
        self, server: EngineHttp, step: RankStep, settings: AgentSettings, folder: str
    ) -> None:
        """See `EngineServer.order`."""
        from windlass.engines.sglang.orders import Capture, Join, order_ranks

        if step is RankStep.CAPTURE:
            num_stages = check_server(server, settings.world_size)
            order: Capture | Join = Capture(settings, folder, num_stages)
        else:
            order = Join(settings, folder)
        order_ranks(server, order, settings.world_size, settings.join_deadline_s)
