"""AReaL's `PPOTrainer` with plain vLLM servers: `install()` before it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.integrations.areal.engines import FSDPEngine as FSDPEngine
    from windlass.integrations.areal.engines import FSDPPPOActor as FSDPPPOActor
    from windlass.integrations.areal.engines import RemotevLLMEngine as RemotevLLMEngine
    from windlass.integrations.areal.engines import install as install

if not TYPE_CHECKING:  # a type checker must go on refusing names that are not there
    __all__, __getattr__, __dir__ = public(__name__)
