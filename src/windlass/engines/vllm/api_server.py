"""Windlass's additions to vLLM's API server.

The API server is the only process that can call the ranks of all data-parallel replicas. It orders the ranks to capture
their layouts, checks the layouts, and then orders the ranks to join a fleet. Each rank returns its result through vLLM's
RPC, so that ranks on other hosts need no secret to report.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import Any, final

import msgspec

from windlass.control.engine_channel import report_cannot_join
from windlass.engines.adapters import adapter_of
from windlass.engines.held_server import held_for
from windlass.engines.join_route import JoinOrder
from windlass.engines.rank_reports import check_layouts, reason_of
from windlass.engines.spec import AgentSettings, CapturedLayout, RankStep, join_deadline_s
from windlass.engines.vllm.backend import is_backend_of
from windlass.engines.vllm.engine_core import ORDERS
from windlass.engines.vllm.spec import refuse_runtime_adapters
from windlass.errors import (
    ConfigError,
    PeerTimeout,
    PeerUnreachable,
    ProtocolError,
    WindlassError,
)

logger = logging.getLogger(__name__)


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order to every rank of a server.

    Attributes:
        step: step of the join.
        settings: settings of the join. Each rank sets `checkpoint` and `loaded` itself.
        token: token that the controller requires; if empty, each rank uses the token of its host (`control_token`).
        pauses_itself: True if rank 0's agent pauses the server for an update; False if the trainer does so by HTTP.
    """

    step: RankStep
    settings: AgentSettings
    token: str
    pauses_itself: bool

    def __repr__(self) -> str:
        return f"RankOrder({self.step!r}, {self.settings!r})"


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of one rank to a `RankOrder`.

    Attributes:
        failed: whether the rank could not carry out the order.
        said: `CapturedLayout` in JSON for a capture, empty for a join. If `failed`, this is the reason; it is empty if
            another rank reports the reason.
    """

    failed: bool = False
    said: str = ""


@final
class _Served:
    """Settings of this process's server.

    Attributes:
        adapter: adapters as `NAME=FOLDER`; empty if the server serves only the model.
        port: port of the server.
    """

    adapter = ""
    port = 0


def note_port(port: int) -> None:
    """Record the port on which this process's server listens."""
    _Served.port = port


def note_adapters(modules: Sequence[Any] | None) -> None:
    """Record the adapters of `--lora-modules`, which vLLM's configuration does not contain."""
    _Served.adapter = ",".join(f"{module.name}={module.path}" for module in modules or ())


@functools.cache
def extend_api_server() -> None:
    """Patch `init_weight_transfer_engine` and `update_weights` of vLLM's `AsyncLLM` (0.24, 0.32). Idempotent.

    The patched `init_weight_transfer_engine` orders the ranks of all replicas to join the trainer's fleet. If the replicas
    run their steps together, the patched `update_weights` pauses all replicas before it calls vLLM's method. If the server
    does not have Windlass's weight-transfer backend, both only call vLLM's methods.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    initialise, update = AsyncLLM.init_weight_transfer_engine, AsyncLLM.update_weights

    async def init_weight_transfer_engine(engine: Any, request: Any) -> None:
        """Order the ranks to join the trainer's fleet."""
        if not is_backend_of(engine.vllm_config):
            await initialise(engine, request)
            return
        await _join_trainer(engine, msgspec.convert(request.init_info, JoinOrder))

    async def update_weights(engine: Any, request: Any) -> None:
        """Call vLLM's method, with all replicas paused if they run their steps together."""
        if not is_backend_of(engine.vllm_config) or not _runs_in_lockstep(engine.vllm_config):
            await update(engine, request)
            return
        # Pause all replicas first: a blocked replica cannot take part in a step that another replica has begun.
        is_paused = await engine.is_paused()
        if not is_paused:
            await engine.pause_generation(mode="keep", clear_cache=False)
        try:
            await update(engine, request)
        finally:
            if not is_paused:
                await engine.resume_generation()

    AsyncLLM.init_weight_transfer_engine = init_weight_transfer_engine
    AsyncLLM.update_weights = update_weights


def _runs_in_lockstep(config: Any) -> bool:
    """Return whether all replicas must run each step together: they do if they share the experts of a MoE model."""
    return bool(config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe)


async def _join_trainer(engine: Any, order: JoinOrder) -> None:
    """Order every rank to join the trainer's fleet. If the join fails, report the reason to the trainer and raise."""
    try:
        await join_ranks(engine, settings_of(engine, order), order.token, pauses_itself=False)
    except Exception as error:
        try:
            await asyncio.to_thread(
                report_cannot_join, order.controller, order.token, order.name, reason_of(error)
            )
        except WindlassError as unheard:
            logger.warning(
                "cannot report to the trainer why this server does not join: %s", unheard
            )
        raise


