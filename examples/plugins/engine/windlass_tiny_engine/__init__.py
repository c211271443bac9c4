"""Description of the engine `tiny` for Windlass. Its server is in `__main__`."""

from __future__ import annotations

from windlass.engines import EngineSpec, Rule

ENGINE = EngineSpec(
    name="tiny",
    title="Tiny",
    module="windlass_tiny_engine",
    rules=(Rule("--freeze", (), "weights that are frozen take no update"),),
)
