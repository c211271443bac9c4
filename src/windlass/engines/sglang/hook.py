"""Custom weight loader that passes orders to SGLang's ranks (`windlass.engines.sglang.hook.run`).

SGLang calls a custom weight loader in every rank's scheduler loop, between batches, with the rank's model. The
"weights" are one empty tensor, whose name is an order in JSON (`windlass.engines.sglang.orders`).
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, assert_never

import msgspec
import torch
import torch.distributed as dist

from windlass.engines.capture.capture import all_ranks, capture, capture_on_every_rank
from windlass.engines.capture.checkpoint import checkpoint_specs, started_with
from windlass.engines.capture.description import Captured
from windlass.engines.capture.memory import fingerprints, held_by, prints_of
from windlass.engines.capture.snapshot import Snapshot
from windlass.engines.engine_rank import EngineRank
from windlass.engines.rank_reports import Secrets, carry_out, reason_of
from windlass.engines.sglang.aborts import can_end_requests, end_at_resume
from windlass.engines.sglang.orders import Describe, Digests, Order, Quiesce, SglangApi, Step
from windlass.engines.sglang.sampling import return_sampled_logprobs, seed_replica
from windlass.engines.sglang.sleep import RankSaver, ServerSleep, install, is_enabled
from windlass.engines.sglang.table import Parameter, RankLayout
from windlass.engines.spec import RankStep
from windlass.envs import environment_value
from windlass.errors import TransferFailed, UnsupportedLayout, WindlassError

_log = logging.getLogger(__name__)
LONGEST_BLOCK_S = 20.0
"""Maximum seconds that a main loop is blocked during a pause; afterwards the paused loop polls for requests as usual.

A blocked loop receives no orders, so an order may wait this long, or twice as long if the agent has not asked for the
pause yet.
"""


@dataclass(slots=True)
class SglangRank:
    """State of this rank's process, which has one model.

    Attributes:
        engine_rank: captured layout and fleet of this rank.
        saver: sleep of this rank; None without SGLang's memory saver.
        can_block: whether a pause may block the main loop. This is False with pipeline stages (later stages would not
            get the order) and with replicas (not tested), or if an order changes weights or an update writes buffers.
        namespace: prefix-cache namespace of the current weights; empty before the first update.
    """

    engine_rank: EngineRank = field(default_factory=partial(EngineRank, looks=False))
    saver: RankSaver | None = None
    can_block: bool = False
    namespace: str = ""


this_rank = SglangRank()
"""State of the rank that runs in this process."""


def run(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carry out an order. SGLang calls this in the main loop of every rank."""
    order: Order = msgspec.json.decode(named_tensors[0][0], type=Order)
    match order:
        case Step():
            carry_out(
                order.folder,
                own_rank(),
                lambda secrets: _carry_out_step(model, order, own_rank(), secrets),
                server_url=order.settings.url,
            )
        case Quiesce():
            _quiesce_or_fail(order)
        case Describe():
            carry_out(
                order.folder,
                own_rank(),
                lambda _: msgspec.json.encode(described(model, this_rank.engine_rank.captured)),
            )
        case Digests():
            carry_out(
                order.folder,
                own_rank(),
                lambda _: msgspec.json.encode(fingerprints(held_by(model))),
            )
        case _:
            assert_never(order)


def described(model: torch.nn.Module, captured: Captured) -> RankLayout:
    """Describe a rank's captured layout for a layout file.

    The field `derived` has each tensor that cannot be updated from outside of the engine, with the reason.
    """
    parameters = {
        name: Parameter(tuple(p.shape), str(p.dtype).removeprefix("torch."), p.element_size())
        for name, p in model.named_parameters()
    }
    written = {spec.name: spec.nbytes for spec in captured.manifest.parameters}
    mirrors = {} if captured.later is None else captured.later.mirrors
    reasons = {
        "SGLang computes it from received values": (*captured.repacked, *captured.recomputed),
        "SGLang rounds it to the dtype of the checkpoint": (r.name for r in captured.roundings),
        "SGLang has copied it from weights": mirrors,
        "SGLang's table has parameters only": written.keys() - parameters.keys(),
        "it is not contiguous": (
            name
            for name, found in parameters.items()
            if name in written and written[name] != found.numel * found.itemsize
        ),
    }
    derived = {name: why for why, names in reasons.items() for name in sorted(names)}
    return RankLayout(manifest=captured.manifest.encode(), parameters=parameters, derived=derived)


