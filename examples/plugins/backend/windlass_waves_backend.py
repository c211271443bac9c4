"""Update backend that writes one-sidedly to a few engine ranks at a time.

    ControlConfig(backend=PluginBackend("waves", {"width": 8}))

A trainer rank then does not occupy a whole NIC that it shares, and the writes to a large fleet do not overflow the buffers
of a switch. Windlass's own sender moves the bytes, and its own receiver verifies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windlass import ConfigError
from windlass.backends import (
    Backend,
    BackendEntry,
    DestinationBinding,
    RankSender,
    SenderBackend,
    Written,
)
from windlass.planning import TransferPlan
from windlass.transports import Deadline


class Waves(Backend):
    """One-sided writes in waves; all else is as in Windlass's own backend.

    Args:
        options: `width`, the maximum number of engine ranks per wave.

    Raises:
        ConfigError: an option is unknown, or `width` is not a positive integer.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        width = options.get("width")
        if set(options) != {"width"} or not isinstance(width, int) or width < 1:
            raise ConfigError(f"waves: options must be a width of 1 or more, got {dict(options)!r}")
        self._width = width

    def sender(self, sender: RankSender, host: str) -> SenderBackend:  # noqa: ARG002
        return WavesSender(self._width, sender)


class WavesSender:
    """Sender of a trainer rank.

    Args:
        width: maximum number of engine ranks per wave.
        sender: sender that writes one wave.
    """

    def __init__(self, width: int, sender: SenderBackend) -> None:
        self._width, self._sender = width, sender

    def connect(self, plan: TransferPlan, bindings: Sequence[DestinationBinding]) -> None:
        self._sender.connect(plan, bindings)

    def prepare(self, version: int) -> None:
        self._sender.prepare(version)

    def write(self, version: int, destinations: Sequence[str], deadline_s: float) -> Written:
        """Write the waves one after another; `deadline_s` is for all of them together."""
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


BACKEND = BackendEntry(Waves)
