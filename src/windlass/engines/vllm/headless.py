"""`python -m windlass.engines.vllm.headless OPTIONS`: `vllm serve --headless`, for all nodes of a server except the first.

The command `vllm` cannot be used: it reads the version of the distribution `vllm`, but vLLM's wheel for CPUs has another
name.
"""

from __future__ import annotations

import sys

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--headless", *sys.argv[1:]])
    args.api_server_count = 0
    run_headless(args)
