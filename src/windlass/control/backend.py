"""Contract of an update backend: the two halves that move bytes, and the steps of the control plane that depend on them.

A backend is a subclass of `Backend`. Its methods have the behaviour of one-sided writes, and a subclass overrides the
methods that differ. `backend_of` returns the backend of a setting. No other code depends on the kind of a backend.
A backend whose updates trainer ranks drive themselves also has `routes.HasRoutes`, and uses `driven.begin`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from windlass.config import DrivenBackend, PluginBackend, UpdateBackend, find_backend
from windlass.control.binding import Binding
from windlass.control.connect_messages import Bound
from windlass.control.delivery import Delivery
from windlass.control.donors import find_donor
from windlass.control.fleet import Group
from windlass.control.link_transports import LinkAddresses, LinkTransports
from windlass.control.links import Link
from windlass.control.messages import Command, Result
from windlass.control.report import UpdateReport
from windlass.control.session import AgentSession
from windlass.errors import ConfigError, PlanError, ProtocolError
from windlass.layout.manifest import ShardManifest
from windlass.net.messages import RoundId
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import Planner
from windlass.transfer.base import RankReceiver, RankSender, ReceiverBackend, SenderBackend
from windlass.transfer.bindings import DestinationBinding, RelayAddress

Narrow = Callable[[str, DestinationBinding], DestinationBinding]
"""Function of a source and a destination's binding. It returns the part that the source needs (`LinkAddresses.narrow`)."""


