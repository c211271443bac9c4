"""SGLang's memory saver in a rank: what sleeps, which values are lost, and when the scheduler may run.

SGLang frees memory by tag (`weights`, `kv_cache`, `cuda_graph`) at `/release_memory_occupation`, and maps it again at
`/resume_memory_occupation`. Every rank carries out these requests in its main loop, between two steps. `RankSaver` adds:

- A rank that updates now refuses to sleep, and so do all other ranks.
- Running requests return to the queue, and are computed again after the engine has woken. SGLang would end instead.
- The answer is sent when all ranks have freed their memory.
- Wrong or repeated tags change nothing. SGLang, or its memory saver, would end instead.
- Memory is mapped only if every rank has enough of it. The memory saver would end the process instead.
- The scheduler stays paused until all memory is mapped and a round (one update) has filled the weights.
- Tensors that neither an update nor SGLang fills again are copied to host memory and back.
- With `--enable-weights-cpu-backup`, the weights count as lost unless every byte has come back.

A round needs two requests, because each request costs a passage of SGLang's main loop. The request that maps the weights also
contains the order to come to rest (`Quiesce`). The request that maps all other memory also makes the scheduler run.

A refusal is the field `rid` of SGLang's answer, which is empty otherwise (`report_refusals`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, final

import torch
import torch.distributed as dist

from windlass.config import PauseMode
from windlass.engines.capture.memory import Holding, Walked, prints_of
from windlass.engines.capture.sleeping import free_nbytes, shortage_of, unfilled
from windlass.engines.engine_rank import EngineRank
from windlass.engines.http import EngineHttp
from windlass.engines.rank_reports import reason_of
from windlass.engines.rank_sleep import RankSleep
from windlass.errors import ConfigError, TransferFailed

_log = logging.getLogger(__name__)
Obey = Callable[[str, str], None]
"""Function that carries out an order in JSON. Its second argument is the reason why the rank must refuse; empty for none."""
WEIGHTS = RankSleep.WEIGHTS
CACHES = ("kv_cache", "cuda_graph")
_ORDER = (CACHES[0], WEIGHTS, CACHES[1])
"""Order in which SGLang itself frees memory if a request names no tags."""
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
_ORDER_TAG = "windlass_order="
"""Beginning of a tag with an order that each rank carries out when it has mapped the other tags of the request."""
_GO_ON_TAG = "windlass_go_on"
"""Tag of a request after which the scheduler runs, as soon as it may."""
_ABORT_TAG = "windlass_abort"
"""Tag of a request to free memory. The server ends all running requests before it frees the memory."""


def is_enabled() -> bool:
    """Return whether this rank's server was started with `--enable-memory-saver`."""
    from sglang.srt.runtime_context import get_server_args

    return bool(get_server_args().enable_memory_saver)