def settings_of(engine: Any, order: JoinOrder) -> AgentSettings:
    """Return the settings that all ranks need for an order to join.

    If the server has no adapter, leave `checkpoint` empty: each rank sets it to the checkpoint's folder on its own host.

    Raises:
        ConfigError: the server has several adapters, the order names another model, or this host does not have the
            model. It is also raised if a server with an adapter has several replicas of a model with experts.
        UnsupportedLayout: updates cannot change the whole adapter.
    """
    # Import here, because the module `checkpoint` imports torch.
    from windlass.engines.capture.checkpoint import checkpoint_folder

    model = engine.vllm_config.model_config
    folder = checkpoint_folder("--model", model.model, model.revision)
    order.check_model(folder)
    world_size = engine.vllm_config.parallel_config.world_size_across_dp
    adapter = adapter_of(_Served.adapter, "--lora-modules")
    if adapter is not None:
        refuse_runtime_adapters()
        if _runs_in_lockstep(engine.vllm_config):
            raise ConfigError(
                "--data-parallel-size must be 1 for an adapter (--lora-modules) of a model with experts, got "
                f"{engine.vllm_config.parallel_config.data_parallel_size}: vLLM drops the adapter of replicas that have "
                "no requests"
            )
    return AgentSettings(
        name=order.name,
        controller=order.controller,
        transport=order.transport,
        url=order.url,
        port=_Served.port,
        checkpoint="" if adapter is None else str(adapter.folder),
        world_size=world_size,
        adapter="" if adapter is None else adapter.name,
        serves_own_weights=order.serves_own_weights,
        join_deadline_s=order.deadline_s or join_deadline_s(folder),
    )


async def join_ranks(
    engine: Any, settings: AgentSettings, token: str, *, pauses_itself: bool
) -> None:
    """Order every rank of this server to leave its previous fleet and join a new one.

    All ranks capture their layouts, this process checks the layouts, and then all ranks join.

    Do nothing if the engine is held (see `held_server`) and belongs to the fleet of `settings.controller` already. Its
    ranks reconnect to this controller by themselves, and the core's loop may be blocked and unable to carry out an order.

    `engine` is vLLM's `AsyncLLM`. For the other arguments see `RankOrder`.

    Raises:
        ConfigError: updates would not reach a tensor that vLLM's loader reads, or this process cannot call all ranks
            of the server.
        ProtocolError: the engine is held, it belongs to another controller's fleet, and `HeldRecord.may_leave` is False.
        PeerUnreachable: a rank failed; the message has the rank's reason.
        PeerTimeout: a rank did not answer within `settings.join_deadline_s`.
    """
    if (held := held_for(settings.port)) is not None:
        if held.controller == settings.controller:
            return
        if not held.may_leave:
            raise ProtocolError(f"join: {held.reason}")
    capture = RankOrder(
        step=RankStep.CAPTURE, settings=settings, token=token, pauses_itself=pauses_itself
    )
    captured = await _order_ranks(engine, capture)
    layouts = [msgspec.json.decode(said, type=CapturedLayout) for said in captured]
    check_layouts(settings.name, layouts)
    await _order_ranks(engine, msgspec.structs.replace(capture, step=RankStep.JOIN))


async def _order_ranks(engine: Any, order: RankOrder) -> list[str]:
    """Send an order to every rank; return `RankAnswer.said` of all ranks, by rank.

    `AsyncLLM.collective_rpc` is not enough, because it returns the results of the first replica only.

    Raises:
        ConfigError: this process cannot call all ranks of the server.
        PeerUnreachable: a rank failed; the message has the rank's reason.
        PeerTimeout: a rank did not answer within `order.settings.join_deadline_s`.
    """
    client, deadline_s = engine.engine_core, order.settings.join_deadline_s
    args = (str(order.step), msgspec.json.encode(order).decode())
    try:
        async with asyncio.timeout(deadline_s):
            found: Sequence[list[str]] = await asyncio.gather(
                *(
                    client._call_utility_async(
                        "collective_rpc", ORDERS, deadline_s, args, None, engine=core
                    )
                    for core in client.core_engines
                )
            )
    except TimeoutError:
        raise PeerTimeout(
            f"engine {order.settings.name}: every rank must {order.step} within {deadline_s} s"
        ) from None
    answers = [msgspec.json.decode(each, type=RankAnswer) for of_core in found for each in of_core]
    reasons = [answer.said for answer in answers if answer.failed and answer.said]
    if reasons:
        raise PeerUnreachable(reasons[0])
    if len(answers) != order.settings.world_size:
        raise ConfigError(
            f"vLLM: one API server must reach all {order.settings.world_size} ranks, got {len(answers)}; "
            "leave out --data-parallel-rank, --data-parallel-external-lb and --data-parallel-hybrid-lb"
        )
    return [answer.said for answer in answers]
