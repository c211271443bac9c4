"""Relay of the backend `p2p`: engines pass verified bytes on to other engines.

`transfer/relay.py` moves the chunks. This file connects it to the contract of a backend:

- binding: `EngineCopies`, the engine ranks that get the bytes of another engine rank
- rounds: `RelayDelivery`
- ranks: `RelayingSender` and `RelayingReceiver`, the halves that carry out the commands
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar, final

from windlass.config import P2pBackend, RelayShape, UpdateMode
from windlass.control.backend import LinkCopies, Narrow
from windlass.control.connect_messages import Bound
from windlass.control.delivery import Delivery, Findings, Order, reply_budget_s
from windlass.control.fleet import Group
from windlass.control.links import Link, LinkLedger
from windlass.control.messages import Abort, Command, Result
from windlass.control.relay_messages import ConnectRelay, Relay, RelayWrite, SkipUpstream
from windlass.control.report import Measure
from windlass.errors import ProtocolError
from windlass.net.messages import RoundId
from windlass.planning.order import staggered
from windlass.planning.plan import TransferPlan
from windlass.planning.relay import RelayGroup, children_of, find_replicas, stripes_of
from windlass.transfer.bindings import (
    Carried,
    DestinationBinding,
    GroupOffer,
    RelayAddress,
    Relayed,
    Written,
)
from windlass.transfer.receiver import Receiver
from windlass.transfer.relay import RelayNode, RelaySource
from windlass.transfer.sender import Sender

FENCE_S = 5.0
"""Deadline in seconds of the fence after a relay in which an upstream lost its connection."""

# --- binding ---------------------------------------------------------------------------------


def find_relay_groups(
    trainers: Group, engines: Sequence[Group], backend: P2pBackend
) -> tuple[RelayGroup, ...]:
    """Return the relay groups: disjoint groups of at least two engine ranks, all from different engines.

    All ranks of a group can send, and they store the same boxes at the same places of their parameters. An engine with
    a transport that writes by GPU kernels (`strided_stores`) joins no group. There are no groups if the trainers have a
    transport of this kind, or if `backend.relay` is off.
    """
    if backend.relay is RelayShape.OFF or _stores_by_kernels(trainers):
        return ()
    able = {
        engine.name: engine
        for engine in engines
        if not _stores_by_kernels(engine)
        and all(agent.hello.can_send for agent in engine.agents.values())
    }
    return tuple(
        RelayGroup(members, stripes_of(backend.relay, len(names)), backend.relay_chunk_nbytes)
        for names in find_replicas({name: engine.manifests for name, engine in able.items()})
        for members in zip(*(able[name].workers for name in names), strict=True)
    )


def _stores_by_kernels(group: Group) -> bool:
    """Return whether any rank of a group offers a transport that writes by GPU kernels (`strided_stores`)."""
    offers = (offer for agent in group.agents.values() for offer in agent.hello.offers)
    return any(offer.traits.strided_stores for offer in offers)


@final
class EngineCopies(LinkCopies):
    """Engine ranks of relay groups. The plan is made for the first member of each group."""

    def __init__(self, groups: Sequence[RelayGroup]) -> None:
        self._groups = tuple(groups)
        super().__init__(
            {name: group.members[0] for group in groups for name in group.members[1:]},
            {name: _below(group, name) for group in groups for name in group.members},
        )

    def commands(
        self, links: Iterable[Link], bound: Mapping[str, Bound], narrow: Narrow
    ) -> dict[str, Command]:
        """Return a `ConnectRelay` for each member of a group, and for each source that writes to a group.

        For arguments see `LinkCopies.commands`.
        """
        sent_to: dict[str, set[str]] = {}
        for source, destination in links:
            sent_to.setdefault(source, set()).add(destination)
        found: dict[str, Command] = {}
        for source, destinations in sent_to.items():
            own = tuple(g for g in self._groups if g.members[0] in destinations)
            members = [name for group in own for name in group.members]
            roots = dict.fromkeys(root for group in own for root in group.roots())
            if own:
                found[source] = _connect_relay(source, own, members, roots, bound, narrow)
        for group in self._groups:
            for member in group.members:
                below = self.children[member]
                found[member] = _connect_relay(member, (group,), below, below, bound, narrow)
        return found


def _connect_relay(
    worker: str,
    groups: tuple[RelayGroup, ...],
    to: Iterable[str],
    through: Iterable[str],
    bound: Mapping[str, Bound],
    narrow: Narrow,
) -> ConnectRelay:
    """Return the command with which `worker` (a source or a member) binds its relay groups.

    Args:
        worker: rank that gets the command.
        groups: relay groups of this rank.
        to: ranks to which `worker` writes. The command contains their memory addresses.
        through: ranks with a relay listener. `worker` connects to them, and the command contains the listeners' addresses.
        bound: engine rank -> its answer to `ConnectEngine`.
        narrow: function that gets a rank and a destination's binding, and returns the part of the binding that this
            rank needs; see `LinkAddresses.narrow`.
    """
    bindings = tuple(narrow(worker, bound[name].binding) for name in to)
    addresses = (bound[name].relay for name in through)
    return ConnectRelay(groups, bindings, tuple(a for a in addresses if a is not None))


def _below(group: RelayGroup, member: str) -> tuple[str, ...]:
    """Return the ranks to which a member of a group passes bytes on, in any of the group's stripes."""
    return tuple(dict.fromkeys(c for stripe in children_of(group, member) for c in stripe))


