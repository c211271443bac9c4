"""AReaL with FSDP2, and `install`.

Every rank writes its shards directly into the vLLM or SGLang servers of the rollout:

    from windlass.integrations.areal import install

    install()  # before `PPOTrainer(...)`; the rest of the script does not change
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import final

import areal.engine
import areal.trainer.rl_trainer
from areal.engine import fsdp_engine

from windlass.integrations.areal.rollout import RemoteSGLangEngine, RemotevLLMEngine
from windlass.integrations.areal.updates import DEADLINE_S, UpdatingActor, UpdatingEngine
from windlass.integrations.hosted import HostAddress
from windlass.layout.naming.adapters import adapter_names
from windlass.trainers.client import TrainerClient
from windlass.trainers.fsdp import connect_trainer

__all__ = ["FSDPEngine", "FSDPPPOActor", "install"]


def install() -> None:
    """Make AReaL's `PPOTrainer` use the actors, `RemotevLLMEngine` and `RemoteSGLangEngine` of Windlass.

    Call this once, in the process that creates the trainer, before you create the trainer. Workers of AReaL's
    controller need no call, because they import these classes by name.
    """
    vars(areal.engine)["FSDPPPOActor"] = FSDPPPOActor
    for engine in (RemotevLLMEngine, RemoteSGLangEngine):
        vars(areal.trainer.rl_trainer)[engine.__name__] = engine
    # Megatron need not be installed. AReaL imports this class at its first use, from the module that this table names.
    vars(areal.engine)["_LAZY_IMPORTS"]["MegatronPPOActor"] = "windlass.integrations.areal.megatron"
    vars(areal.engine).pop("MegatronPPOActor", None)
    # AReaL's Archon needs triton. Without triton, a trainer that uses Archon raises AReaL's own error.
    with suppress(ImportError):
        from areal.experimental.engine import archon_engine

        ours = import_module("windlass.integrations.areal.archon")
        vars(archon_engine)["ArchonPPOActor"] = ours.ArchonPPOActor


class FSDPEngine(UpdatingEngine, fsdp_engine.FSDPEngine):  # type: ignore[misc]
    """AReaL's FSDP engine with weight updates by Windlass, for scripts that create engines themselves."""

    sends_adapters = True

    def connect_trainer(self, address: HostAddress) -> TrainerClient:
        """Connect this rank's shards, with `use_lora` those of the adapter. Not collective; gathers nothing."""
        return connect_trainer(
            self.model,
            name_map=adapter_names() if self.config.use_lora else None,
            controller=address.url,
            token=address.token,
            connect_deadline_s=DEADLINE_S,
        )


@final
class FSDPPPOActor(UpdatingActor, FSDPEngine, fsdp_engine.FSDPPPOActor):  # type: ignore[misc]
    """AReaL's PPO actor, based on `FSDPEngine` of this module."""