@final
class RankSaver:
    """Sleep of one rank. SGLang's main loop calls all methods.

    Args:
        rank: this rank. The object records in `rank.sleep` which memory sleeps and whether the weights are lost.
        model: the rank's model.
        outdate: function that makes later requests use no existing entries of the prefix cache.
        obey: function that carries out the order of a request; it may block the main loop.
    """

    def __init__(
        self, rank: EngineRank, model: torch.nn.Module, outdate: Callable[[], None], obey: Obey
    ) -> None:
        self._rank, self._state, self._outdate, self._obey = rank, rank.sleep, outdate, obey
        self._walked = Walked(model)
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Tensors of the model when it fell asleep, and their addresses. No code of the model runs while it sleeps.
        self._places: list[tuple[Holding, int]] = []
        # Fingerprints of the weights, if SGLang keeps a copy of them.
        self._prints: Mapping[str, object] | None = None
        # Tag -> bytes that its memory had.
        self._nbytes: dict[str, int] = {}
        # Whether the scheduler must run as soon as no memory sleeps and no weights are lost.
        self._runs = False
        self._state.is_enabled = True

    # --- messages of SGLang --------------------------------------------------------------------

    def release(self, message: Any, updater: Any, carry_out: Callable[[], object]) -> str:
        """Pause the scheduler and free the memory that a request's tags name. Return an empty string.

        If this rank or another rank refuses (an update runs, for example), free nothing, and return the reason.

        Args:
            message: SGLang's request.
            updater: SGLang's object that carries out the request.
            carry_out: function that calls SGLang's own handler.
        """
        tags = self._tags_of(message) - self._state.asleep
        if not tags:
            return ""
        hooks, scheduler = self._rank.required()[2], updater.scheduler
        with hooks.turn:
            if refusal := _agreed(updater, self._refusal(hooks.in_round, tags)):
                return refusal
            if not self._state.is_at_rest:
                self._runs = not scheduler._engine_paused
            retract(scheduler)
            if WEIGHTS in tags:
                self._before_loss()
            waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
            free = free_nbytes() or 0
            try:
                for tag in (tag for tag in _ORDER if tag in tags):
                    self._state.asleep |= {tag}
                    before, message.tags = free, [tag]
                    carry_out()
                    free = free_nbytes() or 0
                    self._nbytes[tag] = max(free - before, 0)
            finally:
                scheduler.waiting_queue = waiting
            self._outdate()
            # SGLang waits for all ranks before it frees weights, but not afterwards.
            dist.barrier(updater.tp_cpu_group)
        return ""

    def resume(self, message: Any, updater: Any, carry_out: Callable[[], object]) -> str:
        """Map the memory that a request's tags name, carry out the order in the tags (if any), and resume the scheduler.

        While memory still sleeps or the weights are lost, the scheduler stays paused. Return an empty string. If a rank has
        too little memory, map nothing, make the pause of the order fail, and return the reason. The arguments are those of
        `release`.
        """
        given = tuple(message.tags or ())
        order = next((t.removeprefix(_ORDER_TAG) for t in given if t.startswith(_ORDER_TAG)), "")
        if order:
            # The scheduler must stay paused until the round ends, even if a framework maps the other memory earlier.
            self.paused()
        if tags := self._tags_of(message) & self._state.asleep:
            if refusal := _agreed(updater, self._shortage(tags)):
                if order:
                    self._obey(order, refusal)
                return refusal
            message.tags = sorted(tags)
            carry_out()
            if WEIGHTS in tags:
                self._after_wake()
            self._state.asleep -= tags
            dist.barrier(updater.tp_cpu_group)
        if order:
            self._obey(order, "")
        elif _GO_ON_TAG in given:
            self._runs = True
        self._go_on(updater.scheduler)
        return ""

    def note_caches(self, updater: Any) -> None:
        """Record the size of the KV cache, which the controller compares with the memory of the GPU."""
        try:
            pool = updater.tp_worker.model_runner.token_to_kv_pool
        # This release of SGLang keeps the pool elsewhere.
        except AttributeError:
            return
        # A pool that combines several kinds of memory has no `mem_usage`.
        self._state.caches_nbytes = int(vars(pool).get("mem_usage", 0) * (1 << 30))

    def paused(self) -> None:
        """Record SGLang's request to pause: when memory has woken, the scheduler must stay paused."""
        self._runs = False

    def continued(self, scheduler: Any) -> None:
        """Record that SGLang was asked to continue, so that the scheduler runs when all memory is awake.

        If memory sleeps or the weights are lost now, pause the scheduler again.
        """
        self._runs = True
        if self._state.is_at_rest:
            scheduler._engine_paused = True

    # --- pauses of Windlass --------------------------------------------------------------------

    def check_awake(self) -> None:
        """Check that the weights have memory, at the addresses that they had before they slept.

        Raises:
            TransferFailed: the weights sleep, or a tensor has moved, so that a round would write to memory that the
                engine does not read.
        """
        if WEIGHTS in self._state.asleep:
            raise TransferFailed("the engine fell asleep while the pause began")
        if not self._state.is_lost:
            return
        moved = [holding.name for holding, address in self._places if holding.address != address]
        if moved:
            raise TransferFailed(
                f"wake: tensors must keep their addresses, got {len(moved)} at other addresses (such as {moved[0]}); "
                "start the engine again"
            )

    # --- parts ---------------------------------------------------------------------------------

    def _tags_of(self, message: Any) -> frozenset[str]:
        """Return the tags of memory in a request; all tags if the request names none."""
        return frozenset(message.tags or _ORDER) & {*_ORDER}

    def _refusal(self, in_round: bool, tags: Collection[str]) -> str:
        """Return the reason why this rank must not sleep; an empty string if it may.

        If the weights would be lost, first search for new mirrors (copies of weights).
        """
        if in_round:
            return "an update runs; ask again after its end"
        if WEIGHTS in tags and not self._state.is_lost:
            try:
                # `look` searches for copies of weights by their values, so it must run before the values are lost.
                self._rank.captured.look()
            # The search reads the engine's own objects. An exception would end SGLang's loop, and the server with it.
            except Exception as error:  # noqa: BLE001
                _log.warning("cannot look for values that are computed from weights", exc_info=True)
                return reason_of(error)
        return ""

    def _before_loss(self) -> None:
        """Save the tensors that neither an update nor SGLang restores, and record the addresses of all tensors.

        Then set `is_lost`. If SGLang keeps a copy of the weights, save nothing and do not set `is_lost`, but record the
        fingerprints of all tensors. If the weights are lost already, record only the addresses.
        """
        held = self._walked.held()
        self._places = [(holding, holding.address) for holding in held.values()]
        self._prints = None
        if has_backup():
            self._prints = None if self._state.is_lost else prints_of(held)
            return
        if not self._state.is_lost:
            self._saved = [
                (memory := holding.memory(), memory.to("cpu", copy=True))
                for holding in unfilled(self._rank.captured, held.values(), self._rank.kept)
            ]
        self._state.is_lost = True

    def _after_wake(self) -> None:
        """Restore the saved tensors. If SGLang keeps a copy of the weights but has restored other bytes, set `is_lost`."""
        with torch.inference_mode():
            for memory, value in self._saved:
                memory.copy_(value)
        if has_backup() and self._prints != prints_of(self._walked.held()):
            self._state.is_lost = True

    def _shortage(self, tags: Collection[str]) -> str:
        """Return the reason why the GPU has too little memory to map `tags` again; an empty string if it has enough."""
        return shortage_of(tags, sum(self._nbytes[tag] for tag in tags), free_nbytes())

    def _go_on(self, scheduler: Any) -> None:
        """Resume the scheduler if it is paused, must run, and may run: no memory sleeps and no weights are lost."""
        if self._runs and scheduler._engine_paused and not self._state.is_at_rest:
            go_on(scheduler)