# --- rounds ----------------------------------------------------------------------------------


@final
class RelayDelivery(Delivery):
    """Delivery by trainers and engines: engines write too.

    A round writes by relay at most once, before any rewrite, and only if every member of every group is active. Each
    member reports the incomplete links, and whether bytes may still arrive in its memory. The trainers then write the
    incomplete links directly, which does not count as a rewrite.

    Args:
        children: member -> ranks that it forwards to.
    """

    notices: ClassVar[tuple[type, ...]] = (SkipUpstream,)

    def __init__(self, children: Mapping[str, tuple[str, ...]]) -> None:
        self._children = children
        self._was_tried = self._is_unseen = False
        self._running: set[str] = set()
        self._missed: set[Link] = set()

    def write(
        self,
        missing: Mapping[str, tuple[str, ...]],
        *,
        ledger: LinkLedger,
        active: Collection[str],
        version: int,
        deadline_s: float,
    ) -> list[Order]:
        """Return the commands that write links. The first call writes by relay, and later calls write directly.

        The first call also writes directly if a member of a relay group is not active. For arguments see
        `Delivery.write`.
        """
        was_tried, self._was_tried = self._was_tried, True
        if was_tried or not self._children.keys() <= set(active):
            return super().write(
                missing, ledger=ledger, active=active, version=version, deadline_s=deadline_s
            )
        self._running, self._is_unseen = set(self._children), True
        relay = Relay(version, reply_budget_s(deadline_s))
        return [
            *(Order(worker, relay) for worker in self._children),
            *(
                Order(source, RelayWrite(version, to, deadline_s), destinations=to)
                for source, to in staggered(missing).items()
            ),
        ]

    def answered(self, worker: str, command: Command, result: Result) -> Findings | None:
        """Record that a member has answered `Relay` with `Relayed`, and record the incomplete links from the answer.

        Return None if `result` is not the answer to `Relay`. Otherwise return the measures, the links that the member has
        written, and the ranks that may still get late bytes. Also return commands to members to which `worker` could not
        connect, so that they do not wait for `worker`.
        """
        if not isinstance(command, Relay) or not isinstance(result, Relayed):
            return None
        self._running.discard(worker)
        self._missed |= {(source, worker) for source in result.missing}
        unknown = {
            child: f"{worker} -> {child}: the outcome of a relayed write is unknown"
            for child in result.unknown_to
            if child in self._children
        }
        if result.unknown_from:
            unknown[worker] = (
                f"{worker}: bytes of {', '.join(result.unknown_from)} may still arrive"
            )
        carried: dict[Link, Carried] = {
            (worker, child): sent
            for child, sent in result.passed_on.items()
            if child in self._children[worker]
        }
        return Findings(
            measures={Measure.NBYTES: result.nbytes, Measure.WIRE_S: result.wire_s},
            carried=carried,
            unknown=unknown,
            orders=self._skip(worker, result.unreached),
        )

    def ended(self, worker: str, command: Command) -> None:
        """Record that a member no longer carries out `Relay`, so it passes no bytes on any more."""
        if isinstance(command, Relay):
            self._running.discard(worker)

    def link_failed(self, link: Link) -> tuple[Order, ...]:
        """Return the command that tells the destination of the link not to wait for the source.

        Return () if the destination does not carry out `Relay` any more. The round writes the link again later.
        """
        return self._skip(link[0], (link[1],))

    def left(self, worker: str, *, lost: bool) -> tuple[Order, ...]:
        """Return the commands that tell the ranks below `worker` not to wait for `worker`, which has left the round.

        If `lost` is False, `worker` still counts as running, because it may still write.
        """
        if worker not in self._running:
            return ()
        if lost:
            self._running.discard(worker)
        return self._skip(worker, self._children[worker])

    def _skip(self, upstream: str, children: Iterable[str]) -> tuple[Order, ...]:
        """Return a `SkipUpstream` command for each child that still carries out `Relay`."""
        notice = SkipUpstream(upstream)
        return tuple(
            Order(child, notice, expects_reply=False)
            for child in children
            if child in self._running
        )

    def pop_incomplete(self) -> tuple[bool, frozenset[Link]]:
        """Return whether this is the first call after the relay, and the links that the relay left incomplete.

        Clear the record of these links. The round then writes them directly. The write that follows the first call does
        not count towards `ControlConfig.max_rewrites`; see `Delivery.pop_incomplete`.
        """
        is_unseen, missed = self._is_unseen, frozenset(self._missed)
        self._is_unseen, self._missed = False, set()
        return is_unseen, missed

    def unsettled(self) -> dict[str, tuple[str, ...]]:
        """Return the members that may still write: member -> ranks to which it passes bytes on."""
        return {w: self._children[w] for w in sorted(self._running) if self._children[w]}


