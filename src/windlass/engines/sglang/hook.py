"""What `--custom-weight-loader windlass.engines.sglang.hook.run` lets SGLang's ranks do.

SGLang calls a custom weight loader in every tensor-parallel rank's scheduler loop, between
batches, with the rank's model. The "weights" are one empty tensor whose name is an order in JSON:
join the fleet, stay for as long as a pause lasts, say that the loop is at rest, or write down what
the model holds.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import assert_never

import msgspec
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_tensor

from windlass.config import PauseMode
from windlass.engines.attach import AgentSettings, NoSuchRoute, post
from windlass.engines.capture.capture import Captured, capture
from windlass.engines.capture.codes import checkpoint_specs
from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.membership import Membership
from windlass.engines.rest_gate import RestGate
from windlass.errors import PeerTimeout, PeerUnreachable, UnsupportedLayout, WindlassError

__all__ = [
    "AtRest",
    "Digests",
    "Hold",
    "Join",
    "Joined",
    "SglangApi",
    "load_again",
    "order_ranks",
    "run",
]

HOOK = "windlass.engines.sglang.hook.run"
LONGEST_HOLD_S = 20.0
"""After that the paused loop spins as ever. Orders, which a held loop does not hear, wait so long,
or twice, if the agent has not asked yet."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Capture the layout and join the fleet; each rank writes a `Joined` to `folder`/rank."""

    settings: AgentSettings
    folder: str


class AtRest(msgspec.Struct, frozen=True, tag="at_rest"):
    """Every step before this order is over."""

    pause_id: str


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """As `AtRest`, and the loop stays in the order until the pause ends, or for `LONGEST_HOLD_S`."""

    pause_id: str
    deadline_s: float


class Digests(msgspec.Struct, frozen=True, tag="digests"):
    """Write a digest of every tensor that the model holds to `folder`/rank, as JSON."""

    folder: str


class Joined(msgspec.Struct, frozen=True):
    """Checkpoint tensors that left no trace on this rank, and see `Captured`."""

    unplaced: tuple[str, ...]
    constants: tuple[str, ...]
    repacked: tuple[str, ...]
    recomputed: tuple[str, ...]
    buffer_nbytes: int


Order = Join | AtRest | Hold | Digests


@dataclass(slots=True)
class _Rank:
    """This process; one model lives in it.

    Attributes:
        can_be_held: it is the only rank, since more have not been shown, and what SGLang does around
            an order leaves weights alone, so that they may be written meanwhile.
    """

    membership: Membership = field(default_factory=Membership)
    can_be_held: bool = False


_rank = _Rank()


