"""Start a vLLM server that joins a fleet: `python -m windlass.engines.vllm --name a --model DIR --port 8000`.

Run this with the Python interpreter of vLLM's environment. The token is in the environment variable WINDLASS_TOKEN.
All other options are passed to vLLM's API server.
"""

from __future__ import annotations

import sys

from windlass.engines.launch import launch
from windlass.engines.vllm.spec import ENGINE

if __name__ == "__main__":
    sys.exit(launch(ENGINE, __doc__))
