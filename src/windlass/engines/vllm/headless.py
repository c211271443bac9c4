"""`python -m windlass.engines.vllm.headless OPTIONS`: `vllm serve --headless`, on other nodes than a server's first.

vLLM's command asks for the version of a package that its wheel for CPUs is not called.
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
