"""Choose a transport for each link of a binding, and give each source the addresses for this transport."""

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
    """Check of the addresses that destinations bind, for backends that send bytes without Windlass's transports.

    Args:
        sessions: sessions of the ranks that were connected when the binding began. A rank without a session has lost
            its connection.

    Attributes:
        choices: link -> its transport, with the reason for the choice.
        strided: links over which the source can write strided elements.
    """

    def __init__(self, sessions: Mapping[str, AgentSession]) -> None:
        self._sessions = sessions
        self.choices: dict[Link, LinkChoice] = {}
        self.strided: set[Link] = set()

    def choose(self, links: Iterable[Link]) -> dict[str, str]:  # noqa: ARG002
        """Choose a transport for each link. Return destination -> reason, for destinations that a source cannot reach."""
        return {}

    def find_refused(
        self, bindings: Mapping[str, DestinationBinding], sources: Iterable[str]
    ) -> dict[str, str]:
        """Return engine ranks with a loopback endpoint, if a source is on another host: worker -> reason."""
        hosts = {self._sessions[worker].host for worker in sources if worker in self._sessions}
        found = {}
        for worker, binding in bindings.items():
            session = self._sessions.get(worker)
            reason = unreachable_reason(binding.endpoint)
            if reason and session is not None and hosts - {session.host}:
                found[worker] = f"{worker}: {reason}"
        return found

    def narrow(self, source: str, binding: DestinationBinding) -> DestinationBinding:  # noqa: ARG002
        """Return the part of a destination's binding that `source` uses; without transports, the whole binding."""
        return binding


@final
class LinkTransports(LinkAddresses):
    """Transports of the links, chosen from those that both ranks of a link offer in `Hello`."""

    def choose(self, links: Iterable[Link]) -> dict[str, str]:
        """Choose for each link the fastest transport that source and destination have.

        Two ranks are on one host if their connections come from one address and their processes report the same
        host identity.

        Returns:
            Destination -> reason, for destinations that have no transport in common with a source.
        """
        wrong = {}
        for source, destination in sorted(links):
            here, there = self._sessions.get(source), self._sessions.get(destination)
            if here is None or there is None:
                # The rank has lost its connection since the plan was made.
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
                wrong[destination] = f"{source} cannot write {destination}: {error}"
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
        """Return engine ranks whose binding names an endpoint that is not their own: worker -> reason."""
        return {
            worker: f"{worker}: must bind memory of its own endpoints and no other rank's"
            for worker, binding in bindings.items()
            if not self.owns(worker, binding)
        }

    def owns(self, worker: str, binding: DestinationBinding) -> bool:
        """Return whether a binding is of `worker` and names only endpoints that this rank offered in `Hello`."""
        owners = {binding.endpoint, *(region.endpoint for region in binding.regions)}
        return binding.worker == worker and owners <= {o.endpoint for o in self._offers(worker)}

    def narrow(self, source: str, binding: DestinationBinding) -> DestinationBinding:
        """Return a destination's binding with only the endpoint and regions of the transport that `source` uses.

        The binding is unchanged if `source` has no link to the destination.
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
