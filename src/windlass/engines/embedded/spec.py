"""Settings and command line of the embedded engine."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence

import msgspec

from windlass.engines.spec import EngineSpec
from windlass.errors import ConfigError
from windlass.layout.dtypes import DType

MODULE = "windlass.engines.embedded"
DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine, the same for all of its ranks.

    Attributes:
        name: identity in the fleet; ranks are called `name/rank`.
        model: path of a checkpoint folder, or of a transformers configuration for random weights.
        tensor_parallel_size: number of ranks.
        dtype: dtype of the weights.
        controller: address of the controller; empty to serve the initial weights without a controller.
        transport: transport that receives weights; see `parse_transport`.
        host: address to bind.
        port: port to bind; 0 lets the system choose.
        advertise_host: host that clients connect to; empty for `host`.
        seed: seed of random weights and of sampling. If None, the seed of the weights is 0, and the seed of
            sampling is random.
        max_batch: maximum number of requests that run at once.
        max_positions: maximum number of tokens (prompt and output) of a request.
    """

    name: str
    model: str
    tensor_parallel_size: int = 1
    dtype: DType = DType.FLOAT32
    controller: str = ""
    transport: str = "auto"
    host: str = "127.0.0.1"
    advertise_host: str = ""
    port: int = 0
    seed: int | None = None
    max_batch: int = 64
    max_positions: int = 64

    def __post_init__(self) -> None:
        counts = {
            "tp": self.tensor_parallel_size,
            "max_batch": self.max_batch,
            "max_positions": self.max_positions,
        }
        for field, value in counts.items():
            if value < 1:
                raise ConfigError(f"{field} must be >= 1, got {value}")


def arguments(description: str | None = None) -> argparse.ArgumentParser:
    """Return a parser for the engine's command line."""
    parser = argparse.ArgumentParser(prog=MODULE, description=description, allow_abbrev=False)
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", required=True, help="configuration JSON or checkpoint folder")
    parser.add_argument("--tp", type=int, dest="tensor_parallel_size")
    parser.add_argument("--dtype", type=DType, choices=DTYPES)
    parser.add_argument("--controller", default="", help="address of the controller")
    parser.add_argument("--transport")
    parser.add_argument("--host", help="to bind; see docs/hosts.md")
    parser.add_argument("--advertise-host", help="what others connect to")
    for name in ("--port", "--seed", "--max-batch", "--max-positions"):
        parser.add_argument(name, type=int)
    return parser


def settings_of(args: argparse.Namespace) -> EngineSettings:
    """Return settings from parsed arguments; a setting that the command line does not set gets its default.

    Raises:
        ConfigError: a count is below 1.
    """
    known = EngineSettings.__struct_fields__
    return EngineSettings(**{n: v for n, v in vars(args).items() if n in known and v is not None})


def check(words: Sequence[str]) -> None:
    """Check the words of an engine's command line.

    Raises:
        ConfigError: an option is unknown or has an invalid value.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = arguments().parse_args(words)
    except SystemExit:
        raise ConfigError(said.getvalue().strip().rpartition("error: ")[2]) from None
    settings_of(args)


ENGINE = EngineSpec(
    name="embedded",
    title="embedded",
    module=MODULE,
    check=check,
    context_option="--max-positions",
    default_context=EngineSettings(name="", model="").max_positions,
)