def _carry_out_quiesce(order: str, refusal: str) -> None:
    """Carry out the order `Quiesce` (in JSON) that a request to wake contains; see `RankSaver`.

    If `refusal` is not empty, let the order's pause fail with this reason instead.
    """
    quiesce = msgspec.json.decode(order, type=Quiesce)
    if refusal:
        this_rank.engine_rank.gate.fail(quiesce.pause_id, TransferFailed(refusal))
    else:
        _quiesce_or_fail(quiesce)


def _quiesce_or_fail(order: Quiesce) -> None:
    """Carry out an order to quiesce, and report to the agent that the main loop is quiesced.

    If this fails, let the order's pause fail with the reason, and raise nothing.
    """
    try:
        _quiesce(order)
    # An exception would end SGLang's loop, and the server with it.
    except Exception as error:  # noqa: BLE001
        _log.exception("rank %s: pause %s", own_rank(), order.pause_id)
        this_rank.engine_rank.gate.fail(order.pause_id, _as_refusal(error))
    else:
        _report_quiesced(order)


def _report_quiesced(order: Quiesce) -> None:
    """Report to the agent that the main loop is quiesced; also block the loop if `order.blocked_s` is given."""
    if order.blocked_s is None:
        this_rank.engine_rank.gate.quiesced(order.pause_id)
    else:
        this_rank.engine_rank.gate.block(order.pause_id, order.blocked_s, LONGEST_BLOCK_S)


def _as_refusal(error: Exception) -> WindlassError:
    """Return the error as a `WindlassError`, which the agent can report."""
    if isinstance(error, WindlassError):
        return error
    return UnsupportedLayout(f"the rank could not pause: {reason_of(error)}")


def own_rank() -> int:
    """Return the rank of this process among all ranks of the server.

    Each data-parallel replica has its own torch.distributed world, so `dist.get_rank()` alone is not unique.
    """
    return _own_replica() * dist.get_world_size() + dist.get_rank()


def _own_replica() -> int:
    """Return the index of this rank's data-parallel replica.

    Return 0 if the release of SGLang does not give its ranks this index; the launcher refuses several replicas with such
    a release.
    """
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        replica: int | None = parallel.dp_rank if parallel.dp_size > 1 else 0
    except (ImportError, AttributeError):
        return 0
    return replica or 0


def _own_sampler() -> int:
    """Return an index that two ranks share if and only if they must sample the same tokens.

    This is the index of the rank's data-parallel attention group among the groups of all replicas. If the release has
    no such groups, it is the index of the replica.
    """
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return _own_replica() * int(parallel.attn_dp_size) + int(parallel.attn_dp_rank)
    except (ImportError, AttributeError):
        return _own_replica()


