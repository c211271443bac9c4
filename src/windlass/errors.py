"""Error classes of Windlass.

An unknown outcome is not a failure: after `TransferOutcomeUnknown` the caller must not free or reuse the memory on
either side (the distinction follows google/tunix, `experimental/orchestrator/weight_sync.py`). Messages have one
line and name the argument, the rule and the value.
"""

from __future__ import annotations

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for malformed bytes. A hostile peer can cause each of the three."""


class WindlassError(Exception):
    """Base class of all errors of Windlass."""


class ConfigError(WindlassError, ValueError):
    """An argument, a configuration file or a flag is wrong; nothing was started."""


class PlanError(WindlassError, ValueError):
    """The weights of trainers and engines cannot be connected; no engine was paused and no byte was sent."""


class ManifestError(PlanError):
    """A manifest contradicts itself, or the manifests of the two sides contradict each other."""


class UnsupportedLayout(PlanError):
    """Boxes and strides cannot express a layout."""


class IncompleteCoverage(PlanError):
    """Some bytes of a destination parameter have no source; names the tensor and the gap."""


class TransferError(WindlassError, RuntimeError):
    """A transfer of bytes went wrong."""


class RegionError(TransferError):
    """A range is outside registered or published memory; the transport refused it before it sent a byte."""


class PeerUnreachable(TransferError):
    """The peer is dead, was restarted, or never answered; no further byte will arrive."""


class TransferFailed(TransferError):
    """The transfer ended before it was complete; no further byte will arrive."""


class TransferOutcomeUnknown(TransferError):
    """Bytes may still arrive: the memory must not be freed or reused until the peer is known to be dead."""


class RoundError(WindlassError, RuntimeError):
    """A weight-update round did not publish its version."""


class StaleMessage(RoundError):
    """A message belongs to an earlier epoch, round or version."""


class RoundAborted(RoundError):
    """The round was aborted; the engines continue to serve the old version."""


class ProtocolError(WindlassError, ValueError):
    """A message cannot be decoded, or is not valid in the current state."""


class AuthenticationError(WindlassError, RuntimeError):
    """The token is wrong or missing."""


class PeerTimeout(WindlassError, TimeoutError):
    """A deadline passed while waiting for a peer; names the peer, the phase and the deadline."""


class EngineRefused(WindlassError, RuntimeError):
    """An engine was refused, or could not join; names the engine and quotes the reason."""


class RolloutError(WindlassError, RuntimeError):
    """A rollout ended in an error; names the task and the attempt."""


class TrainerError(WindlassError, RuntimeError):
    """A trainer rank died, hung or raised; names the rank and carries the tail of its log."""


class TransportUnavailable(WindlassError, ImportError):
    """An optional dependency or a kernel feature is missing; names what to install or allow."""
