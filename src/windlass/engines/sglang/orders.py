"""Orders (messages to the ranks of an SGLang server), and pauses, which use orders and the server's own routes.

An order is sent as the name of an empty tensor to `/update_weights_from_tensor`. SGLang passes the name to a custom
weight loader (`HOOK`) in the main loop of every rank, and the loader carries out the order.
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
from windlass.engines.sglang.sleep import ServerSleep
from windlass.engines.spec import AgentSettings, RankStep
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, WindlassError

HOOK = "windlass.engines.sglang.hook.run"
"""Function that SGLang calls in every rank as a custom weight loader."""
DRAIN_S = 30.0
"""Seconds until all pipeline stages have noticed that no request is left; each stage first runs all micro-batches."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Order to capture the layout or to join the fleet; see `windlass.engines.rank_reports.join_fleet`.

    Attributes:
        folder: folder in which the server's HTTP process waits for the ranks' reports.
        num_stages: number of pipeline stages of the engine.
    """

    step: RankStep
    settings: AgentSettings
    folder: str
    num_stages: int = 1


class Quiesce(msgspec.Struct, frozen=True, tag="quiesce"):
    """Order to wait for the last step, and to stop the use of prefix-cache entries of the current weights.

    Attributes:
        pause_id: id of the pause.
        namespace: unique name, which becomes part of the key of all new prefix-cache entries.
        blocked_s: None to return from the order at once. Otherwise the order blocks the main loop (see
            `QuiesceGate.block`): the agent must ask for the pause within these seconds.
        ends_requests: whether stopped requests end when generation resumes; see `windlass.engines.sglang.aborts`.
    """

    pause_id: str
    namespace: str
    blocked_s: float | None = None
    ends_requests: bool = False


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Order to report the captured layout in `folder`, as a `RankLayout` in JSON."""

    folder: str


class Digests(msgspec.Struct, frozen=True, tag="digests"):
    """Order to report a fingerprint of every tensor of the model in `folder`, as JSON."""

    folder: str


Order = Step | Quiesce | Describe | Digests


class _Empty:
    """Object that is unpickled as an empty CPU tensor.

    A real tensor cannot be used: SGLang patches torch's pickling of tensors, and the patch fails on CPU tensors.
    """

    def __reduce__(self) -> tuple[object, ...]:
        empty = torch.zeros(0)
        metadata = (empty.storage_offset(), empty.size(), empty.stride(), empty.requires_grad)
        return rebuild_tensor, (torch.Tensor, empty._typed_storage(), metadata)  # type: ignore[no-untyped-call]


class _Answer(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


def order_ranks(server: EngineHttp, order: Order, world_size: int, deadline_s: float) -> None:
    """Send an order to every rank, and wait until the ranks of the first pipeline stage have carried out the order.

    Ranks of later stages may carry out the order afterwards. `deadline_s` applies to each HTTP request.

    Raises:
        PeerUnreachable: the server refused the order, or a rank failed.
        PeerTimeout: the server did not answer in time.
    """
    with session(server, deadline_s) as selector:
        send_order(server, order, selector, world_size, deadline_s)


@contextmanager
def session(
    server: EngineHttp, deadline_s: float, *, has_sessions: bool = True
) -> Iterator[Mapping[str, str | bool]]:
    """Open an update session of SGLang, and yield the fields that the request of every order must contain.

    If the caller knows that the release has no sessions, it sets `has_sessions` to False to save a request.

    When the `with` block ends, SGLang's ranks post-process weights. The `with` statement waits until the ranks of the
    first pipeline stage have finished the post-processing.
    """
    # SGLang 0.5.16 has no sessions. Without this field, it would pass an order to a draft model too.
    without = {"disable_draft_model": True}
    if not has_sessions:
        yield without
        return
    try:
        _call(server, "/begin_weight_update", {"selector": "target"}, deadline_s)
    except NoSuchRoute:
        yield without
        return
    # A signal raises SystemExit in the launcher.
    except (PeerTimeout, SystemExit):
        # The server may open the session later, and no other process would close it.
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
    selector: Mapping[str, str | bool],
    world_size: int,
    deadline_s: float | None,
    *,
    hook: str = HOOK,
) -> None:
    """Send an order in an open session; see `order_ranks`.

    `selector` has the fields that `session` yielded. An order that blocks main loops has no deadline
    (`deadline_s` is None). `hook` is the path of the custom weight loader.
    """
    name = msgspec.json.encode(order).decode()
    # These are the bytes that SGLang's own serialiser would produce.
    payload = ForkingPickler.dumps([(name, _Empty())])
    body = {
        "serialized_named_tensors": [base64.b64encode(payload).decode()] * world_size,
        "load_format": hook,
        "flush_cache": False,
        **selector,
    }
    _call(server, "/update_weights_from_tensor", body, deadline_s)


def _call(server: EngineHttp, path: str, body: object, deadline_s: float | None) -> None:
    """POST to a route of SGLang's update sessions; raise PeerUnreachable if the answer reports a failure."""
    answer = msgspec.json.decode(server.post(path, body, deadline_s), type=_Answer)
    if not answer.success:
        raise PeerUnreachable(f"POST {server.url}{path}: {answer.message}")


