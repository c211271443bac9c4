"""Weights of the version that a trainer rank publishes, and their checks.

A rank checks that its weights do not change before the end of the round, that they contain no NaN or infinity, and that
ranks with the same box hold the same bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import final

import msgspec

from windlass.config import Reaction
from windlass.control.messages import Done, Prepare, Prepared
from windlass.errors import RoundAborted, WindlassError
from windlass.layout.naming.patterns import said
from windlass.transfer.base import failed_link
from windlass.transfer.bindings import LinkStatus, Written
from windlass.transfer.finite import FiniteCheck
from windlass.transfer.replicated_digests import ReplicatedDigests
from windlass.transfer.sender import Sender

_log = logging.getLogger(__name__)


@final
class HeldWeights:
    """Weights of a trainer rank from the beginning of `publish` to the report.

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
        self._replicated = ReplicatedDigests(sender.manifest, sender.parameters)
        self._digested: tuple[Prepare, bytes] | None = None
        self._finite = FiniteCheck(sender.manifest, sender.parameters)
        self._non_finite: tuple[str, ...] = ()

    def bind(self, replicated: bytes) -> None:
        """Record this rank's boxes that other trainer ranks hold too, encoded as in `ConnectTrainer.replicated`."""
        self._replicated.bind(replicated)

    def note_read(self, read: Collection[int]) -> frozenset[int]:
        """Record which parameters engines get. Only these parameters are checked for NaN and infinity.

        Args:
            read: indices of these parameters in the manifest.

        Returns:
            Indices of the parameters that the comparison of replicated boxes reads; see `Prepare`.
        """
        self._finite.bind(read)
        return self._replicated.read

    def hold(self, version: int) -> None:
        """Record that the trainer publishes `version`, and keeps its weights unchanged from now until `release`.

        Clear the record of changes of the previous version.
        """
        self._version = version
        with self._noting:
            self._is_released = self._is_watched = False
            self._changed_name = ""

    def watch(self) -> None:
        """Record the state of the weights, so that later changes are detected. Call this in the trainer's thread."""
        if self._watch is not None:
            with self._noting:
                self._watch()
                self._is_watched = True

    def note_changes(self) -> None:
        """If a parameter has changed since `watch`, record its name.

        Call this before `TrainerWeights.parameters`, because that call resets the state that `TrainerWeights.changed`
        compares with the weights.
        """
        with self._noting:
            if self._is_watched or self._is_released:
                self._changed_name = self._changed_name or self._changed()

    def release(self) -> None:
        """Record that the trainer no longer waits for a round, so that it may change its weights now."""
        self._is_released = True

    def check_version(self, version: int) -> None:
        """Check that this rank can still send `version`: its weights have not changed, or the replica has a copy of them.

        If no engine serves the published version any more, the controller requests this version again. By then, the
        trainer may have changed its weights. If it has released the version and has not changed its weights, let the
        replica copy the weights again.

        Raises:
            RoundAborted: this rank publishes another version, or its weights have changed since it began to publish
                `version`.
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
        """Check that `note_changes` has recorded no change since this rank began to publish.

        Raises:
            RoundAborted: a parameter has changed; the error names it.
        """
        if self._changed_name:
            raise RoundAborted(_too_early(self._changed_name))

    def examine(self, command: Prepare) -> Prepared | Done:
        """Compute the digests for the comparison of trainer ranks, and look for NaN and infinity, as `command` demands.

        Store the digests for a repeated `command`. Store the names of parameters with NaN or infinity for `checked`.

        Returns:
            Answer to `Prepare`: `Prepared` with the digests, or `Done` if this round compares nothing.

        Raises:
            RoundAborted: a parameter contains NaN or infinity, and `non_finite` is "refuse". Or this round
                needs digests, which can only be computed before the weights are copied to the replica, but an earlier round
                has copied them already.
            WindlassError: see `ReplicatedDigests.take` and `FiniteCheck.find`.
        """
        prepared = self._compare(command) if command.period else Done()
        self._check_finite(command)
        return prepared

    def _compare(self, command: Prepare) -> Prepared:
        """Return the digests of the replicated boxes.

        If the weights were copied to the replica earlier, return the digests that were computed before this copy.

        Raises:
            RoundAborted: the weights were copied earlier, and no digests were computed for this command before the copy.
        """
        compare_s = 0.0
        replica = self._one_sided.replica
        if replica is not None and replica.is_taken(command.version):
            if self._digested is None or self._digested[0] != command:
                raise RoundAborted(
                    "prepare: this rank has no digests for this round's comparison, and its weights may have "
                    "changed since they were copied; publish again"
                )
        else:
            digested = self._replicated.take(command.turn, command.period)
            self._digested = command, digested.tobytes()
            compare_s = self._replicated.compare_s
        return Prepared(self._digested[1], compare_s)

    def _check_finite(self, command: Prepare) -> None:
        """Look for NaN and infinity in the parameters that engines get, unless the weights were copied earlier.

        Raises:
            RoundAborted: a parameter contains NaN or infinity, and `command.non_finite` is "refuse".
        """
        replica, self._non_finite = self._one_sided.replica, ()
        if command.non_finite is Reaction.OFF:
            return
        if replica is not None and replica.is_taken(command.version):
            # The replica was copied earlier, so the live weights may be of a later optimizer step.
            return
        is_refused = command.non_finite is Reaction.REFUSE
        self._non_finite = self._finite.find(everywhere=is_refused)
        if self._non_finite and is_refused:
            raise RoundAborted(
                f"version {command.version}: {said(self._non_finite)} of this rank contain NaN or infinity; skip "
                "optimizer steps whose gradients are not finite, or publish in any case with "
                "ControlConfig(non_finite='warn')"
            )

    def checked(self, sent: Written) -> Written:
        """Add the results of this rank's checks to `sent`, the answer to a write. Return the new answer.

        The new answer names the parameters that contain NaN or infinity.

        If a parameter changed during the write, each link with status OK or FAILED becomes a failed link whose error
        names the parameter. Digests cannot detect such a change: the sender computes each digest from the bytes that it
        has read, even if the trainer had changed them by then. A sender with a replica (a copy of the weights) sends
        from the copy, so a change does no harm and all links stay as they are.
        """
        sent = msgspec.structs.replace(sent, non_finite=self._non_finite)
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

    def prepare_next_comparison(self) -> None:
        """Prepare the comparison of the next update now, so that the next update need not wait for this work."""
        try:
            self._replicated.cut_ahead()
        # The next update tries again and reports the error.
        except WindlassError as error:
            _log.debug("the next comparison could not be prepared: %s", error)

    def close(self) -> None:
        """Free the memory in which replicated weights are compared. Idempotent."""
        self._replicated.close()


def _too_early(name: str) -> str:
    return (
        f"parameter {name!r} changed while its version was published; step the optimizer and unmerge adapters only "
        "after the update has ended, or connect with replica='auto' and publish with copy=True"
    )
