"""`areal_run.py` in a process that builds Megatron models on a CPU."""

from __future__ import annotations

from areal_on_cpu import megatron_on_cpu

if __name__ == "__main__":
    with megatron_on_cpu():
        # Megatron-core, which AReaL imports, must find the stand-ins.
        from areal_run import main

        main()