# --- ranks -----------------------------------------------------------------------------------


@final
class RelayingSender:
    """Trainer half: the rank's sender, which can also write only the roots of relay groups."""

    def __init__(self, sender: Sender) -> None:
        self._sender, self._source = sender, RelaySource(sender)

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """Bind a plan part, and drop the relay groups of an older binding; see `Sender.connect`."""
        self._source.close()
        return self._sender.connect(plan, bindings)

    def change_links(
        self,
        plan: TransferPlan | None,
        bindings: Sequence[DestinationBinding],
        gone: Collection[str],
    ) -> None:
        """Bind the new links of `plan`, and end the links to the ranks in `gone`; see `Sender.change_links`.

        Raises:
            ProtocolError: relay groups are bound. They must be bound again as a whole, with `connect`.
        """
        if self._source.groups:
            raise ProtocolError(
                "change_links: relay groups must not be bound; bind all of them again with connect"
            )
        self._sender.change_links(plan, bindings, gone)

    def prepare(self, version: int) -> None:
        """Pack all links and compute their digests. For links to relay groups, also compute the digest of each chunk."""
        self._sender.prepare(version)
        self._source.prepare()

    def write(self, version: int, destinations: Sequence[str], deadline_s: float) -> Written:
        """Write the links to `destinations` directly, without a relay; see `Sender.write`."""
        return self._sender.write(version, destinations, deadline_s)

    def carry_out(self, command: Command, round_id: RoundId) -> Result | None:
        """Carry out a command of the relay; raise ProtocolError for another command. See `TakesCommands`."""
        match command:
            case ConnectRelay():
                self._source.connect(command.groups, command.bindings, command.addresses)
            case RelayWrite():
                destinations, deadline_s = command.destinations, command.deadline_s
                return self._source.write(round_id, command.version, destinations, deadline_s)
            case _:
                raise ProtocolError(f"a relay's source cannot carry out {type(command).__name__}")
        return None

    def close(self) -> None:
        """Drop the relay groups. The caller closes the sender that this object wraps. Idempotent."""
        self._source.close()


@final
class RelayingReceiver:
    """Engine half: the rank's receiver, which can also pass its bytes on."""

    def __init__(self, receiver: Receiver, host: str) -> None:
        self._receiver, self._node = receiver, RelayNode(receiver, host)
        self._fence_is_due = False

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """Bind a plan part; see `Receiver.connect`."""
        return self._receiver.connect(plan, mode)

    def listen(self) -> RelayAddress:
        """Return the address at which upstreams (ranks that write to this rank) connect. The first call starts to listen."""
        return self._node.open()

    def carry_out(self, command: Command, round_id: RoundId) -> Result | None:
        """Carry out a command of the relay; raise ProtocolError for another command. See `TakesCommands`."""
        match command:
            case ConnectRelay():
                self._node.connect(command.groups[0], command.bindings, command.addresses)
            case Relay():
                relayed, disconnected = self._node.run(round_id, command.deadline_s)
                self._fence_is_due |= bool(disconnected)
                return relayed
            case SkipUpstream():
                # `interrupt` has already carried out this command.
                pass
            case _:
                raise ProtocolError(f"a relay's member cannot carry out {type(command).__name__}")
        return None

    def interrupt(self, command: Command | None, round_id: RoundId | None) -> None:
        """Act on a command that arrives during `Relay`. For arguments see `Interruptible.interrupt`.

        For `SkipUpstream`, stop waiting for the upstream. For `Abort`, and for a lost connection (`command` is None), end
        the relay.
        """
        match command:
            case SkipUpstream() if round_id is not None:
                self._node.refuse(round_id, command.upstream)
            case Abort() | None:
                self._node.interrupt(round_id)
            case _:
                pass

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Compare the digests of the received bytes; see `ReceiverBackend.verify`.

        If an upstream lost its connection during the relay, call the transport's `fence` first. After the fence, the
        upstream's last bytes have either arrived or will never arrive.

        Raises:
            TransferFailed: the bytes of an upstream may still arrive; see also `Receiver.verify`.
            TransferError: see `Receiver.verify`.
        """
        if self._fence_is_due:
            self._receiver.transport.fence(deadline_s=FENCE_S)
            self._fence_is_due = False
        return self._receiver.verify(version, expected)

    def apply(self) -> None:
        """Make the received bytes live; see `ReceiverBackend.apply`."""
        self._receiver.apply()

    def close(self) -> None:
        """Stop listening. The caller closes the receiver that this object wraps. Idempotent."""
        self._node.close()
