"""An update backend: one-sided writes, to a few engine ranks at a time.

    ControlConfig(backend=PluginBackend("waves", {"width": 8}))

A trainer rank that shares its NIC with others then leaves them a part of it, and a fleet larger than a switch's buffers is
written in turns. What moves the bytes, and what receives and verifies them, is Windlass's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windlass import ConfigError
from windlass.planning import TransferPlan
from windlass.transfer import (
    Backend,
    BackendTraits,
    DestinationBinding,
    ReceiverBackend,
    SenderBackend,
    Written,
)
from windlass.transports import Deadline


class WavesSender:
    """A trainer rank's half.

    Args:
        options: `width`, the most engine ranks that are written at a time.
        sender: writes them.

    Raises:
        ConfigError: another option, or a width that is no number of ranks.
    """

    def __init__(self, options: Mapping[str, object], sender: SenderBackend, _host: str) -> None:
        width = options.get("width")
        if set(options) != {"width"} or not isinstance(width, int) or width < 1:
            raise ConfigError(f"waves: options must be a width of 1 or more, got {dict(options)!r}")
        self._width, self._sender = width, sender

    def connect(self, plan: TransferPlan, bindings: Sequence[DestinationBinding]) -> None:
        self._sender.connect(plan, bindings)

    def prepare(self, version: int) -> None:
        self._sender.prepare(version)

    def write(self, version: int, destinations: Sequence[str], deadline_s: float) -> Written:
        """Write the waves one after another; all of them have `deadline_s`."""
        deadline = Deadline.after(deadline_s, f"waves: version {version}")
        waves = [
            self._sender.write(version, destinations[at : at + self._width], deadline.remaining_s)
            for at in range(0, len(destinations), self._width)
        ]
        return Written(
            links=tuple(link for wave in waves for link in wave.links),
            pack_s=sum(wave.pack_s for wave in waves),
            wire_s=sum(wave.wire_s for wave in waves),
            register_s=sum(wave.register_s for wave in waves),
        )

    def close(self) -> None:
        self._sender.close()


def receive(
    _options: Mapping[str, object], receiver: ReceiverBackend, _host: str
) -> ReceiverBackend:
    """Return the half of an engine rank, which need not know of waves."""
    return receiver


BACKEND = Backend(traits=BackendTraits(one_sided=True), sender=WavesSender, receiver=receive)
