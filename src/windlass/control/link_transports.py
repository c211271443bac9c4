"""Chooses a transport for each link of a binding, and checks and selects the addresses that the source writes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import msgspec

from windlass.control.links import Link
from windlass.control.session import AgentSession
from windlass.errors import ConfigError
from windlass.transfer.bindings import DestinationBinding
from windlass.transports.base import TransportOffer
from windlass.transports.choice import LinkChoice, choose_transport, unreachable_reason


class LinkAddresses:
    """Addresses of a new binding, for backends that do not use Windlass's transports. It chooses no transports.

    Args:
        sessions: worker -> session, for the ranks that were connected when the binding began.

    Attributes:
        choices: link -> its transport and the reason for the choice; empty without transports.
        strided: links whose source can write strided elements directly, without staging memory.
    """

    def __init__(self, sessions: Mapping[str, AgentSession]) -> None:
        self._sessions = sessions
        self.choices: dict[Link, LinkChoice] = {}
        self.strided: set[Link] = set()

    def choose(self, links: Iterable[Link]) -> dict[str, str]:  # noqa: ARG002
        """Choose a transport for each link. This base class chooses no transport.

        A subclass records each link's transport in `choices`. If the transport has strided stores, the subclass also adds
        the link to `strided`.

        Returns:
            Destination -> reason, for destinations that a source cannot reach over any transport.
        """
        return {}

    def find_refused(
        self, bindings: Mapping[str, DestinationBinding], sources: Iterable[str]
    ) -> dict[str, str]:
        """Return the engine ranks whose addresses the sources must not use: rank -> reason.

        These are ranks that have bound a loopback address although a source is on another host.

        Args:
            bindings: engine rank -> addresses that it has bound.
            sources: names of the ranks that write to these engine ranks.
        """
        hosts = {self._sessions[worker].host for worker in sources if worker in self._sessions}
        found = {}
        for worker, binding in bindings.items():
            session = self._sessions.get(worker)
            reason = unreachable_reason(binding.endpoint)
            if reason and session is not None and hosts - {session.host}:
                found[worker] = f"{worker}: {reason}"
        return found

    def narrow(self, source: str, binding: DestinationBinding) -> DestinationBinding:  # noqa: ARG002
        """Return the part of a destination's binding that `source` needs; without transports, the whole binding."""
        return binding


@final
class LinkTransports(LinkAddresses):
    """Addresses of a new binding, and a transport for each link that both of its ranks have offered in `Hello`."""

    def choose(self, links: Iterable[Link]) -> dict[str, str]:
        """Choose for each link the fastest transport that both ranks have in common; see `LinkAddresses.choose`.

        Two ranks count as ranks of one host if their connections to the controller come from the same address and both
        report the same `Hello.host`.
        """
        wrong = {}
        for source, destination in sorted(links):
            here, there = self._sessions.get(source), self._sessions.get(destination)
            if here is None or there is None:
                # A rank of the link has lost its connection, so the binding fails later.
                continue
            same_address = here.host == there.host
            offers = here.agent.hello.offers
            try:
                choice = choose_transport(
                    offers,
                    there.agent.hello.offers,
                    same_host=same_address and here.agent.hello.host == there.agent.hello.host,
                    same_address=same_address,
                )
            except ConfigError as error:
                wrong[destination] = f"{source} cannot write to {destination}: {error}"
                continue
            self.choices[source, destination] = choice
            if any(o.traits.strided_stores for o in offers if o.transport == choice.transport):
                self.strided.add((source, destination))
        return wrong

    def find_refused(
        self,
        bindings: Mapping[str, DestinationBinding],
        sources: Iterable[str],  # noqa: ARG002
    ) -> dict[str, str]:
        """Return rank -> reason for each engine rank that has bound memory at an endpoint outside its offers."""
        return {
            worker: f"{worker}: must bind memory only at endpoints that this rank has offered"
            for worker, binding in bindings.items()
            if not self.owns(worker, binding)
        }

    def owns(self, worker: str, binding: DestinationBinding) -> bool:
        """Return whether a binding names the rank `worker`, and has only endpoints that this rank offered in `Hello`."""
        owners = {binding.endpoint, *(region.endpoint for region in binding.regions)}
        return binding.worker == worker and owners <= {o.endpoint for o in self._offers(worker)}

    def narrow(self, source: str, binding: DestinationBinding) -> DestinationBinding:
        """Return a destination's binding with only the endpoint and the regions of the transport that `source` uses.

        Return the whole binding if `source` has no link to the destination.
        """
        choice = self.choices.get((source, binding.worker))
        for offer in self._offers(binding.worker):
            if choice is not None and offer.transport == choice.transport:
                regions = tuple(r for r in binding.regions if r.endpoint == offer.endpoint)
                return msgspec.structs.replace(binding, endpoint=offer.endpoint, regions=regions)
        return binding

    def _offers(self, worker: str) -> tuple[TransportOffer, ...]:
        session = self._sessions.get(worker)
        return () if session is None else session.agent.hello.offers
