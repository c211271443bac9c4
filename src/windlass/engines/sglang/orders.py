"""Orders to the ranks of an SGLang server, and its pause, which uses orders and the server's own routes.

An order travels as the name of an empty tensor: SGLang's route for tensors passes it to a custom weight
loader in the main loop of every rank.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from typing import final

import msgspec
import torch
from torch.multiprocessing.reductions import rebuild_tensor

from windlass.config import PauseMode
from windlass.engines.http import EngineHttp, NoSuchRoute
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.engines.spec import AgentSettings, RankStep
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, WindlassError

HOOK = "windlass.engines.sglang.hook.run"
"""Function that SGLang calls in every rank as a custom weight loader."""
DRAIN_S = 30.0
"""Seconds for pipeline stages to notice that no request is left, which takes each stage a turn of every micro-batch."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Capture the layout, or join the fleet once the captured layouts of all ranks have been accepted.

    Each rank reports its result in `folder`; see `windlass.engines.spec.EngineServer.order`.
    """

    step: RankStep
    settings: AgentSettings
    folder: str
    num_stages: int = 1


class Quiesce(msgspec.Struct, frozen=True, tag="quiesce"):
    """End every earlier step, and hide the caches of the current weights from later requests.

    Attributes:
        pause_id: pause that the loop is quiesced for.
        namespace: unique name, part of all cache keys from now on.
        blocked_s: the loop stays in the order until the pause ends, or for 20 s; this is the number of
            seconds within which the agent must ask for that pause. None lets the loop continue.
    """

    pause_id: str
    namespace: str
    blocked_s: float | None = None


class Digests(msgspec.Struct, frozen=True, tag="digests"):
    """Write a digest of every tensor of the model into `folder`, as JSON."""

    folder: str


Order = Step | Quiesce | Digests


class _Empty:
    """Object that the ranks unpickle as an empty tensor.

    SGLang's ranks patch how torch passes tensors between processes, and the patch fails on CPU tensors.
    """

    def __reduce__(self) -> tuple[object, ...]:
        empty = torch.zeros(0)
        metadata = (empty.storage_offset(), empty.size(), empty.stride(), empty.requires_grad)
        return rebuild_tensor, (torch.Tensor, empty._typed_storage(), metadata)  # type: ignore[no-untyped-call]


class _Answer(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


def order_ranks(server: EngineHttp, order: Order, world_size: int, deadline_s: float) -> None:
    """Make every rank carry out an order in its main loop; return once the ranks of the first stage have done so.

    `deadline_s` applies to every request.

    Raises:
        PeerUnreachable: the server refused, or a rank failed.
        PeerTimeout: no answer in time.
    """
    with session(server, deadline_s) as selector:
        send_order(server, order, selector, world_size, deadline_s)


@contextmanager
def session(server: EngineHttp, deadline_s: float) -> Iterator[Mapping[str, str]]:
    """Open an update session and yield the fields that every order in it must contain.

    Closing the session works on weights; later stages are not awaited.
    """
    try:
        _call(server, "/begin_weight_update", {"selector": "target"}, deadline_s)
    # SGLang 0.5.16 has no sessions, and no draft model here.
    except NoSuchRoute:
        yield {}
        return
    # A signal raises SystemExit while the server waits for requests.
    except (PeerTimeout, SystemExit):
        # The server opens the session later, and no other process would close it.
        with suppress(WindlassError):
            _call(server, "/end_weight_update", {}, deadline_s)
        raise
    try:
        yield {"selector": "target"}
    finally:
        _call(server, "/end_weight_update", {}, deadline_s)


def send_order(
    server: EngineHttp,
    order: msgspec.Struct,
    selector: Mapping[str, str],
    world_size: int,
    deadline_s: float | None,
    *,
    hook: str = HOOK,
) -> None:
    """Send an order within a session, as `order_ranks` does.

    `deadline_s` is None only for an order that lasts as long as a pause.
    """
    name = msgspec.json.encode(order).decode()
    # SGLang's own serialiser produces these bytes.
    payload = ForkingPickler.dumps([(name, _Empty())])
    body = {
        "serialized_named_tensors": [base64.b64encode(payload).decode()] * world_size,
        "load_format": hook,
        "flush_cache": False,
        **selector,
    }
    _call(server, "/update_weights_from_tensor", body, deadline_s)


def _call(server: EngineHttp, path: str, body: object, deadline_s: float | None) -> None:
    answer = msgspec.json.decode(server.post(path, body, deadline_s), type=_Answer)
    if not answer.success:
        raise PeerUnreachable(f"POST {server.url}{path}: {answer.message}")


@final
class SglangApi:
    """`EngineApi` over SGLang's routes.

    In every mode, the order that quiesces the loop outdates the caches of old weights before any weights are
    written. `/flush_cache` cannot do this: it refuses while requests are kept, and it leaves embeddings.

    `gate` is the gate of rank 0. `blocks` says whether weights may be written while an order blocks the
    loops.
    """

    def __init__(
        self,
        server: EngineHttp,
        world_size: int,
        gate: QuiesceGate,
        *,
        blocks: bool,
        num_stages: int = 1,
    ) -> None:
        self._server, self._world_size, self._num_stages = server, world_size, num_stages
        self._gate, self._blocks = gate, blocks

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        """Pause in one of SGLang's own modes.

        SGLang's loop of a pipeline (0.5.23) does not check whether it is paused. Only `abort`, which waits
        until no request is left, stops it.
        """
        if self._num_stages > 1 and mode is not PauseMode.ABORT:
            raise ConfigError(
                f"SGLang: pause_mode must be abort with stages, whose loop runs on in the others, "
                f"got {mode}"
            )
        self._server.post("/pause_generation", {"mode": str(mode)}, deadline_s)
        return True

    def blocks(self, mode: PauseMode) -> bool:  # noqa: ARG002
        """See `EngineApi.blocks`; a loop that is only paused keeps a core busy."""
        return self._blocks

    def quiesce(self, pause_id: str, deadline_s: float, *, block: bool) -> None:
        order = Quiesce(pause_id, uuid.uuid4().hex, deadline_s if block else None)
        with session(self._server, deadline_s) as selector:
            answered_s = None if block else deadline_s
            send_order(self._server, order, selector, self._world_size, answered_s)
            if block:
                # The end of a session works on weights, so it must follow the pause.
                self._gate.wait_ended(pause_id)
        # A flush waits until every stage knows that no request is left.
        if self._num_stages > 1:
            waits_s = min(DRAIN_S, deadline_s)
            self._server.post(f"/flush_cache?timeout={waits_s}", {}, deadline_s)

    def resume(self, deadline_s: float) -> None:
        self._server.post("/continue_generation", {}, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """See `EngineApi.set_version`; running requests are not aborted."""
        body = {"new_version": str(version), "abort_all_requests": False}
        self._server.post("/update_weight_version", body, deadline_s)
