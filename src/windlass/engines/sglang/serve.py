"""`python -m windlass.engines.sglang.serve OPTIONS`: loads the plugin and runs `sglang.launch_server OPTIONS`.

SGLang itself finds the plugin by its entry point only. A source tree on PYTHONPATH has no entry points, and the variable
SGLANG_PLUGINS may exclude the plugin. Without the plugin, the server's private routes would be open to every client.
"""

from __future__ import annotations

import runpy

from windlass.engines.sglang.plugin import load

if __name__ == "__main__":
    load()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