def retract(scheduler: Any) -> None:
    """Pause a scheduler; its running requests return to the queue without their KV cache."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))


def go_on(scheduler: Any) -> None:
    """Let a paused scheduler run again."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    scheduler.continue_generation(ContinueGenerationReqInput())


def has_backup() -> bool:
    """Return whether SGLang copies weights to host memory when they sleep (`--enable-weights-cpu-backup`)."""
    from sglang.srt.runtime_context import get_server_args

    return bool(get_server_args().enable_weights_cpu_backup)


def _agreed(updater: Any, refusal: str) -> str:
    """Return the reason why this rank or another rank refuses; an empty string if no rank refuses. Collective."""
    refuses = torch.tensor([bool(refusal)], dtype=torch.int32)
    dist.all_reduce(refuses, dist.ReduceOp.MAX, updater.tp_cpu_group)
    if not refuses.item():
        return ""
    return refusal or "another rank of the engine refuses; see its log"


@functools.cache
def install(
    rank: EngineRank, model: torch.nn.Module, outdate: Callable[[], None], obey: Obey
) -> RankSaver | None:
    """Patch this process's scheduler so that a `RankSaver` carries out requests to sleep and to wake. Idempotent.

    The arguments are those of `RankSaver`. Return the saver.

    Return None if the server was started without the memory saver.
    """
    if not is_enabled():
        return None
    from sglang.srt.managers import io_struct
    from sglang.utils import TypeBasedDispatcher

    saver = RankSaver(rank, model, outdate, obey)
    dispatch: Callable[[Any, Any], Any] = TypeBasedDispatcher.__call__
    release, resume = (
        io_struct.ReleaseMemoryOccupationReqInput,
        io_struct.ResumeMemoryOccupationReqInput,
    )

    # The scheduler already holds references to its handlers, so it would not call patched handlers. Patch `__call__` of the
    # dispatcher's class instead: Python looks it up for every message.
    def call(dispatcher: Any, message: Any) -> Any:
        carry_out = functools.partial(dispatch, dispatcher, message)
        if isinstance(message, release):
            updater = dispatcher._mapping[release].__self__
            refusal = saver.release(message, updater, carry_out)
            return io_struct.ReleaseMemoryOccupationReqOutput(rid=refusal or None)
        if isinstance(message, resume):
            updater = dispatcher._mapping[release].__self__
            refusal = saver.resume(message, updater, carry_out)
            return io_struct.ResumeMemoryOccupationReqOutput(rid=refusal or None)
        if isinstance(message, io_struct.UpdateWeightsFromTensorReqInput):
            saver.note_caches(dispatcher._mapping[release].__self__)
        answer = carry_out()
        if isinstance(message, io_struct.PauseGenerationReqInput):
            saver.paused()
        elif isinstance(message, io_struct.ContinueGenerationReqInput):
            saver.continued(dispatcher._mapping[release].__self__.scheduler)
        return answer

    TypeBasedDispatcher.__call__ = call
    return saver


