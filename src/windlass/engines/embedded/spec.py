"""What Windlass knows of its own engine."""

from __future__ import annotations

from windlass.engines.spec import EngineSpec

ENGINE = EngineSpec(name="embedded", title="embedded", module="windlass.engines.embedded")
