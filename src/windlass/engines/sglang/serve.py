"""`python -m windlass.engines.sglang.serve OPTIONS`: `sglang.launch_server`, with the plugin loaded in any case.

SGLang finds the plugin by an entry point, which a source tree on PYTHONPATH does not have and which
SGLANG_PLUGINS may leave out: a launcher's server without it would have its private routes open.
"""

from __future__ import annotations

import runpy

from windlass.engines.sglang.plugin import load

if __name__ == "__main__":
    load()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