def _carry_out_step(model: torch.nn.Module, order: Step, rank: int, secrets: Secrets) -> bytes:
    """Carry out the order's step (capture the layout, or join the fleet), and return the body of the report.

    The body is a `CapturedLayout` in JSON for a capture, and empty for a join. Before a capture, patch SGLang's
    scheduler, caches and sampler, and set the seed of this rank's replica. After the capture, set `this_rank.saver`,
    and for an engine with one replica and one stage also `this_rank.can_block`.
    """
    settings = order.settings
    if this_rank.saver is not None:
        this_rank.saver.check_awake()
    if order.step is RankStep.JOIN:
        this_rank.engine_rank.join(settings, rank, secrets.token)
        return b""
    alone = order.num_stages == 1 and settings.world_size == dist.get_world_size()

    def captured() -> Captured:
        seed_replica(_own_sampler())
        if not alone:
            return _capture_layout(model, order, rank)[0]
        every = partial(all_ranks, device=next(model.parameters()).device)
        found, untouched = capture_on_every_rank(lambda: _capture_layout(model, order, rank), every)
        # True if updates write only to the model's own memory, and not to buffers.
        plain = not found.repacked and not found.recomputed
        this_rank.can_block = every(plain and untouched)
        return found

    def api() -> SglangApi:
        server, sleep = secrets.server(settings.url), None
        if is_enabled():
            sleep = ServerSleep(server, this_rank.engine_rank.sleep)
            this_rank.engine_rank.sleep.ask = sleep.fall_asleep
        return SglangApi(
            server,
            settings.world_size,
            this_rank.engine_rank.gate,
            blocks=this_rank.can_block,
            num_stages=order.num_stages,
            can_end_requests=ends,
            has_sessions=has_sessions(),
            sleep=sleep,
        )

    ends = can_end_requests()
    separate_caches()
    return_sampled_logprobs()
    found = this_rank.engine_rank.capture(settings, rank, captured, api)
    this_rank.saver = install(this_rank.engine_rank, model, _outdate_own_caches, _carry_out_quiesce)
    return msgspec.json.encode(found)


def _capture_layout(model: torch.nn.Module, order: Step, rank: int) -> tuple[Captured, bool]:
    """Capture the layout. Return the layout, and the result of `orders_change_nothing`.

    Raises:
        ConfigError: see `checkpoint_specs`.
        UnsupportedLayout: see `capture`. Or the engine has pipeline stages, and SGLang changes tensors before or after
            an order.
    """
    settings = order.settings
    captured = capture(
        model,
        checkpoint_specs(Path(settings.checkpoint)),
        partial(load_again, model),
        worker=f"{settings.name}/{rank}",
        reference=started_with(settings),
        made_up=settings.made_up,
    )
    untouched = orders_change_nothing(model)
    if order.num_stages > 1 and has_sessions() and not untouched:
        raise UnsupportedLayout(
            f"--pp must be 1 for this model, got {order.num_stages}: SGLang repacks the model's weights before and after "
            "an order, but answers the order before later stages have finished"
        )
    return captured, untouched


def has_sessions() -> bool:
    """Return whether this release unpacks weights before an order and repacks them after it; SGLang 0.5.16 does not."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    return "restore_weights_before_loading" in vars(DefaultModelLoader)


def orders_change_nothing(model: torch.nn.Module) -> bool:
    """Return True if SGLang's own steps before and after an order leave every tensor unchanged.

    SGLang unpacks the weights before each order (a command that this loader carries out) and repacks them afterwards.
    Repack and unpack them once, restore the model, and return True if no tensor moved or changed. Also return True if this
    release of SGLang does neither.

    Call this during an order, when weights are unpacked.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if not has_sessions():
        return True
    device = next(model.parameters()).device
    before = Snapshot(model, copies=True)
    try:
        within = _addresses_and_prints(model)
        DefaultModelLoader.postprocess_weights(model, device)
        after = _addresses_and_prints(model)
        DefaultModelLoader.restore_weights_before_loading(model, device)
        return within == after == _addresses_and_prints(model)
    finally:
        before.restore()


def _addresses_and_prints(model: torch.nn.Module) -> Mapping[str, tuple[int, int]]:
    """Return the address and the fingerprint of every tensor, by name."""
    held = held_by(model)
    prints = prints_of(held)
    return {name: (holding.address, prints[name]) for name, holding in held.items()}


