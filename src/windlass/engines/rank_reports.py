"""What the ranks of a server are given, and what they report, beside the answer of the server itself.

SGLang answers for the first stage of a pipeline, when later ones may not have begun, and vLLM for the first
of its replicas. So a rank leaves its report in a folder of the launcher's, and sends word through a socket
there that it is complete. The secrets that a rank needs lie in the same folder, which this user alone can
read: they are in no environment and in no request.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, final

import msgspec

from windlass.engines.http import EngineHttp
from windlass.errors import (
    ConfigError,
    PeerTimeout,
    PeerUnreachable,
    UnsupportedLayout,
    WindlassError,
)

_log = logging.getLogger(__name__)
_SOCKET = "sent"
_SECRETS = "secrets"
_LONGEST = 4096
"""Bytes that a rank sends before it goes on: no more than a socket holds that nobody reads."""


class RefusedByOtherRank(UnsupportedLayout):
    """Another rank of this engine could not capture its layout; that rank says why."""


class Secrets(msgspec.Struct, frozen=True):
    """What opens the controller to a rank, and its own server.

    Attributes:
        token: of the controller; empty where there is none.
        key, api_key, admin_api_key: see `windlass.engines.http.EngineHttp`.
    """

    token: str = ""
    key: str = ""
    api_key: str = ""
    admin_api_key: str = ""

    def server(self, url: str) -> EngineHttp:
        """Return the rank's own server, as these open it."""
        return EngineHttp(url, self.key, self.api_key, self.admin_api_key)

    def __repr__(self) -> str:
        return "Secrets(...)"


class _Sent(msgspec.Struct, frozen=True):
    """`failed`: what is in the folder is the reason."""

    rank: int
    failed: bool = False


def carry_out(folder: str, rank: int, order: Callable[[Secrets], bytes]) -> None:
    """Called by a rank: do what it was told, and report what `order` returns, or why it could not.

    Nothing is raised, which would end SGLang's loop; nor is anybody waited for who listens no more.
    """
    try:
        sent, body = _Sent(rank), order(_secrets_in(folder))
    except RefusedByOtherRank:
        return  # the rank that has a reason tells it
    except Exception as error:  # noqa: BLE001 - the engine's loop, and the engine, would end with it
        _log.exception("rank %s", rank)
        text = (
            str(error) if isinstance(error, WindlassError) else f"{type(error).__name__}: {error}"
        )
        sent, body = _Sent(rank, failed=True), text.encode()
    try:
        (Path(folder) / str(rank)).write_bytes(body)
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(Path(folder) / _SOCKET))
            line.sendall(msgspec.json.encode(sent))
    except OSError as error:  # whoever asked has given up or ended, or is on another host
        _log.warning("rank %s: nobody hears what it reports in %s: %s", rank, folder, error)


def _secrets_in(folder: str) -> Secrets:
    try:
        return msgspec.json.decode((Path(folder) / _SECRETS).read_bytes(), type=Secrets)
    except OSError as error:
        raise ConfigError(
            f"every rank must be on its launcher's host and of its user, got no {folder}: {error}"
        ) from error


@final
class RankReports:
    """A folder for the reports of every rank of this host; left when they have been read.

    Args:
        world_size: ranks that will report.
        secrets: that they need.
    """

    def __init__(self, world_size: int, secrets: Secrets = Secrets()) -> None:  # noqa: B008 - frozen
        self._world_size = world_size
        self._owned = ExitStack()
        with ExitStack() as undo:
            self.folder = undo.enter_context(tempfile.TemporaryDirectory())
            (Path(self.folder) / _SECRETS).write_bytes(msgspec.json.encode(secrets))
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
                    f"carried out; every rank must be of this server and of this host"
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
