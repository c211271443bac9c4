"""A SGLang server started as slime starts its own (`launch_server_process` of `sglang_engine.py`): by no command of SGLang's.

Settings are made in one process, which loads no plugins, and are handed to another, which serves.
"""

from __future__ import annotations

import multiprocessing
import sys

from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import prepare_server_args

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    server = multiprocessing.Process(
        target=launch_server, args=(prepare_server_args(sys.argv[1:]),)
    )
    server.start()
    server.join()
