"""Signs of a mistake in the trainer: a version that changes no byte, and parameters with NaN or infinity."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import final

import msgspec

from windlass.control.links import Link
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.layout.naming.patterns import patterns_of, said

_log = logging.getLogger(__name__)


def unchanged_reason(version: int) -> str:
    """Return the text of a warning or an error about a version with the same bytes as the previous version."""
    return (
        f"version {version} changes nothing: its bytes equal the bytes of the previous version; check that the "
        "optimizer steps the published parameters (not a copy, not a frozen base under adapters), that adapters are "
        "merged before the update, and that rounding to the weights' dtype does not undo steps (raise the learning rate)"
    )


def is_unchanged(sent: Sequence[Mapping[Link, str]], before: Mapping[Link, str]) -> bool:
    """Return whether a version sends engines exactly the bytes that these engines already serve.

    Compare only engines whose links all have a digest in `before`. If there is no such engine, return False.

    Args:
        sent: for each engine, link -> digest of the bytes that were sent.
        before: link -> digest in the version that engines serve now.
    """
    known = [links for links in sent if links and links.keys() <= before.keys()]
    return bool(known) and all(links.items() <= before.items() for links in known)


def num_by_pattern(names: Collection[str]) -> dict[str, int]:
    """Summarise names by patterns, with "*" in place of layer numbers: pattern -> number of names that it matches."""
    return {pattern: len(of) for pattern, of in patterns_of(sorted(names)).items()}


@final
class Suspicions:
    """Signs in the versions of one run, in the order in which they are published.

    Attributes:
        digests: link -> digest, of the version that trainers published last.
    """

    def __init__(self) -> None:
        self.digests: Mapping[Link, str] = {}
        self._num_unchanged = 0
        self._had_non_finite = False

    def sent_before(self, workers: Collection[str]) -> dict[Link, str]:
        """Return the digests of all links to `workers`, for `RoundSpec.sent_before`.

        All `workers` must serve the version of `digests`.
        """
        return {link: digest for link, digest in self.digests.items() if link[1] in workers}

    def add_to(
        self, report: UpdateReport, *, unchanged: bool, non_finite: Collection[str]
    ) -> UpdateReport:
        """Return the report with the fields `unchanged` and `non_finite`. Each is a sign of a mistake in the training.

        If several versions in a row have the same sign, log a warning for the first of them only.

        Args:
            report: report of the version.
            unchanged: whether the version changes no byte.
            non_finite: names of trainer parameters that contain NaN or infinity.
        """
        self._num_unchanged = self._num_unchanged + 1 if unchanged else 0
        if self._num_unchanged == 1 and report.outcome is RoundOutcome.PUBLISHED:
            _log.warning("%s", unchanged_reason(report.version))
        if non_finite and not self._had_non_finite:
            _log.warning(
                "version %d: trainer parameters contain NaN or infinity: %s",
                report.version,
                said(non_finite),
            )
        self._had_non_finite = bool(non_finite)
        return msgspec.structs.replace(
            report, unchanged=self._num_unchanged, non_finite=num_by_pattern(non_finite)
        )
