"""Two settings of a vLLM server for rollouts: the seed, and the log-probabilities to return.

vLLM's default seed is 0, so that two servers would sample the same tokens for the same request. By default vLLM
returns log-probabilities of the model's own distribution (`--logprobs-mode raw_logprobs`), which differs from the sampled
distribution if temperature, `top_p` or `top_k` are set.

A launcher passes both settings as options (`sampling_options`). If a user starts a server with our weight-transfer
backend, `set_defaults` changes both defaults. A value that the user passes takes precedence.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.engines.options import options_of

PROCESSED = "processed_logprobs"
_SEED, _LOGPROBS_MODE = "--seed", "--logprobs-mode"
_BITS = 31
"""Number of bits of a seed; numpy accepts at most 32."""
_ONE_PROCESS_PER_RANK = "external_launcher"


def sampling_options(rest: Sequence[str], meeting_place: str = "") -> tuple[str, ...]:
    """Return options for vLLM's command line. The user's own options follow them and take precedence.

    Args:
        rest: options of the user.
        meeting_place: rendezvous address of a server on several nodes; empty for a server on one node. Every node
            derives the same seed from it, because all ranks must sample with the same seed.
    """
    file = dict(options_of(rest)).get("--config", "")
    names_seed = file and re.search(r"^\s*seed\s*:", Path(file).read_text(), re.MULTILINE)
    seed = () if names_seed else (_SEED, str(new_seed(meeting_place)))
    return (_LOGPROBS_MODE, PROCESSED, *seed)


def new_seed(meeting_place: str = "") -> int:
    """Return a random seed, or if `meeting_place` is not empty, a hash of `meeting_place`."""
    if meeting_place:
        digest = hashlib.sha256(meeting_place.encode()).digest()
        return int.from_bytes(digest[:4], "big") >> (32 - _BITS)
    return 1 + secrets.randbelow((1 << _BITS) - 1)


def set_defaults(args: Any) -> None:
    """Set both defaults in vLLM's `EngineArgs`, for a server that a user started with our weight-transfer backend."""
    said, defaults = dict(options_of(sys.argv[1:])), type(args)
    if args.logprobs_mode == defaults.logprobs_mode and _LOGPROBS_MODE not in said:
        args.logprobs_mode = PROCESSED
    if args.seed == defaults.seed and _SEED not in said and _has_one_process(args):
        args.seed = new_seed(_meeting_place(args))


def _has_one_process(args: Any) -> bool:
    """Return whether one process creates the configuration of all ranks. Otherwise each rank would draw its own seed."""
    return bool(args.distributed_executor_backend != _ONE_PROCESS_PER_RANK)


def _meeting_place(args: Any) -> str:
    return f"{args.master_addr}:{args.master_port}" if vars(args).get("nnodes", 1) > 1 else ""
