"""A plugin of SGLang by which orders reach every data-parallel replica of a server.

SGLang (0.5.23) sends what its control plane is asked to the schedulers of all replicas and waits for
all of them. For tensors it refuses beforehand, because a payload has one entry per tensor-parallel
rank. Orders are the same for every rank: only what is, and is for a custom weight loader, passes the
refusal by, in the way in which SGLang handles the sessions around it. Of the replicas' answers to a
flush it passes on one; here a refusal of any replica counts, since stages of that one are still at work.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from windlass.engines.sglang.releases import RELEASES, REPLICAS
from windlass.engines.versions import has, installed_version
from windlass.envs import environment_value
from windlass.errors import ConfigError

__all__ = ["register", "with_plugin"]

_NAME = "windlass"
_MANAGER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_OF_TENSORS = (None, "direct", "flattened_bucket")
"""Load formats that are no custom weight loader."""
_ENTRY_POINTS = f"[sglang.srt.plugins]\n{_NAME} = {__name__}:register\n"

_Result = tuple[bool, str]


class _Request(Protocol):
    serialized_named_tensors: list[str | bytes]
    load_format: str | None


class _Flushed(Protocol):
    @property
    def success(self) -> bool: ...


class _Manager(Protocol):
    """The part of SGLang's tokenizer manager that is used."""

    update_weights_from_tensor_communicator: object
    flush_cache_communicator: Callable[[object], Awaitable[Sequence[_Flushed]]]

    def auto_create_handle_loop(self) -> None: ...

    def _weight_update_session_call(
        self, communicator: object, obj: _Request
    ) -> Awaitable[_Result]: ...


_Route = Callable[[_Manager, _Request, object], Awaitable[_Result]]
_Flush = Callable[[_Manager, float | None], Awaitable[_Flushed]]


@contextmanager
def with_plugin(num_replicas: int) -> Iterator[dict[str, str]]:
    """Yields what the environment of a server with so many replicas has besides.

    An entry point is how SGLang finds a plugin, wherever on the path its distribution lies.

    Raises:
        ConfigError: the ranks of this release do not say which replica they are.
    """
    if num_replicas == 1:
        yield {}
        return
    if not has(REPLICAS, version := installed_version(RELEASES)):
        raise ConfigError(
            f"dp: must be 1 with SGLang {version}, whose ranks do not say which replica they are, "
            f"got --dp {num_replicas}"
        )
    with TemporaryDirectory() as folder:
        info = Path(folder) / f"{_NAME}_replicas-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {_NAME}-replicas\nVersion: 1\n")
        (info / "entry_points.txt").write_text(_ENTRY_POINTS)
        path, chosen = environment_value("PYTHONPATH"), environment_value("SGLANG_PLUGINS")
        yield {
            "PYTHONPATH": ":".join((folder, *((path,) if path else ()))),
            **({"SGLANG_PLUGINS": f"{chosen},{_NAME}"} if chosen else {}),
        }


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    around = HookType.AROUND
    HookRegistry.register(f"{_MANAGER}.update_weights_from_tensor", _reach_every_replica, around)
    HookRegistry.register(f"{_MANAGER}.flush_cache", _flush_every_replica, around)


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
    """What one replica has refused is refused; what all have done SGLang does as ever, once more."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager.auto_create_handle_loop()
    answers = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
    refused = [answer for answer in answers if not answer.success]
    return refused[0] if refused else await original(manager, timeout_s)
