"""Orders to the ranks of an SGLang server, and how they get there: as names of an empty tensor.

SGLang's route for tensors hands them to a custom weight loader in the main loop of every rank.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler

import msgspec
import torch
from torch.multiprocessing.reductions import rebuild_tensor

from windlass.engines.http import NoSuchRoute, post
from windlass.engines.sglang.answers import Answers
from windlass.engines.sglang.server import HOOK
from windlass.engines.spec import AgentSettings
from windlass.errors import PeerTimeout, PeerUnreachable, WindlassError

__all__ = [
    "Quiesce",
    "Digests",
    "Block",
    "Join",
    "Capture",
    "Order",
    "ask_ranks",
    "order_ranks",
    "send_order",
    "session",
]

REPORTED_S = 0.5
"""For what ranks have reported before their server refused or ended."""


class Capture(msgspec.Struct, frozen=True, tag="capture"):
    """Capture the layout; each rank sends a `CapturedLayout` to the `Answers` of `folder`."""

    settings: AgentSettings
    folder: str
    num_stages: int = 1


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Join the fleet, once what all ranks have captured was found good; each reports so in `folder`."""

    settings: AgentSettings
    folder: str


class Quiesce(msgspec.Struct, frozen=True, tag="quiesce"):
    """Every step before this order is over, and caches of the weights until now answer nobody else.

    `namespace`: unlike that of any other order; of the keys of the caches from now on.
    """

    pause_id: str
    namespace: str


class Block(msgspec.Struct, frozen=True, tag="block"):
    """As `Quiesce`, and the loop stays in the order until the pause ends, or for 20 s."""

    pause_id: str
    namespace: str
    deadline_s: float


class Digests(msgspec.Struct, frozen=True, tag="digests"):
    """Send a digest of every tensor that the model holds to the `Answers` of `folder`, as JSON."""

    folder: str


Order = Capture | Join | Quiesce | Block | Digests


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


def order_ranks(url: str, order: Order, world_size: int, deadline_s: float) -> None:
    """Have every rank carry out an order in its main loop; return once those of the first stage have.

    Args:
        url: of the server.
        order: what they are to do.
        world_size: ranks.
        deadline_s: of every request.

    Raises:
        PeerUnreachable: the server refused, or a rank failed. PeerTimeout: no answer in time.
    """
    with session(url, deadline_s) as selector:
        send_order(url, order, selector, world_size, deadline_s)


def ask_ranks(
    url: str, order: Callable[[str], Order], world_size: int, deadline_s: float
) -> list[bytes]:
    """Have every rank, of every stage, carry out an order that it answers; what they reported, by rank.

    Args:
        url: of the server.
        order: makes it for the folder of the answers.
        world_size: ranks.
        deadline_s: of every request, and of the answers after them.

    Raises:
        PeerUnreachable: besides, a rank reports why it could not. PeerTimeout.
    """
    with Answers(world_size) as answers:
        try:
            order_ranks(url, order(answers.folder), world_size, deadline_s)
        except PeerUnreachable:
            # SGLang ends with the rank that failed, and its answer tells nothing of why.
            with suppress(PeerTimeout):
                answers.gather(REPORTED_S)
            raise
        return answers.gather(deadline_s)


@contextmanager
def session(url: str, deadline_s: float) -> Iterator[Mapping[str, str]]:
    """Yields what orders say within.

    The end works on weights, and is not awaited in later stages.
    """
    try:
        _call(url, "/begin_weight_update", {"selector": "target"}, deadline_s)
    except NoSuchRoute:  # 0.5.16: no sessions, and no draft model here
        yield {}
        return
    except (
        PeerTimeout,
        SystemExit,
    ):  # SystemExit: by a signal, while the server waits for requests
        with suppress(WindlassError):  # it opens later, and nobody else would close it
            _call(url, "/end_weight_update", {}, deadline_s)
        raise
    try:
        yield {"selector": "target"}
    finally:
        _call(url, "/end_weight_update", {}, deadline_s)


def send_order(
    url: str,
    order: Order,
    selector: Mapping[str, str],
    world_size: int,
    deadline_s: float | None,
) -> None:
    """As `order_ranks`, within a session; `deadline_s` is None for an order that lasts as long as a pause."""
    name = msgspec.json.encode(order).decode()
    payload = ForkingPickler.dumps([(name, _Empty())])  # what SGLang's own serialiser does
    body = {
        "serialized_named_tensors": [base64.b64encode(payload).decode()] * world_size,
        "load_format": HOOK,
        "flush_cache": False,
        **selector,
    }
    _call(url, "/update_weights_from_tensor", body, deadline_s)


def _call(url: str, path: str, body: object, deadline_s: float | None) -> None:
    answer = msgspec.json.decode(post(url, path, body, deadline_s), type=_Answer)
    if not answer.success:
        raise PeerUnreachable(f"POST {url}{path}: {answer.message}")
