"""Orders to the ranks of an SGLang server, and how it is paused by them and by its own routes.

Orders get there as names of an empty tensor: SGLang's route for tensors hands them to a custom weight loader
in the main loop of every rank.
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
from windlass.engines.sglang.spec import HOOK
from windlass.engines.spec import AgentSettings, RankStep
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, WindlassError

DRAIN_S = 30.0
"""For stages to notice that no request is left; they do so after a turn of every micro-batch."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Capture the layout, or, once what all ranks have captured was found good, join the fleet.

    Each rank reports so in `folder`, see `windlass.engines.spec.EngineServer.order`.
    """

    step: RankStep
    settings: AgentSettings
    folder: str
    num_stages: int = 1


class Quiesce(msgspec.Struct, frozen=True, tag="quiesce"):
    """Every step before this order is over, and caches of the weights until now answer nobody else.

    Attributes:
        pause_id: that the loop is quiesced for.
        namespace: unlike that of any other order; of the keys of the caches from now on.
        blocked_s: the loop stays in the order until the pause ends, or for 20 s; this is the deadline
            for the agent to ask for that pause. None where the loop goes on.
    """

    pause_id: str
    namespace: str
    blocked_s: float | None = None


class Digests(msgspec.Struct, frozen=True, tag="digests"):
    """Report a digest of every tensor that the model holds in `folder`, as JSON."""

    folder: str


Order = Step | Quiesce | Digests


class _Empty:
    """Reaches the ranks as an empty tensor.

    Ranks patch how torch hands tensors to other processes in a way that fails on CPU tensors.
    """

    def __reduce__(self) -> tuple[object, ...]:
        empty = torch.zeros(0)
        metadata = (empty.storage_offset(), empty.size(), empty.stride(), empty.requires_grad)
        return rebuild_tensor, (torch.Tensor, empty._typed_storage(), metadata)  # type: ignore[no-untyped-call]


class _Answer(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


def order_ranks(server: EngineHttp, order: Order, world_size: int, deadline_s: float) -> None:
    """Have every rank carry out an order in its main loop; return once those of the first stage have.

    `deadline_s`: of every request.

    Raises:
        PeerUnreachable: the server refused, or a rank failed. PeerTimeout: no answer in time.
    """
    with session(server, deadline_s) as selector:
        send_order(server, order, selector, world_size, deadline_s)


@contextmanager
def session(server: EngineHttp, deadline_s: float) -> Iterator[Mapping[str, str]]:
    """Yields what orders say within.

    The end works on weights, and is not awaited in later stages.
    """
    try:
        _call(server, "/begin_weight_update", {"selector": "target"}, deadline_s)
    except NoSuchRoute:  # 0.5.16: no sessions, and no draft model here
        yield {}
        return
    except (PeerTimeout, SystemExit):  # by a signal, while the server waits for requests
        with suppress(WindlassError):  # it opens later, and nobody else would close it
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
    """Do as `order_ranks`, within a session; `deadline_s` is None for an order that lasts as long as a pause."""
    name = msgspec.json.encode(order).decode()
    payload = ForkingPickler.dumps([(name, _Empty())])  # what SGLang's own serialiser does
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

    Caches of old weights are outdated by the order that quiesces the loop, in whichever mode,
    before anything is written: `/flush_cache` refuses while requests are kept, and leaves embeddings.

    `gate`: of rank 0. `blocks`: whether weights may be written while an order keeps the loops blocked.
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
        """SGLang's own modes.

        Its loop of a pipeline (0.5.23) does not look whether it is paused, so that only `abort`,
        which waits until no request is left, stops it.
        """
        if self._num_stages > 1 and mode is not PauseMode.ABORT:
            raise ConfigError(
                f"SGLang: pause_mode must be abort with stages, whose loop runs on in the others, "
                f"got {mode}"
            )
        self._server.post("/pause_generation", {"mode": str(mode)}, deadline_s)
        return True

    def blocks(self, mode: PauseMode) -> bool:  # noqa: ARG002
        """See `EngineApi.blocks`; a loop that is only paused spins."""
        return self._blocks

    def quiesce(self, pause_id: str, deadline_s: float, *, block: bool) -> None:
        order = Quiesce(pause_id, uuid.uuid4().hex, deadline_s if block else None)
        with session(self._server, deadline_s) as selector:
            answered_s = None if block else deadline_s
            send_order(self._server, order, selector, self._world_size, answered_s)
            if block:
                self._gate.wait_ended(pause_id)  # the end of a session works on weights
        if self._num_stages > 1:  # a flush waits until every stage knows that no request is left
            waits_s = min(DRAIN_S, deadline_s)
            self._server.post(f"/flush_cache?timeout={waits_s}", {}, deadline_s)

    def resume(self, deadline_s: float) -> None:
        self._server.post("/continue_generation", {}, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """See `EngineApi.set_version`; running requests are not aborted."""
        body = {"new_version": str(version), "abort_all_requests": False}
        self._server.post("/update_weight_version", body, deadline_s)