def load_again(model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load weights as SGLang does while it serves: unpack old weights, load new weights, post-process them."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    device = next(model.parameters()).device
    if not has_sessions():
        DefaultModelLoader.load_weights_and_postprocess(model, weights, device)
        return
    DefaultModelLoader.restore_weights_before_loading(model, device)
    model.load_weights(weights)  # type: ignore[operator]
    DefaultModelLoader.postprocess_weights(model, device)


_OWN_KEY = "windlass_extra_key"
"""Attribute of a request: the `extra_key` that its client chose."""
_FOLLOWS = "windlass_follows"
"""Attribute that marks a method as patched."""
_NO_NAMESPACES = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"


def separate_caches() -> None:
    """Patch SGLang so that a request finds only prefix-cache entries of the weights with which the request started.

    The patched `Req.init_next_round_input` adds the namespace of the current weights to a request's `extra_key`, which is
    part of the key of cache entries. The method adds the namespace only if SGLang passes a `tree_cache`. SGLang (0.5.16,
    0.5.23) passes it if a waiting request may start. A request that runs during an update keeps its old namespace. Later
    requests do not find the cache entries of this request, and SGLang evicts them like other unused entries.

    Raises:
        UnsupportedLayout: this release has no `init_next_round_input` or `extra_key`, or its tree ignores `extra_key`.
    """
    from sglang.srt.managers.schedule_batch import Req

    if environment_value(_NO_NAMESPACES).lower() in ("1", "true", "yes", "y"):
        raise UnsupportedLayout(
            f"{_NO_NAMESPACES} must not be set: SGLang's C++ radix tree ignores extra_key, and returns cache entries "
            "of old weights"
        )
    begin: Callable[..., None] | None = vars(Req).get("init_next_round_input")
    if begin is None or "extra_key" not in inspect.signature(Req.__init__).parameters:
        raise UnsupportedLayout(
            "sglang: Req must have extra_key and init_next_round_input, because Windlass uses them to separate "
            "cache entries of old and new weights"
        )
    if _FOLLOWS in vars(begin):
        return

    @wraps(begin)
    def begin_in_namespace(
        request: Any, tree_cache: object = None, cow_mamba: bool | None = None
    ) -> None:
        if tree_cache is not None and this_rank.namespace:
            own = vars(request).setdefault(_OWN_KEY, request.extra_key)
            request.extra_key = f"{this_rank.namespace}:{own or ''}"
        begin(request, tree_cache, cow_mamba)

    vars(begin_in_namespace)[_FOLLOWS] = True
    Req.init_next_round_input = begin_in_namespace


def _outdate_caches(namespace: str) -> None:
    """Keep later requests from using existing cache entries: set a new namespace, and clear the embedding cache."""
    this_rank.namespace = namespace
    # The embedding cache has no namespaces. It is in `mm_schedule` in 0.5.23, and in `mm_utils` in 0.5.16.
    for module in ("mm_schedule", "mm_utils"):
        found = sys.modules.get(f"sglang.srt.managers.{module}")
        embeddings = None if found is None else vars(found).get("embedding_cache")
        if embeddings is not None:
            embeddings.clear()


def _outdate_own_caches() -> None:
    """Keep later requests from using existing cache entries, because sleep frees the memory of the entries.

    The new namespace is the old namespace with a mark added. So all ranks set the same namespace without a message.
    """
    _outdate_caches(f"{this_rank.namespace}'")


def _quiesce(order: Quiesce) -> None:
    """Set a new cache namespace, search for new derived values, and wait for the GPU.

    Also record whether paused requests end when generation resumes (`end_at_resume`).

    A rank calls this while it carries out an order: between two steps, and before an update writes weights.

    Raises:
        UnsupportedLayout: an update cannot refill a value that the engine has computed from weights, or the engine has
            moved a tensor into which updates write.
        TransferFailed: see `RankSaver.check_awake`.
    """
    end_at_resume(ends_requests=order.ends_requests)
    _outdate_caches(order.namespace)
    if this_rank.saver is not None:
        this_rank.saver.check_awake()
    # `look` compares values with weights. If the weights are lost, `RankSaver` called `look` before the loss.
    if not this_rank.engine_rank.sleep.is_lost:
        this_rank.engine_rank.captured.look()
    if torch.cuda.is_available():
        # The last step may still run on the GPU.
        torch.cuda.synchronize()
