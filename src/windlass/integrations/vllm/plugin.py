"""Entry point for the group `vllm.general_plugins`.

vLLM calls `register` at the start of its API server, of every EngineCore and of every worker
(`vllm/plugins/__init__.py`, 0.24 and 0.32). `register` does not change engines that use another backend, or none.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from windlass.engines.vllm.backend import BACKEND, is_backend_of
from windlass.engines.vllm.core_sleep import keep_lost_weights_paused
from windlass.engines.vllm.cpu_kernels import multiply_by_parameters
from windlass.engines.vllm.engine_core import keep_caches_apart
from windlass.engines.vllm.sampling import set_defaults
from windlass.engines.vllm.spec import follow_quantised, refuse_unsafe_config
from windlass.envs import CONTROLLER_VARIABLE, environment_value

__all__ = ["register"]

_LORA_MODULES = "windlass_lora_modules"


def register() -> None:
    """Register the weight-transfer backend "windlass", and patch vLLM in this process for servers with this backend.

    The patches separate the EngineCore's caches by version, keep a server without weights paused, and complete the
    server's options. On a CPU, they also make linear layers compute with their parameters instead of packed copies.
    """
    from vllm.config import get_current_vllm_config
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM raises ValueError if this process has registered the backend before.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            BACKEND, "windlass.engines.vllm.weight_transfer", "WindlassTransferEngine"
        )
    keep_caches_apart()
    keep_lost_weights_paused()
    _prepare_servers()
    multiply_by_parameters(lambda: is_backend_of(get_current_vllm_config()))


@functools.cache
def _prepare_servers() -> None:
    """Patch two methods of vLLM's `EngineArgs`.

    `from_cli_args` completes the options of a server (`windlass.engines.vllm.membership`).
    `create_engine_config` sets defaults and extends the API server if the server has Windlass's backend.
    """
    from vllm.engine.arg_utils import EngineArgs

    create, read = EngineArgs.create_engine_config, vars(EngineArgs)["from_cli_args"].__func__

    def from_cli_args(cls: Any, args: Any) -> Any:
        from windlass.engines.vllm.membership import prepare, refuse_while_held

        if environment_value(CONTROLLER_VARIABLE):
            prepare(args)
        else:
            refuse_while_held(args)
        made = read(cls, args)
        # `EngineArgs` lacks the server's option `--lora-modules`, which `_create_engine_config` needs.
        vars(made)[_LORA_MODULES] = vars(args).get("lora_modules")
        return made

    @functools.wraps(create)
    def _create_engine_config(args: Any, *given: Any, **named: Any) -> Any:
        transfer = vars(args).get("weight_transfer_config")
        if transfer is None or transfer.backend != BACKEND:
            return create(args, *given, **named)
        from windlass.engines.vllm.api_server import extend_api_server, note_adapters

        set_defaults(args)
        follow_quantised(args)
        note_adapters(vars(args).get(_LORA_MODULES))
        extend_api_server()
        config = create(args, *given, **named)
        if environment_value(CONTROLLER_VARIABLE):
            # Check the configuration now. The ranks check it again, but only after they have loaded the model.
            has_adapter = bool(vars(args).get(_LORA_MODULES))
            refuse_unsafe_config(
                config,
                adapter=has_adapter,
                serves_own_weights=True,
                # This process does not know the transport. `pull` passes every rule; the ranks check the real transport.
                transport="pull",
            )
        return config

    EngineArgs.from_cli_args = classmethod(from_cli_args)
    EngineArgs.create_engine_config = _create_engine_config
