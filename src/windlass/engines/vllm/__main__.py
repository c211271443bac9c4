"""A vLLM server in the fleet: `python -m windlass.engines.vllm --name a --model DIR --port 8000`.

Everything else on the command line goes to vLLM's API server. Run it with the interpreter of vLLM's
environment; the token is read from WINDLASS_TOKEN.
"""

from __future__ import annotations

import sys

from windlass.engines.launch import launch
from windlass.engines.vllm.spec import ENGINE

if __name__ == "__main__":
    sys.exit(launch(ENGINE, __doc__))
