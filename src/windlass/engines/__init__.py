"""Engine adapters: code that runs in a rollout engine's processes, and the API for engines of other packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.control.engine_agent import EngineHooks as EngineHooks
    from windlass.engines.client import EngineClient as EngineClient
    from windlass.engines.client import EngineWeights as EngineWeights
    from windlass.engines.options import Rule as Rule
    from windlass.engines.spec import AgentSettings as AgentSettings
    from windlass.engines.spec import CapturedLayout as CapturedLayout
    from windlass.engines.spec import EngineOptions as EngineOptions
    from windlass.engines.spec import EngineServer as EngineServer
    from windlass.engines.spec import EngineSpec as EngineSpec
    from windlass.engines.spec import ServerCommand as ServerCommand
    from windlass.transfer.dtensor import describe_module as describe_module
    from windlass.transfer.dtensor import parameter_addresses as parameter_addresses

# Hide `__getattr__` from type checkers, so that they still report unknown names.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
