"""An SGLang server started as slime starts its own (`launch_server_process` of
`sglang_engine.py`), without a command of SGLang.

One process, which loads no plugins, makes the settings; another process gets them and serves.
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