class LinkCopies:
    """Engine ranks that get the same bytes as another rank, over links between engines. By default, both maps are empty.

    Attributes:
        of: rank -> the rank that the plan fills instead; both get the same bytes.
        children: rank -> ranks to which it passes its bytes on.
    """

    def __init__(
        self,
        of: Mapping[str, str] | None = None,
        children: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.of, self.children = of or {}, children or {}

    def commands(
        self,
        links: Iterable[Link],  # noqa: ARG002
        bound: Mapping[str, Bound],  # noqa: ARG002
        narrow: Narrow,  # noqa: ARG002
    ) -> dict[str, Command]:
        """Return the commands that bind the links between engines: rank -> command. By default, return no commands.

        The ranks get the commands after all sources and engines have bound the plan.

        Args:
            links: links of the plan.
            bound: engine rank -> its answer to `ConnectEngine`.
            narrow: see `LinkAddresses.narrow`.
        """
        return {}


class Backend:
    """Way of moving the bytes of an update, with the options of one configuration.

    Trainer ranks call `sender`, engine ranks call `receiver`, and the controller calls the other methods. A half with
    its own commands also has the method of `TakesCommands`.
    """

    # --- halves: in the ranks ----------------------------------------------------------------

    def sender(self, sender: RankSender, host: str) -> SenderBackend:  # noqa: ARG002
        """Return the half of this backend for a trainer rank: an object that sends the rank's parameters.

        Args:
            sender: the rank's sender of one-sided writes, with the layout and memory of the rank's parameters.
            host: address at which the engines can connect to this rank.

        Raises:
            ConfigError: the backend is not usable here.
        """
        return sender

    def receiver(self, receiver: RankReceiver, host: str) -> ReceiverBackend:  # noqa: ARG002
        """Return the half of this backend for an engine rank: an object that fills the rank's live parameters.

        Args:
            receiver: the rank's receiver of one-sided writes, with the layout and addresses of the rank's live parameters.
            host: address at which other ranks can connect to this rank.

        Raises:
            ConfigError: the backend is not usable here.
        """
        return receiver

    def refuse_replica(self) -> str:
        """Return why trainer ranks cannot send from a replica (a copy of their weights) with this backend; empty if they can."""
        return ""

    # --- binding: in the controller ----------------------------------------------------------

    def kept_part(
        self,
        held: Binding,  # noqa: ARG002
        trainers: Group,  # noqa: ARG002
        engines: Sequence[Group],  # noqa: ARG002
    ) -> Binding | None:
        """Return the part of `held` that is still valid after the fleet has changed.

        The ranks of this part get no command to bind. Return None to bind all ranks again.

        Args:
            held: binding from before the change.
            trainers: trainer ranks of the new binding.
            engines: engines of the new binding.
        """
        return None

    def addresses(self, sessions: Mapping[str, AgentSession]) -> LinkAddresses:
        """Return the object that chooses how sources reach destinations in a new binding.

        By default, it chooses a transport for each link. `sessions` has the session of each connected rank.
        """
        return LinkTransports(sessions)

    def parts(self, plan: TransferPlan, *, sending: bool) -> dict[str, TransferPlan]:
        """Return the part of a plan for each source (`sending`) or for each destination; see `TransferPlan.parts`."""
        return plan.parts(sending=sending, all_names=False)

    def copies(self, trainers: Group, engines: Sequence[Group]) -> LinkCopies:  # noqa: ARG002
        """Return which engine ranks get their bytes from other engine ranks instead of the trainers; by default none."""
        return LinkCopies()

    # --- rounds: in the controller -----------------------------------------------------------

    def delivery(self, binding: Binding) -> Delivery:  # noqa: ARG002
        """Return a new delivery for the next round, which uses `binding`."""
        return Delivery()

    def is_spent(self, report: UpdateReport) -> bool:  # noqa: ARG002
        """Return whether the ranks must be bound again after a round that ended with `report`."""
        return False

    def find_donor(
        self,
        newcomer: Group,
        candidates: Sequence[Group],
        trainers: Sequence[ShardManifest],
        planner: Planner,
    ) -> tuple[Group, TransferPlan]:
        """Choose the engine that sends its weights to `newcomer`, an engine that is behind; see `donors.find_donor`.

        Returns:
            The engine and the plan of the copy.

        Raises:
            PlanError: no candidate can send the right bytes.
        """
        return find_donor(newcomer, candidates, trainers, planner)


class OwnPathBackend(Backend):
    """Backend with its own data path instead of transports. A subclass defines `sender` and `receiver`."""

    def refuse_replica(self) -> str:
        """Return the reason why senders of this backend use no replica: they read the parameters themselves."""
        return "sends from the parameters themselves and cannot use a replica; use p2p"

    def addresses(self, sessions: Mapping[str, AgentSession]) -> LinkAddresses:
        """Return addresses without transports, because the backend moves the bytes itself."""
        return LinkAddresses(sessions)

    def find_donor(
        self,
        newcomer: Group,  # noqa: ARG002
        candidates: Sequence[Group],  # noqa: ARG002
        trainers: Sequence[ShardManifest],  # noqa: ARG002
        planner: Planner,  # noqa: ARG002
    ) -> tuple[Group, TransferPlan]:
        """Raise an error: engine ranks of this backend cannot send, so an engine that is behind waits for the next version.

        Raises:
            PlanError: always.
        """
        raise PlanError("engines of this backend cannot send their weights")


def backend_of(config: UpdateBackend | DrivenBackend) -> Backend:
    """Return the backend that a setting names.

    Raises:
        ConfigError: the backend is not installed in this process, or its options are wrong.
    """
    options = config.options if isinstance(config, PluginBackend) else config
    found = find_backend(config.name).make(options)
    if not isinstance(found, Backend):
        raise ConfigError(
            f"backend {config.name!r} must make a {Backend.__qualname__}, got {found!r}"
        )
    return found


# --- halves with commands --------------------------------------------------------------------


@runtime_checkable
class TakesCommands(Protocol):
    """Half of a backend with its own commands."""

    def carry_out(self, command: Command, round_id: RoundId) -> Result | None:
        """Carry out a command of the backend. Return the answer, or None to answer with `Done`.

        Raises:
            ProtocolError: the half does not know the command.
        """
        ...


@runtime_checkable
class ChangesLinks(Protocol):
    """Trainer half that can bind some links and keep the others. Without it, `Backend.kept_part` must return None."""

    def change_links(
        self,
        plan: TransferPlan | None,
        bindings: Sequence[DestinationBinding],
        gone: Collection[str],
    ) -> None:
        """Bind the links of `plan` to the addresses in `bindings`, and end the links to the ranks in `gone`.

        All other links stay bound. For errors see `Sender.change_links`.
        """
        ...


@runtime_checkable
class Interruptible(Protocol):
    """Half of a backend that can end a running command early."""

    def interrupt(self, command: Command | None, round_id: RoundId | None) -> None:
        """End the command that runs now, if the new command demands it or the connection has ended.

        The thread of the connection calls this method.

        Args:
            command: command that has just arrived; None if the connection has ended.
            round_id: round of this command; None if the connection has ended.
        """
        ...


@runtime_checkable
class Listens(Protocol):
    """Engine half that other ranks connect to during a round."""

    def listen(self) -> RelayAddress:
        """Return the address at which this rank listens for other ranks. The first call may start to listen."""
        ...


def carry_out(half: object, command: Command, round_id: RoundId) -> Result | None:
    """Make a backend's sender (on a trainer rank) or receiver (on an engine rank) carry out a command.

    Return the answer, or None to answer with `Done`.

    Raises:
        ProtocolError: the backend has no such command.
    """
    if not isinstance(half, TakesCommands):
        raise ProtocolError(f"{type(half).__name__} cannot carry out {type(command).__name__}")
    return half.carry_out(command, round_id)
