"""Agent of a trainer rank: carries out commands of the coordinator by calls of its sender."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import final

import msgspec

from windlass.control.backend import carry_out
from windlass.control.connect_messages import ChangeLinks, ConnectTrainer
from windlass.control.held_weights import HeldWeights
from windlass.control.messages import (
    Abort,
    Command,
    Done,
    Prepare,
    Release,
    Result,
    TrainerCommand,
    Write,
)
from windlass.control.trainer_binding import TrainerBinding
from windlass.errors import ProtocolError
from windlass.net.messages import RoundId
from windlass.transfer.bindings import Written
from windlass.transfer.sender import Sender


@final
class TrainerAgent:
    """`CommandHandler` of a trainer rank.

    Args:
        sender: sender of one-sided writes; other backends read the same parameters.
        host: address at which engines can reach this rank, for backends that listen.
        read, watch, changed, release: see `TrainerWeights`.
        used_nbytes: see `EngineAgent`.

    Attributes:
        held: weights of the version that the trainer publishes now.
    """

    def __init__(
        self,
        sender: Sender,
        *,
        host: str = "127.0.0.1",
        read: Callable[[Collection[int]], None] | None = None,
        watch: Callable[[], None] | None = None,
        changed: Callable[[], str] = str,
        release: Callable[[], None] | None = None,
        used_nbytes: Callable[[], int] | None = None,
    ) -> None:
        self._used_nbytes = used_nbytes
        self._release = release
        self._one_sided, self.held = sender, HeldWeights(sender, watch, changed)
        self._binding = TrainerBinding(sender, self.held, host=host, read=read)

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        """Carry out a command; see `CommandHandler.handle`.

        Raises:
            ProtocolError: the command is not for trainers.
            RoundAborted: the weights cannot be sent, for example because they have changed; see `HeldWeights`.
            WindlassError: the backend's sender failed.
        """
        if not isinstance(command, TrainerCommand):
            raise ProtocolError(f"a trainer cannot carry out {type(command).__name__}")
        result = self._carry_out(command, epoch, round_number)
        if isinstance(result, Done | Written) and self._used_nbytes is not None:
            result = msgspec.structs.replace(result, memory_nbytes=self._used_nbytes())
        return result

    def _carry_out(self, command: TrainerCommand, epoch: int, round_number: int) -> Result:
        match command:
            case ConnectTrainer() | ChangeLinks():
                return self._binding.bind(command, epoch)
            case Prepare():
                self.held.note_changes()
                self.held.check_version(command.version)
                with self._one_sided.reading(), self._one_sided.parameters.once():
                    # Examine first: the trainer may change the weights as soon as `prepare` has copied them to a replica.
                    prepared = self.held.examine(command)
                    self._binding.sender.prepare(command.version)
                replica = self._one_sided.replica
                if replica is not None and not replica.is_taken(command.version):
                    # `prepare` has just copied the weights. Check that the trainer did not change them during this copy.
                    self.held.note_changes()
                    self.held.refuse_changed()
                return prepared
            case Write():
                write = self._binding.sender.write
                sent = write(command.version, command.destinations, command.deadline_s)
                return self.held.checked(sent)
            case Release() if self._release is not None:
                self._release()
            case Abort():
                # There is nothing to undo: in this rank, a round changes only the sender's packed bytes.
                pass
            case _:
                result = carry_out(self._binding.sender, command, RoundId(epoch, round_number))
                if isinstance(result, Written):
                    return self.held.checked(result)
                return result or Done()
        return Done()

    def close(self) -> None:
        """Free the memory for the comparison of replicated weights, and close the backend's sender. Idempotent.

        The argument `sender` of the class stays open; the caller must close it.
        """
        self.held.close()
        self._binding.close()
