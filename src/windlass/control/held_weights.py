"""Weights that a trainer rank keeps unchanged for the version that it publishes, and the checks that it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

import msgspec

from windlass.errors import RoundAborted
from windlass.transfer.base import failed_link
from windlass.transfer.bindings import LinkStatus, Written
from windlass.transfer.sender import Sender


@final
class HeldWeights:
    """Weights of a trainer rank from the begin of `publish` to the report.

    Args:
        sender: sender of one-sided writes, which may have a replica of the weights.
        watch: see `TrainerWeights`.
        changed: see `TrainerWeights`.
    """

    def __init__(
        self, sender: Sender, watch: Callable[[], None] | None, changed: Callable[[], str]
    ) -> None:
        self._one_sided, self._watch, self._changed = sender, watch, changed
        self._version: int | None = None
        self._is_released = self._is_watched = False
        # Name of a parameter that has changed since this rank began to publish its version.
        self._changed_name = ""
        self._noting = threading.Lock()

    def hold(self, version: int) -> None:
        """Accept commands for `version`; the trainer keeps its weights unchanged from now until `release`."""
        self._version = version
        with self._noting:
            self._is_released = self._is_watched = False
            self._changed_name = ""

    def watch(self) -> None:
        """Detect changes of the weights from now on; called in the trainer's thread, after `hold`."""
        if self._watch is not None:
            with self._noting:
                self._watch()
                self._is_watched = True

    def note_changes(self) -> None:
        """Record the name of a parameter that has changed.

        Call this before `TrainerWeights.parameters`, which resets the state that `TrainerWeights.changed` compares with.
        """
        with self._noting:
            if self._is_watched or self._is_released:
                self._changed_name = self._changed_name or self._changed()

    def release(self) -> None:
        """Record that the trainer no longer waits for a round, so that it may change its weights now."""
        self._is_released = True

    def check_version(self, version: int) -> None:
        """Check that the weights are unchanged since the trainer began to publish `version`.

        The controller requests a published version again if no engine serves it any more. The trainer may have changed
        its weights meanwhile.

        Raises:
            RoundAborted: the weights may have changed since the trainer began to publish `version`.
        """
        if self._version not in {None, version}:
            raise RoundAborted(
                f"prepare: version must be {self._version}, the version of this rank's weights, got {version}"
            )
        replica = self._one_sided.replica
        if (
            replica is not None
            and (not self._is_released or replica.holds(version))
            and replica.is_taken(version)
        ):
            return
        if not self._is_released:
            self.refuse_changed()
            return
        if self._changed_name:
            raise RoundAborted(
                f"prepare: the weights have changed since this rank published version {version}; "
                "publish again"
            )
        self._one_sided.begin_version(version=version)

    def refuse_changed(self) -> None:
        """Raise RoundAborted if a parameter has changed since this rank began to publish."""
        if self._changed_name:
            raise RoundAborted(_too_early(self._changed_name))

    def checked(self, sent: Written) -> Written:
        """Mark links as failed if a parameter changed during the write.

        Digests do not detect such a change, because the sender computes a digest of the bytes that it has read.
        """
        if self._one_sided.replica is not None or not (name := self._changed()):
            return sent
        reason = _too_early(name)
        links = tuple(
            failed_link(link.destination, reason)
            if link.status in (LinkStatus.OK, LinkStatus.FAILED)
            else link
            for link in sent.links
        )
        return msgspec.structs.replace(sent, links=links)


def _too_early(name: str) -> str:
    return (
        f"parameter {name!r} changed while its version was published; step the optimizer and take merged adapters out "
        "once the update has ended, or publish with `copy=True` (`replica='auto'`)"
    )
