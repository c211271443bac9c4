"""Which transport every link of a fleet takes, and the memory of its destination by that transport."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import msgspec

from windlass.errors import ConfigError
from windlass.transfer.bindings import DestinationBinding
from windlass.transports.base import TransportOffer
from windlass.transports.choice import LinkChoice, choose_transport
from windlass.updates.session import AgentSession

__all__ = ["LinkTransports"]


@final
class LinkTransports:
    """Of the ranks that were connected when a binding began.

    Args:
        sessions: by name of the rank; a rank that is not among them was lost, and its links have no
            transport.
    """

    def __init__(self, sessions: Mapping[str, AgentSession]) -> None:
        self._sessions = sessions
        self._choices: dict[tuple[str, str], LinkChoice] = {}
        self._strided = frozenset[tuple[str, str]]()

    @property
    def choices(self) -> Mapping[tuple[str, str], LinkChoice]:
        """(source, destination) -> what that link takes."""
        return self._choices

    @property
    def strided(self) -> frozenset[tuple[str, str]]:
        """(source, destination) of links whose source stores with strides."""
        return self._strided

    def choose(self, links: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Give each (source, destination) the fastest transport that both have.

        One host: connections that come from one address, of processes that say the same of it.

        Returns:
            Destination -> why some source cannot write it.
        """
        wrong, strided = {}, set()
        for source, destination in sorted(links):
            here, there = self._sessions.get(source), self._sessions.get(destination)
            if here is None or there is None:
                continue  # lost meanwhile
            same_address = here.host == there.host
            try:
                self._choices[source, destination] = choose_transport(
                    here.agent.hello.offers,
                    there.agent.hello.offers,
                    same_host=same_address and here.agent.hello.host == there.agent.hello.host,
                    same_address=same_address,
                )
            except ConfigError as error:
                wrong[destination] = f"{source} cannot write {destination}: {error}"
                continue
            name = self._choices[source, destination].transport
            if any(o.traits.strided_stores for o in self._offers(source) if o.transport == name):
                strided.add((source, destination))
        self._strided = frozenset(strided)
        return wrong

    def owns(self, worker: str, binding: DestinationBinding) -> bool:
        """Whether a rank has bound memory of its own endpoints and no other rank's."""
        owners = {binding.endpoint, *(region.endpoint for region in binding.regions)}
        return binding.worker == worker and owners <= {
            offer.endpoint for offer in self._offers(worker)
        }

    def bindings_for(
        self, source: str, bindings: Iterable[DestinationBinding]
    ) -> tuple[DestinationBinding, ...]:
        """What `source` needs to write each destination by the transport of their link.

        Destinations without a link from `source` are passed on as they are.
        """
        return tuple(self._narrow(source, binding) for binding in bindings)

    def _narrow(self, source: str, binding: DestinationBinding) -> DestinationBinding:
        choice = self._choices.get((source, binding.worker))
        for offer in self._offers(binding.worker):
            if choice is not None and offer.transport == choice.transport:
                regions = tuple(r for r in binding.regions if r.endpoint == offer.endpoint)
                return msgspec.structs.replace(binding, endpoint=offer.endpoint, regions=regions)
        return binding

    def _offers(self, worker: str) -> tuple[TransportOffer, ...]:
        session = self._sessions.get(worker)
        return () if session is None else session.agent.hello.offers
