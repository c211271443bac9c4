"""Orders reach every data-parallel replica of an SGLang server.

SGLang (0.5.23) sends what its control plane is asked to the schedulers of all
replicas and waits for all of them, but refuses tensors beforehand, because a payload has one entry per
tensor-parallel rank. Orders are the same for every rank: only what is, and is for a custom weight loader,
passes the refusal by, in the way in which SGLang handles the sessions around it. Of the replicas' answers to
a flush it passes on one; here a refusal of any replica counts, since stages of that one are still at work.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

_OF_TENSORS = (None, "direct", "flattened_bucket")
"""Load formats that are no custom weight loader."""

_Result = tuple[bool, str]


class _Request(Protocol):
    serialized_named_tensors: list[str | bytes]
    load_format: str | None


class _Flushed(Protocol):
    @property
    def success(self) -> bool: ...


class _Manager(Protocol):
    """The part of SGLang's tokenizer manager that is used."""

    server_args: Any
    update_weights_from_tensor_communicator: object
    flush_cache_communicator: Callable[[object], Awaitable[Sequence[_Flushed]]]

    def auto_create_handle_loop(self) -> None: ...

    def _weight_update_session_call(
        self, communicator: object, obj: _Request
    ) -> Awaitable[_Result]: ...


_Route = Callable[[_Manager, _Request, object], Awaitable[_Result]]
_Flush = Callable[[_Manager, float | None], Awaitable[_Flushed]]


def reach_replicas(mixin: Any) -> None:
    """Have the methods of SGLang's tokenizer manager reach all replicas, where there are several."""
    update: _Route = mixin.update_weights_from_tensor
    flush: _Flush = mixin.flush_cache

    async def update_weights_from_tensor(
        manager: _Manager, request: _Request, received: object = None
    ) -> _Result:
        if manager.server_args.dp_size == 1:
            return await update(manager, request, received)
        return await _reach_every_replica(update, manager, request, received)

    async def flush_cache(manager: _Manager, timeout_s: float | None = None) -> _Flushed:
        if manager.server_args.dp_size == 1:
            return await flush(manager, timeout_s)
        return await _flush_every_replica(flush, manager, timeout_s)

    mixin.update_weights_from_tensor, mixin.flush_cache = update_weights_from_tensor, flush_cache


async def _reach_every_replica(
    original: _Route, manager: _Manager, request: _Request, received: object = None
) -> _Result:
    from sglang.srt.utils.common import normalize_serialized_named_tensor_payloads

    if request.load_format in _OF_TENSORS or len(set(request.serialized_named_tensors)) > 1:
        return await original(manager, request, received)

    manager.auto_create_handle_loop()
    request.serialized_named_tensors = normalize_serialized_named_tensor_payloads(
        request.serialized_named_tensors
    )
    return await manager._weight_update_session_call(
        manager.update_weights_from_tensor_communicator, request
    )


async def _flush_every_replica(
    original: _Flush, manager: _Manager, timeout_s: float | None = None
) -> _Flushed:
    """Refuse what one replica has refused; what all have done SGLang does as ever, once more."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager.auto_create_handle_loop()
    answers = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
    refused = [answer for answer in answers if not answer.success]
    return refused[0] if refused else await original(manager, timeout_s)
