"""What the ranks of a server report to whoever gave them an order, beside SGLang's own answer.

SGLang answers for the first stage of a pipeline, when later ones may not have begun. So a rank leaves
its report in a folder, and sends word through a socket there that it is complete.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, final

import msgspec

from windlass.errors import PeerTimeout, PeerUnreachable

__all__ = ["Answers", "report", "report_failure"]

_log = logging.getLogger(__name__)
_SOCKET = "sent"
_LONGEST = 4096
"""Bytes that a rank sends before it goes on: no more than a socket holds that nobody reads."""


class _Sent(msgspec.Struct, frozen=True):
    """`failed`: what is in the folder is the reason."""

    rank: int
    failed: bool = False


def report(folder: str, rank: int, body: bytes) -> None:
    """Called by a rank that has carried out an order; returns whether or not anybody listens yet.

    Nor does it matter to the rank whether anybody listens still: an error would end SGLang's loop.
    """
    _send(folder, _Sent(rank), body)


def report_failure(folder: str, rank: int, reason: str) -> None:
    """Called by a rank that could not; as `report`."""
    _send(folder, _Sent(rank, failed=True), reason.encode())


def _send(folder: str, sent: _Sent, body: bytes) -> None:
    try:
        (Path(folder) / str(sent.rank)).write_bytes(body)
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(Path(folder) / _SOCKET))
            line.sendall(msgspec.json.encode(sent))
    except OSError as error:  # whoever asked has given up or ended, or is on another host
        _log.warning("rank %s: nobody hears what it reports in %s: %s", sent.rank, folder, error)


@final
class Answers:
    """A folder for the answers of every rank of this host; left when they have been read.

    Args:
        world_size: ranks that will answer.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._owned = ExitStack()
        with ExitStack() as undo:
            self.folder = undo.enter_context(tempfile.TemporaryDirectory())
            self._listening = undo.enter_context(socket.socket(socket.AF_UNIX))
            self._listening.bind(str(Path(self.folder) / _SOCKET))
            self._listening.listen(world_size)
            self._owned = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._owned.close()

    def gather(self, deadline_s: float) -> list[bytes]:
        """Return what every rank reported, by rank.

        Raises:
            PeerTimeout: names the ranks that reported nothing within `deadline_s`.
            PeerUnreachable: a rank could not carry out the order; its reason.
        """
        missing, end_s = set(range(self._world_size)), time.monotonic() + deadline_s
        while missing:
            try:
                sent = self._next(end_s)
            except TimeoutError as error:
                raise PeerTimeout(
                    f"ranks {sorted(missing)} have not reported within {deadline_s} s that an order is "
                    f"carried out"
                ) from error
            if sent.failed:
                reason = (Path(self.folder) / str(sent.rank)).read_text()
                raise PeerUnreachable(f"rank {sent.rank}: {reason}")
            missing.discard(sent.rank)
        return [(Path(self.folder) / str(rank)).read_bytes() for rank in range(self._world_size)]

    def _next(self, end_s: float) -> _Sent:
        self._listening.settimeout(max(end_s - time.monotonic(), 0.001))
        line, _ = self._listening.accept()
        with line:
            line.settimeout(max(end_s - time.monotonic(), 0.001))
            received = b""
            while part := line.recv(_LONGEST):
                received += part
        return msgspec.json.decode(received, type=_Sent)
