"""A plan that every rank has bound to its memory: the ranks that take part, and their links. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from windlass.control.connect_messages import Identity
from windlass.control.links import Link
from windlass.control.report import BindCost
from windlass.planning.replicated import Replicated
from windlass.transfer.bindings import Carried
from windlass.transports.choice import LinkChoice


@dataclass(frozen=True, kw_only=True)
class Binding:
    """A plan that every rank has bound to its memory. It has no links in a driven round (see `driven`).

    Attributes:
        signature: processes for which the binding is valid; if a process is replaced, a new binding is needed.
        engines: engine -> its worker names.
        trainers: worker names of the trainer ranks.
        links: (source, destination) -> bytes that the source sends by the plan.
        transports: (source, destination) -> transport of the link, with the reason for the choice; empty unless bytes
            travel by one-sided writes.
        relay: member of a relay group -> ranks that it forwards to.
        replicated: boxes that several trainer ranks hold; None if the sources are engines.
        bound_in: trainer -> epoch of the last command that bound it.
        ended: links that trainers still have but that the binding no longer contains.
        unused: trainer tensors that no engine has had since these trainers connected.
        stays: engine -> names of its tensors that no source writes, so that the engine keeps their values. Engines
            without such tensors are left out.
        costs: rank -> cost of its binding, for the ranks that were asked to bind.
    """

    signature: frozenset[Identity]
    engines: Mapping[str, tuple[str, ...]]
    trainers: tuple[str, ...] = ()
    links: Mapping[Link, int] = field(default_factory=dict)
    transports: Mapping[Link, LinkChoice] = field(default_factory=dict)
    relay: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    replicated: Replicated | None = None
    bound_in: Mapping[str, int] = field(default_factory=dict)
    ended: frozenset[Link] = frozenset()
    unused: frozenset[str] = frozenset()
    stays: Mapping[str, frozenset[str]] = field(default_factory=dict)
    costs: Mapping[str, BindCost] = field(default_factory=dict)

    @property
    def kept(self) -> frozenset[str]:
        """Names of the tensors that at least one engine keeps."""
        return frozenset[str]().union(*self.stays.values())

    @property
    def sent_nbytes(self) -> int:
        """Largest number of bytes that one trainer rank sends."""
        return max(self.sent_by.values(), default=0)

    @cached_property
    def sent_by(self) -> Counter[str]:
        """Number of bytes that each trainer rank sends."""
        sent = Counter[str]()
        for (source, _), nbytes in self.links.items():
            sent[source] += nbytes
        return sent

    @cached_property
    def transport_of(self) -> dict[Link, str]:
        """Transport name of each link."""
        return {link: choice.transport for link, choice in self.transports.items()}

    def describe_links(self, carried: Mapping[Link, Carried]) -> list[dict[str, str | float]]:
        """Return the links as `/v1/status` shows them, the slowest first.

        Args:
            carried: link -> bytes and seconds in the last update that used the link.
        """
        unused = Carried(0, 0.0)
        found = [
            (carried.get(link, unused), link, choice) for link, choice in self.transports.items()
        ]
        return [
            {
                "source": link[0],
                "destination": link[1],
                "transport": choice.transport,
                "nbytes": sent.nbytes or self.links.get(link, 0),
                "wire_s": sent.wire_s,
                "gbps": sent.gbps,
                "ceiling_gbps": choice.ceiling_bytes_per_s / 1e9,
                "reason": choice.reason,
            }
            for sent, link, choice in sorted(found, key=lambda each: -each[0].wire_s)
        ]

    def identities_of(self, workers: Iterable[str]) -> frozenset[Identity]:
        """Return (worker name, incarnation) for the process of each of these ranks."""
        known = self._incarnations
        return frozenset((name, known[name]) for name in workers if name in known)

    @cached_property
    def _incarnations(self) -> dict[str, str]:
        return dict(self.signature)

    def without(self, engines: Collection[str]) -> Binding:
        """Return the binding without these engines. Their links move to `ended`, because no source has dropped them yet."""
        if not engines:
            return self
        workers = {w for name in engines for w in self.engines.get(name, ())}
        ended = frozenset(link for link in self.links if link[1] in workers)
        return replace(
            self,
            signature=frozenset(who for who in self.signature if who[0] not in workers),
            engines={name: own for name, own in self.engines.items() if name not in engines},
            links={link: n for link, n in self.links.items() if link not in ended},
            transports={link: c for link, c in self.transports.items() if link not in ended},
            stays={name: own for name, own in self.stays.items() if name not in engines},
            ended=self.ended | ended,
        )

    def part_for(
        self, trainers: frozenset[Identity], engines: Mapping[str, frozenset[Identity]]
    ) -> Binding | None:
        """Return the part of the binding that is still valid: the engines whose processes have not changed.

        Args:
            trainers: processes of the trainers.
            engines: engine -> its processes.

        Returns:
            The part; None if it is empty, or if the trainer processes have changed.
        """
        if self.identities_of(self.trainers) != trainers:
            return None
        same = {
            name
            for name, own in self.engines.items()
            if self.identities_of(own) == engines.get(name)
        }
        kept = self.without(self.engines.keys() - same)
        return kept if kept.engines else None

    def joined(self, new: Binding) -> Binding:
        """Return this binding plus `new`. In `new`, the same trainers have bound engines that this binding lacks.

        `ended` is empty, because the trainers dropped the ended links when they bound `new`. `unused` and `costs` come
        from `new`.
        """
        return replace(
            self,
            signature=self.signature | new.signature,
            engines={**self.engines, **new.engines},
            links={**self.links, **new.links},
            transports={**self.transports, **new.transports},
            bound_in={**self.bound_in, **new.bound_in},
            ended=frozenset(),
            unused=new.unused,
            stays={**self.stays, **new.stays},
            costs=new.costs,
        )
