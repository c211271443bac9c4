"""One peer of the NIXL transport, and the keys of its regions: NIXL's metadata."""

from __future__ import annotations

import base64
import binascii
import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import final

import msgspec

from windlass.errors import DECODE_ERRORS, RegionError
from windlass.memory.ranges import Pieces
from windlass.transports.base import MemoryRegion, PeerEndpoint, RemoteRegion
from windlass.transports.liveness import PeerLiveness
from windlass.transports.nixl.native import NativeHandle
from windlass.transports.regions import overlaps

_MAX_KEY_CHARS = 1 << 20


class NixlKey(msgspec.Struct, frozen=True, array_like=True):
    """NIXL's metadata for one region, and a word that peers may write first.

    `step_nbytes`: the region is registered in steps of it; 0 for at once. `gpu`: -1 for host memory.
    """

    metadata: bytes
    scratch: int
    step_nbytes: int = 0
    gpu: int = -1


@final
class NixlPeer:
    """One incarnation of one peer. Guarded by the transport's `lock`, but for `liveness`."""

    def __init__(self, liveness: PeerLiveness, lock: threading.Lock) -> None:
        self.liveness = liveness
        self.calls: dict[object, Pieces] = {}
        """Under way, in any thread."""
        self._calls_ended = threading.Condition(lock)
        self.keys: dict[str, tuple[NixlKey, ...]] = {}
        """Regions that are known."""
        self.scratch = 0
        self.connection = 1
        self.gpu = -1
        self.confirmed = False
        self.open: dict[NativeHandle, Pieces] = {}
        """Given up, and not over: several threads may write at once."""
        self.unknown_reason = ""
        self.late = False
        self.words: list[NativeHandle] = []
        """Late ones, which nobody waits for."""

    @contextlib.contextmanager
    def call(self, pieces: Pieces) -> Iterator[None]:
        """Around a native call, from before it begins to its end. Enter it under the lock, leave it without."""
        mark = object()
        self.calls[mark] = pieces
        try:
            yield
        finally:
            with self._calls_ended:
                del self.calls[mark]
                self._calls_ended.notify_all()

    def wait_for_calls(self, connection: int, timeout_s: float) -> bool:
        """Whether no call is under way, in any thread, or `connection` is no longer the one in use.

        Under the lock, which others may take meanwhile.
        """
        return self._calls_ended.wait_for(
            lambda: not self.calls or self.connection != connection, timeout_s
        )

    def is_open(
        self, state_of: Callable[[NativeHandle], str], errors: tuple[type[Exception], ...]
    ) -> bool:
        """Whether one that was given up may still be going on; forgets those that are done."""
        for handle in list(self.open):
            try:
                done = state_of(handle) == "DONE"
            except errors:
                done = self.late = False  # no error of NIXL is a fence
            if done:
                del self.open[handle]
        if not self.open:
            self.unknown_reason, self.late = "", False
        return bool(self.open)

    def touches(self, region: MemoryRegion) -> bool:
        """Whether a call under way, or one that was given up and is not over, reads the region."""
        return any(
            overlaps(region, local, nbytes)
            for local, _, nbytes in (*self.calls.values(), *self.open.values())
        )


def forget_ended(peers: dict[PeerEndpoint, NixlPeer], is_open: Callable[[NixlPeer], bool]) -> None:
    """Close the connections of processes that have ended. Called under the transport's lock.

    Whoever writes to one of them at this moment finds that it has ended. What UCX keeps of it stays:
    to have it forget a peer under an open transfer is not safe.
    """
    idle = {endpoint: p for endpoint, p in peers.items() if not (p.calls or p.words)}
    for endpoint in [e for e, p in idle.items() if p.liveness.has_ended(reconnect=False)]:
        if not is_open(peers[endpoint]):
            peers.pop(endpoint).liveness.close()


def encode_keys(keys: Sequence[NixlKey]) -> str:
    """`RemoteRegion.key`."""
    return base64.b64encode(msgspec.msgpack.encode(keys)).decode()


def decode_keys(region: RemoteRegion) -> list[NixlKey]:
    """The keys of a region; at least one.

    Raises:
        RegionError: it has none that can be read.
    """
    if len(region.key) > _MAX_KEY_CHARS:
        raise RegionError(f"nixl: key must be <= {_MAX_KEY_CHARS} chars, got {len(region.key)}")
    try:
        raw = base64.b64decode(region.key, validate=True)
        keys = msgspec.msgpack.decode(raw, type=list[NixlKey])
    except (binascii.Error, *DECODE_ERRORS, ValueError) as error:
        raise RegionError(f"nixl: key of {region.address:#x} cannot be read: {error}") from error
    steps = [key.step_nbytes for key in keys]
    if not steps or any(0 < step < mmap.PAGESIZE or step < 0 for step in steps):
        raise RegionError(
            f"nixl: key of {region.address:#x} must name steps of 0 or >= {mmap.PAGESIZE}, got {steps}"
        )
    return keys