@final
class SglangApi:
    """`EngineApi` that uses SGLang's routes and orders.

    The order `Quiesce` stops the use of prefix-cache entries of old weights. `/flush_cache` is not enough: SGLang refuses
    this request while other requests run, and does not clear the embedding cache.

    Args:
        server: the server.
        world_size: number of ranks.
        gate: gate of rank 0.
        blocks: whether updates may write weights while an order blocks the main loops.
        num_stages: number of pipeline stages.
        can_end_requests: whether every rank can end requests itself; see `windlass.engines.sglang.aborts`.
        has_sessions: whether this release has update sessions; see `session`.
        sleep: calls that make the ranks sleep and wake; None without SGLang's memory saver.
    """

    def __init__(
        self,
        server: EngineHttp,
        world_size: int,
        gate: QuiesceGate,
        *,
        blocks: bool,
        num_stages: int = 1,
        can_end_requests: bool = False,
        has_sessions: bool = True,
        sleep: ServerSleep | None = None,
    ) -> None:
        self._sleep, self._has_sessions = sleep, has_sessions
        # Whether the weights are lost in this pause, because the engine and its trainer use the GPU memory in turns.
        self._is_turn = False
        self._server, self._world_size, self._num_stages = server, world_size, num_stages
        self._gate, self._blocks = gate, blocks
        self._can_end_requests = can_end_requests and num_stages == 1
        self._ends_requests = False

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        """Pause in one of SGLang's own modes; see `EngineApi.pause`.

        SGLang's `abort` waits until the server has sent the answer of every running request. So if ranks can end
        requests themselves, pause with `retract` instead; `quiesce` then orders the ranks to end the requests at
        `resume`.

        With pipeline stages, the main loop of SGLang 0.5.23 continues its steps during a pause. Only the mode `abort` stops
        the steps, because it ends all requests.

        Raises:
            ConfigError: the engine has pipeline stages, and `mode` is not `abort`.
            PeerUnreachable, PeerTimeout: the server did not pause.
        """
        if self._num_stages > 1 and mode is not PauseMode.ABORT:
            raise ConfigError(
                f"SGLang: pause_mode must be abort with pipeline stages, got {mode}: the main loops of pipeline stages "
                "ignore other modes"
            )
        self._is_turn = self._sleep is not None and self._sleep.is_empty
        if self._is_turn:
            self._ends_requests = False
            return True
        if self._sleep is not None and self._sleep.is_at_rest:
            # No request runs, and waiting requests begin only after the update.
            mode = PauseMode.IN_PLACE
        self._ends_requests = self._can_end_requests and mode is PauseMode.ABORT
        own_mode = PauseMode.RETRACT if self._ends_requests else mode
        self._server.post("/pause_generation", {"mode": str(own_mode)}, deadline_s)
        return True

    def blocks(self, mode: PauseMode) -> bool:  # noqa: ARG002
        """Return whether to block the main loops; a loop that is paused but not blocked uses a whole CPU core."""
        return self._blocks

    def quiesce(self, pause_id: str, deadline_s: float, *, block: bool) -> None:
        """Send the order `Quiesce` to every rank, and return when the ranks have carried it out.

        If the weights are lost, the request that wakes them contains the order. No session is needed then, because the
        weights have no values to unpack and post-process. With pipeline stages, also wait until every stage has noticed
        that no request is left.

        Raises:
            PeerUnreachable, PeerTimeout: the server refused the order, a rank failed, or the server did not answer in time.
        """
        blocked_s = deadline_s if block else None
        answered_s = None if block else deadline_s
        order = Quiesce(pause_id, uuid.uuid4().hex, blocked_s, self._ends_requests)
        if self._sleep is not None and self._is_turn:
            self._sleep.come_to_rest(msgspec.json.encode(order).decode(), answered_s)
            return
        with session(self._server, deadline_s, has_sessions=self._has_sessions) as selector:
            send_order(self._server, order, selector, self._world_size, answered_s)
            if block:
                # SGLang post-processes weights at the end of the session. So keep the session open until the pause ends.
                self._gate.wait_ended(pause_id)
        # SGLang answers this flush after every stage has noticed that no request is left.
        if self._num_stages > 1:
            waits_s = min(DRAIN_S, deadline_s)
            self._server.post(f"/flush_cache?timeout={waits_s}", {}, deadline_s)

    def resume(self, deadline_s: float) -> None:
        """Resume generation; see `EngineApi.resume`. If the round woke the weights, first wake all other memory.

        Raises:
            PeerUnreachable, PeerTimeout: the server did not resume.
        """
        if self._sleep is not None and self._is_turn:
            self._sleep.go_on(deadline_s)
            return
        self._server.post("/continue_generation", {}, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """Set the version without aborting running requests; see `EngineApi.set_version`.

        Raises:
            PeerUnreachable, PeerTimeout: the server did not set the version.
        """
        body = {"new_version": str(version), "abort_all_requests": False}
        self._server.post("/update_weight_version", body, deadline_s)
