"""Start a vLLM server that joins a fleet: `python -m windlass.engines.vllm --name a --model DIR --port 8000`.

All other options are passed to vLLM's API server. Run this with the Python of vLLM's environment. The token
is read from WINDLASS_TOKEN.
"""

from __future__ import annotations

import sys

from windlass.engines.launch import launch
from windlass.engines.vllm.spec import ENGINE

if __name__ == "__main__":
    sys.exit(launch(ENGINE, __doc__))
