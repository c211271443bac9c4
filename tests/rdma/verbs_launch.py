"""Parts of `verbs_job` that a test can import without torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection

from windlass.errors import WindlassError
from windlass.transfer.arena import Arena
from windlass.transports.registry import create_transport, parse_transport

__all__ = ["CONFIG", "NUM_VERSIONS", "PATIENCE_S", "first_error", "launch_engine", "launch_trainer"]

PATIENCE_S = 300.0
NUM_VERSIONS = 2
CONFIG = {
    "vocab_size": 66,
    "hidden_size": 20,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}


def launch_engine(model: str, url: str, host: str, transport: str, token: str) -> None:
    """Run an engine in a fork."""
    from verbs_job import run_engine

    run_engine(model, url, host, transport, token)


def launch_trainer(
    rank: int,
    world_size: int,
    folder: str,
    url: str,
    transport: str,
    token: str,
    hold: Connection,
) -> None:
    """Run a trainer rank in a fork."""
    from verbs_job import run_trainer

    run_trainer(rank, world_size, folder, url, transport, token, hold)


def first_error(transport: str, answer: Callable[[str], None]) -> None:
    """Run in a fork and report the error that an arena over this transport raises."""
    try:
        Arena(create_transport(parse_transport(transport)), 8 << 20)
    except WindlassError as error:
        answer(f"{type(error).__name__}: {error}")
        # The agent's own end would wait for memory that it may not lock.
        os._exit(0)
    answer("")
