"""Agent of an engine rank: carries out commands of the coordinator by calls of its receiver and its engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, final

import msgspec

from windlass.config import DrivenBackend, P2pBackend, PauseMode, UpdateBackend, UpdateMode
from windlass.control.backend import Interruptible, Listens, backend_of, carry_out
from windlass.control.connect_messages import Bound, ConnectEngine, ConnectTrainer
from windlass.control.engine_state import HoldCause
from windlass.control.messages import (
    SLEEPS,
    Abort,
    Apply,
    BeginDriven,
    Command,
    Done,
    EngineCommand,
    Pause,
    Prepare,
    Publish,
    Result,
    Sleep,
    SourceCommand,
    Verified,
    Verify,
    Write,
)
from windlass.control.trainer_agent import TrainerAgent
from windlass.errors import PeerUnreachable, ProtocolError, RoundAborted
from windlass.net.messages import RoundId
from windlass.planning.plan import TransferPlan
from windlass.transfer.base import ReceiverBackend
from windlass.transfer.kept import KeptTensors
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender

_log = logging.getLogger(__name__)
FENCE_S = 5.0
"""Seconds to wait until late bytes of an ended source can no longer arrive."""
GO_ON_S = 20.0
"""Seconds within which an engine must resume after the connection to the controller is lost."""
MIN_RESUME_S = 0.1
"""Seconds that an engine has to resume even if setting the version has used up the deadline."""


class EngineHooks(Protocol):
    """Calls that the agent makes to one rank of a live engine in the same process.

    The agent calls every method from its own thread, while the engine's loop runs in another thread.
    """

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        """Stop this rank. Return once its kernels neither read weights nor write caches. Idempotent.

        Rank 0 also stops accepting requests, and applies `mode` to running requests.

        Args:
            pause_id: identity of this pause, the same on all ranks of the engine and different for every other pause.
            mode: what happens to running requests.
            deadline_s: seconds within which the rank must stop.

        Raises:
            PeerTimeout: the rank still used its weights after `deadline_s`.
        """
        ...

    def resume(self, deadline_s: float) -> None:
        """Resume generation. Idempotent.

        Raises:
            WindlassError: the engine did not resume, or did not confirm it within `deadline_s`. The engine then gets no
                traffic, and the controller repeats the command.
        """
        ...

    def finalise(self) -> None:
        """Recompute state that the engine derives from its weights, and drop caches computed with the old weights.

        Called after new weights are in place, while the engine is paused.

        Raises:
            WindlassError: the engine could not recompute a value.
        """
        ...

    def set_version(self, version: int, deadline_s: float) -> None:
        """Make the engine stamp `version` on all tokens that it generates from now on.

        Idempotent; called before `resume`.

        Raises:
            WindlassError: the engine did not set the version; the controller repeats the command, as for `resume`.
        """
        ...


class Sleeper(Protocol):
    """Memory of an engine rank that the engine frees while the trainer steps. `EngineHooks.pause` wakes it."""

    @property
    def is_empty(self) -> bool:
        """True if the weights are lost, because the rank sleeps or has slept and no round has filled them since."""
        ...

    @property
    def caches_nbytes(self) -> int:
        """Bytes that the rank must map before it serves, not counting its weights; 0 if they are not known."""
        ...

    def sleep(self, mode: PauseMode, deadline_s: float) -> None:
        """Pause the rank, and free its weights and its caches. Arguments and errors as in `EngineHooks.pause`."""
        ...

    def stays_awake(self) -> AbstractContextManager[None]:
        """Return a context manager. `sleep` waits until the `with` block ends; a block that begins during `sleep` waits too."""
        ...

    def round_ended(self) -> None:
        """Allow the framework to make the rank sleep again, which `EngineHooks.pause` has forbidden. Idempotent."""
        ...


@final
class EngineAgent:
    """`CommandHandler` of an engine rank. It tracks whether the live weights may be of two versions.

    Args:
        receiver: receiver of one-sided writes; other backends fill the same parameters.
        hooks: the engine.
        sender: sends the live weights to engines that join later; None if this rank cannot send.
        host: address at which other ranks can reach this rank, for backends with groups.
        serves_own_weights: whether the engine serves its initial weights before the first version. If the round of the
            first version fails, the engine resumes with its initial weights.
        sleeper: memory of the rank that sleeps; None if the engine keeps its memory. While the weights are lost, the
            engine does not serve.
        used_nbytes: function that returns the bytes in use of this rank's memory; None to report none.
        on_held: function that the agent calls with a cause if the engine stays paused after a round, or after the
            connection to the controller was lost. The agent calls it with None before the engine resumes. If `on_held`
            is None, the agent calls nothing.
        buffered: see `EngineWeights`.
        mixed_weights: see `EngineWeights`.
        num_ranks: number of ranks of the engine.

    Attributes:
        served_version: version that this rank serves; -1 for none.
        lineage: lineage of the run that `served_version` belongs to; empty for none.
        unwritten: names of the tensors that no version has written; empty before the first version.
    """

    def __init__(
        self,
        receiver: Receiver,
        hooks: EngineHooks,
        sender: Sender | None = None,
        *,
        host: str = "127.0.0.1",
        serves_own_weights: bool = False,
        sleeper: Sleeper | None = None,
        used_nbytes: Callable[[], int] | None = None,
        on_held: Callable[[HoldCause | None], None] | None = None,
        buffered: Collection[str] = (),
        mixed_weights: bool = False,
        num_ranks: int = 1,
    ) -> None:
        self._num_ranks = num_ranks
        self._used_nbytes, self._on_held = used_nbytes, on_held
        self._held_for: HoldCause | None = None
        # Whether the loss of the connection caused a hold with the cause EMPTY; `on_welcome` ends such a hold.
        self._is_cut_off = False
        # Whether a round has paused the engine, and the engine has not resumed since.
        self._is_paused = False
        self._serves_own_weights, self._sleeper = serves_own_weights, sleeper
        self._one_sided, self._host = receiver, host
        self._source = None if sender is None else TrainerAgent(sender, host=host)
        self._backend: UpdateBackend = P2pBackend()
        self._receiver: ReceiverBackend = receiver
        self._kept = KeptTensors(receiver.manifest, receiver.live_addresses, buffered)
        # Name of a driven backend -> its half. It keeps its groups between updates.
        self._driven: dict[str, ReceiverBackend] = {}
        # The half that receives the bytes of the current round.
        self._delivery: ReceiverBackend = receiver
        self._hooks = hooks
        self._lock = threading.Lock()
        self._mode = UpdateMode.IN_PLACE
        self.served_version, self.lineage = -1, ""
        self.unwritten: frozenset[str] = frozenset()
        self._is_stamped = True
        self._mixed_weights = mixed_weights
        # Whether the current round may already have changed live weights of this rank, or of another rank of its engine.
        self._open_to_writes = False
        # Whether a source may have ended during a write whose bytes may still arrive.
        self._may_be_written = False
        self._round_id = RoundId(0, 0)
        # Version that `Apply` has made live in this rank, and that the rank has not been told to serve; -1 for none.
        self._applied = -1
        # Rounds of the newest `Pause` and of the newest `Publish`.
        self._paused_in = self._published_in = RoundId(0, 0)
        self._not_resumed = ""

    @property
    def kept(self) -> frozenset[str]:
        """Names of the tensors that this rank keeps, because no trainer has them."""
        return self._kept.names

    @property
    def mixed_weights(self) -> bool:
        """True if live weights may contain bytes of two versions, or if the weights are lost (`Sleeper.is_empty`).

        During a round, this is True as soon as one-sided writes or `apply` may have changed live weights of the engine: if the
        controller disappears at this time, the agent cannot know which bytes have changed.
        """
        return self._mixed_weights or self._open_to_writes or self._is_empty

    @property
    def applied(self) -> int:
        """Version that is live in this rank while the rank waits for the command to serve it; -1 for none."""
        return -1 if self._is_empty else self._applied

    @property
    def reported_unwritten(self) -> frozenset[str]:
        """Value of `unwritten` for the version in `Hello`: the one that this rank serves, or else `applied`."""
        return self.unwritten if self.applied < 0 else self._unwritten_next

    @property
    def _unwritten_next(self) -> frozenset[str]:
        """Value of `unwritten` after the version of this round is published."""
        kept = self._kept.names
        return kept if self.served_version < 0 else self.unwritten & kept

    @property
    def _is_empty(self) -> bool:
        return self._sleeper is not None and self._sleeper.is_empty

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        """Carry out a command; see `CommandHandler.handle`.

        Raises:
            ProtocolError: the command is not for engines.
        """
        if not isinstance(command, EngineCommand):
            raise ProtocolError(f"an engine cannot carry out {type(command).__name__}")
        with self._lock:
            round_id = RoundId(epoch, round_number)
            # If the controller never reported how the previous round ended, `_open_to_writes` is still True, and the
            # weights may contain bytes of two versions.
            self._mixed_weights |= self._open_to_writes and round_id > self._round_id
            self._round_id = round_id
            result = self._carry_out(command)
        # The memory of an engine without a sleeper changes little during a round. The agent measures it after it has resumed, because a call of
        # the driver would lengthen the pause.
        measures = self._sleeper is not None or isinstance(command, Publish)
        if measures and isinstance(result, Done) and self._used_nbytes is not None:
            result = msgspec.structs.replace(result, memory_nbytes=self._used_nbytes())
        return result

    def _carry_out(self, command: EngineCommand) -> Result:
        """Carry out a command and return the answer: call the hooks, the sleeper, or the backend's receiver (`_delivery`).

        The caller holds the agent's lock. Record in `_open_to_writes` whether live weights may now change, and in
        `_not_resumed` why the engine does not generate after the command.

        Raises:
            ProtocolError: the command asks the engine to sleep, and the engine cannot.
            WindlassError: the hooks, the sleeper or the receiver could not carry out the command.
        """
        match command:
            case ConnectEngine():
                return self._connect(command)
            case Pause():
                # The end of this round resumes the engine, so an earlier failure to resume no longer counts.
                self._not_resumed = ""
                self._is_paused, self._paused_in, self._applied = True, self._round_id, -1
                pause_id = f"{self._round_id.epoch}.{self._round_id.round}"
                self._hooks.pause(pause_id, command.mode, command.deadline_s)
                # If the connection is lost now, another rank of this engine may still get `Apply`. This rank must then not
                # serve the old version together with a rank that has the new one.
                self._open_to_writes |= self._mode is UpdateMode.IN_PLACE or self._num_ranks > 1
            case Sleep():
                if self._sleeper is None:
                    raise ProtocolError("this engine cannot sleep")
                self._applied = -1
                self._sleeper.sleep(command.mode, command.deadline_s)
                self._not_resumed = SLEEPS
            case Verify():
                verified = Verified(self._delivery.verify(command.version, command.expected))
                # If the parameters are in another process, the call above has fetched their present values.
                self._kept.verify()
                return verified
            case Apply():
                self._open_to_writes = True
                self._delivery.apply()
                self._hooks.finalise()
                self._applied = command.version
            case Publish():
                self._publish(command.version, command.lineage, command.deadline_s)
            case Abort():
                self._abort(command.deadline_s, mixed_weights=command.mixed_weights)
            case BeginDriven():
                self._applied = -1
                self._choose_driven(command.backend)
                carry_out(self._delivery, command, self._round_id)
            case ConnectTrainer() | Prepare() | Write():
                return self._send_own(command)
            case _:
                result = carry_out(self._delivery, command, self._round_id)
                if result is not None:
                    return result
        return Done(not_resumed=self._not_resumed)

    def _connect(self, command: ConnectEngine) -> Bound:
        """Wait for late bytes of earlier writes, bind the rank's part of a plan with the command's backend, and return the addresses.

        Store the mode of the update and the digests of the tensors that the engine keeps. If the backend differs from the
        present backend, close the present receiver first.
        """
        self._mode = command.mode
        self._fence()
        self._kept.bind(command.kept, are_whole=not self.mixed_weights)
        self._choose(command.backend)
        binding = self._receiver.connect(TransferPlan.decode(command.plan), command.mode)
        if not command.relays or not isinstance(self._receiver, Listens):
            return Bound(command.plan_digest, binding)
        return Bound(command.plan_digest, binding, self._receiver.listen())

    def on_command(self, command: Command, epoch: int, round_number: int) -> None:
        """Let the backend end the running command early, if the new command demands it.

        The channel calls this when it receives a command, while an earlier command may still run.
        """
        if isinstance(self._receiver, Interruptible):
            self._receiver.interrupt(command, RoundId(epoch, round_number))

    def close(self) -> None:
        """Close this rank's receivers of all backends, and its sender for catch-ups.

        The receivers leave their collective groups and free their GPU memory. Idempotent.
        """
        for half in self._driven.values():
            half.close()
        self._receiver.close()
        self._one_sided.close()
        if self._source is not None:
            self._source.close()

    def _send_own(self, command: SourceCommand) -> Result:
        """Carry out a command for the source of a catch-up: this rank sends its own weights to another engine.

        The caller holds the agent's lock, so no other command changes the weights while this command runs.

        Raises:
            ProtocolError: this rank cannot send.
            RoundAborted: this rank does not serve the version of the command, or may have mixed weights.
        """
        if self._source is None:
            raise ProtocolError(f"this engine cannot carry out {type(command).__name__}")
        # A sender that reads freed memory would send zeros, and their digests would agree.
        with nullcontext() if self._sleeper is None else self._sleeper.stays_awake():
            if not isinstance(command, ConnectTrainer):
                self._check_serves(command.version)
            result = self._source.handle(
                command, epoch=self._round_id.epoch, round_number=self._round_id.round
            )
        return Done(self._not_resumed) if isinstance(result, Done) else result

    def _check_serves(self, version: int) -> None:
        if self.mixed_weights:
            raise RoundAborted(
                f"version {version} cannot be sent: the weights of this engine may be of two versions"
            )
        if self.served_version != version:
            raise RoundAborted(
                f"version must be {self.served_version}, which this engine serves, got {version}"
            )

    def on_disconnect(self) -> None:
        """Resume the engine after the connection to the controller was lost, unless the engine's weights are mixed.

        Raises:
            PeerUnreachable: the engine did not resume. The caller must call this again later.
        """
        if isinstance(self._receiver, Interruptible):
            self._receiver.interrupt(None, None)
        with self._lock:
            self._may_be_written = True
            # The controller will not report how this round ended. If the round may have changed live weights, these
            # weights also count as mixed in later rounds.
            self._mixed_weights |= self._open_to_writes
            was_held = self._held_for is not None
            self._end_round(GO_ON_S)
            self._is_cut_off |= self._held_for is HoldCause.EMPTY and not was_held
            if self._not_resumed:
                raise PeerUnreachable(f"the engine did not resume: {self._not_resumed}")

    def on_welcome(self) -> None:
        """Record that a controller is connected again.

        If the weights sleep or are lost, and the engine is held only since the connection was lost, call `on_held` with
        None: the controller's next round fills the weights.
        """
        with self._lock:
            if self._is_cut_off and self._held_for is HoldCause.EMPTY:
                self._note_held(None)
            self._is_cut_off = False

    def _choose(self, backend: UpdateBackend) -> None:
        """Let `backend` receive the bytes of the next rounds.

        If `backend` is not the present backend, close the present backend's receiver first.

        Raises:
            ProtocolError: see `_choose_driven`.
            ConfigError: see `backend_of`.
        """
        self._require_reached(backend)
        if backend != self._backend:
            self._receiver.close()
            self._one_sided.close()
            self._receiver = backend_of(backend).receiver(self._one_sided, self._host)
            self._backend = backend
        self._delivery = self._receiver

    def _choose_driven(self, backend: DrivenBackend) -> None:
        """Let the driven backend `backend` receive the bytes of this round.

        Raises:
            ProtocolError: the engine's process runs without Windlass, so only `p2p` can reach it.
            ConfigError: see `backend_of`.
        """
        self._require_reached(backend)
        # The one-sided receiver stays open, because late writes may still arrive in its memory.
        if self._receiver is not self._one_sided:
            self._receiver.close()
            self._receiver = backend_of(self._backend).receiver(self._one_sided, self._host)
        if backend.name not in self._driven:
            half = backend_of(backend).receiver(self._one_sided, self._host)
            self._driven[backend.name] = half
        # A driven round writes all tensors.
        self._kept.bind(())
        self._delivery = self._driven[backend.name]
        # A driven round changes no live memory before `Apply`.
        self._mode = UpdateMode.STAGED

    def _require_reached(self, backend: UpdateBackend | DrivenBackend) -> None:
        if self._one_sided.remote is not None and not isinstance(backend, P2pBackend):
            raise ProtocolError(
                f"backend must be p2p for an engine whose process runs without Windlass, got {backend.name}"
            )

    def _publish(self, version: int, lineage: str, deadline_s: float) -> None:
        """Record that all weights of this rank are of `version`. Then set the version of the engine, and resume it.

        If the rank serves this version already, only resume the engine.

        Raises:
            RoundAborted: the round of this command has not paused the rank, and the rank neither serves `version` nor has
                applied it before.
        """
        serves = (self.served_version, self.lineage) == (version, lineage)
        if self._round_id == self._paused_in or self.applied == version:
            self.unwritten, self._applied = self._unwritten_next, -1
            self.lineage = lineage
            self.served_version, self._is_stamped = version, False
            self._mixed_weights = self._open_to_writes = False
        elif not serves or self.mixed_weights:
            raise RoundAborted(
                f"version must be {self.applied}, which this rank has applied, got {version}"
            )
        self._published_in = self._round_id
        self._end_round(deadline_s)

    def _fence(self) -> None:
        """If an earlier round may have left a write unfinished, wait until its bytes can no longer arrive.

        Called before this rank binds again. Running sources have ended their writes by then, so only bytes of a dead
        source can be late.
        """
        if self._may_be_written:
            self._one_sided.transport.fence(deadline_s=FENCE_S)
        self._may_be_written = False

    def _abort(self, deadline_s: float, *, mixed_weights: bool) -> None:
        """End a round that did not publish. Resume the engine with its old weights, unless its weights are mixed.

        Late bytes may still arrive, so the next binding first waits for them (`_fence`).
        """
        self._may_be_written = True
        # If this rank serves the version of the round already, only other ranks of the engine may lack the version.
        self._mixed_weights |= mixed_weights and self._round_id != self._published_in
        self._open_to_writes = False
        self._end_round(deadline_s)

    def _end_round(self, deadline_s: float) -> None:
        """Resume the engine (`_go_on_if_whole`). Then allow the framework to make the engine sleep again."""
        try:
            self._go_on_if_whole(deadline_s)
        finally:
            if self._sleeper is not None:
                self._sleeper.round_ended()

    def _note_held(self, cause: HoldCause | None) -> None:
        """Call `on_held` with `cause`, unless the previous call of this method had the same cause.

        Call it for EMPTY every time. EMPTY stands for weights that sleep and for lost weights, so the state may have
        changed although the cause has not.
        """
        is_new = cause is not self._held_for or cause is HoldCause.EMPTY
        if self._on_held is not None and is_new:
            self._on_held(cause)
        self._held_for = cause

    def _hold_cause(self) -> HoldCause | None:
        """Return the reason why the engine must stay paused; None if it may resume."""
        if self._mixed_weights:
            return HoldCause.MIXED
        if self._is_empty:
            return HoldCause.EMPTY
        if self.served_version < 0 and not self._serves_own_weights:
            return HoldCause.NO_VERSION
        return None

    def _go_on_if_whole(self, deadline_s: float) -> None:
        """Resume the engine within `deadline_s`, unless its weights are mixed or it has no weights to serve.

        If the engine does not resume, raise nothing: the next `Done` reports the reason (`Done.not_resumed`), and the
        controller repeats the command. If the connection was lost, the channel tries again when the rank has connected.
        """
        self._not_resumed = SLEEPS if self._is_empty else ""
        cause = self._hold_cause()
        # If no round has paused the engine yet, its requests do not wait, so it is not held.
        is_running = cause is HoldCause.NO_VERSION and not self._is_paused
        self._note_held(None if is_running else cause)
        if cause is not None:
            return
        end = time.monotonic() + deadline_s
        try:
            if not self._is_stamped:
                self._hooks.set_version(self.served_version, deadline_s)
                self._is_stamped = True
            self._hooks.resume(max(end - time.monotonic(), MIN_RESUME_S))
            self._is_paused = False
        # The engine's own code may raise any exception.
        except Exception as error:  # noqa: BLE001
            _log.exception("the engine did not resume")
            self._not_resumed = f"{type(error).__name__}: {error}"
            self._note_held(HoldCause.NOT_RESUMED)