def report_refusals(mixin: Any) -> None:
    """Patch the methods with which SGLang's tokenizer manager handles requests to sleep and to wake.

    A patched method raises ConfigError with the reason if a rank refuses. For a request with `_ABORT_TAG`, the method
    first pauses the manager in the mode `abort`. If a rank then refuses, the method ends this pause, unless the manager was
    paused before the request. After a request with `_GO_ON_TAG`, the method ends the manager's pause, so that the manager
    passes waiting requests to the scheduler.

    `mixin` is SGLang's class `TokenizerControlMixin`.
    """
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    def asking(name: str) -> Callable[..., Awaitable[None]]:
        async def ask(manager: Any, request: Any, received: object = None) -> None:  # noqa: ARG001
            tags, was_paused = request.tags or (), manager.is_pause
            goes_on, aborts = _GO_ON_TAG in tags, _ABORT_TAG in tags
            manager.auto_create_handle_loop()
            if aborts:
                await manager.pause_generation(PauseGenerationReqInput(mode="abort"))
            answers = await getattr(manager, f"{name}_communicator")(request)
            if refusals := [answer.rid for answer in answers if answer.rid]:
                if aborts and not was_paused:
                    await manager.continue_generation(ContinueGenerationReqInput())
                raise ConfigError(f"{name}: {refusals[0]}")
            if goes_on:
                async with manager.is_pause_cond:
                    manager.is_pause = False
                    manager.is_pause_cond.notify_all()

        return ask

    for name in (RELEASE[1:], RESUME[1:]):
        setattr(mixin, name, asking(name))


@final
class ServerSleep:
    """Calls of rank 0's agent to make all ranks sleep and wake.

    Args:
        server: the server.
        state: state of rank 0. Between two requests, the states of all ranks are equal.
    """

    def __init__(self, server: EngineHttp, state: RankSleep) -> None:
        self._server, self._state = server, state
        # Whether a round woke the weights. If the training framework woke them, the framework also wakes the caches.
        self._woke = False

    @property
    def is_at_rest(self) -> bool:
        """True if the scheduler is paused, because memory sleeps or the weights are lost."""
        return self._state.is_at_rest

    @property
    def is_empty(self) -> bool:
        """True if the weights sleep or are lost. The scheduler then stays paused until a round has filled them."""
        return self._state.is_empty

    def fall_asleep(self, mode: PauseMode, deadline_s: float) -> None:
        """Pause, and make all ranks sleep; see `Sleeper.sleep`.

        Raises:
            ConfigError: `mode` keeps the KV cache.
            PeerUnreachable: a rank refused, or the server cannot be reached. After a refusal, the engine generates or is
                paused as before the call.
            PeerTimeout: the server has not answered within `deadline_s`; it may still fall asleep.
        """
        if mode is PauseMode.IN_PLACE:
            raise ConfigError(
                "SGLang: sleep: mode must be abort or retract, because the KV cache is freed"
            )
        # In mode `retract`, the ranks themselves return running requests to the queue.
        aborts = mode is PauseMode.ABORT and not self._state.is_at_rest
        self._server.post(RELEASE, {"tags": [*_ORDER, _ABORT_TAG]} if aborts else {}, deadline_s)

    def come_to_rest(self, order: str, deadline_s: float | None) -> None:
        """Pause a server that sleeps: order all ranks to map sleeping weights and to carry out `order`.

        If one rank fails, the pause fails on all ranks.

        Args:
            order: `Quiesce` in JSON.
            deadline_s: deadline for the server's response; None if the order blocks main loops until the end of the pause.

        Raises:
            PeerUnreachable, PeerTimeout: a rank could not map its weights, or the server did not answer.
        """
        self._woke = self._woke or WEIGHTS in self._state.asleep
        self._server.post(RESUME, {"tags": [WEIGHTS, f"{_ORDER_TAG}{order}"]}, deadline_s)

    def go_on(self, deadline_s: float) -> None:
        """Order all ranks to resume their schedulers. Idempotent.

        If a round woke the weights, the ranks first map their other memory.

        Raises:
            PeerUnreachable, PeerTimeout: a rank has too little memory, or the server did not answer.
        """
        rest = sorted(self._state.asleep) if self._woke else []
        self._server.post(RESUME, {"tags": [*rest, _GO_ON_TAG]}, deadline_s)
        self._woke = False
