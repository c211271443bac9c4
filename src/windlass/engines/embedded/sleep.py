"""Sleep of the embedded engine: the trainer gets the memory of weights and KV cache while it steps.

The engine saves and restores only tensors that no trainer has (`keep` of `connect_trainer`). All other weights are lost,
so the engine serves nothing until a round (the controller's steps for one update) has filled and verified all of them.
PREPARE of the next round wakes the weights, and the first step after PUBLISH allocates the KV cache.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import final

from windlass.config import PauseMode
from windlass.control.engine_agent import EngineHooks
from windlass.errors import ConfigError, PeerTimeout, ProtocolError, UnsupportedLayout
from windlass.layout.manifest import ShardManifest
from windlass.memory.sleeping import SleepingMemory
from windlass.transfer.arena import Arena


@final
class SleepingWeights:
    """Weights of one rank, which can sleep.

    The model loop calls `sleep`, and the agent's thread calls the other methods during a pause.

    Args:
        arena: memory of all parameters.
        manifest: manifest of the rank.
        addresses: addresses of the parameters, in manifest order.
        locate: function that returns the present addresses of the parameters.
        may_sleep: whether the arena's transport allows the arena to sleep (`TransportTraits.unpinned`).
        caches_nbytes: see `Sleeper`.

    Attributes:
        is_empty: whether the values are lost and no round has filled the weights since.
    """

    def __init__(
        self,
        arena: Arena,
        manifest: ShardManifest,
        addresses: Sequence[int],
        locate: Callable[[], Sequence[int]],
        *,
        may_sleep: bool,
        caches_nbytes: int = 0,
    ) -> None:
        self.caches_nbytes = caches_nbytes
        self._memory = SleepingMemory(arena.address, arena.nbytes)
        self._manifest, self._addresses = manifest, tuple(addresses)
        self._locate, self._may_sleep = locate, may_sleep
        # (address, bytes) of each parameter with a tensor that no update fills.
        self._saved: list[tuple[int, bytes]] = []
        self.is_empty = False
        # Held while the memory is freed, or while a sender reads it.
        self._awake = threading.Lock()

    def sleep(self, kept: Collection[str] = ()) -> None:
        """Free the memory, and record that the values are lost. Idempotent.

        Args:
            kept: names of tensors that no update fills. They are saved for `wake`.
        """
        with self._awake:
            self.is_empty = True
            if not self._memory.is_asleep:
                manifest = self._manifest
                indices = {index for name, index in manifest.rows() if name in kept}
                self._saved = [
                    (
                        self._addresses[i],
                        ctypes.string_at(self._addresses[i], manifest.parameters[i].nbytes),
                    )
                    for i in sorted(indices)
                ]
            self._memory.sleep()

    @contextmanager
    def stays_awake(self) -> Iterator[None]:
        """Keep the memory allocated during the `with` block.

        A call of `sleep` waits until the block ends. If `sleep` already runs, this method first waits until it has ended.
        """
        with self._awake:
            yield

    def wake(self) -> None:
        """Allocate the memory again, restore the saved tensors, and check that every parameter has its old address. Idempotent.

        Raises:
            TransferFailed: there is too little memory.
            UnsupportedLayout: a parameter has moved, so that the next update would write to memory that the engine does
                not read.
        """
        self._memory.wake()
        for address, saved in self._saved:
            ctypes.memmove(address, saved, len(saved))
        self._saved = []
        if (found := tuple(self._locate())) != self._addresses:
            num_kept = sum(a == b for a, b in zip(found, self._addresses, strict=False))
            raise UnsupportedLayout(
                f"wake: all {len(self._addresses)} parameters must keep their addresses, got {num_kept} with an unchanged "
                f"address, of {len(found)} found; start the engine again"
            )

    def filled(self) -> None:
        """Record that a round has filled and verified all weights."""
        self.is_empty = False

    def require_may_sleep(self) -> None:
        """Raise ConfigError if peers map or pin the memory, because mapped or pinned memory cannot be freed."""
        if not self._may_sleep:
            raise ConfigError(
                "sleep: transport must be pull or cma, because every other transport needs the engine's memory to stay "
                "in place"
            )

    def require_values(self, what: str) -> None:
        """Raise ConfigError if the values are lost. `what` names the operation that needs them, for the error."""
        if self.is_empty:
            raise ConfigError(f"{what}: the engine sleeps until the next version")


@final
class SleepingHooks:
    """`EngineHooks` of a rank that may sleep, and its `Sleeper`. Each pause wakes the weights, before a round fills them.

    Args:
        hooks: hooks of the rank.
        weights: weights of the rank.
        pause_and_sleep: function of a pause mode and a deadline that makes every rank sleep; None if another rank has it.
    """

    def __init__(
        self,
        hooks: EngineHooks,
        weights: SleepingWeights,
        pause_and_sleep: Callable[[PauseMode, float], None] | None,
    ) -> None:
        self._hooks, self._weights, self._pause_and_sleep = hooks, weights, pause_and_sleep
        # Held while the rank falls asleep or while a round begins, so that a round never fills memory without pages.
        self._turn = threading.Lock()
        self._in_round = False

    @property
    def is_empty(self) -> bool:
        """True if the weights are lost; see `Sleeper`."""
        return self._weights.is_empty

    @property
    def caches_nbytes(self) -> int:
        """Bytes that the rank needs beside its weights; see `Sleeper`."""
        return self._weights.caches_nbytes

    def sleep(self, mode: PauseMode, deadline_s: float) -> None:
        """On rank 0, make every rank sleep. On another rank, only check that sleep is possible. See `Sleeper.sleep`.

        Raises:
            ConfigError: `mode` keeps the KV cache, or the transport needs the memory to stay in place.
            ProtocolError: an update runs.
        """
        self._weights.require_may_sleep()
        if mode is PauseMode.IN_PLACE:
            raise ConfigError("sleep: mode must be abort or retract, because the KV cache is freed")
        with self._turn:
            if self._in_round:
                raise ProtocolError("sleep: an update runs; ask again after its end")
            if self._pause_and_sleep is not None:
                self._pause_and_sleep(mode, deadline_s)

    def stays_awake(self) -> AbstractContextManager[None]:
        """Keep the rank awake while it sends its weights; see `Sleeper.stays_awake`."""
        return self._weights.stays_awake()

    def round_ended(self) -> None:
        """Record that no round runs, so that the rank may sleep again; see `Sleeper.round_ended`."""
        self._in_round = False

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        """Pause the engine, then wake the weights; see `EngineHooks.pause` and `SleepingWeights.wake`.

        The rank then refuses to sleep until `round_ended` is called.

        Raises:
            PeerTimeout: the rank did not finish falling asleep within `deadline_s`, or the engine did not pause within
                `deadline_s`.
        """
        if not self._turn.acquire(timeout=deadline_s):
            raise PeerTimeout(f"pause: this rank was still falling asleep after {deadline_s} s")
        self._in_round = True
        self._turn.release()
        try:
            self._hooks.pause(pause_id, mode, deadline_s)
            self._weights.wake()
        except BaseException:
            self._in_round = False
            raise

    def resume(self, deadline_s: float) -> None:
        """Resume generation; see `EngineHooks.resume`."""
        self._hooks.resume(deadline_s)

    def finalise(self) -> None:
        """Finalise the engine (see `EngineHooks.finalise`), then record that a round has filled all weights."""
        self._hooks.finalise()
        self._weights.filled()

    def set_version(self, version: int, deadline_s: float) -> None:
        """Set the version of later tokens; see `EngineHooks.set_version`."""
        self._hooks.set_version(version, deadline_s)