def run(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Called by SGLang in the main loop of every rank."""
    order: Order = msgspec.json.decode(named_tensors[0][0], type=Order)
    rank = dist.get_rank()
    match order:
        case Join():
            _join(model, order, rank)
        case AtRest():
            _check_at_rest(model)
            _rank.membership.gate.at_rest(order.pause_id)
        case Hold():
            _check_at_rest(model)
            _rank.membership.gate.hold(order.pause_id, order.deadline_s, LONGEST_HOLD_S)
        case Digests():
            (Path(order.folder) / str(rank)).write_bytes(
                msgspec.json.encode(fingerprints(held_by(model)))
            )
        case _:
            assert_never(order)


def _join(model: torch.nn.Module, order: Join, rank: int) -> None:
    settings = order.settings

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        load_again(model, weights)

    def learn() -> Captured:
        captured = capture(
            model,
            checkpoint_specs(Path(settings.checkpoint)),
            load,
            worker=f"{settings.name}/{rank}",
            reference=settings.reference(),
        )
        _rank.can_be_held = (
            settings.world_size == 1 and _plain(captured) and _orders_change_nothing(model)
        )
        return captured

    def api() -> SglangApi:
        gate = _rank.membership.gate
        return SglangApi(settings.url, settings.world_size, gate, holds=_rank.can_be_held)

    captured = _rank.membership.join(settings, rank, learn, api)
    joined = Joined(
        unplaced=captured.unplaced,
        constants=captured.constants,
        repacked=captured.repacked,
        recomputed=captured.recomputed,
        buffer_nbytes=captured.buffer_nbytes,
    )
    (Path(order.folder) / str(rank)).write_bytes(msgspec.json.encode(joined))


def _plain(captured: Captured) -> bool:
    """Whether the manifest's parameters are the model's own memory, all of them."""
    return not captured.repacked and not captured.recomputed


def _orders_change_nothing(model: torch.nn.Module) -> bool:
    """Whether what SGLang does before and after an order changes no tensor and moves none.

    Releases with sessions undo in-place packing before it and pack anew after it. Called in an order,
    and leaves the model as it is in one.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if "restore_weights_before_loading" not in vars(DefaultModelLoader):
        return False  # 0.5.16 has no sessions; holding it has not been shown
    device = next(model.parameters()).device
    within = _state(model)
    DefaultModelLoader.postprocess_weights(model, device)
    after = _state(model)
    DefaultModelLoader.restore_weights_before_loading(model, device)
    return within == after == _state(model)


def _state(model: torch.nn.Module) -> Mapping[str, tuple[int, str]]:
    """Address and digest of every tensor."""
    held = held_by(model)
    addresses = [holding.address for holding in held.values()]
    digests = fingerprints(held).items()
    return {name: (a, digest) for a, (name, digest) in zip(addresses, digests, strict=True)}


def load_again(model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """As SGLang loads weights while it runs: unpack, load, post-process."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    device = next(model.parameters()).device
    if "restore_weights_before_loading" not in vars(DefaultModelLoader):  # 0.5.16
        DefaultModelLoader.load_weights_and_postprocess(model, weights, device)
        return
    DefaultModelLoader.restore_weights_before_loading(model, device)
    model.load_weights(weights)  # type: ignore[operator]
    DefaultModelLoader.postprocess_weights(model, device)


def _check_at_rest(model: torch.nn.Module) -> None:
    captured = _rank.membership.captured
    held = held_by(model)
    parameters = captured.manifest.parameters
    addresses = {p.name: a for p, a in zip(parameters, captured.addresses, strict=True)}
    known = addresses.keys() - set(captured.repacked)
    moved = sorted(n for n in known if n not in held or held[n].address != addresses[n])
    if moved:
        raise UnsupportedLayout(f"{moved}: tensors that moved since the layout was captured")
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the last step may still be running


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


def order_ranks(
    url: str, order: msgspec.Struct, world_size: int, deadline_s: float, *, hook: str = HOOK
) -> None:
    """Have every rank carry out an order in its main loop; return once all have.

    Args:
        url: of the server.
        order: an `Order`, or what another `hook` understands.
        world_size: tensor-parallel ranks.
        deadline_s: of every request.
        hook: the custom weight loader that the order is for.

    Raises:
        PeerUnreachable: the server refused, or a rank failed. PeerTimeout: no answer in time.
    """
    with _session(url, deadline_s) as selector:
        _order(url, order, selector, world_size, deadline_s, hook=hook)


@contextmanager
def _session(url: str, deadline_s: float) -> Iterator[Mapping[str, str]]:
    """Yields what orders say within."""
    try:
        _call(url, "/begin_weight_update", {"selector": "target"}, deadline_s)
    except NoSuchRoute:  # 0.5.16: no sessions, and no draft model here
        yield {}
        return
    except PeerTimeout:
        with suppress(WindlassError):  # it opens later, and nobody else would close it
            _call(url, "/end_weight_update", {}, deadline_s)
        raise
    try:
        yield {"selector": "target"}
    finally:
        _call(url, "/end_weight_update", {}, deadline_s)


def _order(
    url: str,
    order: msgspec.Struct,
    selector: Mapping[str, str],
    world_size: int,
    deadline_s: float | None,
    *,
    hook: str = HOOK,
) -> None:
    name = msgspec.json.encode(order).decode()
    payload = ForkingPickler.dumps([(name, _Empty())])  # what SGLang's own serialiser does
    body = {
        "serialized_named_tensors": [base64.b64encode(payload).decode()] * world_size,
        "load_format": hook,
        "flush_cache": False,
        **selector,
    }
    _call(url, "/update_weights_from_tensor", body, deadline_s)


def _call(url: str, path: str, body: object, deadline_s: float | None) -> None:
    answer = msgspec.json.decode(post(url, path, body, deadline_s), type=_Answer)
    if not answer.success:
        raise PeerUnreachable(f"POST {url}{path}: {answer.message}")


class SglangApi:
    """`EngineApi` over SGLang's routes.

    Args:
        url: of the server.
        world_size: tensor-parallel ranks.
        gate: of rank 0.
        holds: whether weights may be written while an order runs.
    """

    def __init__(self, url: str, world_size: int, gate: RestGate, *, holds: bool) -> None:
        self._url, self._world_size, self._gate, self._holds = url, world_size, gate, holds
        self._flushes = True

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        """SGLang's own modes; caches of old weights are dropped unless requests keep them."""
        self._flushes = mode is not PauseMode.IN_PLACE
        post(self._url, "/pause_generation", {"mode": str(mode)}, deadline_s)
        return True

    def holds(self, mode: PauseMode) -> bool:  # noqa: ARG002
        """See `EngineApi.holds`; a loop that is only paused spins."""
        return self._holds

    def hold(self, pause_id: str, deadline_s: float) -> None:
        """See `EngineApi.hold`."""
        with _session(self._url, deadline_s) as selector:
            self._flush(deadline_s)  # a held loop does not hear it
            _order(self._url, Hold(pause_id, deadline_s), selector, self._world_size, None)
            self._gate.wait_ended(pause_id)  # the end of a session works on weights

    def rest(self, pause_id: str, deadline_s: float) -> None:
        """See `EngineApi.rest`."""
        order_ranks(self._url, AtRest(pause_id), self._world_size, deadline_s)
        self._flush(deadline_s)

    def _flush(self, deadline_s: float) -> None:
        if self._flushes:
            post(self._url, "/flush_cache", {}, deadline_s)

    def resume(self, deadline_s: float) -> None:
        """See `EngineApi.resume`."""
        post(self._url, "/continue_generation", {}, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """See `EngineApi.set_version`; running requests are not aborted."""
        body = {"new_version": str(version), "abort_all_requests": False}
        post(self._url, "/update_weight_version", body, deadline_s)
