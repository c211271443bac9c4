"""Settings of a vLLM server for rollouts: the seed, and the log-probabilities to return.

vLLM's default seed is 0, so that two servers would sample the same tokens for the same request. By default vLLM
returns log-probabilities of the model's own distribution (`--logprobs-mode raw_logprobs`), which differs from the sampled
distribution if temperature, `top_p` or `top_k` are set.

By default, vLLM returns at most 20 log-probabilities per token. The first one belongs to the sampled token, so vLLM must
be able to return 21 for the 20 most probable tokens of OpenAI's API.

`set_defaults` changes these defaults for a server with our weight-transfer backend. A value that the user passes takes
precedence.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import sys
from pathlib import Path
from typing import Any

from windlass.engines.options import options_of

PROCESSED = "processed_logprobs"
"""Value of `--logprobs-mode` for log-probabilities of the sampled distribution."""
_SEED, _LOGPROBS_MODE, _MAX_LOGPROBS = "--seed", "--logprobs-mode", "--max-logprobs"
_NUM_LOGPROBS = 21
"""Default of `--max-logprobs`."""
_BITS = 31
"""Number of bits of a seed; numpy accepts at most 32."""
_ONE_PROCESS_PER_RANK = "external_launcher"


def new_seed(meeting_place: str = "") -> int:
    """Return a random seed, or a hash of `meeting_place` (the rendezvous address of a server over several nodes).

    The hash gives all nodes of the server the same seed.
    """
    if meeting_place:
        digest = hashlib.sha256(meeting_place.encode()).digest()
        return int.from_bytes(digest[:4], "big") >> (32 - _BITS)
    return 1 + secrets.randbelow((1 << _BITS) - 1)


def set_defaults(args: Any) -> None:
    """Set `logprobs_mode`, `max_logprobs` and `seed` to Windlass's defaults, except those that the user has set.

    With the executor `external_launcher`, leave `seed` unchanged, because each rank would choose another seed. `args` are
    the `EngineArgs` of a server with Windlass's backend.
    """
    defaults = type(args)
    if args.logprobs_mode == defaults.logprobs_mode and not _is_given(_LOGPROBS_MODE):
        args.logprobs_mode = PROCESSED
    if args.max_logprobs == defaults.max_logprobs and not _is_given(_MAX_LOGPROBS):
        args.max_logprobs = _NUM_LOGPROBS
    if args.seed == defaults.seed and not _is_given(_SEED) and _is_configured_once(args):
        args.seed = new_seed(_meeting_place(args))


def _is_given(option: str) -> bool:
    """Return whether the user gave an option on the command line, or in the file that `--config` names."""
    given = dict(options_of(sys.argv[1:]))
    if option in given:
        return True
    file = Path(given.get("--config") or "/nowhere")
    key = option.removeprefix("--").replace("-", "[-_]")
    return file.is_file() and bool(re.search(rf"^\s*{key}\s*:", file.read_text(), re.MULTILINE))


def _is_configured_once(args: Any) -> bool:
    """Return whether one process creates the configuration of all ranks, so that all ranks get the same random seed."""
    return bool(args.distributed_executor_backend != _ONE_PROCESS_PER_RANK)


def _meeting_place(args: Any) -> str:
    """Return the rendezvous address of a server over several nodes; empty for a server on one node."""
    return f"{args.master_addr}:{args.master_port}" if vars(args).get("nnodes", 1) > 1 else ""
