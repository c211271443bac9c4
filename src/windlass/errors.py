"""Every error that Windlass raises on purpose.

*Unknown* is kept apart from *failed* throughout: after `TransferOutcomeUnknown` the
memory on both sides must be left alone (the distinction follows google/tunix,
`experimental/orchestrator/weight_sync.py`). Messages are one line and name the
argument, the rule and the value.
"""

from __future__ import annotations

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on bytes that are not what was expected: by hostile ones all three."""


class WindlassError(Exception):
    """The base of every error raised on purpose."""


class ConfigError(WindlassError, ValueError):
    """An argument, a configuration file or a flag is wrong; nothing was started."""


class PlanError(WindlassError, ValueError):
    """Found while connecting: nothing was paused and nothing was sent."""


class ManifestError(PlanError):
    """A manifest contradicts itself, or the manifests of the two sides contradict each other."""


class UnsupportedLayout(PlanError):
    """A layout that boxes and strides cannot express."""


class IncompleteCoverage(PlanError):
    """Some bytes of a destination parameter have no source; names the tensor and the hole."""


class TransferError(WindlassError, RuntimeError):
    """Moving bytes went wrong."""


class RegionError(TransferError):
    """A range lies outside registered or published memory; refused before anything was sent."""


class PeerUnreachable(TransferError):
    """The peer is dead, was restarted, or never answered; no further byte will land."""


class TransferFailed(TransferError):
    """The transfer is over and did not complete; no further byte will land."""


class TransferOutcomeUnknown(TransferError):
    """Bytes may still land: nothing may be freed or reused until the peer is known to be gone."""


class RoundError(WindlassError, RuntimeError):
    """A weight-update round did not publish."""


class StaleMessage(RoundError):
    """A message from an epoch, round or version that has passed."""


class RoundAborted(RoundError):
    """The round was given up and the old version goes on being served."""


class ProtocolError(WindlassError, ValueError):
    """A message that cannot be decoded, or that does not belong here."""


class AuthenticationError(WindlassError, RuntimeError):
    """A wrong or missing token."""


class PeerTimeout(WindlassError, TimeoutError):
    """A deadline passed while waiting for a peer; names the peer, the phase and the deadline."""


class EngineRefused(WindlassError, RuntimeError):
    """An engine was refused, or could not join; names it, and quotes the reason."""


class RolloutError(WindlassError, RuntimeError):
    """A rollout ended in an error; names the task and the attempt."""


class TrainerError(WindlassError, RuntimeError):
    """A trainer rank died, hung or raised; names the rank and carries the tail of its log."""


class TransportUnavailable(WindlassError, ImportError):
    """An optional dependency or a kernel feature is missing; names what to install or allow."""
