"""Start an SGLang server and join a fleet: `python -m windlass.engines.sglang --name a --model DIR --port 8000`.

Run this with the Python interpreter of SGLang's environment. The token is in the environment variable WINDLASS_TOKEN.
All other options are passed to `sglang.launch_server`.
"""

from __future__ import annotations

import sys

from windlass.engines.launch import launch
from windlass.engines.sglang.spec import ENGINE

if __name__ == "__main__":
    sys.exit(launch(ENGINE, __doc__))
