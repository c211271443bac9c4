"""What `--custom-weight-loader windlass.engines.sglang.hook.run` lets SGLang's ranks do.

SGLang calls a custom weight loader in every rank's scheduler loop, between batches, with the rank's
model. The "weights" are one empty tensor whose name is an order in JSON: learn the layout, join the
fleet, stay for as long as a pause lasts, say that the loop is at rest, or what the model holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

import msgspec
import torch
import torch.distributed as dist

from windlass.engines.capture.capture import Captured, capture
from windlass.engines.capture.codes import checkpoint_specs
from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.capture.snapshot import Snapshot
from windlass.engines.membership import Membership
from windlass.engines.sglang.answers import say, say_failed
from windlass.engines.sglang.api import SglangApi
from windlass.engines.sglang.orders import AtRest, Digests, Hold, Join, Learn, Learnt, Order
from windlass.errors import UnsupportedLayout, WindlassError

__all__ = ["load_again", "own_rank", "run"]

_log = logging.getLogger(__name__)
LONGEST_HOLD_S = 20.0
"""After that the paused loop spins as ever. Orders, which a held loop does not hear, wait so long,
or twice, if the agent has not asked yet."""


@dataclass(slots=True)
class _Rank:
    """This process; one model lives in it.

    Attributes:
        can_be_held: what SGLang does around an order leaves the weights of every rank alone, so that
            they may be written meanwhile, and there are no stages, of which later ones would not hear
            of an order that this one is held in, and no replicas (not shown).
    """

    membership: Membership = field(default_factory=Membership)
    can_be_held: bool = False


_rank = _Rank()


def run(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Called by SGLang in the main loop of every rank."""
    order: Order = msgspec.json.decode(named_tensors[0][0], type=Order)
    rank = own_rank()
    match order:
        case Learn() | Join():
            try:
                if isinstance(order, Learn):
                    _learn(model, order, rank)
                else:
                    _rank.membership.join(order.settings, rank)
                    say(order.folder, rank, b"")
            except _RefusedElsewhereError:
                pass  # the rank that has a reason tells it
            except Exception as error:  # noqa: BLE001 - SGLang's loop, and the engine, would end with it
                _log.exception("rank %s: %s", rank, type(order).__name__)
                say_failed(order.folder, rank, _reason(error))
        case AtRest():
            _check_at_rest(model)
            _rank.membership.gate.at_rest(order.pause_id)
        case Hold():
            _check_at_rest(model)
            _rank.membership.gate.hold(order.pause_id, order.deadline_s, LONGEST_HOLD_S)
        case Digests():
            say(order.folder, rank, msgspec.json.encode(fingerprints(held_by(model))))
        case _:
            assert_never(order)


class _RefusedElsewhereError(UnsupportedLayout):
    """Another rank of this engine could not learn its layout."""


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, WindlassError) else f"{type(error).__name__}: {error}"


def own_rank() -> int:
    """Of this process among all of the server's: replicas, stages, tensor-parallel ranks.

    A replica is a world of its own.
    """
    return _own_replica() * dist.get_world_size() + dist.get_rank()


def _own_replica() -> int:
    """0 in releases that do not say it in a rank; `with_plugin` refuses those replicas."""
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        replica: int | None = parallel.dp_rank if parallel.dp_size > 1 else 0
    except (ImportError, AttributeError):
        return 0
    return replica or 0


def _learn(model: torch.nn.Module, order: Learn, rank: int) -> None:
    settings = order.settings

    alone = order.num_stages == 1 and settings.world_size == dist.get_world_size()

    def learn() -> Captured:
        # Ranks agree on it: those that have learnt theirs do not learn again with one that has not.
        try:
            captured, untouched = _layout_of(model, order, rank)
        except BaseException:
            if alone:
                _on_every_rank(model, mine=False)
            raise
        if alone and not _on_every_rank(model, mine=True):
            raise _RefusedElsewhereError
        _rank.can_be_held = alone and _on_every_rank(model, mine=_plain(captured) and untouched)
        return captured

    def api() -> SglangApi:
        gate = _rank.membership.gate
        return SglangApi(
            settings.url,
            settings.world_size,
            gate,
            holds=_rank.can_be_held,
            num_stages=order.num_stages,
        )

    captured = _rank.membership.learn(settings, rank, learn, api)
    learnt = Learnt(
        unplaced=captured.unplaced,
        constants=captured.constants,
        repacked=captured.repacked,
        recomputed=captured.recomputed,
        buffer_nbytes=captured.buffer_nbytes,
    )
    say(order.folder, rank, msgspec.json.encode(learnt))


def _layout_of(model: torch.nn.Module, order: Learn, rank: int) -> tuple[Captured, bool]:
    """What was learnt, and whether SGLang leaves weights alone around an order."""
    settings = order.settings

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        load_again(model, weights)

    captured = capture(
        model,
        checkpoint_specs(Path(settings.checkpoint)),
        load,
        worker=f"{settings.name}/{rank}",
        reference=settings.reference(),
    )
    untouched = _orders_change_nothing(model)
    if order.num_stages > 1 and _has_sessions() and not untouched:
        raise UnsupportedLayout(
            "pp: stages must hold weights that SGLang neither packs nor restores around an "
            "order, since it answers for the first stage while others still do"
        )
    return captured, untouched


def _has_sessions() -> bool:
    """Whether orders come within sessions, which work on weights; 0.5.16 has none."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    return "restore_weights_before_loading" in vars(DefaultModelLoader)


def _plain(captured: Captured) -> bool:
    """Whether the manifest's parameters are the model's own memory, all of them."""
    return not captured.repacked and not captured.recomputed


def _on_every_rank(model: torch.nn.Module, *, mine: bool) -> bool:
    """Whether it is so on all ranks of this world, each of which is in the same order."""
    least = torch.tensor([int(mine)], device=next(model.parameters()).device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return bool(least.item())


def _orders_change_nothing(model: torch.nn.Module) -> bool:
    """Whether what SGLang does before and after an order changes no tensor and moves none.

    Releases with sessions undo in-place packing before it and pack anew after it. Called in an order,
    and leaves the model as it is in one.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if not _has_sessions():
        return True
    device = next(model.parameters()).device
    before = Snapshot(model, copies=True)
    try:
        within = _state(model)
        DefaultModelLoader.postprocess_weights(model, device)
        after = _state(model)
        DefaultModelLoader.restore_weights_before_loading(model, device)
        return within == after == _state(model)
    finally:
        before.restore()


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
    if not _has_sessions():
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
