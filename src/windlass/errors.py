"""Error classes of Windlass.

`TransferOutcomeUnknown` is not a failure: afterwards, neither the sender's nor the receiver's memory may be freed or
reused. google/tunix makes the same distinction (`experimental/orchestrator/weight_sync.py`). Messages have one line; if
an argument is wrong, they name the argument, the rule and the value.
"""

from __future__ import annotations

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for malformed bytes of a peer."""


def text_of(error: BaseException) -> str:
    """Return the text of an exception of a user's code, without characters that UTF-8 cannot encode.

    If `__str__` of the exception raises a second exception, return a text with the type of the second exception.
    """
    try:
        text = str(error)
    # `__str__` is user code too.
    except Exception as raised:  # noqa: BLE001
        text = f"(no text: its __str__ raised {type(raised).__name__})"
    return text.encode("utf-8", "replace").decode()


class WindlassError(Exception):
    """Base class of all errors of Windlass."""


class ConfigError(WindlassError, ValueError):
    """An argument, a configuration file or a flag is wrong; nothing was started."""


class PlanError(WindlassError, ValueError):
    """The trainers' weights do not fit the engines' weights; no engine was paused and no byte was sent."""


class ManifestError(PlanError):
    """A manifest contradicts itself, or the manifests of trainers and engines contradict each other."""


class UnsupportedLayout(PlanError):
    """Windlass cannot describe or update a memory layout; the message has the reason."""


class IncompleteCoverage(PlanError):
    """No trainer has some elements of an engine's parameter; the message names the tensor and the missing elements."""


class TransferError(WindlassError, RuntimeError):
    """Base class of errors in a transfer of bytes."""


class RegionError(TransferError):
    """A memory range is outside registered memory, or cannot be registered; the transport has sent no byte."""


class PeerUnreachable(TransferError):
    """The peer is dead, was restarted, or never answered. No further byte of the transfer will arrive."""


class TransferFailed(TransferError):
    """The transfer ended before it was complete. No further byte of the transfer will arrive."""


class TransferOutcomeUnknown(TransferError):
    """Bytes may still arrive: the memory must not be freed or reused until the peer is known to be dead."""


class StaleMessage(WindlassError, RuntimeError):
    """A message belongs to an earlier epoch, round or version."""


class RoundAborted(WindlassError, RuntimeError):
    """The round was aborted; the engines continue to serve the old version."""


class ProtocolError(WindlassError, ValueError):
    """A message cannot be decoded, or is not valid in the current state."""


class AuthenticationError(WindlassError, RuntimeError):
    """The token is wrong or missing."""


class PeerTimeout(WindlassError, TimeoutError):
    """A deadline passed while waiting for a peer; the message names the peer, the phase and the deadline."""


class EngineRefused(WindlassError, RuntimeError):
    """An engine was refused, or could not join; the message has the engine's name and the reason."""


class RolloutError(WindlassError, RuntimeError):
    """A rollout ended in an error; the message names the task and the attempt."""


class TrainerError(WindlassError, RuntimeError):
    """A trainer rank died, hung or raised; the message has the rank and the end of its log."""


class TransportUnavailable(WindlassError, ImportError):
    """An optional dependency or a kernel feature is missing; the message says what to install or allow."""
