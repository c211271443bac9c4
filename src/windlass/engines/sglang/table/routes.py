"""What an SGLang server tells of itself over HTTP: its settings, and where its weights lie.

Started with `--remote-instance-weight-loader-start-seed-via-transfer-engine`, every tensor-parallel
rank has registered its parameters with a Mooncake engine of its own, and the server tells the table.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import final

import msgspec

from windlass.config import PauseMode
from windlass.engines.http import get, post
from windlass.engines.sglang.routes import SglangRoutes
from windlass.engines.sglang.settings import RULES, refuse_unsafe_settings
from windlass.engines.spec import Rule
from windlass.errors import ConfigError, PeerUnreachable, UnsupportedLayout

__all__ = ["ENABLING", "Entry", "ServerInfo", "TableRoutes", "WeightTable", "refuse_unsafe_server"]

ENABLING = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
_ALL_NAMES = ""
"""Is part of every name: a checksum that skips these tensors computes nothing."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Where a parameter lies in the rank's process; `itemsize` in bytes."""

    address: int
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Of all elements; SGLang tells no strides."""
        return self.numel * self.itemsize


class WeightTable(msgspec.Struct, frozen=True, array_like=True):
    """Of one rank: address of its Mooncake engine, and its parameters by name."""

    session: str
    entries: dict[str, Entry]


class _TableAnswer(msgspec.Struct, frozen=True):
    rank: int
    remote_instance_transfer_engine_info: WeightTable


class ServerInfo(msgspec.Struct, frozen=True):
    """The settings that matter here; names and meanings are SGLang's.

    Attributes:
        launch_command: options after the program's name, as a shell would read them.
    """

    version: str
    device: str
    launch_command: str | None = None
    tp_size: int = 1

    def arguments(self) -> tuple[str, ...]:
        """What the server was started with, less what would start another table."""
        words = shlex.split(self.launch_command or "")
        return tuple(word for word in words if word != ENABLING)


class _Rank(msgspec.Struct, frozen=True):
    tp_rank: int


class _Checksums(msgspec.Struct, frozen=True):
    checksums: dict[str, str]
    parallelism_info: list[_Rank]


class _CheckerAnswer(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""
    ranks: list[_Checksums] = []


_TENSOR_PARALLEL = "the table knows tensor-parallel ranks only"
_SERVER_RULES = (
    *RULES,
    Rule("--pp-size", (1,), _TENSOR_PARALLEL, ("pp_size",)),
    Rule("--dp-size", (1,), _TENSOR_PARALLEL, ("dp_size",)),
    Rule(
        "--quantization", (None,), "quantised weights are computed, not copied", ("quantization",)
    ),
    Rule("--load-format", ("auto", "safetensors"), "no checkpoint to compare", ("load_format",)),
)
"""Of a server that runs no code of ours."""


def refuse_unsafe_server(told: Mapping[str, object], installed: str) -> ServerInfo:
    """Check what the server was started with.

    Args:
        told: of `server_info`.
        installed: version of SGLang in this environment.

    Returns:
        What is used of it.

    Raises:
        ConfigError: names a setting with which an update would be wrong, and why.
        PeerUnreachable: it is not SGLang's answer.
    """
    refuse_unsafe_settings("server", told, _SERVER_RULES)
    try:
        info = msgspec.convert(told, type=ServerInfo)
    except msgspec.ValidationError as error:
        raise PeerUnreachable(f"/server_info: not SGLang's answer: {error}") from error
    if info.version != installed:
        raise ConfigError(
            f"server: version must be {installed}, got {info.version}: the layout is captured from the "
            f"model class here"
        )
    if info.launch_command is None:
        raise ConfigError(
            "server: launch_command must be told in /server_info, so that its model can be built "
            "here, got none: start it as a program, not as a library"
        )
    return info


@final
class TableRoutes(SglangRoutes):
    """Of one server.

    Args:
        url: of the server. world_size: its tensor-parallel ranks.
    """

    def __init__(self, url: str, world_size: int) -> None:
        super().__init__(url)
        self.world_size = world_size

    def table(self, rank: int) -> WeightTable:
        """Where the weights of a rank lie.

        Raises:
            UnsupportedLayout: the server has no table, or an empty one.
            PeerTimeout: it does not answer.
        """
        path = f"/remote_instance_transfer_engine_info?rank={rank}"
        try:
            answer = msgspec.json.decode(get(self.url, path), type=_TableAnswer)
        except (PeerUnreachable, msgspec.DecodeError) as error:
            raise UnsupportedLayout(
                f"rank {rank}: no table at {self.url}: start the server with {ENABLING}, a "
                f"--engine-info-bootstrap-port of its own, and mooncake in its environment ({error})"
            ) from error
        table = answer.remote_instance_transfer_engine_info
        if not table.session or not table.entries:
            raise UnsupportedLayout(f"rank {rank}: the table at {self.url} is empty")
        return table

    def pause(self, mode: PauseMode, deadline_s: float) -> None:
        """Return once no rank reads weights any more, and nothing computed with them is cached.

        The server's checksum of no tensor at all is what proves it: every rank comes past in its
        main loop, after every earlier step, synchronises its device, and is waited for by all.

        Args:
            mode: ABORT or RETRACT. A flush is refused while requests keep their caches, and what they
                leave when they end would be found by others afterwards.
            deadline_s: of every request.

        Raises:
            ConfigError: another mode; nothing was paused.
            PeerUnreachable, PeerTimeout: it is not quiesced, or has not emptied its caches.
        """
        if mode is PauseMode.IN_PLACE:
            raise ConfigError(
                "pause_mode must be abort or retract for a server without Windlass in it, whose caches "
                f"of old weights outlive an update otherwise, got {mode}"
            )
        self.pause_generation(mode, deadline_s)
        self.checksums(deadline_s, skip=(_ALL_NAMES,))
        # With a timeout, a flush waits for what was retracted, in vain.
        self.flush_cache(deadline_s, 0.0 if mode is PauseMode.RETRACT else deadline_s)

    def checksums(self, deadline_s: float, skip: Sequence[str] = ()) -> dict[int, dict[str, str]]:
        """By rank and name, of what the model holds, computed by SGLang.

        Raises:
            PeerUnreachable: a rank did not take part.
        """
        body = {"action": "checksum", "selector": "target", "skip_tensor_list": list(skip)}
        answer = msgspec.json.decode(
            post(self.url, "/weights_checker", body, deadline_s), type=_CheckerAnswer
        )
        found = {r.parallelism_info[0].tp_rank: r.checksums for r in answer.ranks}
        if not answer.success or sorted(found) != list(range(self.world_size)):
            raise PeerUnreachable(
                f"{self.url}/weights_checker: ranks must be 0..{self.world_size - 1}, got "
                f"{sorted(found)}: {answer.message}"
            )
        return found
