"""Settings of a vLLM server for rollouts: its seed, and the distribution of its log-probabilities.

vLLM's default seed is 0, so two servers draw the same samples for the same requests. By default vLLM returns the
model's own log-probabilities (`--logprobs-mode raw_logprobs`). The sampler draws from another distribution once
temperature, `top_p` or `top_k` are set.

The launcher passes both settings as options (`sampling_options`). `set_defaults` changes both defaults for a server that a
user started with our weight-transfer backend. A value that the user passes takes precedence.
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
"""Bits of a seed; numpy accepts at most 32."""
_ONE_PROCESS_PER_RANK = "external_launcher"


def sampling_options(rest: Sequence[str], meeting_place: str = "") -> tuple[str, ...]:
    """Return options for vLLM's command line. The user's own options follow them and take precedence.

    Args:
        rest: options that the user gave.
        meeting_place: address where the nodes of a server meet. The seed is derived from it, because all ranks
            must sample with the same seed. Empty for a server on one node.
    """
    file = dict(options_of(rest)).get("--config", "")
    names_seed = file and re.search(r"^\s*seed\s*:", Path(file).read_text(), re.MULTILINE)
    seed = () if names_seed else (_SEED, str(new_seed(meeting_place)))
    return (_LOGPROBS_MODE, PROCESSED, *seed)


def new_seed(meeting_place: str = "") -> int:
    """Return a random seed, or one derived from `meeting_place`, so that all nodes of a server get the same."""
    if meeting_place:
        digest = hashlib.sha256(meeting_place.encode()).digest()
        return int.from_bytes(digest[:4], "big") >> (32 - _BITS)
    return 1 + secrets.randbelow((1 << _BITS) - 1)


def set_defaults(args: Any) -> None:
    """Set both defaults in vLLM's `EngineArgs` of a server that its user started with our weight-transfer backend."""
    said, defaults = dict(options_of(sys.argv[1:])), type(args)
    if args.logprobs_mode == defaults.logprobs_mode and _LOGPROBS_MODE not in said:
        args.logprobs_mode = PROCESSED
    if args.seed == defaults.seed and _SEED not in said and _has_one_process(args):
        args.seed = new_seed(_meeting_place(args))


def _has_one_process(args: Any) -> bool:
    """Return False if every rank creates its own configuration: each rank would then draw another seed."""
    return bool(args.distributed_executor_backend != _ONE_PROCESS_PER_RANK)


def _meeting_place(args: Any) -> str:
    return f"{args.master_addr}:{args.master_port}" if vars(args).get("nnodes", 1) > 1 else ""
