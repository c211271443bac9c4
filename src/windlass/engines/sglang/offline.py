"""Capture of the layout of an SGLang server, for servers without Windlass. `windlass capture` calls it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from windlass.engines.http import EngineHttp
from windlass.engines.launch import arguments, checked_arguments, serve, server_environment
from windlass.engines.private_routes import saved_key
from windlass.engines.rank_reports import Secrets, check_layouts, order_step
from windlass.engines.sglang.orders import Describe, order_ranks
from windlass.engines.sglang.spec import ENGINE, SglangServer, send_step
from windlass.engines.sglang.table import LayoutFile, RankLayout, config_digest, read_settings
from windlass.engines.spec import (
    AgentSettings,
    CapturedLayout,
    RankStep,
    ServerCommand,
    join_deadline_s,
)
from windlass.engines.versions import check_installed
from windlass.errors import ConfigError
from windlass.net.addresses import LOOPBACK, free_port

NAME = "layout"


def capture(model: Path, tensor_parallel_size: int, output: Path, options: Sequence[str]) -> int:
    """Start SGLang with Windlass, let its ranks capture their layouts, write the layout file, and end SGLang.

    Args:
        model: checkpoint folder.
        tensor_parallel_size: number of ranks.
        output: path of the layout file.
        options: options of SGLang's server; options that change the layout must be those of the live server.

    Returns:
        0, or the exit status of a server that failed.

    Raises:
        ConfigError: the options are invalid, or updates would be wrong with them.
    """
    words = ("--name", NAME, "--model", str(model), "--tp", str(tensor_parallel_size), *options)
    args = checked_arguments(ENGINE, words)
    if args.pp * args.dp * args.nnodes > 1:
        raise ConfigError(
            f"--pp, --dp and --nnodes must be 1, got {args.pp}, {args.dp} and {args.nnodes}: SGLang publishes weight "
            "tables only for tensor-parallel ranks of one host"
        )
    _, rest = arguments(ENGINE.module, None).parse_known_args(words)
    for warning in check_installed(ENGINE.releases) if ENGINE.releases else ():
        sys.stderr.write(f"{warning}\n")
    args.host = args.advertise_host = LOOPBACK
    args.port = args.port or free_port()
    settings = AgentSettings(
        name=NAME,
        controller="",
        transport="",
        url=f"http://{LOOPBACK}:{args.port}",
        checkpoint=str(model),
        world_size=args.tp,
        join_deadline_s=args.join_deadline_s or join_deadline_s(model),
    )
    command, server = SglangServer().command(args, rest), SglangServer()
    with server_environment(args) as given:
        command = ServerCommand(command.argv, {**command.environment, **given})
        return serve(
            args,
            command,
            ready_line=server.ready_line,
            task=lambda url: _write(settings, EngineHttp(url, saved_key(url)), output),
        )


def _write(settings: AgentSettings, server: EngineHttp, output: Path) -> None:
    """Order the ranks of a running server to capture and describe their layouts. Write the layout file `output`."""
    secrets = Secrets(key=server.key)
    captured = order_step(send_step, RankStep.CAPTURE, settings, secrets)
    check_layouts(NAME, [msgspec.json.decode(each, type=CapturedLayout) for each in captured])

    def describe(server: EngineHttp, _step: RankStep, settings: AgentSettings, folder: str) -> None:
        order_ranks(server, Describe(folder), settings.world_size, settings.join_deadline_s)

    described = order_step(describe, RankStep.CAPTURE, settings, secrets)
    version, told = read_settings(server)
    layout = LayoutFile(
        engine=ENGINE.name,
        version=version,
        config_digest=config_digest(Path(settings.checkpoint)),
        settings=told,
        ranks=tuple(msgspec.json.decode(each, type=RankLayout) for each in described),
    )
    output.write_bytes(msgspec.json.encode(layout))
    for rank, each in enumerate(layout.ranks):
        for name, why in each.derived.items():
            sys.stderr.write(
                f"rank {rank}: {name} cannot be updated in a server without Windlass, because {why}\n"
            )
