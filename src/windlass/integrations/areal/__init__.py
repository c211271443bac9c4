"""AReaL's `PPOTrainer` with plain vLLM or SGLang servers: call `install()` before you create the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.integrations.areal.archon import ArchonEngine as ArchonEngine
    from windlass.integrations.areal.archon import ArchonPPOActor as ArchonPPOActor
    from windlass.integrations.areal.engines import FSDPEngine as FSDPEngine
    from windlass.integrations.areal.engines import FSDPPPOActor as FSDPPPOActor
    from windlass.integrations.areal.engines import install as install
    from windlass.integrations.areal.megatron import MegatronEngine as MegatronEngine
    from windlass.integrations.areal.megatron import MegatronPPOActor as MegatronPPOActor
    from windlass.integrations.areal.rollout import RemoteSGLangEngine as RemoteSGLangEngine
    from windlass.integrations.areal.rollout import RemotevLLMEngine as RemotevLLMEngine

# Hide `__getattr__` from type checkers, so that they still report unknown names.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
