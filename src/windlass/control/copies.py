"""Engine ranks that get the bytes of another rank, as a binding sees them. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from windlass.control.connect_messages import Bound
from windlass.control.links import Link
from windlass.control.messages import Command
from windlass.transfer.bindings import DestinationBinding

Narrow = Callable[[str, DestinationBinding], DestinationBinding]
"""See `LinkAddresses.narrow`."""


class LinkCopies:
    """Engine ranks that get the same bytes as another rank, over links between engines. By default no rank does.

    Attributes:
        of: rank -> rank for which the plan is made instead.
        children: rank that takes part -> ranks that it passes bytes on to.
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
        """Return the commands that bind the links between engines, after sources and engines have bound the plan.

        Args:
            links: links of the plan.
            bound: engine rank -> its answer to `ConnectEngine`.
            narrow: see `LinkAddresses.narrow`.
        """
        return {}
